"""Writes objects that never change (I2): small ones by put-if-absent, shards by a copy that is verified on the way."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial

from raycheck.bucket.document_reading import again_if_corrupt
from raycheck.bucket.format.checksum import READS, crc32
from raycheck.bucket.format.manifest import Blob, ShardRecord
from raycheck.bucket.store import Store
from raycheck.bucket.store.interface import MAX_CONDITIONAL_BYTES
from raycheck.bucket.store.jitter import CHANCE
from raycheck.bucket.store.retry import retry
from raycheck.errors import ConflictError, CorruptError, SaveFailedError, StoreError

PUT_ONCE_ATTEMPTS = 4


def put_once(store: Store, key: str, data: bytes) -> float | None:
    """Create `key`, or accept that exactly these bytes are there. Raises SaveFailedError on other bytes (I2).

    Returns the store's time of the answer that says so; None when the bytes were there.
    """

    def create() -> float | None:
        try:
            return store.put_if_absent(key, data).at
        except ConflictError:
            return None

    # After a StoreError the effect decides: if the write was applied, the next try finds these bytes.
    pauses_s = (CHANCE.uniform(0.1, 0.2) * 3**attempt for attempt in range(1, PUT_ONCE_ATTEMPTS))
    at = retry(create, on=StoreError, pauses_s=pauses_s)
    if at is None and not _holds(store, key, data):
        raise SaveFailedError(f"{store}: {key} exists with other bytes; this save is given up")
    return at


def put_all_once(store: Store, documents: Mapping[str, bytes]) -> float | None:
    """Create each of these objects as `put_once` does, or by a plain PUT what is too large for a condition.

    They are under way together, in any order, so none of them may prove another one. Returns the store's time when the
    last one was written; None when it did not say so of each: of one that was there, or that was too large.
    """

    def put(key: str, data: bytes) -> float | None:
        if len(data) <= MAX_CONDITIONAL_BYTES:
            return put_once(store, key, data)
        store.put(key, data)  # a repeated write carries the same bytes
        return None

    times = store.together(*(partial(put, key, data) for key, data in documents.items()))
    told = [at for at in times if at is not None]
    return max(told) if len(told) == len(times) else None  # the time of one may be long past when another has ended


def _holds(store: Store, key: str, data: bytes) -> bool:
    """Return whether exactly these bytes are there. Others are read again: they may have changed on their way."""
    for _ in range(READS):
        with suppress(CorruptError):  # the object is longer than `data`
            if store.get(key, len(data)).data == data:
                return True
    return False


def copy_object(source: Store, key: str, record: Blob | ShardRecord, target: Store, new_key: str) -> None:
    """Copy one object from checkpoint to checkpoint, in one bucket or across two, and verify it on the way.

    record: its size and checksum. Raises CorruptError when the bytes differ from the record twice in a row,
    NotFoundError when the object is missing.
    """
    again_if_corrupt(lambda: _copy(source, key, record, target, new_key))


def _copy(source: Store, key: str, record: Blob | ShardRecord, target: Store, new_key: str) -> None:
    size, step = record.size_bytes, target.part_bytes(record.size_bytes)
    seen = 0

    def parts() -> Iterator[memoryview]:
        nonlocal seen
        for start in range(0, size, step):
            data = source.get_range(key, start, min(start + step, size))
            seen = crc32(data, seen)
            yield memoryview(data)

    target.put_parts(new_key, parts(), size)
    if seen != record.crc32:
        raise CorruptError(f"{source}: {key} has checksum {seen:08x}, its manifest says {record.crc32:08x}")
