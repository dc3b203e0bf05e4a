"""Reads, writes and merges the segments of a run's history: immutable objects that contain facts. Step 41.

A reader takes the union of all segments that it finds. So it does not matter how often, in which order or by whom a
fact is written, and a crash between any two requests leaves either too much or nothing. A segment is deleted only when
another one that has all of its facts was written and read back.
"""

from collections.abc import Collection, Sequence
from contextlib import suppress
from functools import partial
from uuid import uuid4

from raycheck.bucket.document_reading import read_document
from raycheck.bucket.format.object_keys import HISTORY_PREFIX, is_segment_key, segment_key
from raycheck.bucket.history.facts import (
    MAX_SEGMENT_BYTES,
    Facts,
    Segment,
    dump_segment,
    facts_in,
    has_unknown_fields,
    load_segment,
)
from raycheck.bucket.store import Store
from raycheck.bucket.store.interface import MAX_CONDITIONAL_BYTES, Listed
from raycheck.errors import ConflictError, CorruptError, DeniedError, NotFoundError

MAX_SEGMENTS = 8
"""With more of them, the smallest are merged. So a reader needs one listing and this many requests."""
GROWTH = 2
"""A merge also includes a segment that is at most this many times as large as all smaller ones together."""
LISTINGS = 5
"""How often a reader lists segments before it gives up those that are merged and deleted faster than it reads."""


def read_facts(store: Store, run_id: str, read: dict[str, Facts] | None = None) -> tuple[Facts, tuple[str, ...]]:
    """Read the whole history of the run `run_id`. Return it, and in words what of it cannot be read.

    Sends one listing and one request per segment, and a few more while segments are being merged. read: what an earlier
    call has read, which is not read again, since a segment never changes; this call adds to it.
    """
    read = {} if read is None else read
    unreadable: dict[str, str] = {}
    for _ in range(LISTINGS):
        try:
            keys = [item.key for item in _listed(store)]
        except DeniedError as error:
            return Facts(), (f"{store}: {HISTORY_PREFIX} cannot be read: {error}",)
        new = [key for key in keys if key not in read and key not in unreadable]
        items = store.together(*(partial(_read, store, key, run_id) for key in new)) if new else []
        found = dict(zip(new, items, strict=True))
        read.update({key: item for key, item in found.items() if isinstance(item, Facts)})
        unreadable.update({key: item for key, item in found.items() if isinstance(item, str)})
        if None not in found.values():  # otherwise one was merged after the listing
            for key in read.keys() - set(keys):
                del read[key]  # merged into others, which were read
            break
    facts = Facts()
    for item in read.values():
        facts = facts.joined(item)
    return facts, tuple(unreadable.values())


def read_facts_of_all(store: Store) -> dict[str, Facts]:
    """Read all segments, of whatever run, for a repair that does not know the run's id. Return the facts by run id.

    Segments that cannot be read are left out. Raises StoreError.
    """
    found: dict[str, Facts] = {}
    for item in _listed(store):
        with suppress(NotFoundError, CorruptError, DeniedError):
            segment = _segment(store, item.key)
            facts = facts_in(segment, what=f"{store}: {item.key}")
            found[segment.run_id] = found.get(segment.run_id, Facts()).joined(facts)
    return found


def _listed(store: Store) -> list[Listed]:
    return sorted((item for item in store.list_objects(HISTORY_PREFIX) if is_segment_key(item.key)), key=_by_size)


def _by_size(item: Listed) -> tuple[int, str]:
    return item.size_bytes, item.key


def _read(store: Store, key: str, run_id: str) -> Facts | str | None:
    """Return a segment's facts, the reason in words if it cannot be read, or None if it is no longer there."""
    try:
        segment = _segment(store, key)
        if segment.run_id != run_id:
            return f"{store}: {key} is of another run ({segment.run_id}); its part of the history is left out"
        return facts_in(segment, what=f"{store}: {key}")
    except NotFoundError:
        return None
    except (CorruptError, DeniedError) as error:
        return f"{error}. Its part of the history is left out"


def _segment(store: Store, key: str) -> Segment:
    return read_document(store, key, load_segment, max_bytes=MAX_SEGMENT_BYTES)[0]


def record_facts(store: Store, facts: Facts, *, run_id: str, counter: int) -> None:
    """Write facts as a new segment, which takes the place of some small ones if there are MAX_SEGMENTS.

    A repetition is harmless. counter: that of the newest body of `latest` that the caller knows. Raises StoreError;
    then the facts may or may not be written.
    """
    if not facts:
        return
    found = _listed(store)
    merged, facts = _with_smallest(store, facts, found, run_id) if len(found) >= MAX_SEGMENTS else ([], facts)
    data = dump_segment(facts.thinned(), run_id)
    key = segment_key(counter, uuid4().hex[:8])
    _put(store, key, data)
    if merged and store.get(key, len(data)).data == data:
        for old in merged:
            store.delete(old)


def _put(store: Store, key: str, data: bytes) -> None:
    if len(data) <= MAX_CONDITIONAL_BYTES:
        store.put_if_absent(key, data)
    else:
        store.put(key, data)  # the key has a random number, so nothing is replaced


def copy_segments(source: Store, target: Store, run_id: str, before: frozenset[str] | None) -> frozenset[str]:
    """Copy the segments of a run that its mirror lacks, and delete from the mirror those that the source has merged
    into others since. Return the keys of those that are in both. Raises StoreError.

    before: what the last call of this process has returned, None for the first one: that one also reads what an earlier
    process may have copied. Segments that cannot be read are left out.
    """
    there = {item.key for item in _listed(target)}
    copied, is_whole = set(), True
    for item in _listed(source):
        try:
            if item.key not in there:
                _put(
                    target, item.key, read_document(source, item.key, load_segment, max_bytes=MAX_SEGMENT_BYTES)[1].data
                )
            copied.add(item.key)
        except ConflictError:  # another copier was faster
            copied.add(item.key)
        except (CorruptError, NotFoundError):  # a merged one is copied the next time, in another
            is_whole = False
    if not is_whole:
        return frozenset(copied | (before or set()))
    left = _covered(target, run_id, copied, there - copied) if before is None else before - copied
    for key in sorted(left):
        target.delete(key)
    return frozenset(copied)


def _covered(store: Store, run_id: str, known: Collection[str], others: Collection[str]) -> list[str]:
    """Return those of the segments `others` whose facts are all in `known`. If there are no others, nothing is read."""
    whole = Facts()
    for key in known if others else ():
        if isinstance(facts := _read(store, key, run_id), Facts):
            whole = whole.joined(facts)
    return [key for key in others if isinstance(facts := _read(store, key, run_id), Facts) and whole.covers(facts)]


def _with_smallest(store: Store, facts: Facts, found: Sequence[Listed], run_id: str) -> tuple[list[str], Facts]:
    """Return the segments to merge, and `facts` with theirs.

    They are as many of the smallest as have to go, and then each that is not much larger than what is merged already.
    Segments that cannot be read, are of another run, or have fields of a newer writer are left as they are.
    """
    size = len(dump_segment(facts, run_id))
    merged: list[str] = []
    must = len(found) + 1 - MAX_SEGMENTS
    for item in found:
        is_small = len(merged) < must or item.size_bytes <= GROWTH * size
        if not is_small or size + item.size_bytes > MAX_SEGMENT_BYTES // 2:
            break
        try:
            segment = _segment(store, item.key)
            if segment.run_id != run_id or has_unknown_fields(segment):
                continue
            facts = facts.joined(facts_in(segment, what=f"{store}: {item.key}"))
        except (CorruptError, NotFoundError, DeniedError):
            continue
        merged.append(item.key)
        size += item.size_bytes
    return merged, facts
