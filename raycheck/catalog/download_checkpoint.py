"""Fetches a checkpoint into a folder. This is the public `download`.

The folder gets the manifest, and either stock DCP directories, one per component, or safetensors files, one or more per
entry of the state. Every byte is verified on its way. A file under its own name is complete; the name of an incomplete
one ends in `.partial`. So an interrupted download can be repeated, and fetches only what is missing.

The manifest is written first and marks the folder as this checkpoint's; nothing is written next to other files.
"""

import os
from collections.abc import Collection, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from raycheck.bucket.document_reading import again_if_corrupt
from raycheck.bucket.format.checksum import crc32
from raycheck.bucket.format.manifest import Manifest
from raycheck.bucket.format.object_keys import MANIFEST
from raycheck.bucket.local_files import PARTIAL, appear, check_room, file_crc32, opened_partial, partial_of, write_file
from raycheck.bucket.reading import Checkpoint, ask_latest, missing_error
from raycheck.bucket.store import open_store
from raycheck.bucket.store.interface import Buffer
from raycheck.bucket.store.read_ahead import Spans, read_ahead
from raycheck.catalog.stored_objects import StoredObject, checkpoint_at, names_in, stored_objects
from raycheck.errors import ConfigError, CorruptError, DamagedError, NotFoundError, RaycheckError, StoreError
from raycheck.show_progress import ShowProgress, show_nothing
from raycheck.storage_settings import StorageSettings

Format = Literal["dcp", "safetensors"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Downloaded:
    """A downloaded checkpoint.

    checkpoint: its name in the run. files: their names in the folder, and their sizes in bytes. fetched_bytes: how much
    this call fetched; the rest existed before.
    """

    checkpoint: str
    step: int
    files: dict[str, int]
    fetched_bytes: int


def download(
    source: str,
    to: str | os.PathLike[str],
    *,
    at: int | str | None = None,
    components: Collection[str] | None = None,
    format: Format = "dcp",  # noqa: A002  the option's name
    storage: StorageSettings | None = None,
    progress: ShowProgress = show_nothing,
) -> Downloaded:
    """Fetch a checkpoint into a folder, with several requests at a time and in bounded memory.

    An interrupted download can be repeated, and fetches only what is missing.

    source: a run's URI. to: a new or empty folder, or that of an earlier download of the checkpoint. at: which
    checkpoint: a step, its name, or None for the head. components: the names of the components to fetch; None: all.
    format: "dcp", a stock DCP directory per component, which torch.distributed.checkpoint loads; or
    "safetensors", the tensors of each entry in safetensors files under their names in the checkpoint, and all other
    values in values.json, for which torch is needed. For a Hugging Face directory see export_hf. storage: the settings
    for the bucket. progress: called with the bytes that have arrived, and their total.

    Raises NotFoundError if there is no such checkpoint or retention drops it in the meantime, ConfigError for a folder
    with other files, and DamagedError if bytes differ from what was saved.
    """
    if format not in ("dcp", "safetensors"):
        raise ConfigError(f"download: format={format!r} is not one of dcp, safetensors")
    if format == "safetensors" and components is not None:
        raise ConfigError("download: components= chooses directories of format dcp; leave it out with safetensors")
    store = open_store(source, storage)
    checkpoint = ask_latest(store, lambda body: checkpoint_at(store, body, at))
    data, manifest = checkpoint.read_manifest_bytes(), checkpoint.read_manifest()
    known = {component.name for component in manifest.components}
    if missing := sorted(set(components or ()) - known):
        raise ConfigError(f"{checkpoint.entry.key} has no component {missing[0]!r}; it has: {', '.join(sorted(known))}")
    root = Path(to).absolute()
    with _typed_errors(root):
        _take_folder(root, data, checkpoint)
        if format == "dcp":
            wanted = _objects(checkpoint, manifest, known if components is None else set(components))
            files, fetched = _fetch_all(root, wanted, checkpoint, progress)
        else:
            from raycheck.catalog.download_safetensors import fetch_safetensors

            files, fetched = fetch_safetensors(root, checkpoint, manifest, progress)
    return Downloaded(
        checkpoint=manifest.key, step=manifest.step, files={MANIFEST: len(data), **files}, fetched_bytes=fetched
    )


def _objects(checkpoint: Checkpoint, manifest: Manifest, components: set[str]) -> dict[str, StoredObject]:
    """Return the objects of these components by their file names in the folder."""
    named = zip(names_in(manifest), stored_objects(checkpoint, manifest), strict=True)
    return {name: item for name, item in named if name.partition("/")[0] in components and "/" in name}


def _take_folder(root: Path, manifest: bytes, checkpoint: Checkpoint) -> None:
    """Mark the folder as this checkpoint's, unless it already is. Raises ConfigError if it contains anything else."""
    root.mkdir(parents=True, exist_ok=True)
    mark = root / MANIFEST
    if mark.is_file() and not mark.is_symlink():
        if mark.stat().st_size != len(manifest) or mark.read_bytes() != manifest:
            raise ConfigError(f"{root} holds another checkpoint than {checkpoint.entry.key}. Name another folder")
        return
    if {item.name for item in root.iterdir()} - {MANIFEST + PARTIAL}:
        raise ConfigError(f"{root} is not empty, and holds no earlier download of this. Name a new folder")
    write_file(mark, manifest)


def _fetch_all(
    root: Path, wanted: dict[str, StoredObject], checkpoint: Checkpoint, progress: ShowProgress
) -> tuple[dict[str, int], int]:
    """Fetch what is missing. Returns the sizes of all files, and the bytes fetched."""
    total = sum(item.size_bytes for item in wanted.values())
    fetched = 0

    def fetch() -> None:
        nonlocal fetched
        missing = {name: item for name, item in wanted.items() if not _is_whole(root / name, item)}
        done = total - sum(item.size_bytes for item in missing.values())
        progress(done, total)
        for count, is_new in _fetch(root, missing, checkpoint):
            done, fetched = done + count, fetched + count * is_new
            progress(done, total)

    again_if_corrupt(fetch)
    return {name: item.size_bytes for name, item in wanted.items()}, fetched


def _is_whole(path: Path, item: StoredObject) -> bool:
    """Return whether a file has the size and checksum of an object."""
    is_file = path.is_file() and not path.is_symlink()
    return is_file and path.stat().st_size == item.size_bytes and file_crc32(path) == item.crc32


def _fetch(root: Path, missing: dict[str, StoredObject], checkpoint: Checkpoint) -> Iterator[tuple[int, bool]]:
    """Fetch these files, resuming partial ones.

    Yields how many bytes have arrived, and whether they were fetched now. Raises DamagedError if a file's checksum
    differs; the file is then removed.
    """
    begun = {name: _begun_bytes(root / name, item) for name, item in missing.items()}
    check_room(root, sum(item.size_bytes for item in missing.values()) - sum(begun.values()))
    spans = {name: Spans(item.store, item.key, begun[name], item.size_bytes) for name, item in missing.items()}
    with closing(read_ahead(span for own in spans.values() for span in own)) as ahead:
        for name, item in missing.items():
            partial = partial_of(root / name)
            partial.parent.mkdir(exist_ok=True)
            seen = file_crc32(partial) if begun[name] else 0
            yield begun[name], False
            with opened_partial(root / name, goes_on=begun[name] > 0) as file:
                for _ in spans[name]:
                    data = _next(ahead, checkpoint, item)
                    seen = crc32(data, seen)
                    file.write(data)
                    yield len(data), True
            if seen != item.crc32:
                partial.unlink()
                raise DamagedError(f"{item} has checksum {seen:08x}, its manifest says {item.crc32:08x}")
            appear(root / name)


def _next(ahead: Iterator[Buffer], checkpoint: Checkpoint, item: StoredObject) -> Buffer:
    try:
        return next(ahead)
    except NotFoundError:
        raise missing_error(checkpoint.store, checkpoint.entry.key, item.key) from None
    except CorruptError as error:
        raise DamagedError(str(error)) from None


def _begun_bytes(path: Path, item: StoredObject) -> int:
    """Return how many bytes of a file an earlier download has left."""
    partial = partial_of(path)
    size = partial.stat().st_size if partial.is_file() and not partial.is_symlink() else 0
    return size if size <= item.size_bytes else 0


@contextmanager
def _typed_errors(root: Path) -> Iterator[None]:
    try:
        yield
    except RaycheckError:
        raise
    except OSError as error:
        raise StoreError(f"{error.filename or root}: {error.strerror or error}") from error
