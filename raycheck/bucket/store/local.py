"""`file://`: a folder, for one machine or a shared file system with hard links and flock.

A whole object appears by rename, so a reader never sees half; data and folder are flushed before a put returns.
Creation is exclusive through `link`, replacement through a lock file that dies with its process.
"""

import errno
import fcntl
import hashlib
import os
import stat
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, cast
from uuid import uuid4

from raycheck.bucket.store.base import (
    MAX_WHOLE_BYTES,
    Buffer,
    Got,
    Listed,
    Store,
    Upload,
    check_conditional_size,
    check_length,
    check_whole,
)
from raycheck.errors import ConflictError, CorruptError, NotFoundError, StoreError

_HIDDEN = ".raycheck-"  # temporaries and locks: never listed as objects
_LOCK = f"{_HIDDEN}lock"


class LocalStore(Store):
    """Versions are content digests: equal bytes are equal state, and conditional bodies are small."""

    def __init__(self, uri: str, root: str) -> None:
        self.uri = uri
        self._root = Path(root)

    def get(self, key: str, max_bytes: int = MAX_WHOLE_BYTES) -> Got:
        with self._errors(key), self._opened(key) as file:
            check_whole(self.uri, key, os.fstat(file.fileno()).st_size, max_bytes)
            data = file.read(max_bytes + 1)
            check_whole(self.uri, key, len(data), max_bytes)  # it may grow while it is read
            return Got(data, hashlib.blake2b(data).hexdigest(), time.time())

    def get_range(self, key: str, start: int, stop: int) -> Buffer:
        with self._errors(key), self._opened(key) as file:
            data = os.pread(file.fileno(), stop - start, start)
            while data and len(data) < stop - start:  # one pread returns at most 2 GiB
                more = os.pread(file.fileno(), stop - start - len(data), start + len(data))
                if not more:
                    break
                data += more
            return check_length(self.uri, key, data, start, stop)

    def head(self, key: str) -> int:
        with self._errors(key):
            found = self._path(key).stat()
            self._check_file(key, found)
            return found.st_size

    def list_objects(self, prefix: str) -> Iterator[Listed]:
        for folder, _, names in os.walk(self._path(prefix)):
            for name in names:
                path = Path(folder, name)
                if not name.startswith(_HIDDEN):
                    with suppress(FileNotFoundError):  # deleted while we list
                        yield Listed(path.relative_to(self._root).as_posix(), path.stat().st_size)

    def list_names(self, prefix: str) -> list[str]:
        with self._errors(prefix), suppress(FileNotFoundError):
            found = [item.name for item in os.scandir(self._path(prefix)) if item.is_dir()]
            return sorted(name for name in found if next(self.list_objects(f"{prefix}{name}/"), None))
        return []

    def put(self, key: str, data: Buffer) -> None:
        self.put_parts(key, [memoryview(data)], len(data))

    def put_parts(self, key: str, parts: Iterable[memoryview], size_bytes: int) -> None:
        del size_bytes
        with self._errors(key), self._written(key, parts) as temporary:
            temporary.replace(self._path(key))

    def part_bytes(self, size_bytes: int) -> int:
        del size_bytes
        return 16 * 1024 * 1024

    def put_if_absent(self, key: str, data: bytes) -> None:
        check_conditional_size(key, data)
        with self._errors(key), self._written(key, [memoryview(data)]) as temporary:
            try:
                os.link(temporary, self._path(key))
            except FileExistsError:
                raise ConflictError(f"{self.uri}: {key} exists") from None

    def put_if_match(self, key: str, data: bytes, version: str) -> None:
        check_conditional_size(key, data)
        with self._errors(key), self._written(key, [memoryview(data)]) as temporary, self._locked():
            try:
                current = self.get(key).version
            except NotFoundError:
                current = ""
            if current != version:
                raise ConflictError(f"{self.uri}: {key} is another version")
            temporary.replace(self._path(key))

    def delete(self, key: str) -> None:
        with self._errors(key), suppress(FileNotFoundError):
            path = self._path(key)
            if path.is_dir():
                return
            path.unlink()
            for folder in path.parents:  # an object store has no empty folders
                if folder == self._root or not folder.is_relative_to(self._root):
                    break
                folder.rmdir()

    def list_uploads(self, prefix: str) -> Iterator[Upload]:
        """Temporaries, which a killed writer leaves beside its object; their keys are their own paths."""
        for folder, _, names in os.walk(self._path(prefix)):
            for name in names:
                if name.startswith(_HIDDEN) and name != _LOCK:
                    yield Upload(Path(folder, name).relative_to(self._root).as_posix(), name)

    def upload_bytes(self, upload: Upload) -> int:
        try:
            return self.head(upload.key)
        except NotFoundError:
            return 0

    def abort_upload(self, upload: Upload) -> None:
        self.delete(upload.key)

    def _path(self, key: str) -> Path:
        return self._root / key

    @contextmanager
    def _opened(self, key: str) -> Iterator[IO[bytes]]:
        """A file to be read, and nothing else: opening a pipe would wait for somebody to write into it."""
        with open(self._path(key), "rb", opener=_without_waiting) as file:
            self._check_file(key, os.fstat(file.fileno()))
            yield file

    def _check_file(self, key: str, found: os.stat_result) -> None:
        if stat.S_ISDIR(found.st_mode):
            raise FileNotFoundError(key)
        if not stat.S_ISREG(found.st_mode):
            raise CorruptError(f"{self.uri}: {key} is no file but a pipe, a socket or a device")

    @contextmanager
    def _errors(self, key: str) -> Iterator[None]:
        try:
            yield
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            raise NotFoundError(f"{self.uri}: no object {key}") from None
        except OSError as error:
            if error.errno == errno.ENOTEMPTY:  # rmdir: the folder still holds objects
                return
            raise StoreError(f"{self.uri}: {key}: {error.strerror or error}") from error

    @contextmanager
    def _written(self, key: str, parts: Iterable[memoryview]) -> Iterator[Path]:
        """The parts in a flushed temporary beside `key`; after the block the folder is flushed too."""
        path = self._path(key)
        temporary = path.parent / f"{_HIDDEN}{uuid4().hex}"
        try:
            with _created(temporary) as file:
                for part in parts:
                    view = memoryview(part).cast("B")
                    while view:
                        view = view[file.write(view) :]
                os.fsync(file.fileno())
            yield temporary
            folder = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        finally:
            temporary.unlink(missing_ok=True)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with (self._root / _LOCK).open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


def _created(path: Path) -> IO[bytes]:
    """A delete beside us may take the empty folder away between making it and making the file in it."""
    for _ in range(100):
        with suppress(FileNotFoundError, FileExistsError):
            path.parent.mkdir(parents=True, exist_ok=True)
            return cast("IO[bytes]", path.open("xb", buffering=0))
    raise OSError(errno.ENOENT, f"the folder {path.parent} cannot be made")
