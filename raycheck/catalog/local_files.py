"""Writes files of a local folder so that a file under its own name is whole: until then its name ends in `.partial`."""

import os
import shutil
from pathlib import Path

from raycheck.bucket.format.checksum import crc32
from raycheck.errors import ConfigError

PARTIAL = ".partial"
READ_BYTES = 8 * 1024 * 1024


def partial_of(path: Path) -> Path:
    """Returns where a file is while it is not whole."""
    return path.with_name(path.name + PARTIAL)


def appear(path: Path) -> None:
    """Give a file its own name, now that it is whole and flushed."""
    partial_of(path).replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def file_crc32(path: Path) -> int:
    with path.open("rb") as file:
        seen = 0
        while data := file.read(READ_BYTES):
            seen = crc32(data, seen)
    return seen


def check_room(root: Path, needed: int) -> None:
    """Raise ConfigError, before anything is fetched, when the disk has too little room."""
    free = shutil.disk_usage(root).free
    if needed > free:
        raise ConfigError(f"{root}: {needed} bytes are to be fetched, and the disk has room for {free}")
