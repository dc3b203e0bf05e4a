"""Deletes a checkpoint or a whole run by hand. Step 37.

Both begin with a swap, after which nobody lists or restores what is being deleted. The objects are deleted after that,
like those of evicted checkpoints. After a crash at any point, repeating the delete continues it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from uuid import uuid4

from raycheck.bucket.format import object_keys
from raycheck.bucket.format.latest import MAX_ATTEMPTS_LISTED, Latest
from raycheck.bucket.protocol.pin_and_evict import by_hand, drop, with_evicted
from raycheck.bucket.protocol.removal.prune_and_sweep import delete_objects, prune
from raycheck.bucket.protocol.rewind import attempt_by_hand
from raycheck.bucket.protocol.sharing.base_run import without_reservation
from raycheck.bucket.protocol.swap import Register, refuse_mirror
from raycheck.bucket.reading import list_directories, no_run_error
from raycheck.bucket.store import Store
from raycheck.bucket.store.address import shown_uri
from raycheck.bucket.store.interface import Listed
from raycheck.errors import ConfigError, ConflictError, NotFoundError
from raycheck.show_progress import ProgressTally


@dataclass(frozen=True, kw_only=True, slots=True)
class DeletedRun:
    """The result of deleting a run, or its preview.

    is_gone: nothing of it is left. num_objects, size_bytes: what there was to delete, at most. used_by: the paths to
    the runs ("../fork") that use its directories, which therefore stay.
    """

    is_gone: bool
    num_objects: int
    size_bytes: int
    used_by: tuple[str, ...] = ()


def delete_checkpoint(register: Register, key: str) -> Latest:
    """Evict the live checkpoint `key`, whatever keeps it. Return the new body. A prune deletes its objects.

    Raises ConfigError for the head and in a mirror, and NotFoundError when the checkpoint never existed.
    """

    def choose(body: Latest, now: float) -> Mapping[str, str]:
        del now
        if body.entry(key) is None and any(item.key == key for item in body.evicted):
            return {}
        check_checkpoint(register.store.uri, body, key)
        return {key: by_hand()}

    return drop(register, choose, what=f"delete of {key}")


def check_checkpoint(uri: str, body: Latest, key: str) -> None:
    """Raise ConfigError for a checkpoint that cannot be deleted, and NotFoundError for one that is not live."""
    refuse_mirror(uri, body, "delete the checkpoint")
    if body.entry(key) is None:
        raise NotFoundError(f"{shown_uri(uri)}: checkpoint {key} is no longer live")
    if body.head == key:
        raise ConfigError(
            f"{shown_uri(uri)}: {key} is what the next start restores. First go back to another checkpoint, with "
            "'raycheck rewind', or delete the run, with 'raycheck delete-run'"
        )


def delete_run(
    register: Register,
    *,
    keeps_shared: bool = False,
    keeps_exports: bool = False,
    only_at: int | None = None,
    tally: ProgressTally | None = None,
) -> DeletedRun:
    """Delete a run: mark it, delete its checkpoints, then everything else, and `latest` last.

    keeps_shared: what other runs use stays, along with `latest`, until they have returned it; otherwise a run that
    others use is refused. keeps_exports: leave its exported directories alone. only_at: the counter of the body from
    which the caller decided that the run may be deleted. tally: counts the objects. Raises NotFoundError without a run;
    ConflictError when `latest` has been written since `only_at`; and ConfigError when others use it or another run is
    inside its folder. In these cases nothing was changed.
    """
    store = register.store
    num_objects, size_bytes = check_folder(store, keeps_exports=keeps_exports)
    owner = f"delete-{uuid4().hex[:12]}"

    def change(body: Latest, now: float) -> Latest | None:
        body = without_reservation(store, body)
        check_users(store, body, keeps_shared=keeps_shared)
        if body.deleted_at is not None:
            return None
        if only_at is not None and body.counter != only_at:
            raise ConflictError(f"{store}: somebody has just changed the run; nothing was deleted")
        mine = attempt_by_hand(owner, body.attempt.number + 1, restore_key=None, now=now)
        marked = replace(
            body,
            deleted_at=now,
            newest_owners=(*body.newest_owners, owner),
            attempts=(*body.attempts[1 - MAX_ATTEMPTS_LISTED :], mine),
            head=None,
            mirror=None,
            finished=None,
        )
        return with_evicted(marked, dict.fromkeys((entry.key for entry in body.live), "the run was deleted"), now=now)

    register.edit(change, what="delete of the run")
    prune(register, grace_s=0.0, tally=tally)
    body = register.read_existing()[0]
    if body.holds:
        users = tuple(hold.holder for hold in body.holds)
        return DeletedRun(is_gone=False, num_objects=num_objects, size_bytes=size_bytes, used_by=users)
    keys = [item.key for item in objects_of(store, keeps_exports=keeps_exports)]
    delete_objects(store, [key for key in keys if key != object_keys.LATEST_KEY], tally=tally)
    for upload in list(store.list_uploads(object_keys.CHECKPOINTS_PREFIX)):
        store.abort_upload(upload)
    store.delete(object_keys.LATEST_KEY)
    return DeletedRun(is_gone=True, num_objects=num_objects, size_bytes=size_bytes)


def mark_lost(register: Register) -> None:
    """Write a `latest` that marks the run as deleted, where checkpoints exist and `latest` is missing. Step 37.

    Do nothing if `latest` exists. Raises the errors of check_lost.
    """
    store = register.store
    owner = f"delete-{uuid4().hex[:12]}"

    def create(body: Latest | None, now: float) -> Latest | None:
        if body is not None:
            return None
        number = 1 + check_lost(store)
        return Latest(
            run_id=uuid4().hex,
            counter=0,
            proven=number,
            newest_owners=(owner,),
            attempts=(attempt_by_hand(owner, number, restore_key=None, now=now),),
            head=None,
            deleted_at=now,
        )

    register.swap(create, what="delete of what is left of the run")


def check_lost(store: Store) -> int:
    """Return the highest attempt of the checkpoints that exist where `latest` is missing.

    Raises NotFoundError when there is none, and ConfigError when other runs were given holds on them.
    """
    names = list_directories(store)
    if not names:
        raise no_run_error(store)
    if store.list_names(object_keys.HOLDS_PREFIX):
        raise ConfigError(
            f"{store}: other runs may use its checkpoints, according to the records below {object_keys.HOLDS_PREFIX}. "
            "First rebuild latest with 'raycheck repair'; then 'raycheck delete-run' knows what they use"
        )
    return names[-1].attempt


def check_folder(store: Store, *, keeps_exports: bool = False, tally: ProgressTally | None = None) -> tuple[int, int]:
    """Return the number of objects in the run's folder that a delete removes, and their bytes. This lists all objects.

    Raises ConfigError when another run is inside the folder, at any depth. tally: counts what was listed.
    """
    num_objects = size_bytes = 0
    for item in store.list_objects(""):
        if (inside := object_keys.run_inside(item.key)) is not None:
            raise ConfigError(f"{store}: another run is in its folder {inside!r}; delete or move that one first")
        if tally is not None:
            tally.add(1)
        if not (keeps_exports and item.key.startswith(object_keys.RESULT_PREFIXES)):
            num_objects, size_bytes = num_objects + 1, size_bytes + item.size_bytes
    return num_objects, size_bytes


def users_of(store: Store, body: Latest) -> tuple[str, ...]:
    """Return the paths to the runs that hold directories of this one, except the run's own reservation."""
    return tuple(hold.holder for hold in without_reservation(store, body).holds)


def check_users(store: Store, body: Latest, *, keeps_shared: bool) -> None:
    """Raise ConfigError when other runs use checkpoints of the run, unless what they use is kept."""
    users = users_of(store, body)
    if users and not keeps_shared:
        names = ", ".join(users[:5])
        raise ConfigError(
            f"{store}: {'another run uses' if len(users) == 1 else f'{len(users)} other runs use'} checkpoints of "
            f"it ({names}). Delete {'that one' if len(users) == 1 else 'them'} first, or give "
            "--keep-shared: then what they use stays until they have dropped it"
        )


def objects_of(store: Store, *, keeps_exports: bool) -> Iterator[Listed]:
    """Yield all objects in the run's folder, except its exports if they are kept."""
    for item in store.list_objects(""):
        if not (keeps_exports and item.key.startswith(object_keys.RESULT_PREFIXES)):
            yield item
