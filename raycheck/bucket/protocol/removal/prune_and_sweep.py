"""Deletes the objects of checkpoints that were evicted or never committed. Steps 19 to 23.

A delete cannot be fenced, so only objects that can never be needed again are deleted (I6). Then it does not matter who
deletes them, how late, or how often. There are two kinds. First, an evicted checkpoint, except directories that a live
entry holds: a commit may refer only to what an entry of the body it replaces holds, so what nobody holds is never held
again. Second, what an attempt older than the one in `latest` wrote and `latest` does not name: an older attempt cannot
commit (I4).

Below `checkpoints/`, only directories whose name is exactly a checkpoint's are deleted. paging.py and holds.py clean up
`pages/` and `holds/`.
"""

from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from raycheck.bucket.document_reading import again_if_corrupt
from raycheck.bucket.format import object_keys
from raycheck.bucket.format.latest import Latest
from raycheck.bucket.format.object_keys import CheckpointName
from raycheck.bucket.history.attempt_facts import facts_of
from raycheck.bucket.history.facts import Facts
from raycheck.bucket.history.segments import record_facts
from raycheck.bucket.protocol.paging import sweep_pages
from raycheck.bucket.protocol.pin_and_evict import evict, forget
from raycheck.bucket.protocol.retention import decide_retention
from raycheck.bucket.protocol.sharing.holds import drop_orphans, settle
from raycheck.bucket.protocol.swap import Register, lost_error
from raycheck.bucket.reading import list_directories, read_latest
from raycheck.bucket.store import Store
from raycheck.bucket.store.interface import Upload
from raycheck.errors import CorruptError, DeniedError, RaycheckError, StoreError
from raycheck.settings import Retention
from raycheck.show_progress import ProgressTally

GRACE_S = 600.0
AT_ONCE = 8
NO_RULES = Retention()


@dataclass(frozen=True, kw_only=True, slots=True)
class Deletion:
    """A deletion by prune or sweep: the objects of one checkpoint or upload, and the reason.

    name: the checkpoint's name, or the upload's key. wait_s: seconds until the readers' grace period ends, by the
    bucket's clock. is_deleted: False in a dry run, during that period, and while others refer to its objects.
    """

    name: str
    num_objects: int
    size_bytes: int
    reason: str
    wait_s: float = 0.0
    is_deleted: bool = False


def prune(
    register: Register,
    rules: Retention = NO_RULES,
    *,
    grace_s: float = GRACE_S,
    spare: frozenset[str] = frozenset(),
    tally: ProgressTally | None = None,
    by: str = "",
) -> tuple[str, ...]:
    """Evict what `rules` do not keep or what has expired, and delete evicted checkpoints. Steps 19 to 21.

    Only evicted checkpoints are deleted, and not what a live one still uses (I6). grace_s: seconds that readers have
    before a delete. spare: checkpoints that the caller is still reading, which stay. tally: counts the objects. by: see
    evict. Returns the names that are completely deleted. After a crash at any point the next prune continues. Raises
    NotFoundError without a run.
    """
    evict(register, rules, by=by)
    body, got = register.read_existing()
    held = body.held()
    gone, failures = [], []
    for name, wait_s in _waits(body, got.at, grace_s):
        if not wait_s and name not in spare:
            try:
                _delete_checkpoint(register.store, name, is_held=name in held, tally=tally)
            except (StoreError, CorruptError) as error:  # one object that cannot be deleted must not stop the others
                failures.append(error)
                continue
            if name not in held:
                gone.append(name)  # otherwise its objects stay, and it stays in `evicted`, until nobody refers to it
    if gone:
        _record_drops(register.store, body, gone)
        forget(register, frozenset(gone))
    try:
        settle(register)
        if body.past_pages:
            sweep_pages(register.store)
    except (StoreError, CorruptError) as error:
        failures.append(error)
    if failures:
        raise failures[0]
    return tuple(gone)


def _record_drops(store: Store, body: Latest, keys: Collection[str]) -> None:
    """Write into the history why these checkpoints were evicted, which `latest` will no longer say. Step 21.

    A mirror has the history of its source, which says it.
    """
    if body.is_mirror:
        return
    drops = {item.key: item for item in facts_of(body).drops.values() if item.key in keys}
    with suppress(RaycheckError):  # for people only: losing it loses no checkpoint
        record_facts(store, Facts(drops=drops), run_id=body.run_id, counter=body.counter)


def plan_prune(
    register: Register,
    rules: Retention = NO_RULES,
    *,
    grace_s: float = GRACE_S,
    tally: ProgressTally | None = None,
) -> tuple[Deletion, ...]:
    """List what `prune` would delete now or after the grace period. Write nothing. tally: counts the objects."""
    body, got = register.read_existing()
    decisions = decide_retention(body, rules, now=got.at)
    held = replace(body, newest=tuple(item.entry for item in decisions if item.is_kept), head=None).held()
    due = [(name, "evicted", wait_s) for name, wait_s in _waits(body, got.at, grace_s)]
    due += [(item.entry.key, item.reason, grace_s) for item in decisions if not item.is_kept]
    found = []
    for name, why, wait_s in due:
        reason = f"{why}; others refer to its objects" if name in held else why
        found.append(deletion_of(register.store, name, reason, wait_s, held))
        if tally is not None:
            tally.add(found[-1].num_objects)
    return tuple(found)


def sweep(store: Store, *, also_whole: bool = False, tally: ProgressTally | None = None) -> tuple[Deletion, ...]:
    """Delete what failed saves of earlier attempts left, and abort their uploads. Steps 22 and 23.

    Those attempts can commit nothing more, so nobody will ever need it (I6). Returns what was deleted. After a crash at
    any point the next sweep continues. also_whole: also delete directories that have a manifest and an index. They
    could be restored; if `latest` was put back to an older state unnoticed, only a person can decide whether they are
    checkpoints. tally: counts the objects. Raises NotFoundError without a run, CorruptError when `latest` is older than
    a directory; then nothing is deleted.
    """
    drop_orphans(Register(store))
    swept, uploads = _garbage(store, also_whole=also_whole)
    for item in swept:
        _delete_checkpoint(store, item.name, is_held=False, tally=tally)
    aborted = [_unfinished(store, upload) for upload in uploads]
    for upload in uploads:
        store.abort_upload(upload)
    sweep_pages(store)
    return tuple(replace(item, is_deleted=True) for item in (*swept, *aborted))


def plan_sweep(store: Store, *, also_whole: bool = False) -> tuple[Deletion, ...]:
    """List what `sweep` would delete. Write nothing."""
    swept, uploads = _garbage(store, also_whole=also_whole)
    return (*swept, *(_unfinished(store, upload) for upload in uploads))


def _waits(body: Latest, now: float, grace_s: float) -> Iterator[tuple[str, float]]:
    """Yield each evicted checkpoint, and the number of seconds that readers still have."""
    for item in body.evicted:
        yield item.key, max(0.0, grace_s - (now - item.at))


def _garbage(store: Store, *, also_whole: bool) -> tuple[list[Deletion], list[Upload]]:
    """Find the directories and uploads to sweep.

    `latest` is read after the listing: otherwise a claim in between would look like a lost `latest`. A mirror has
    nothing to sweep: what it does not list may still be arriving.
    """
    uploads = _uploads(store)

    def look() -> tuple[list[CheckpointName], Latest]:
        names = list_directories(store)
        body = read_latest(store)
        if names and not body.has_answered(names[-1]):
            raise lost_error(store.uri, f"does not know the checkpoint {names[-1]}")
        return names, body

    names, body = again_if_corrupt(look)
    if body.is_mirror:
        return [], []
    number = body.attempt.number
    named = body.held() | {item.key for item in body.evicted}
    found = []
    for name in names:
        if name.attempt < number and str(name) not in named:
            objects = _sizes(store, str(name))
            is_whole = {object_keys.manifest_key(str(name)), object_keys.index_key(str(name))} <= objects.keys()
            if also_whole or not is_whole:
                found.append(
                    Deletion(
                        name=str(name),
                        num_objects=len(objects),
                        size_bytes=sum(objects.values()),
                        reason=f"attempt {name.attempt} ended before it was {'listed' if is_whole else 'whole'}",
                    )
                )
    left = [upload for upload in uploads if (of := object_keys.checkpoint_of(upload.key)) and of.attempt < number]
    return found, left


def _uploads(store: Store) -> list[Upload]:
    """List the unfinished uploads; none without the permission, since directories can still be swept."""
    try:
        return list(store.list_uploads(object_keys.CHECKPOINTS_PREFIX))
    except DeniedError:
        return []


def _unfinished(store: Store, upload: Upload) -> Deletion:
    size_bytes = store.upload_bytes(upload)
    return Deletion(name=upload.key, num_objects=0, size_bytes=size_bytes, reason="an upload that never ended")


def deletion_of(store: Store, name: str, reason: str, wait_s: float, held: Collection[str] = ()) -> Deletion:
    """Return what deleting a checkpoint frees: only its manifest if its directory is `held`. This lists its objects."""
    sizes = _sizes(store, name)
    if name in held:
        sizes = {key: size for key, size in sizes.items() if key == object_keys.manifest_key(name)}
    return Deletion(name=name, num_objects=len(sizes), size_bytes=sum(sizes.values()), reason=reason, wait_s=wait_s)


def _sizes(store: Store, name: str) -> dict[str, int]:
    """Return the size in bytes of each object of a checkpoint, by key.

    Keys outside of it are left out, whatever a listing returns: nothing else may be deleted.
    """
    prefix = object_keys.checkpoint_prefix(name)
    return {item.key: item.size_bytes for item in store.list_objects(prefix) if item.key.startswith(prefix)}


def _delete_checkpoint(store: Store, name: str, *, is_held: bool, tally: ProgressTally | None = None) -> None:
    """Delete a checkpoint's objects, the manifest first: from then on no reader mistakes the rest for a checkpoint."""
    store.delete(object_keys.manifest_key(name))
    if tally is not None:
        tally.add(1)
    if is_held:
        return
    delete_objects(store, list(_sizes(store, name)), tally=tally)


def delete_objects(store: Store, keys: Sequence[str], *, tally: ProgressTally | None = None) -> None:
    """Delete objects, several at a time. tally: counts them. Raises the first error after all have been tried."""
    if not keys:
        return
    failures = []
    with ThreadPoolExecutor(min(AT_ONCE, len(keys)), thread_name_prefix="raycheck-delete") as pool:
        for error in pool.map(partial(_delete, store), keys):
            if error is not None:
                failures.append(error)
            elif tally is not None:
                tally.add(1)
    if failures:
        raise failures[0]


def _delete(store: Store, key: str) -> StoreError | None:
    """Delete an object. Return the store's error, since raising it would end the deletes of all others."""
    try:
        store.delete(key)
    except StoreError as error:
        return error
    return None
