"""`memory://`: keeps objects in fsspec's memory of this process, for tests and experiments. No other process sees them.

It is fsspec's memory so that other readers in this process find the objects under the same URI: stock torch can read a
checkpoint there with its FsspecReader.
"""

import copy
import hashlib
import threading
import time
from collections.abc import Hashable, Iterable, Iterator, MutableMapping
from typing import Self

from fsspec.implementations.memory import MemoryFile, MemoryFileSystem

from raycheck.bucket.store.address import located
from raycheck.bucket.store.interface import (
    MAX_WHOLE_BYTES,
    Buffer,
    Got,
    Listed,
    Store,
    Written,
    check_conditional_size,
    check_length,
    check_whole,
)
from raycheck.errors import ConflictError, NotFoundError

_lock = threading.RLock()


class MemoryStore(Store):
    """The objects in a mapping. Every write takes one lock, so conditional writes hold between threads.

    objects: the mapping, from the store's root and the key; fsspec's memory unless another one is given. Equal bytes
    have equal versions, as on stores whose ETag is the MD5 of the content: the worst case for compare-and-swap.
    """

    def __init__(self, uri: str, root: str = "", objects: MutableMapping[str, bytes] | None = None) -> None:
        self.uri = uri
        self.objects = _FsspecMemory() if objects is None else objects
        self._root = root

    @property
    def bucket_id(self) -> Hashable:
        return id(self.objects) if isinstance(self.objects, dict) else "memory"

    @property
    def root_path(self) -> str:
        return self._root.strip("/")

    def _rerooted(self, way: str, uri: str) -> Self:
        other = copy.copy(self)
        other.uri, other._root = uri, self._full(f"{way}/")  # noqa: SLF001
        return other

    def _full(self, key: str) -> str:
        """Return the path in the mapping of a key or prefix that is relative to the root."""
        return located(self._root, key)

    def get(self, key: str, max_bytes: int = MAX_WHOLE_BYTES) -> Got:
        data = self._read(key)
        check_whole(self.uri, key, len(data), max_bytes)
        return Got(data, _version(data), self._now())

    def get_range(self, key: str, start: int, stop: int) -> Buffer:
        return check_length(self.uri, key, self._read(key)[start:stop], start, stop)

    def head(self, key: str) -> int:
        return len(self._read(key))

    def list_objects(self, prefix: str) -> Iterator[Listed]:
        under = self._full(prefix)
        with _lock:
            found = [
                Listed(prefix + path[len(under) :], len(self.objects[path]))
                for path in self.objects
                if path.startswith(under)
            ]
        return iter(found)

    def list_names(self, prefix: str) -> list[str]:
        below = (item.key[len(prefix) :].partition("/") for item in self.list_objects(prefix))
        return sorted({name for name, slash, _ in below if slash})

    def put(self, key: str, data: Buffer) -> None:
        with _lock:
            self.objects[self._full(key)] = bytes(data)

    def put_parts(self, key: str, parts: Iterable[memoryview], size_bytes: int) -> None:
        del size_bytes
        self.put(key, b"".join(parts))

    def part_bytes(self, size_bytes: int) -> int:
        return max(size_bytes, 1)

    def put_if_absent(self, key: str, data: bytes) -> Written:
        check_conditional_size(key, data)
        with _lock:
            if self._full(key) in self.objects:
                raise ConflictError(f"{self}: {key} exists")
            self.put(key, data)
        return Written(_version(data), self._now())

    def put_if_match(self, key: str, data: bytes, version: str) -> Written:
        check_conditional_size(key, data)
        with _lock:
            current = self.objects.get(self._full(key))
            if current is None or _version(current) != version:
                raise ConflictError(f"{self}: {key} is another version")
            self.put(key, data)
        return Written(_version(data), self._now())

    def delete(self, key: str) -> None:
        with _lock:
            self.objects.pop(self._full(key), None)

    def _now(self) -> float:
        return time.time()

    def _read(self, key: str) -> bytes:
        try:
            return self.objects[self._full(key)]
        except KeyError:
            raise NotFoundError(f"{self}: no object {key}") from None


class _FsspecMemory(MutableMapping[str, bytes]):
    """fsspec's memory as a mapping from a path, which begins with "/", to the bytes of that file."""

    def __getitem__(self, path: str) -> bytes:
        return bytes(MemoryFileSystem.store[path].getvalue())

    def __setitem__(self, path: str, data: bytes) -> None:
        MemoryFileSystem.store[path] = MemoryFile(path=path, data=data)

    def __delitem__(self, path: str) -> None:
        del MemoryFileSystem.store[path]

    def __iter__(self) -> Iterator[str]:
        return iter(tuple(MemoryFileSystem.store))

    def __len__(self) -> int:
        return len(MemoryFileSystem.store)


def _version(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()
