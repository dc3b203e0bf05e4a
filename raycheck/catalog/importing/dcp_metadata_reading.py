"""Reads the `.metadata` of a torch DCP directory, a pickle, without letting it call arbitrary code.

Only the classes of DCP's metadata can be looked up by name; they hold values and do nothing else. The result is
validated afterwards, since even these may contain anything.
"""

import io
import pickle
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata

from raycheck.catalog.importing.source_tensors import check_shape
from raycheck.errors import ConfigError, CorruptError

_CLASSES: dict[tuple[str, str], Any] = {
    **{
        (metadata.__name__, name): getattr(metadata, name)
        for name in (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
        if hasattr(metadata, name)
    },
    (filesystem.__name__, "_StorageInfo"): filesystem._StorageInfo,  # noqa: SLF001  DCP has no public name for it
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): lambda name: torch.strided if name == "torch.strided" else None,
    ("collections", "OrderedDict"): dict,
    **{
        (f"pathlib{own}", f"{kind}Path"): lambda *parts: "/".join(map(str, parts))
        for own in ("", "._local")
        for kind in ("Posix", "Windows", "PurePosix")
    },  # where the directory was
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ValuePlace:
    """The location of a torch.save record: file, first byte, and size in bytes."""

    file: str
    start: int
    size_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class DcpTensor:
    """A tensor of a DCP directory, and the location of each of its boxes: offsets, sizes, place."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[tuple[tuple[int, ...], tuple[int, ...], ValuePlace], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class DcpContents:
    """The contents of a DCP directory. paths: the path of each name in the nested state, if known."""

    tensors: dict[str, DcpTensor]
    values: dict[str, ValuePlace]
    paths: dict[str, tuple[str | int, ...]]


def read_dcp_metadata(data: bytes, what: str) -> DcpContents:
    """Read `.metadata`. what: its name in errors. Raises CorruptError for data that DCP does not write, and ConfigError
    for data that an extension of DCP wrote."""
    try:
        found = _Reader(io.BytesIO(data)).load()
    except CorruptError as error:
        raise CorruptError(f"{what}: {error}") from None
    except Exception as error:  # noqa: BLE001  hostile bytes make an unpickler raise anything
        raise CorruptError(f"{what} is not DCP metadata: {type(error).__name__}: {str(error)[:200]}") from None
    try:
        return _contents(found, what)
    except (AttributeError, TypeError, ValueError, KeyError) as error:
        raise CorruptError(f"{what} is not DCP metadata: {type(error).__name__}: {str(error)[:200]}") from None


class _Reader(pickle.Unpickler):
    """An unpickler that finds only the classes of DCP's metadata and dtypes."""

    def find_class(self, module: str, name: str) -> Any:
        found = _CLASSES.get((module, name))
        if found is None and module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            found = getattr(torch, name)
        if found is None:
            raise CorruptError(f"it names {module}.{name}"[:300] + ", which DCP metadata never contains")
        return found


def _contents(found: Any, what: str) -> DcpContents:
    if type(found) is not metadata.Metadata or type(found.state_dict_metadata) is not dict:
        raise CorruptError(f"{what} is not DCP metadata")
    places: dict[tuple[str, tuple[int, ...] | None], ValuePlace] = {}
    for key, info in (found.storage_data or {}).items():
        offset = None if key.offset is None else tuple(key.offset)
        if getattr(info, "transform_descriptors", None):
            raise ConfigError(
                f"{what}: {key.fqn} was written by a stream extension ({info.transform_descriptors}); load it with "
                "torch and save it without extensions"
            )
        places[key.fqn, offset] = ValuePlace(file=info.relative_path, start=info.offset, size_bytes=info.length)
    tensors, values = {}, {}
    for name, about in found.state_dict_metadata.items():
        if type(name) is not str:
            raise CorruptError(f"{what} names a tensor by a {type(name).__name__}")
        if type(about) is metadata.BytesStorageMetadata:
            values[name] = places[name, None]
        else:
            tensors[name] = _tensor(name, about, places, what)
    paths = {
        name: tuple(step if type(step) is int else str(step) for step in path)
        for name, path in (found.planner_data or {}).items()
        if name in tensors or name in values
    }
    return DcpContents(tensors=tensors, values=values, paths=paths)


def _tensor(name: str, about: Any, places: dict[Any, ValuePlace], what: str) -> DcpTensor:
    dtype = about.properties.dtype
    if not isinstance(dtype, torch.dtype):
        raise CorruptError(f"{what}: {name} has no dtype")
    shape = check_shape(tuple(about.size), f"{what}: {name}")
    chunks = []
    for chunk in about.chunks:
        offsets = check_shape(tuple(chunk.offsets), f"{what}: {name}")
        sizes = check_shape(tuple(chunk.sizes), f"{what}: {name}")
        chunks.append((offsets, sizes, places[name, offsets]))
    return DcpTensor(dtype=dtype, shape=shape, chunks=tuple(chunks))
