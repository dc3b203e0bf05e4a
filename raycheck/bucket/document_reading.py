"""Reads documents from a store: bounded in size, and a second time before they count as damaged.

Bytes can be corrupted on the way although the object in the bucket is intact. So two readings in a row have to fail
before a repair is advised, a run is ended or anything is written.
"""

from collections.abc import Callable
from typing import Protocol, TypeVar

from raycheck.bucket.format.checksum import READS
from raycheck.bucket.store import Got, Store
from raycheck.errors import CorruptError

T = TypeVar("T")
D_co = TypeVar("D_co", covariant=True)


class Load(Protocol[D_co]):
    """The parser of an object's bytes; `what` names the object in errors. Raises CorruptError."""

    def __call__(self, data: bytes, *, what: str) -> D_co: ...


def read_document(store: Store, key: str, load: Load[T], *, max_bytes: int) -> tuple[T, Got]:
    """Read the document at `key`, and return it with the store's response.

    Raises NotFoundError, and CorruptError when two readings in a row fail.
    """

    def read() -> tuple[T, Got]:
        got = store.get(key, max_bytes)
        return load(got.data, what=f"{store}: {key}"), got

    return again_if_corrupt(read)


def read_quickly(store: Store, key: str, load: Load[T], *, max_bytes: int) -> T:
    """Read the document at `key`, for a reader of very many: in the store's cheapest way, and again in the usual way.

    Raises the errors of read_document.
    """
    what = f"{store}: {key}"
    try:
        return load(store.get_data(key, max_bytes), what=what)
    except CorruptError:
        return load(store.get(key, max_bytes).data, what=what)


def again_if_corrupt(read: Callable[[], T]) -> T:
    """Call `read`, and once more when it raises CorruptError. Raises the second CorruptError.

    read: must request from the store each time.
    """
    for _ in range(READS - 1):
        try:
            return read()
        except CorruptError:
            continue
    return read()
