"""Reads documents from a store: bounded in size, and a second time before they count as damaged.

Bytes can change on their way although the object in the bucket is whole. So nobody is told to repair anything, no run
ends and nothing is written before two readings in a row have failed.
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
    """Read the document at `key`; returns it with the store's answer.

    Raises NotFoundError, and CorruptError when two readings in a row fail.
    """

    def read() -> tuple[T, Got]:
        got = store.get(key, max_bytes)
        return load(got.data, what=f"{store}: {key}"), got

    return again_if_corrupt(read)


def read_quickly(store: Store, key: str, load: Load[T], *, max_bytes: int) -> T:
    """Read the document at `key`, for a reader of very many: in the store's cheapest way, and again in the usual one.

    Raises as read_document.
    """
    what = f"{store}: {key}"
    try:
        return load(store.get_data(key, max_bytes), what=what)
    except CorruptError:
        return load(store.get(key, max_bytes).data, what=what)


def again_if_corrupt(read: Callable[[], T]) -> T:
    """Call `read`, and once more when it raises CorruptError. Raises the second CorruptError.

    read: must ask the store anew each time.
    """
    for _ in range(READS - 1):
        try:
            return read()
        except CorruptError:
            continue
    return read()
