"""A local folder with versions: each is in a folder of its own that appears complete, never changes, and goes later.

`latest` is a link to the newest one. A program that loads a model opens several files, so it has to follow the link
once and use the folder behind it. If it does not, it may find a file missing when a newer version appears, but never
weights of two versions: a model's files of weights have other names in each version, and an adapter has only one file.
One process at a time makes versions here; others that use the folder find them.
"""

import fcntl
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

from raycheck.bucket.format.document import dump
from raycheck.bucket.local_files import sync, write_file
from raycheck.errors import ConfigError, CorruptError, RaycheckError, StoreError
from raycheck.published.records import MAX_RECORD_BYTES, RECORD_FILE, VersionRecord, load_record

LINK, LOCK = "latest", ".raycheck-published"
WAIT_S = 600.0
"""How long a process waits at most for another one that makes a version in the same folder."""
_BUILDING = ".building-"
_PLACE = re.compile(r"version-\d{9}-[0-9a-f]{8}(-[0-9a-f]{8})?")


@dataclass(frozen=True, slots=True)
class LocalVersion:
    """A complete version in a local folder. lock: while it is held, the folder stays."""

    path: Path
    record: VersionRecord
    lock: int = field(compare=False)

    def release(self) -> None:
        _unlock(self.lock)


class VersionFolder:
    """The folder at `path`, which is made if it does not exist."""

    def __init__(self, path: Path, *, keep: int, is_private: bool = False) -> None:
        """keep: how many of the newest versions stay. is_private: nobody else may read it, or have made it.

        Raises ConfigError for a folder that contains something else.
        """
        self.path = path
        self._keep = keep
        with typed_errors(path):
            path.mkdir(parents=True, exist_ok=True, mode=0o700 if is_private else 0o777)
            if is_private and (path.is_symlink() or path.stat().st_uid != os.getuid()):
                raise ConfigError(f"{path} belongs to somebody else. Choose another folder with cache=")
            if any(path.iterdir()) and not (path / LOCK).exists():
                raise ConfigError(f"{path} is not empty, and not a folder of published versions. Choose another one")
            (path / LOCK).touch()

    @contextmanager
    def writing(self, *, wait: bool = False) -> Iterator[bool]:
        """Hold the right to make versions here during the block. Yield False if another process holds it.

        wait: until it does not hold it any more. Raises StoreError after WAIT_S.
        """
        with typed_errors(self.path):
            lock = os.open(self.path / LOCK, os.O_RDWR)
        try:
            deadline = time.monotonic() + WAIT_S
            while not (is_mine := _locked(lock, fcntl.LOCK_EX)) and wait:
                if time.monotonic() > deadline:
                    raise StoreError(f"{self.path}: another process has been making a version for {WAIT_S:.0f} s")
                time.sleep(0.1)
            yield is_mine
        finally:
            _unlock(lock)

    def newest(self) -> LocalVersion | None:
        """Return the version that `latest` names, locked; None if there is none, or its record is damaged."""
        for _ in range(3):  # it may go while it is being opened, once a newer one is there
            try:
                path = self.path / (self.path / LINK).readlink().name
                lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            except OSError:
                continue
            with suppress(OSError, CorruptError):
                if _locked(lock, fcntl.LOCK_SH):
                    with (path / RECORD_FILE).open("rb") as file:
                        data = file.read(MAX_RECORD_BYTES + 1)
                    return LocalVersion(path, load_record(data, what=str(path / RECORD_FILE)), lock)
            _unlock(lock)
        return None

    @contextmanager
    def building(self) -> Iterator[Path]:
        """Yield an empty folder in which a version is made. What is left in it after the block is removed.

        Only for the process that is `writing`, so that such folders of earlier ones are dead.
        """
        with typed_errors(self.path):
            for entry in list(self.path.glob(f"{_BUILDING}*")):
                _remove(entry)
            made = self.path / f"{_BUILDING}{uuid4().hex[:8]}"
            made.mkdir()
        try:
            yield made
        finally:
            _remove(made)

    def show(self, made: Path, record: VersionRecord) -> None:
        """Make a folder that was built the newest version, and delete older ones that nobody has locked."""
        with typed_errors(self.path):
            write_file(made / RECORD_FILE, dump(record))
            place = self.path / record.directory
            if place.exists():  # somebody may be using it
                place = self.path / f"{record.directory}-{uuid4().hex[:8]}"
            made.rename(place)
            link = self.path / f"{_BUILDING}{uuid4().hex[:8]}"
            link.symlink_to(place.name)
            link.replace(self.path / LINK)
            sync(self.path)
            self._delete_older(place)

    def _delete_older(self, newest: Path) -> None:
        places = [path for path in self.path.iterdir() if _PLACE.fullmatch(path.name) and path != newest]
        for path in sorted(places, key=lambda path: path.stat().st_mtime_ns, reverse=True)[self._keep - 1 :]:
            with suppress(OSError):
                lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
                if _locked(lock, fcntl.LOCK_EX):
                    shutil.rmtree(path, ignore_errors=True)
                _unlock(lock)


@contextmanager
def typed_errors(path: Path) -> Iterator[None]:
    """Raise StoreError for an error of the file system."""
    try:
        yield
    except RaycheckError:  # some of these are OSErrors, too
        raise
    except OSError as error:
        raise StoreError(f"{path}: {error.strerror or error}") from error


def _locked(lock: int, kind: int) -> bool:
    """Take a lock, given by its file descriptor. Return False if another process holds it."""
    try:
        fcntl.flock(lock, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _unlock(lock: int) -> None:
    """Return a lock. A child that was forked meanwhile has the file open, too, so closing it is not enough."""
    with suppress(OSError):
        fcntl.flock(lock, fcntl.LOCK_UN)
    os.close(lock)


def _remove(path: Path) -> None:
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)
