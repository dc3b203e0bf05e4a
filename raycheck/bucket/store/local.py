"""`file://`: keeps objects in a folder, on one machine or on a shared file system with hard links and flock.

An object appears by rename, so a reader never sees half of it; data and folder are flushed before a put returns.
Creation is exclusive through `link`, replacement through a lock on a file, which ends with its process.

The root may be a symbolic link, or be behind one. Below the root no link is followed: its target is not part of the
run. Each folder on the path to an object is opened relative to the one above it, without following links. So a link
that someone creates there between a check and a delete leads nowhere either.
"""

import errno
import fcntl
import hashlib
import os
import stat
import time
from collections.abc import Hashable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, cast
from uuid import uuid4

from raycheck.bucket.store.address import located
from raycheck.bucket.store.interface import (
    MAX_WHOLE_BYTES,
    Buffer,
    Got,
    Listed,
    Store,
    Upload,
    Written,
    check_conditional_size,
    check_length,
    check_whole,
)
from raycheck.bucket.store.moved_bytes import counted
from raycheck.errors import ConfigError, ConflictError, CorruptError, NotFoundError, StoreError

_HIDDEN = ".raycheck-"
"""How the names of temporaries and locks begin. They are never listed as objects."""
_LOCK = f"{_HIDDEN}lock"
CHECKPOINTS = "checkpoints"
_LACKING = (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)
"""What a file system answers that does not know a call."""


class LocalStore(Store):
    """The objects as files in one folder.

    A version is a digest of the bytes: equal bytes are an equal state, and only small bodies are written conditionally.
    flushes: whether what is written survives a loss of power. Otherwise the caller flushes it.
    """

    def __init__(self, uri: str, root: str, *, flushes: bool = True) -> None:
        self.uri = uri
        self._root = Path(root)
        self._flushes = flushes

    @property
    def bucket_id(self) -> Hashable:
        return "file"

    @property
    def root_path(self) -> str:
        return str(self._root).strip("/")

    def way_to(self, other: Store) -> str | None:
        """Return None also when the folders are on different file systems: others may see only one of them."""
        way = super().way_to(other)
        return (
            way
            if isinstance(other, LocalStore) and _device(self._root) == _device(Path(f"/{other.root_path}"))
            else None
        )

    def _rerooted(self, way: str, uri: str) -> "LocalStore":
        return LocalStore(uri, f"/{located(f'{self.root_path}/', way)}")

    def get(self, key: str, max_bytes: int = MAX_WHOLE_BYTES) -> Got:
        with self._errors(key), self._opened(key) as file:
            size_bytes = os.fstat(file.fileno()).st_size
            check_whole(self.uri, key, size_bytes, max_bytes)
            data = file.read(size_bytes)  # Python allocates memory for what it is asked to read, not for what is there
            return Got(data, _version(data), time.time())

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
        with self._errors(key), self._folders(key) as (folders, names):
            found = os.stat(names[-1], dir_fd=folders[-1], follow_symlinks=False)
            self._check_file(key, found)
            return found.st_size

    def list_objects(self, prefix: str) -> Iterator[Listed]:
        for key, name, size_bytes in self._files(prefix):
            if not name.startswith(_HIDDEN):
                yield Listed(key, size_bytes)

    def list_names(self, prefix: str) -> list[str]:
        return sorted(name for name in self.list_folders(prefix) if next(self.list_objects(f"{prefix}{name}/"), None))

    def list_folders(self, prefix: str) -> Iterator[str]:
        found: list[str] = []
        with self._errors(prefix), suppress(FileNotFoundError), self._folders(f"{prefix}any") as (folders, _):
            found += [item.name for item in _items(folders[-1]) if item.is_dir(follow_symlinks=False)]
        yield from found

    def put(self, key: str, data: Buffer) -> None:
        self.put_parts(key, [memoryview(data)], len(data))

    def put_parts(self, key: str, parts: Iterable[memoryview], size_bytes: int) -> None:
        del size_bytes
        with self._errors(key), self._written(key, parts) as (folder, temporary, name):
            os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)

    def part_bytes(self, size_bytes: int) -> int:
        del size_bytes
        return 16 * 1024 * 1024

    def put_if_absent(self, key: str, data: bytes) -> Written:
        check_conditional_size(key, data)
        with self._errors(key), self._written(key, [memoryview(data)]) as (folder, temporary, name):
            try:
                with self._needs("hard links"):
                    os.link(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
            except FileExistsError:
                raise ConflictError(f"{self}: {key} exists") from None
        return Written(_version(data), time.time())

    def put_if_match(self, key: str, data: bytes, version: str) -> Written:
        check_conditional_size(key, data)
        written = self._written(key, [memoryview(data)])
        with self._errors(key), written as (folder, temporary, name), self._locked():
            try:
                current = self.get(key).version
            except NotFoundError:
                current = ""
            if current != version:
                raise ConflictError(f"{self}: {key} is another version")
            os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
        return Written(_version(data), time.time())

    def delete(self, key: str) -> None:
        if key.startswith("../"):
            raise ConfigError(f"{self}: {key!r} is not a key of this run: nothing outside of it is deleted")
        is_gone = suppress(FileNotFoundError, NotADirectoryError)
        with self._errors(key), is_gone, self._folders(key) as (folders, names):
            if stat.S_ISDIR(os.stat(names[-1], dir_fd=folders[-1], follow_symlinks=False).st_mode):
                return
            os.unlink(names[-1], dir_fd=folders[-1])  # for a link this removes the link itself
            for name, above in zip(names[-2::-1], folders[-2::-1], strict=True):  # an object store has no empty folders
                os.rmdir(name, dir_fd=above)

    def list_uploads(self, prefix: str) -> Iterator[Upload]:
        """Yield the temporary files that killed writers have left next to their objects, with their paths as keys."""
        for key, name, _ in self._files(prefix):
            if name.startswith(_HIDDEN) and name != _LOCK:
                yield Upload(key, name)

    def upload_bytes(self, upload: Upload) -> int:
        try:
            return self.head(upload.key)
        except NotFoundError:
            return 0

    def abort_upload(self, upload: Upload) -> None:
        self.delete(upload.key)

    @contextmanager
    def _folders(self, key: str, *, makes: bool = False) -> Iterator[tuple[list[int], list[str]]]:
        """Open the folders on the path to `key`, the root first. makes: create missing folders.

        Yields them, and the names that lead from each folder to the next one and to the object.
        """
        names = key.split("/")
        root = self._root
        while not makes and names[0] == ".." and CHECKPOINTS in names:  # a borrowed directory, which is only read
            root, names = root.parent, names[1:]
        if {"", ".", ".."} & set(names) or "\0" in key:
            raise ConfigError(f"{self}: {key!r} is not a key: its parts must be names")
        if makes:
            root.mkdir(parents=True, exist_ok=True)
        folders = [os.open(root, os.O_RDONLY | os.O_DIRECTORY)]
        try:
            for name in names[:-1]:
                if makes:
                    with suppress(FileExistsError):
                        os.mkdir(name, dir_fd=folders[-1])
                folders.append(self._open(key, name, folders[-1], os.O_RDONLY | os.O_DIRECTORY))
            yield folders, names
        finally:
            for folder in folders:
                os.close(folder)

    def _open(self, key: str, name: str, folder: int, flags: int) -> int:
        """Open `name` in a folder. Raises CorruptError for a link, whatever its target."""
        try:
            return os.open(name, flags | os.O_NOFOLLOW, 0o666, dir_fd=folder)
        except OSError:
            with suppress(OSError):
                self._check_no_link(key, name, os.stat(name, dir_fd=folder, follow_symlinks=False))
            raise

    def _check_no_link(self, key: str, name: str, found: os.stat_result) -> None:
        if stat.S_ISLNK(found.st_mode):
            raise CorruptError(
                f"{self}: {key}: {name} is a symbolic link, and none is followed inside a run. Put the files "
                "themselves there; the folder of the whole run may be a link"
            )

    def _files(self, prefix: str) -> Iterator[tuple[str, str, int]]:
        """Yield key, name and size of every file below `prefix`.

        A folder that cannot be read is an error: otherwise the listing would look like an empty folder's.
        """
        with self._errors(prefix), suppress(FileNotFoundError), self._folders(f"{prefix}any") as (folders, _):
            yield from self._files_in(folders[-1], prefix)

    def _files_in(self, folder: int, prefix: str) -> Iterator[tuple[str, str, int]]:
        for item in _items(folder):
            key = f"{prefix}{item.name}"
            with suppress(FileNotFoundError):  # deleted while we list
                if item.is_dir(follow_symlinks=False):
                    inner = self._open(key, item.name, folder, os.O_RDONLY | os.O_DIRECTORY)
                    try:
                        yield from self._files_in(inner, f"{key}/")
                    finally:
                        os.close(inner)
                elif item.is_file(follow_symlinks=False):
                    yield key, item.name, item.stat(follow_symlinks=False).st_size

    @contextmanager
    def _opened(self, key: str) -> Iterator[IO[bytes]]:
        """Open a regular file for reading, without blocking: opening a pipe would wait for someone to write."""
        with self._folders(key) as (folders, names):
            file = os.fdopen(self._open(key, names[-1], folders[-1], os.O_RDONLY | os.O_NONBLOCK), "rb")
        with file:
            self._check_file(key, os.fstat(file.fileno()))
            yield file

    def _check_file(self, key: str, found: os.stat_result) -> None:
        self._check_no_link(key, "it", found)
        if stat.S_ISDIR(found.st_mode):
            raise FileNotFoundError(key)
        if not stat.S_ISREG(found.st_mode):
            raise CorruptError(f"{self}: {key} is not a file but a pipe, a socket or a device")

    @contextmanager
    def _errors(self, key: str) -> Iterator[None]:
        try:
            yield
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            raise NotFoundError(f"{self}: no object {key}") from None
        except OSError as error:
            if error.errno == errno.ENOTEMPTY:  # rmdir: the folder still holds objects
                return
            raise StoreError(f"{self}: {key}: {error.strerror or error}") from error

    @contextmanager
    def _written(self, key: str, parts: Iterable[memoryview]) -> Iterator[tuple[int, str, str]]:
        """Write the parts into a temporary file next to `key`, and flush it.

        Yields the open folder, the temporary file's name in it and the object's name. After the block the folder is
        flushed too.
        """
        temporary = f"{_HIDDEN}{uuid4().hex}"
        with self._created(key, temporary) as (folder, file):
            try:
                with file:
                    for part in counted(parts):
                        view = memoryview(part).cast("B")
                        while view:
                            view = view[file.write(view) :]
                    if self._flushes:
                        os.fsync(file.fileno())
                yield folder, temporary, key.rpartition("/")[2]
                if self._flushes:
                    os.fsync(folder)
            finally:
                with suppress(FileNotFoundError):
                    os.unlink(temporary, dir_fd=folder)

    @contextmanager
    def _created(self, key: str, temporary: str) -> Iterator[tuple[int, IO[bytes]]]:
        """Yield the open folder of `key`, and a new file in it.

        Tries again when a delete in another process removes the empty folder before the file is created.
        """
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        for _ in range(100):
            with ExitStack() as stack:
                try:
                    folders, _names = stack.enter_context(self._folders(key, makes=True))
                    file = self._open(key, temporary, folders[-1], flags)
                except (FileNotFoundError, FileExistsError):
                    continue
                yield folders[-1], cast("IO[bytes]", os.fdopen(file, "wb", buffering=0))
                return
        raise OSError(errno.ENOENT, f"the folder of {key} cannot be created")

    @contextmanager
    def _needs(self, what: str) -> Iterator[None]:
        """Say what the file system lacks, which is the case for many buckets that are mounted as a folder."""
        try:
            yield
        except OSError as error:
            if error.errno not in _LACKING:
                raise
            raise ConfigError(
                f"{self}: the file system of this folder has no {what} ({error.strerror}), without which two drivers "
                "could overwrite each other. Use one that has them, such as a local disk or NFS with locks; for a "
                "bucket that is mounted here, give its own address (s3://, gs://, az://)"
            ) from None

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with self._folders(_LOCK) as (folders, _):
            lock = self._open(_LOCK, _LOCK, folders[-1], os.O_RDWR | os.O_CREAT)
        try:
            with self._needs("flock"):
                fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                yield
            finally:
                # Closing alone would leave it locked if a process was forked meanwhile, which has the file open, too.
                fcntl.flock(lock, fcntl.LOCK_UN)
        finally:
            os.close(lock)


def _items(folder: int) -> list[os.DirEntry[str]]:
    with os.scandir(folder) as items:
        return list(items)


def _version(data: bytes) -> str:
    return hashlib.blake2b(data).hexdigest()


def _device(folder: Path) -> int:
    """Return the file system of a folder, which may not exist yet."""
    while not folder.exists():
        folder = folder.parent
    return folder.stat().st_dev
