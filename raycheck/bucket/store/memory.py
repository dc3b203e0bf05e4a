"""`memory://`: keeps objects in fsspec's in-process store, for tests and tries. No other process sees them."""

import hashlib
import threading
import time
from collections.abc import Iterable, Iterator

import fsspec

from raycheck.bucket.store.interface import (
    MAX_WHOLE_BYTES,
    Buffer,
    Got,
    Listed,
    Store,
    check_conditional_size,
    check_length,
    check_whole,
)
from raycheck.errors import ConflictError, NotFoundError

_lock = threading.RLock()  # one for the whole process, like fsspec's memory


class MemoryStore(Store):
    """Keeps objects in this process. Every method holds one lock, so conditional writes hold between its threads."""

    def __init__(self, uri: str, root: str) -> None:
        self.uri = uri
        self._root = root
        self._fs = fsspec.filesystem("memory")

    def get(self, key: str, max_bytes: int = MAX_WHOLE_BYTES) -> Got:
        check_whole(self.uri, key, self.head(key), max_bytes)
        with _lock:
            data = self._read(key)
        return Got(data, hashlib.blake2b(data).hexdigest(), time.time())

    def get_range(self, key: str, start: int, stop: int) -> Buffer:
        with _lock:
            return check_length(self.uri, key, self._read(key)[start:stop], start, stop)

    def head(self, key: str) -> int:
        with _lock:
            return len(self._read(key))

    def list_objects(self, prefix: str) -> Iterator[Listed]:
        with _lock:
            found = self._fs.find(self._path(prefix), detail=True)
        for path, item in found.items():
            yield Listed(path[len(self._root) + 1 :], item["size"])

    def list_names(self, prefix: str) -> list[str]:
        below = (item.key[len(prefix) :].partition("/") for item in self.list_objects(prefix))
        return sorted({name for name, slash, _ in below if slash})

    def put(self, key: str, data: Buffer) -> None:
        with _lock:
            self._fs.pipe_file(self._path(key), bytes(data))

    def put_parts(self, key: str, parts: Iterable[memoryview], size_bytes: int) -> None:
        del size_bytes
        self.put(key, b"".join(parts))

    def part_bytes(self, size_bytes: int) -> int:
        return max(size_bytes, 1)

    def put_if_absent(self, key: str, data: bytes) -> None:
        check_conditional_size(key, data)
        with _lock:
            if self._fs.exists(self._path(key)):
                raise ConflictError(f"{self.uri}: {key} exists")
            self.put(key, data)

    def put_if_match(self, key: str, data: bytes, version: str) -> None:
        check_conditional_size(key, data)
        with _lock:
            try:
                current = self.get(key).version
            except NotFoundError:
                current = ""
            if current != version:
                raise ConflictError(f"{self.uri}: {key} is another version")
            self.put(key, data)

    def delete(self, key: str) -> None:
        with _lock:
            if self._fs.isfile(self._path(key)):
                self._fs.rm_file(self._path(key))

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}"

    def _read(self, key: str) -> bytes:
        try:
            return bytes(self._fs.cat_file(self._path(key)))
        except (FileNotFoundError, IsADirectoryError):
            raise NotFoundError(f"{self.uri}: no object {key}") from None
