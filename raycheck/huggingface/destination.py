"""Makes an export appear at its destination as a whole, or not at all.

A local folder appears with one rename of a temporary sibling. In a bucket, the file that every reader needs first is
written last. Nothing is written next to objects that are not part of this export.
"""

import fcntl
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import unquote, urlsplit
from uuid import uuid4

from raycheck.bucket.format.object_keys import export_key
from raycheck.bucket.local_files import sync
from raycheck.bucket.protocol.removal.exported_directories import check_not_being_pruned
from raycheck.bucket.store import Store, open_store
from raycheck.bucket.store.address import path_below, with_settings
from raycheck.errors import ConfigError, NotFoundError, StoreError
from raycheck.storage_settings import StorageSettings


@contextmanager
def destination(
    dest: Store | str, prefix: str, storage: StorageSettings | None = None, *, source: Store, is_dry: bool = False
) -> Iterator[tuple[Store, str]]:
    """Yield the store and the prefix to write to.

    A local folder gets its name only after the block; after an error in the block there is no such folder. storage: how
    to open a URI that is not a local folder. source: a run's store, through whose client a place in the run is written.
    is_dry: the block writes nothing, and no folder is made. Raises
    ConfigError, before anything is changed, for a folder that is not empty.
    """
    path = None if isinstance(dest, Store) else local_path(dest)
    if isinstance(dest, Store):
        yield dest, prefix
    elif path is None:
        uri = dest if storage is None else with_settings(dest, storage)
        inside = path_below(source.uri, uri)
        yield (open_store(uri), prefix) if inside is None else (source, f"{inside}/{prefix}")
    elif is_dry:
        _refuse_occupied(path.resolve())
        yield open_store(f"memory://{uuid4().hex}"), ""
    else:
        with _appearing(path / prefix.strip("/")) as temporary:
            yield open_store(str(temporary)), ""


def check_free(store: Store, prefix: str, names: Iterable[str], last: str) -> None:
    """Raise ConfigError if `prefix` contains a whole export, one that is being deleted, or anything that this export
    would not overwrite.

    names: the files of this export. last: the one that is written last.
    """
    if next(iter(store.list_objects(prefix)), None) is None:
        return  # the usual case, at the price of one request
    check_not_being_pruned(store, prefix)
    with suppress(NotFoundError):
        store.head(export_key(prefix, last))
        raise ConfigError(
            f"{store}: {export_key(prefix, last)} exists: there is already an export here. Choose an empty destination"
        )
    mine = set(names)
    for item in store.list_objects(prefix):
        if item.key[len(prefix) :] not in mine:
            raise ConfigError(
                f"{store}: {item.key} exists, which is not part of this export. Choose an empty destination"
            )


def local_path(dest: str) -> Path | None:
    """Return the folder that `dest` refers to, or None if it is not on this machine."""
    if "://" not in dest:
        return Path(dest).absolute()
    if not dest.startswith("file://"):
        return None
    open_store(dest)  # raises for a host, a query or a fragment
    return Path(unquote(urlsplit(dest).path))


@contextmanager
def _appearing(path: Path) -> Iterator[Path]:
    """Yield a temporary folder, which is renamed to `path` when the block ends without an error.

    Temporary folders of dead exports to this path are removed.
    """
    path = path.resolve()
    _refuse_occupied(path)
    mark = f".{path.name}.raycheck-export-"
    temporary = path.parent / f"{mark}{uuid4().hex}"
    with _typed_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        for entry in os.scandir(path.parent):
            if entry.name.startswith(mark):
                _remove_if_dead(Path(entry.path))
        temporary.mkdir()
        lock = os.open(temporary, os.O_RDONLY)
    try:
        _try_to_lock(lock)  # while it is held, no other export considers this folder abandoned
        yield temporary
        _refuse_occupied(path)
        with _typed_errors(path):
            temporary.replace(path)
            sync(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        os.close(lock)


@contextmanager
def _typed_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StoreError(f"{path}: {error.strerror or error}") from error


def _refuse_occupied(path: Path) -> None:
    if path.is_dir() and not any(path.iterdir()):
        return
    if os.path.lexists(path):
        raise ConfigError(f"{path} exists and is not an empty folder. Choose a new one")


def _remove_if_dead(folder: Path) -> None:
    """Remove a temporary folder whose export is dead. A running export holds a lock on it until its process ends."""
    with suppress(OSError):
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            if _try_to_lock(lock):
                shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(lock)


def _try_to_lock(folder: int) -> bool:
    """Take the lock of a folder, given by its file descriptor. Return False if another process holds it."""
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # held by a running export, or a file system without locks
        return False
    return True
