"""A local folder with versions: each is in a folder of its own that appears complete, never changes, and goes later.

`latest` is a link to the newest one. A program that loads a model opens several files, so it has to follow the link
once and use the folder behind it. If it does not, it may find a file missing when a newer version appears, but never
files of two versions: the weights' files have other names in each. One process at a time makes versions here; others
that use the folder find them.
"""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

from raycheck.bucket.format.document import dump
from raycheck.errors import ConfigError, CorruptError, StoreError
from raycheck.published.records import MAX_RECORD_BYTES, VersionRecord, load_record

LINK, LOCK = "latest", ".raycheck-published"
RECORD_FILE = "raycheck-version.json"
_BUILDING = ".building-"


@dataclass(frozen=True, slots=True)
class LocalFiles:
    """A complete version in a local folder. lock: while it is open, the folder stays."""

    path: Path
    record: VersionRecord
    lock: int = field(compare=False)

    def release(self) -> None:
        os.close(self.lock)


class VersionFolder:
    """The folder at `path`, which is made if it does not exist."""

    def __init__(self, path: Path, *, keep: int = 2) -> None:
        """keep: how many of the newest versions stay. Raises ConfigError for a folder that contains something else."""
        self.path = path
        self._keep = keep
        with typed_errors(path):
            path.mkdir(parents=True, exist_ok=True)
            if any(path.iterdir()) and not (path / LOCK).exists():
                raise ConfigError(f"{path} is not empty, and not a folder of published versions. Choose another one")
            (path / LOCK).touch()

    @contextmanager
    def writing(self, *, wait: bool = False) -> Iterator[bool]:
        """Hold the right to make versions here during the block. Yield False if another process holds it.

        wait: until it does not hold it any more.
        """
        with typed_errors(self.path):
            lock = os.open(self.path / LOCK, os.O_RDWR)
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                yield False
                return
            yield True
        finally:
            os.close(lock)

    def newest(self) -> LocalFiles | None:
        """Return the version that `latest` names, locked; None if there is none, or its record is damaged."""
        for _ in range(3):  # it may go while it is being opened, once a newer one is there
            try:
                path = self.path / (self.path / LINK).readlink().name
                lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            except OSError:
                continue
            try:
                fcntl.flock(lock, fcntl.LOCK_SH)
                data = (path / RECORD_FILE).read_bytes()
                if len(data) <= MAX_RECORD_BYTES:
                    return LocalFiles(path, load_record(data, what=str(path / RECORD_FILE)), lock)
            except (OSError, CorruptError):
                pass
            os.close(lock)
        return None

    @contextmanager
    def building(self) -> Iterator[Path]:
        """Yield an empty folder in which a version is made. What is left in it after the block is removed.

        Only for the process that is `writing`, so that such folders of earlier ones are dead.
        """
        for entry in list(os.scandir(self.path)):
            if entry.name.startswith(_BUILDING):
                shutil.rmtree(entry.path, ignore_errors=True)
        made = self.path / f"{_BUILDING}{uuid4().hex[:8]}"
        with typed_errors(made):
            made.mkdir()
        try:
            yield made
        finally:
            shutil.rmtree(made, ignore_errors=True)

    def show(self, made: Path, record: VersionRecord) -> None:
        """Make a folder that was built the newest version, and delete older ones that nobody has locked."""
        with typed_errors(self.path):
            with (made / RECORD_FILE).open("wb") as file:
                file.write(dump(record))
                file.flush()
                os.fsync(file.fileno())
            place = self.path / f"{record.number:09d}-{record.checkpoint}-{record.series[:8]}"
            if place.exists():  # of a process that died before the link
                shutil.rmtree(place)
            made.rename(place)
            link = self.path / f"{_BUILDING}{uuid4().hex[:8]}"
            link.symlink_to(place.name)
            link.replace(self.path / LINK)
            folder = os.open(self.path, os.O_RDONLY)
            os.fsync(folder)
            os.close(folder)
        self._delete_older(place)

    def _delete_older(self, newest: Path) -> None:
        places = [path for path in self.path.iterdir() if path.is_dir() and not path.name.startswith(".")]
        places = [path for path in places if path != newest and path.name != LINK]
        places.sort(key=lambda path: path.stat().st_mtime_ns, reverse=True)
        for path in places[self._keep - 1 :]:
            with suppress(OSError):
                lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path, ignore_errors=True)
                finally:
                    os.close(lock)


@contextmanager
def typed_errors(path: Path) -> Iterator[None]:
    """Raise StoreError for an error of the file system."""
    try:
        yield
    except OSError as error:
        raise StoreError(f"{path}: {error.strerror or error}") from error
