"""Documents as they come from a store: bounded in size while they are read, and read again before they are damaged.

Bytes can change on their way, and then the object in the bucket is whole. So nobody is told to repair anything, no run
ends and nothing is written before the same complaint has come twice.
"""

from collections.abc import Callable
from typing import Protocol, TypeVar

from raycheck.bucket.format.checksum import READS
from raycheck.bucket.store import Got, Store
from raycheck.errors import CorruptError

T = TypeVar("T")
D_co = TypeVar("D_co", covariant=True)


class Load(Protocol[D_co]):
    """Parses the bytes of an object that errors call `what`. Raises CorruptError."""

    def __call__(self, data: bytes, *, what: str) -> D_co: ...


def read_document(store: Store, key: str, load: Load[T], *, max_bytes: int) -> tuple[T, Got]:
    """The document at `key`, and the answer that it came in. Raises NotFoundError, and CorruptError when it cannot be
    read twice in a row."""

    def read() -> tuple[T, Got]:
        got = store.get(key, max_bytes)
        return load(got.data, what=f"{store.uri}: {key}"), got

    return again_if_corrupt(read)


def again_if_corrupt(read: Callable[[], T]) -> T:
    """What `read` returns, which must ask the store anew each time. Raises CorruptError when it does so twice."""
    for _ in range(READS - 1):
        try:
            return read()
        except CorruptError:
            continue
    return read()
