"""Deletes a checkpoint or a whole run by hand. Step 37.

Both begin with a swap, after which nobody lists or restores what is being deleted. The objects go after that, as those
of evicted checkpoints do. After a crash anywhere a repetition goes on.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from uuid import uuid4

from raycheck.bucket.format import object_keys
from raycheck.bucket.format.latest import MAX_ATTEMPTS_LISTED, Hold, Latest
from raycheck.bucket.protocol.base_run import without_reservation
from raycheck.bucket.protocol.pin_and_evict import with_evicted
from raycheck.bucket.protocol.prune_and_sweep import delete_objects, prune
from raycheck.bucket.protocol.rewind import attempt_by_hand
from raycheck.bucket.protocol.swap import Register, refuse_mirror
from raycheck.bucket.store import Store
from raycheck.errors import ConfigError, NotFoundError

OWN_FOLDERS = frozenset({"checkpoints", "attempts", "holds", "probes", "ray", "exports"})


@dataclass(frozen=True, kw_only=True, slots=True)
class DeletedRun:
    """Says what a delete of a run came to.

    is_gone: nothing of it is left. holds: the runs that still use directories of it, which stay.
    """

    is_gone: bool
    holds: tuple[Hold, ...] = ()


def delete_checkpoint(register: Register, key: str) -> Latest:
    """Evict the live checkpoint `key`, whatever keeps it. Returns the new body. A prune deletes its objects.

    Raises ConfigError for the head and in a mirror, and NotFoundError when the checkpoint was never there.
    """

    def change(body: Latest, now: float) -> Latest | None:
        refuse_mirror(register.store.uri, body, "delete the checkpoint")
        if any(item.key == key for item in body.evicted):
            return None
        if body.entry(key) is None:
            raise NotFoundError(f"{register.store.uri}: checkpoint {key} is no longer live")
        if body.head == key:
            raise ConfigError(
                f"{register.store.uri}: {key} is what the next start restores. First go back to another checkpoint, "
                "with 'raycheck rewind', or delete the run, with 'raycheck delete-run'"
            )
        return with_evicted(body, (key,), now=now)

    return register.edit(change, what=f"delete of {key}")


def delete_run(register: Register, *, keeps_shared: bool = False, keeps_exports: bool = False) -> DeletedRun:
    """Delete a run: mark it, delete its checkpoints, then everything else, and `latest` last.

    keeps_shared: what other runs use stays, with `latest`, until they have given it back; else a run that others use is
    refused. keeps_exports: leave its exported directories alone. Raises NotFoundError without a run, and ConfigError,
    before anything is changed, when others use it or another run lies inside its folder.
    """
    store = register.store
    inside = sorted(set(store.list_names("")) - OWN_FOLDERS)
    for name in inside:
        if "checkpoints" in store.list_names(f"{name}/"):
            raise ConfigError(f"{store.uri}: another run lies in its folder {name!r}; delete or move that one first")
    owner = f"delete-{uuid4().hex[:12]}"

    def change(body: Latest, now: float) -> Latest | None:
        body = without_reservation(store, body)
        if body.holds and not keeps_shared:
            names = ", ".join(hold.holder for hold in body.holds[:5])
            raise ConfigError(
                f"{store.uri}: {len(body.holds)} other runs use checkpoints of it ({names}). Delete them first, or "
                "give --keep-shared: then what they use stays until they have dropped it"
            )
        if body.deleted_at is not None:
            return None
        mine = attempt_by_hand(owner, body.attempt.number + 1, restore_key=None, now=now)
        marked = replace(
            body,
            deleted_at=now,
            owners=(*body.owners, owner),
            attempts=(*body.attempts[1 - MAX_ATTEMPTS_LISTED :], mine),
            head=None,
            mirror=None,
            finished=None,
        )
        return with_evicted(marked, tuple(entry.key for entry in body.live), now=now)

    register.edit(change, what="delete of the run")
    prune(register, grace_s=0.0)
    body = register.read_existing()[0]
    if body.holds:
        return DeletedRun(is_gone=False, holds=body.holds)
    delete_objects(store, list(_others(store, keeps_exports=keeps_exports)))
    for upload in list(store.list_uploads(object_keys.CHECKPOINTS_PREFIX)):
        store.abort_upload(upload)
    store.delete(object_keys.LATEST_KEY)
    return DeletedRun(is_gone=True)


def _others(store: Store, *, keeps_exports: bool) -> Iterator[str]:
    for item in store.list_objects(""):
        is_kept = keeps_exports and item.key.startswith(object_keys.EXPORTS_PREFIX)
        if item.key != object_keys.LATEST_KEY and not is_kept:
            yield item.key
