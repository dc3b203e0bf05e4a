"""Asserts the invariants of FORMAT.md on a bucket. Every test that touches a run ends with `assert_invariants`.

`assert_write` asserts them right after one write, and also which body of `latest` may follow on which. It needs a World
(fault_injection.py), whose memory it uses instead of the store, so that thousands of runs can be watched at every step.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import lru_cache

from raycheck.bucket.format import object_keys
from raycheck.bucket.format.checksum import crc32
from raycheck.bucket.format.latest import MAX_BYTES, Entry, Latest, Page, in_order, load_latest, load_page
from raycheck.bucket.format.manifest import Manifest, load_manifest
from raycheck.bucket.format.object_keys import CheckpointName
from raycheck.bucket.reading import Checkpoint, list_directories, read_latest
from raycheck.bucket.store import Store
from raycheck.errors import NotFoundError
from tests.support.servers.fault_injection import World, Write


def assert_invariants(store: Store, before: Latest | None = None) -> Latest | None:
    """Assert I1, I2, I3 and I4 on the objects in `store`. before: an earlier body, after which nothing may go back."""
    try:
        body = read_latest(store)
    except NotFoundError:
        assert before is None, "latest disappeared"
        return None
    for checkpoint in (Checkpoint(store, entry) for entry in body.live if not entry.damaged):
        bad = [finding for finding in checkpoint.verify() if finding.problem]
        assert not bad, f"I1, I3: {bad}"
        assert_manifest(checkpoint.read_manifest(), checkpoint.entry, body)
    assert_body(body)
    if before is not None:
        assert_went_on(before, body)
    assert len(store.get(object_keys.LATEST_KEY).data) <= MAX_BYTES
    return body


def assert_body(body: Latest) -> None:
    """Assert what must be true of any body of `latest` by itself."""
    numbers = [attempt.number for attempt in body.attempts]
    assert numbers == sorted(set(numbers)), "attempts are numbered upwards"
    order = [CheckpointName.parse(entry.key) for entry in body.live]
    assert body.proven is None or body.proven <= body.attempt.number
    assert all(body.has_answered(name) for name in order), "I4: committed before its claim was answered"
    assert [(n.attempt, n.save) for n in order] == sorted((n.attempt, n.save) for n in order), "order of commit"
    assert not {entry.key for entry in body.live} & {item.key for item in body.evicted}, "I4: evicted and live"
    assert body.attempt.owner in body.owners
    assert len(set(body.owners)) == len(body.owners), "an owner is listed twice"
    restore = body.attempt.restore_key
    assert restore is None or body.attempt.last_save or body.entry(restore), "the restore source is kept"


def assert_manifest(manifest: Manifest, entry: Entry, body: Latest) -> None:
    assert manifest.key == entry.key, "I3"
    assert set(manifest.refs) == set(entry.refs), "I3: references"
    assert set(manifest.refs) <= body.held(), "I3: a referenced directory is not held"
    name = CheckpointName.parse(entry.key)
    assert (name.step, name.attempt, name.save) == (manifest.step, manifest.attempt, manifest.save), "I2"


def assert_went_on(before: Latest, after: Latest) -> None:
    """Assert that `after` can have come from `before` by any number of swaps."""
    assert after.counter >= before.counter, "the write counter only grows"
    assert after.attempt.number >= before.attempt.number, "I4: attempts only grow"
    assert before.proven is None or after.proven >= before.proven
    assert set(before.owners) <= set(after.owners), "owners are never taken off"
    gone = {item.key for item in before.evicted}
    assert not gone & {entry.key for entry in after.live}, "I4: an evicted entry came back"


def assert_write(world: World, write: Write) -> None:
    """Assert I1, I2, I3, I4 and I6 after one write."""
    if write.key == object_keys.LATEST_KEY:
        _assert_swap(world)
    elif write.verb == "delete":
        _assert_delete(world, write.key)
    elif write.verb == "abort_upload":
        name = object_keys.checkpoint_of(write.key)
        assert name is not None, write
        assert name.attempt < load(world.bodies[-1]).attempt.number, f"I6: aborted {write.key}"
    elif not write.key.startswith("probes/"):
        assert world.wrote.get(write.key, write.data) == write.data, f"I2: {write.key} has other bytes now"


def _assert_swap(world: World) -> None:
    stored = load(world.bodies[-1])
    for page in stored.all_pages:
        assert world.objects.get(page.key) == world.wrote[page.key], f"I3: {page.key} is missing"
    body = whole(world, world.bodies[-1])
    assert_body(body)
    assert world.objects[object_keys.LATEST_KEY] == world.bodies[-1]
    for entry in body.live:
        assert_manifest(manifest_of(world, entry), entry, body)
        for key, wanted in needed(world, entry).items():
            data = world.objects.get(key)
            assert data is not None, f"I3: {key} of {entry.key} is missing"
            assert (len(data), crc32(data)) == wanted, f"I1: {key}"
    if len(world.bodies) > 1:
        before = whole(world, world.bodies[-2])
        assert_went_on(before, body)
        if body.is_mirror:
            assert_mirror_follows(before, body)
        elif not body.attempt.owner.startswith("repair-"):
            assert_follows(before, body)
    back = {entry.key for entry in body.live} & set().union(*(_evicted(world, data) for data in world.bodies))
    assert not back, f"I4: {back} came back"


def _assert_delete(world: World, key: str) -> None:
    name = object_keys.checkpoint_of(key)
    if (counter := object_keys.counter_of_page(key)) is not None:
        stored = load(world.bodies[-1])
        assert counter <= stored.counter, f"I6: {key} may still be named"
        assert key not in {page.key for page in stored.all_pages}, f"I6: {key} is named"
        return
    if name is None:
        is_for_people = object_keys.is_segment_key(key)  # a part of the history, which was merged into another
        assert is_for_people or key.startswith("probes/"), f"I6: {key} lies outside of checkpoints/"
        return
    body = whole(world, world.bodies[-1])
    was_evicted = any(str(name) in _evicted(world, data) for data in world.bodies)
    assert was_evicted or name.attempt < body.attempt.number, f"I6: {key} could still be committed"
    for entry in body.live:
        is_needed = key == object_keys.manifest_key(entry.key) or key in needed(world, entry)
        assert not is_needed, f"I6: {key} is needed by {entry.key}"


def manifest_of(world: World, entry: Entry) -> Manifest:
    return _manifest(_manifest_bytes(world, entry))


def needed(world: World, entry: Entry) -> dict[str, tuple[int, int]]:
    """Return size and checksum of every object of a checkpoint besides its manifest, by key."""
    return _objects(_manifest_bytes(world, entry))


def _manifest_bytes(world: World, entry: Entry) -> bytes:
    data = world.objects.get(object_keys.manifest_key(entry.key))
    assert data is not None, f"I3: {entry.key} has no manifest"
    assert crc32(data) == entry.manifest_crc32, f"I1: manifest of {entry.key}"
    return data


@lru_cache(maxsize=20_000)
def load(data: bytes) -> Latest:
    """Parse a body that a world remembers, without its pages."""
    return load_latest(data, what="latest")


def whole(world: World, data: bytes) -> Latest:
    """Return a body that a world remembers, with what its pages list, also if they are deleted by now."""
    body = load(data)
    body = replace(body, past_pages=()) if body.past_pages else body
    refs = body.all_pages
    if not refs:
        return body
    assert {ref.key for ref in refs} <= world.wrote.keys(), "I3: a page was named before it was written"
    pages = [_page(world.wrote[ref.key]) for ref in refs]
    live = [entry for page in pages for entry in page.live]
    evicted = [item for page in pages for item in page.evicted]
    assert not {entry.key for entry in live} & body.kept_newest, "the head or what is restored is in a page"
    for ref, page in zip(refs, pages, strict=True):
        keys = [*(item.key for item in (*page.live, *page.evicted)), *page.owners]
        assert (ref.count, ref.first, ref.last) == (len(keys), keys[0], keys[-1])
        assert (ref.size_bytes, ref.crc32) == (len(world.wrote[ref.key]), crc32(world.wrote[ref.key]))
    return replace(
        body,
        newest=in_order((*live, *body.newest)),
        pages=(),
        newest_evicted=(*evicted, *body.newest_evicted),
        evicted_pages=(),
        newest_owners=(*(owner for page in pages for owner in page.owners), *body.newest_owners),
        owner_pages=(),
    )


@lru_cache(maxsize=5_000)
def _page(data: bytes) -> Page:
    return load_page(data, what="page")


@lru_cache(maxsize=5_000)
def _manifest(data: bytes) -> Manifest:
    return load_manifest(data, what="manifest")


@lru_cache(maxsize=5_000)
def _objects(data: bytes) -> dict[str, tuple[int, int]]:
    return {key: (record.size_bytes, record.crc32) for key, record in _manifest(data).objects()}


def _evicted(world: World, data: bytes) -> frozenset[str]:
    return frozenset(item.key for item in whole(world, data).evicted) if load(data).evicted_pages else _in_body(data)


@lru_cache(maxsize=20_000)
def _in_body(data: bytes) -> frozenset[str]:
    return frozenset(item.key for item in load(data).evicted)


def assert_follows(before: Latest | None, after: Latest) -> None:
    """Assert I4 on two successive bodies of `latest`: they differ by one recorded decision, and no more."""
    if before is None:
        assert (after.counter, after.head, after.live, after.evicted) == (1, None, (), ()), "a run begins empty"
        assert [attempt.number for attempt in after.attempts] == [1], "a run begins with attempt 1"
        return
    assert after.counter == before.counter + 1, "every swap counts one"
    assert after.owners[: len(before.owners)] == before.owners, "owners are never taken off"
    kept = [entry.key for entry in after.live if before.entry(entry.key) is not None]
    gone = [entry.key for entry in before.live if after.entry(entry.key) is None]
    new = [entry for entry in after.live if before.entry(entry.key) is None]
    assert kept == [entry.key for entry in before.live if entry.key not in gone], "the order of commits changed"
    released = before.held() - after.held()
    again = [item.key for item in before.evicted if item.key in released]
    evicted = [item.key for item in after.evicted if item not in before.evicted or item.key in again]
    assert evicted == again + gone, "what leaves live is evicted, and what only that referred to is evicted anew"
    assert not [key for key in gone if before.entry(key).pinned], "a pinned checkpoint was evicted"
    kept_by_name = [key for key in gone if before.entry(key).name and before.entry(key).expires_at is None]
    moved = {entry.name for entry in after.live if before.entry(entry.key) is None}
    assert {before.entry(key).name for key in kept_by_name} <= moved, "a named checkpoint was evicted"
    assert not {item.key for item in before.evicted} & {entry.key for entry in new}, "an evicted entry came back"
    forgotten = {item.key for item in before.evicted} - {item.key for item in after.evicted}
    assert not forgotten & after.held(), "a name was forgotten whose objects a live entry holds"
    if after.finished != before.finished:
        _assert_finished_or_moved(before, after)
    assert after.head == before.head or after.finished is None, "an end that lies behind the head is still there"
    if after.attempt.number == before.attempt.number:
        _assert_same_attempt(before, after, new, gone)
    else:
        assert not new, "a claim commits nothing"
        assert not gone, "a claim evicts nothing"
        _assert_next_attempt(before, after)


def assert_mirror_follows(before: Latest, after: Latest) -> None:
    """Assert step 38 on two successive bodies of a mirror: it went forward, and forgot nothing that may be deleted."""
    assert before.is_mirror, "a run that was trained on became a mirror"
    assert (after.run_id, after.mirror.owner) == (before.run_id, before.mirror.owner)
    assert after.counter == before.counter + 1, "every swap counts one"
    assert after.mirror.counter >= before.mirror.counter, "a mirror went back"
    assert after.attempt.number > max(attempt.number for attempt in after.attempts[:-1]), "a mirror's attempt is above"
    assert after.attempt.restore_key == after.head, "an attempt restores the head"
    assert before.head is None or after.head is not None, "a mirror lost its head"
    dropped = {name for name in before.held() | {item.key for item in before.evicted} if name not in after.held()}
    if before.live != after.live:
        assert dropped <= {item.key for item in after.evicted}, "what leaves a mirror is evicted"


def _assert_finished_or_moved(before: Latest, after: Latest) -> None:
    """Assert step 33: the end is the live attempt's, by a swap that changes nothing else; moving head takes it off."""
    if after.finished is not None:
        assert after.is_finished, "another attempt, or another checkpoint than the head, was called the end"
        assert replace(after, counter=before.counter, finished=before.finished) == before, "an end changes nothing else"
    else:
        assert after.head != before.head or after.attempt.owner.startswith("rewind-"), "an end was forgotten"


def _assert_same_attempt(before: Latest, after: Latest, new: list[Entry], gone: list[str]) -> None:
    was, now = before.attempt, after.attempt
    assert after.owners == before.owners, "only a claim brings a new owner"
    if now.restore_key != was.restore_key:
        _assert_went_back(before, after)
        return
    assert replace(now, coordinator=was.coordinator, last_save=was.last_save) == was, "an attempt never changes"
    assert _damaged(before) - set(gone) <= _damaged(after), "only a rewind takes the mark of damage away"
    if not new:
        assert (after.head, now.last_save) == (before.head, was.last_save), "head moved without a decision"
    else:
        (entry,) = new
        name = CheckpointName.parse(entry.key)
        assert now.coordinator == was.coordinator, "a commit of a coordinator that the attempt does not name"
        assert name.attempt == now.number, f"{entry.key} was committed in attempt {now.number}"
        assert was.last_save < name.save == now.last_save, f"{entry.key} was committed after save {was.last_save}"
        assert after.head == after.live[-1].key == entry.key, "a commit is the newest entry and the head"
        assert set(entry.refs) <= before.held(), "a commit refers to what nobody held"
    assert now.last_save or now.restore_key not in gone, "what the live attempt restores was evicted"


def _assert_went_back(before: Latest, after: Latest) -> None:
    """Assert step 26: the attempt restores an older checkpoint, its former one is marked and kept, and no more."""
    was, now = before.attempt, after.attempt
    assert replace(now, restore_key=was.restore_key) == was, "an attempt never changes"
    assert was.last_save == 0, "an attempt that has saved goes back"
    assert _damaged(after) - _damaged(before) == {was.restore_key} == {before.head}, "another one is marked"
    assert after.entry(was.restore_key).pinned, "a damaged checkpoint is kept for inspection"
    assert after.head == now.restore_key, "an attempt restores the head"
    assert CheckpointName.parse(after.head) < CheckpointName.parse(before.head), "going back goes forward"
    unmarked = tuple(replace(entry, damaged=None, pinned=False) for entry in after.live)
    assert unmarked == tuple(replace(entry, damaged=None, pinned=False) for entry in before.live), "an entry changed"


def _damaged(body: Latest) -> set[str]:
    return {entry.key for entry in body.live if entry.damaged}


def _assert_next_attempt(before: Latest, after: Latest) -> None:
    was, now = before.attempt, after.attempt
    assert now.number == was.number + 1, "attempts are numbered without gaps"
    assert after.attempts[:-1] == before.attempts[-len(after.attempts) + 1 :], "an ended attempt changed"
    assert now.group not in {attempt.group for attempt in before.attempts}, "a group that was replaced claimed again"
    assert now.owner == was.owner or now.owner not in before.owners, "a fenced owner is back"
    assert now.last_save == 0
    assert now.restore_key == after.head, "an attempt restores the head"
    assert after.head == before.head or now.owner != was.owner, "only a new owner moves the head by its claim"
    assert (after.head is None) <= (not after.live), "I7: a fresh start over existing checkpoints"


def assert_never_named_again(deleted: Iterable[str], body: Latest) -> None:
    """Assert I6: `body` needs no object that was ever deleted.

    A manifest may be deleted before objects that others refer to.
    """
    live, held = {entry.key for entry in body.live}, body.held()
    for key in deleted:
        name = str(object_keys.checkpoint_of(key))
        assert name not in (live if key == object_keys.manifest_key(name) else held), f"I6: {key} was deleted"


def assert_same_bytes(store: Store, wrote: Mapping[str, bytes]) -> None:
    """Assert I2: each object but `latest` has the bytes first put there, or after a torn upload the first of them."""
    for item in store.list_objects(""):
        if item.key != object_keys.LATEST_KEY and item.key in wrote:
            data = store.get(item.key).data
            assert wrote[item.key].startswith(data), f"I2: {item.key} changed"


def assert_repaired(store: Store, before: Latest, after: Latest) -> None:
    """Assert step 32: a repair lists all that was live in `before`, and lets no earlier attempt go on.

    Pins and evictions may be lost. before: the last body before `latest` was lost.
    """
    missing = {entry.key for entry in before.live} - {entry.key for entry in after.live}
    assert not missing, f"repair lost {sorted(missing)}"
    names = list_directories(store)
    assert all(name.attempt < after.attempt.number for name in names), "an attempt before a repair goes on"
    assert after.attempt.owner not in before.owners
    assert after.attempt.restore_key == after.head is not None
