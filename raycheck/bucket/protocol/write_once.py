"""Writes small objects that never change (I2), by put-if-absent."""

from collections.abc import Mapping
from contextlib import suppress
from functools import partial

from raycheck.bucket.format import object_keys
from raycheck.bucket.format.checksum import READS
from raycheck.bucket.format.document import dump
from raycheck.bucket.format.manifest import Manifest
from raycheck.bucket.store import Store
from raycheck.bucket.store.interface import MAX_CONDITIONAL_BYTES
from raycheck.bucket.store.jitter import CHANCE
from raycheck.bucket.store.retry import retry
from raycheck.errors import ConflictError, CorruptError, SaveFailedError, StoreError

PUT_ONCE_ATTEMPTS = 4


def put_once(store: Store, key: str, data: bytes) -> float | None:
    """Create `key`, or accept that exactly these bytes are there. Return the store's time of the write, None if they
    were there.

    Raises SaveFailedError if other bytes are there: what is written once never changes (I2).
    """

    def create() -> float | None:
        try:
            return store.put_if_absent(key, data).at
        except ConflictError:
            return None

    # After a StoreError only the effect counts: if the write was applied, the next try finds these bytes.
    pauses_s = (CHANCE.uniform(0.1, 0.2) * 3**attempt for attempt in range(1, PUT_ONCE_ATTEMPTS))
    at = retry(create, on=StoreError, pauses_s=pauses_s)
    if at is None and not _holds(store, key, data):
        raise SaveFailedError(f"{store}: {key} exists with other bytes; this save fails")
    return at


def put_all_once(store: Store, documents: Mapping[str, bytes]) -> float | None:
    """Create each of these objects as `put_once` does, or by a plain PUT if it is too large for a condition.

    They are written concurrently, in any order, so none of them may prove another one. Return the store's time when the
    last one was written; None when the store gave no time for one of them, because it already existed or was too large.
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
    """Return whether exactly these bytes are there. Other bytes are read again, since they may have been corrupted on
    the way."""
    for _ in range(READS):
        with suppress(CorruptError):  # the object is longer than `data`
            if store.get(key, len(data)).data == data:
                return True
    return False


def write_manifest(store: Store, manifest: Manifest) -> bytes:
    """Write the manifest of a new run's first checkpoint by put-if-absent, and return its bytes. Step 30.

    Equal bytes that already exist were written by an earlier try, and are accepted.
    """
    data = dump(manifest)
    put_once(store, object_keys.manifest_key(manifest.key), data)
    return data
