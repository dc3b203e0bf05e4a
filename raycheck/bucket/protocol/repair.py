"""Rebuilds a `latest` that was lost, rolled back or damaged, from the manifests. Runs by command only. Step 32.

A manifest proves that all ranks' shards were durable (I1), whether or not its commit succeeded. The sizes of all
objects, including index and `.metadata`, are checked nevertheless, and the head is read in full.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from uuid import uuid4

from raycheck.bucket.attempt_records import MAX_BYTES as MAX_RECORD
from raycheck.bucket.attempt_records import load_record, record_end
from raycheck.bucket.document_reading import again_if_corrupt, read_document
from raycheck.bucket.format import object_keys
from raycheck.bucket.format.checksum import crc32
from raycheck.bucket.format.document import NewerFormatError
from raycheck.bucket.format.latest import (
    MAX_BYTES,
    Attempt,
    Entry,
    Latest,
    Loan,
    PastPage,
    dump_latest,
    listed_metrics,
    load_latest,
)
from raycheck.bucket.format.manifest import MAX_BYTES as MAX_MANIFEST
from raycheck.bucket.format.manifest import Manifest, load_manifest
from raycheck.bucket.format.object_keys import CheckpointName
from raycheck.bucket.history.facts import CommitRecord, Facts
from raycheck.bucket.history.segments import read_facts_of_all
from raycheck.bucket.pages import Pages
from raycheck.bucket.protocol.paging import fold
from raycheck.bucket.protocol.rewind import attempt_by_hand
from raycheck.bucket.protocol.sharing.holds import borrow_again, recorded_holds
from raycheck.bucket.protocol.write_once import put_all_once
from raycheck.bucket.reading import Checkpoint, list_directories
from raycheck.bucket.store import Got, Store
from raycheck.errors import ConfigError, CorruptError, NotFoundError

COUNTER_STRIDE = 1_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Repaired:
    """The new `latest`, and the directories that could not be listed in it, each with its reason."""

    latest: Latest
    left_out: tuple[tuple[str, str], ...]


def repair(store: Store) -> Repaired:
    """Rebuild `latest` from the manifests. Step 32. Stop the run first: its deletes carry no condition.

    Raises ConfigError when `latest` is sound, NotFoundError when there is nothing from which to rebuild it,
    ConflictError when someone else has written it in the meantime.
    """
    stored, got = _old(store)
    pages = Pages(store)
    old, lost = (None, ()) if stored is None else pages.readable(stored)
    one, other = set(list_directories(store)), set(list_directories(store))  # a name may be corrupted on the way
    names = sorted(one | other)
    is_sound = old is not None and not lost and all(old.has_answered(name) for name in one & other)
    if old is not None and is_sound and _has_its_head(store, old):
        raise ConfigError(f"{store}: latest is sound (attempt {old.attempt.number}); there is nothing to repair")
    run_id, known = _run_of(store, names, old)
    live, left_out, loans, now = _listed_again(store, names, old, run_id, known)
    if not live:
        raise NotFoundError(f"{store}: no whole checkpoint was found to rebuild latest from{_reasons(left_out)}")
    records = list(_ended_attempts(store))
    attempts = [*records, *(fact.attempt for fact in known.attempts.values())]
    number = 1 + max([*(name.attempt for name in names), *(item.number for item in attempts), *_number(old)])
    owner = f"repair-{uuid4().hex[:12]}"
    owners = dict.fromkeys([*(old.owners if old else ()), *(item.owner for item in attempts), owner])
    head = _head(live, records)
    new = Latest(
        run_id=run_id,
        # Without an old body its counter is unknown. This one is far above any that a coordinator can have seen, so
        # a coordinator that is still running does not mistake the new body for a rolled back one.
        counter=old.counter + 1 if old else number * COUNTER_STRIDE,
        proven=number,
        newest_owners=tuple(owners),
        attempts=(attempt_by_hand(owner, number, restore_key=head, now=now),),
        head=head,
        finished=old.finished if old and old.ends_with(head) else None,
        newest=tuple(live),
        newest_evicted=old.evicted if old else (),
        holds=old.holds if old else recorded_holds(store, now=now),
        loans=loans,
        past_pages=_past_pages(stored) if stored else (),
        forked_from=old.forked_from if old else "",
    )
    data = _stored(store, new, pages)
    if got is None:
        store.put_if_absent(object_keys.LATEST_KEY, data)
    else:
        store.put_if_match(object_keys.LATEST_KEY, data, got.version)
    if old and old.attempt.number:
        record_end(store, old.attempt, by=new.attempt, cause="the run was repaired", finished_at=old.finished_at)
    return Repaired(latest=new, left_out=tuple(left_out))


def _run_of(store: Store, names: list[CheckpointName], old: Latest | None) -> tuple[str, Facts]:
    """Return the run's id, and what the history knows of the run.

    Without an old body, that is the id in the segments that name the newest of these checkpoints, with its size; so
    they are not those of another run that was here before. If there are none, it is a new id.
    """
    by_run = read_facts_of_all(store)
    if old:
        return old.run_id, by_run.get(old.run_id, Facts())
    for name in reversed(names):
        records = ((facts.commits.get(str(name)), run_id) for run_id, facts in by_run.items())
        found = [(record.counter, run_id, record.size_bytes) for record, run_id in records if record is not None]
        size = _size_of(store, name) if found else None
        if same := [(counter, run_id) for counter, run_id, size_bytes in found if size_bytes == size]:
            return max(same)[1], by_run[max(same)[1]]
    return uuid4().hex, Facts()


def _size_of(store: Store, name: CheckpointName) -> int | None:
    """Return the size that a checkpoint's manifest states, or None if it cannot be read."""
    with suppress(NotFoundError, CorruptError):
        key = object_keys.manifest_key(str(name))
        return read_document(store, key, load_manifest, max_bytes=MAX_MANIFEST)[0].size_bytes
    return None


def _listed_again(
    store: Store, names: list[CheckpointName], old: Latest | None, run_id: str, known: Facts
) -> tuple[list[Entry], list[tuple[str, str]], tuple[Loan, ...], float]:
    """Return the entries of the whole directories among `names`, in their order, and the others with their reasons.

    Also return the loans of all of them, for which holds are taken again, and the bucket's time.
    """
    gone = {item.key for item in old.evicted} if old else set()
    before = {entry.key: entry for entry in old.live} if old else {}
    names_of = {entry.name: entry.key for entry in before.values() if entry.name is not None}
    loans = old.loans if old else ()
    live: list[Entry] = []
    left_out: list[tuple[str, str]] = []
    now = 0.0
    for name in reversed(names):
        if str(name) in gone:
            continue
        try:
            entry, now = _verified(store, name, before.get(str(name)), known.commits.get(str(name)), is_head=not live)
            loans = borrow_again(store, entry.refs, loans, run_id=run_id)
            live.append(_with_own_name(entry, names_of))
        except NewerFormatError:
            raise
        except (NotFoundError, CorruptError) as error:  # a store that fails proves nothing
            left_out.append((str(name), str(error)))
    return live[::-1], left_out, loans, now


def _old(store: Store) -> tuple[Latest | None, Got | None]:
    """Read what is there now: nothing, an unreadable body, or a body that may be too old. Return the body and the
    response."""
    answers: list[Got | None] = []

    def read() -> Latest | None:
        answers.append(None)
        with suppress(NotFoundError):
            got = answers[-1] = store.get(object_keys.LATEST_KEY, MAX_BYTES)
            return load_latest(got.data, what=f"{store}: latest")
        return None

    try:
        return again_if_corrupt(read), answers[-1]
    except NewerFormatError:
        raise
    except CorruptError as error:
        if answers[-1] is None:
            raise CorruptError(
                f"{error}: this object is not a `latest` that raycheck wrote; delete it, then repair"
            ) from None
        return None, answers[-1]


def _past_pages(old: Latest) -> tuple[PastPage, ...]:
    """Return the pages that stay for a while although the rebuilt body does not name them."""
    left = (PastPage(key=page.key, since=old.counter + 1) for page in old.all_pages)
    return (*old.past_pages, *left)


def _stored(store: Store, body: Latest, pages: Pages) -> bytes:
    """Write the pages of a whole body. Return the bytes of its `latest`."""
    folded, written = fold(body, None, pages)
    if written:
        put_all_once(store, written)
    return dump_latest(folded)


def _has_its_head(store: Store, old: Latest) -> bool:
    """Return whether the head's objects exist.

    A `latest` that was put back to an older state of the same attempt names checkpoints that have been deleted since.
    """
    head = old.entry(old.head) if old.head else None
    return head is None or not any(finding.problem for finding in Checkpoint(store, head).verify(reads=False))


def _verified(
    store: Store, name: CheckpointName, before: Entry | None, record: CommitRecord | None, *, is_head: bool
) -> tuple[Entry, float]:
    """Verify a directory. Return its entry, with pin and expiry as in the old body, and the bucket's time.

    before: its entry in the old body. record: its commit in the history. Raises NotFoundError or CorruptError when it
    is not whole.
    """
    entry, now = again_if_corrupt(lambda: _entry(store, name, before, record, is_head=is_head))
    for finding in Checkpoint(store, entry).verify(reads=is_head):
        if finding.problem:
            raise CorruptError(f"{finding.key}: {finding.problem}")
    return entry, now


def _entry(
    store: Store, name: CheckpointName, before: Entry | None, record: CommitRecord | None, *, is_head: bool
) -> tuple[Entry, float]:
    """Make a directory's entry from its manifest, which is read twice. Returns it with the bucket's time."""
    key = object_keys.manifest_key(str(name))
    try:
        got = store.get(key, MAX_MANIFEST)
    except NotFoundError:
        raise NotFoundError("it has no manifest: its save was never finished, or it was being deleted") from None
    manifest = load_manifest(got.data, what=key)
    entry = Entry(
        key=manifest.key,
        refs=manifest.refs,
        step=manifest.step,
        committed_at=_committed_at(manifest, before, record, got.at),
        size_bytes=manifest.size_bytes,
        metrics=before.metrics if before else listed_metrics(manifest.metrics, needed=None),
        manifest_crc32=crc32(got.data),
        rolling=manifest.rolling,
        by_notice=manifest.by_notice,
        drifted=bool(manifest.drifted),
        pinned=before.pinned if before else False,
        expires_at=before.expires_at if before else _expires_at(manifest, got.at),
        damaged=before.damaged if before and not is_head else None,  # all objects of the newest one are read
        name=before.name if before else manifest.name,
        scores=before.scores if before else {},
    )
    if manifest.key != str(name):
        raise CorruptError(f"its manifest is that of {manifest.key}")
    Checkpoint(store, entry).read_manifest()
    return entry, got.at


def _with_own_name(entry: Entry, names_of: dict[str, str]) -> Entry:
    """Remove the name of an entry if a newer one has it, or if the old body gives it to another one.

    names_of: which checkpoint has each name; a new name is added.

    A manifest states only which name its save requested: the same step may have been saved twice under that name, and a
    person may have moved the name since.
    """
    has_own = entry.name is None or names_of.setdefault(entry.name, entry.key) == entry.key
    return entry if has_own else replace(entry, name=None)


def _expires_at(manifest: Manifest, now: float) -> float | None:
    """Return when a checkpoint expires for which no old body says so: late rather than early."""
    return None if manifest.expire_after_s is None else now + manifest.expire_after_s


def _committed_at(manifest: Manifest, before: Entry | None, record: CommitRecord | None, now: float) -> float:
    """Return when a checkpoint was committed. If neither the old body nor the history says that, return the earliest
    possible time.

    If all of them got the time of the repair, keep_every_s would see them in one span, and drop all but one of
    them at the next commit.
    """
    if before is not None:
        return before.committed_at
    if record is not None:
        return record.at
    return now if manifest.began_at is None else min(now, manifest.began_at + manifest.trained_s)


def _ended_attempts(store: Store) -> Iterator[Attempt]:
    """Yield the attempts that left a record: an owner that was fenced must stay fenced."""
    for item in store.list_objects(object_keys.ATTEMPTS_PREFIX):
        if not object_keys.is_attempt_key(item.key):
            continue
        try:
            yield read_document(store, item.key, load_record, max_bytes=MAX_RECORD)[0].attempt
        except (CorruptError, NotFoundError):
            continue  # the record is for people; the directories' names also give the attempt's number


def _head(live: list[Entry], records: list[Attempt]) -> str:
    """Choose the head: the newest checkpoint, or the one to which the run was rewound, if nothing was saved since."""
    newest = live[-1].key
    name = CheckpointName.parse(newest)
    last = max(records, key=lambda record: record.number, default=None)
    if last is None or name is None or last.world_size or last.number <= name.attempt:
        return newest
    return next((entry.key for entry in live if entry.key == last.restore_key and not entry.damaged), newest)


def _number(old: Latest | None) -> list[int]:
    return [old.attempt.number] if old else []


def _reasons(left_out: list[tuple[str, str]]) -> str:
    return "".join(f"\n  {name}: {why}" for name, why in left_out[:10])
