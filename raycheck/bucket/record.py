"""`attempts/NNNNNN.json`: what an attempt was and why it ended, once it is over. For people, and for a repair."""

from dataclasses import dataclass

from raycheck.bucket import layout
from raycheck.bucket.document import FORMAT_VERSION, Document, dump, load
from raycheck.bucket.latest import Attempt
from raycheck.bucket.store import Store
from raycheck.errors import ConflictError, StoreError

MAX_BYTES = 64 * 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class Record(Document):
    """An ended attempt."""

    format_version: int = FORMAT_VERSION
    attempt: Attempt
    ended_by_attempt: int
    ended_at: float
    cause: str


def record_end(store: Store, ended: Attempt, *, by: Attempt, cause: str) -> bool:
    """Write the record, once. Whether it could be written: nothing in a running system depends on it."""
    record = Record(attempt=ended, ended_by_attempt=by.number, ended_at=by.claimed_at, cause=cause)
    try:
        store.put_if_absent(layout.attempt_key(ended.number), dump(record))
    except (ConflictError, StoreError):
        return False
    return True


def load_record(data: bytes, *, what: str) -> Record:
    return load(Record, data, what=what, max_bytes=MAX_BYTES)
