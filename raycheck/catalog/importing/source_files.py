"""Reads the files of a source, on this machine or in a bucket, by their relative names.

Names in a source's documents are untrusted: only names in the listing are ever read. On this machine a link may point
to another place in the source or, in Hugging Face's cache, to a blob of the same model, and nowhere else.
"""

import json
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from raycheck.bucket.store import Store, open_store
from raycheck.bucket.store.address import kind_of, parse_uri, shown_uri
from raycheck.bucket.store.interface import Buffer
from raycheck.errors import ConfigError, CorruptError, NotFoundError, StoreError
from raycheck.storage_settings import StorageSettings

MAX_FILES = 100_000
MAX_JSON_BYTES = 64 * 1024 * 1024
MAX_LEVELS = 4
BLOCK_BYTES = 16 * 1024 * 1024


class SourceFiles:
    """The files under one folder or prefix. Close it to remove copies on this machine.

    uri: the address, for people. only: the name of the one file that was given as the source, "" for a folder. sizes:
    bytes by name, for every file; names are relative and have "/" between their parts.
    """

    def __init__(self, uri: str, sizes: Mapping[str, int], *, only: str = "") -> None:
        self.uri = uri
        self.only = only
        self.sizes = dict(sorted(sizes.items()))
        self._scratch = ExitStack()
        self._copies: dict[str, Path] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._scratch.close()

    def __str__(self) -> str:
        """Return the address for messages."""
        return shown_uri(self.uri)

    def range(self, name: str, start: int, stop: int) -> Buffer:
        """Return exactly the bytes start..stop of a file. Raises CorruptError if it is shorter."""
        raise NotImplementedError

    def local(self, name: str) -> Path:
        """Return a file on this machine with the bytes of this one: itself, or a copy on disk."""
        self.check(name)
        if name not in self._copies:
            self._copies[name] = self._copy(name)
        return self._copies[name]

    def what(self, name: str) -> str:
        """Return a file's address for errors."""
        return f"{self}: {name}" if name and not self.only else str(self)

    def check(self, name: str) -> int:
        """Return a file's size in bytes. Raises CorruptError for a name that is not one of the source's files."""
        if name not in self.sizes:
            raise CorruptError(f"{self}: {name!r} is named by the source's own documents, but is not one of its files")
        return self.sizes[name]

    def read(self, name: str, max_bytes: int) -> bytes:
        """Return a whole file. Raises CorruptError above `max_bytes`."""
        size = self.check(name)
        if size > max_bytes:
            raise CorruptError(f"{self.what(name)} has {size} bytes, more than the {max_bytes} that it may have")
        return bytes(self.range(name, 0, size)) if size else b""

    def read_json(self, name: str) -> Any:
        """Return a JSON document. Raises CorruptError for anything else."""
        try:
            return json.loads(self.read(name, MAX_JSON_BYTES))
        except (ValueError, RecursionError) as error:
            raise CorruptError(f"{self.what(name)} is not JSON: {error}") from None

    def below(self, prefix: str) -> "SourceFiles":
        """Return the files under `prefix`, which ends in "/", with names relative to it."""
        return PartialFiles(self, prefix)

    def one(self, name: str) -> "SourceFiles":
        """Return a source with only this file."""
        return PartialFiles(self, "", only=name)

    def folders(self) -> list[str]:
        """Return the names of the direct subfolders, in order."""
        return sorted({name.partition("/")[0] for name in self.sizes if "/" in name})

    def _copy(self, name: str) -> Path:
        folder = Path(self._scratch.enter_context(tempfile.TemporaryDirectory(prefix="raycheck-import-")))
        size, free = self.sizes[name], shutil.disk_usage(folder).free
        if size > free:
            raise ConfigError(
                f"{self.what(name)} has {size} bytes, which must be on this machine's disk while they are read; "
                f"{folder.parent} has {free} left. Set TMPDIR to a larger disk"
            )
        path = folder / "file"
        with path.open("wb") as file:
            for start in range(0, size, BLOCK_BYTES):
                file.write(self.range(name, start, min(start + BLOCK_BYTES, size)))
        return path


class LocalFiles(SourceFiles):
    """The files of a folder on this machine, or one file in it."""

    def __init__(self, uri: str, path: Path) -> None:
        path = path.resolve()
        self._root = path if path.is_dir() else path.parent
        self._allowed = _cache_of(self._root) or self._root
        self._paths = {path.name: path} if path.is_file() else dict(self._walk())
        sizes = {name: file.stat().st_size for name, file in self._paths.items()}
        super().__init__(uri, sizes, only=path.name if path.is_file() else "")

    def range(self, name: str, start: int, stop: int) -> Buffer:
        self.check(name)
        try:
            with self._paths[name].open("rb") as file:
                file.seek(start)
                data = file.read(stop - start)
        except OSError as error:
            raise StoreError(f"{self.what(name)}: {error.strerror or error}") from error
        if len(data) < stop - start:
            raise CorruptError(f"{self.what(name)} ends before byte {stop}: is it still being written, or truncated?")
        return data

    def _copy(self, name: str) -> Path:
        return self._paths[name]

    def _walk(self) -> Iterator[tuple[str, Path]]:
        count = 0
        for folder, folders, files in os.walk(self._root):
            here = Path(folder)
            if len(here.relative_to(self._root).parts) >= MAX_LEVELS:
                folders.clear()
            for file in files:
                count += 1
                _refuse_many(str(self._root), count)
                path, name = here / file, (here / file).relative_to(self._root).as_posix()
                target = path.resolve()
                if not target.is_relative_to(self._allowed):
                    raise CorruptError(f"{path} is a link that leads out of {self._allowed}: it is not followed")
                if path.exists() and not stat.S_ISREG(target.stat().st_mode):
                    raise CorruptError(f"{path} is not a file: pipes and devices are not read")
                if path.exists():
                    yield name, target


def _cache_of(folder: Path) -> Path | None:
    """Return the model's folder in Hugging Face's cache if `folder` is one of its snapshots, whose files are links to
    the model's blobs."""
    model = folder.parent.parent
    return model if folder.parent.name == "snapshots" and model.name.startswith(("models--", "datasets--")) else None


class BucketFiles(SourceFiles):
    """The files under a prefix in a bucket."""

    def __init__(self, uri: str, store: Store, *, only: str = "") -> None:
        self._store = store
        sizes: dict[str, int] = {}
        if only:
            sizes[only] = store.head(only)
        else:
            for item in store.list_objects(""):
                _refuse_many(uri, len(sizes))
                if item.key.count("/") <= MAX_LEVELS:
                    sizes[item.key] = item.size_bytes
        super().__init__(uri, sizes, only=only)

    def range(self, name: str, start: int, stop: int) -> Buffer:
        self.check(name)
        return self._store.get_range(name, start, stop)


class PartialFiles(SourceFiles):
    """The files of another source under one prefix, or one file of it."""

    def __init__(self, whole: SourceFiles, prefix: str, *, only: str = "") -> None:
        self._whole, self._prefix = whole, prefix
        sizes = {name.removeprefix(prefix): size for name, size in whole.sizes.items() if name.startswith(prefix)}
        uri = f"{whole.uri.rstrip('/')}/{prefix or only}".rstrip("/")
        super().__init__(uri, {only: sizes[only]} if only else sizes, only=only)

    def range(self, name: str, start: int, stop: int) -> Buffer:
        return self._whole.range(self._prefix + name, start, stop)

    def local(self, name: str) -> Path:
        return self._whole.local(self._prefix + name)


def open_source(source: str, storage: StorageSettings | None = None) -> SourceFiles:
    """List the files at an address: a folder or file of this machine, or a prefix or object in a bucket.

    storage: the settings for the bucket. Raises NotFoundError if there are no files.
    """
    if kind_of(source) == "file":
        path = Path(parse_uri(source).prefix if "://" in source else source).expanduser()
        if not path.exists():
            raise NotFoundError(f"{shown_uri(source)}: there is no such file or folder")
        if not path.is_file() and not path.is_dir():
            raise ConfigError(f"{shown_uri(source)} is neither a file nor a folder")
        files: SourceFiles = LocalFiles(source, path)
    else:
        files = _open_in_bucket(source, storage)
    if not files.sizes:
        raise NotFoundError(f"{shown_uri(source)}: no files were found here")
    return files


def _open_in_bucket(source: str, storage: StorageSettings | None) -> SourceFiles:
    base, mark, query = source.partition("?")
    parent, _, name = base.rstrip("/").rpartition("/")
    if name.lower().endswith((".pt", ".pth", ".ckpt", ".bin", ".safetensors")) and not parent.endswith(":/"):
        return BucketFiles(source, open_store(f"{parent}{mark}{query}", storage), only=name)
    return BucketFiles(source, open_store(source, storage))


def _refuse_many(uri: str, count: int) -> None:
    if count >= MAX_FILES:
        raise ConfigError(f"{shown_uri(uri)}: there are more than {MAX_FILES} files; name the checkpoint itself")
