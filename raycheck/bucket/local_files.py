"""Writes local files so that a file under its own name is complete; until then its name ends in `.partial`."""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from raycheck.bucket.format.checksum import crc32
from raycheck.errors import ConfigError

PARTIAL = ".partial"
FICLONE = 0x40049409
"""The request to share the bytes of another file, in linux/fs.h."""
MIN_LINKED_BYTES = 16 * 1024 * 1024
READ_BYTES = 8 * 1024 * 1024


def partial_of(path: Path) -> Path:
    """Return the path of a file while it is incomplete."""
    return path.with_name(path.name + PARTIAL)


@contextmanager
def opened_partial(path: Path, *, goes_on: bool = False) -> Iterator[IO[bytes]]:
    """Open the file that becomes `path`, and flush it if the block succeeds. A link in its place is not followed.

    goes_on: append to the bytes that are already there.
    """
    partial = partial_of(path)
    if partial.is_symlink():
        partial.unlink()
    if path.parent.is_symlink():
        raise ConfigError(f"{path.parent} is a symbolic link; remove it, or name another folder")
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | (os.O_APPEND if goes_on else os.O_TRUNC)
    with os.fdopen(os.open(partial, flags, 0o666), "wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def write_file(path: Path, data: bytes) -> None:
    """Write a small file completely."""
    with opened_partial(path) as file:
        file.write(data)
    appear(path)


def appear(path: Path) -> None:
    """Give a complete, flushed file its own name."""
    partial_of(path).replace(path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Have a file's bytes, or the names in a folder, survive a loss of power."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def sync_files(folder: Path) -> None:
    """Have the files in a folder, and their names, survive a loss of power."""
    for path in folder.iterdir():
        sync(path)
    sync(folder)


def file_crc32(path: Path) -> int:
    with path.open("rb") as file:
        seen = 0
        while data := file.read(READ_BYTES):
            seen = crc32(data, seen)
    return seen


def clone_file(source: Path, target: Path) -> None:
    """Copy a file. Both share their bytes on the disk where the file system can do that, until one is changed."""
    with source.open("rb") as before, target.open("wb") as after:
        try:
            fcntl.ioctl(after.fileno(), FICLONE, before.fileno())
        except OSError:
            shutil.copyfileobj(before, after, READ_BYTES)
            after.flush()
            os.fsync(after.fileno())


def link_or_clone(source: Path, target: Path) -> None:
    """Give a large file that never changes another name; copy a small one, or where that is not possible."""
    try:
        if source.stat().st_size >= MIN_LINKED_BYTES:
            target.hardlink_to(source)
            return
    except FileNotFoundError:
        raise
    except OSError:
        pass
    clone_file(source, target)


def check_room(root: Path, needed: int) -> None:
    """Raise ConfigError, before anything is fetched, if the disk has too little room."""
    free = shutil.disk_usage(root).free
    if needed > free:
        raise ConfigError(f"{root}: {needed} bytes must be fetched, but the disk has room for {free}")
