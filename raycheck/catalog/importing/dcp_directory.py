"""Reads a directory that stock torch DCP has written: its boxes as they are, its shard files record by record.

The nested state is assembled from the paths that DCP's planner stores. DCP has turned the keys of dicts into strings.
"""

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from raycheck.bucket.format.manifest import MAX_BYTES as MAX_MANIFEST_BYTES
from raycheck.bucket.format.manifest import load_manifest
from raycheck.bucket.format.object_keys import MANIFEST
from raycheck.catalog.importing.dcp_metadata_reading import DcpContents, ValuePlace, read_dcp_metadata
from raycheck.catalog.importing.source_files import BLOCK_BYTES, SourceFiles
from raycheck.catalog.importing.source_tensors import Box, SourceTensor, SourceTensors, with_ties
from raycheck.catalog.importing.state_in_source import ReadSettings, SourceState, count_in
from raycheck.catalog.importing.torch_file import MAX_DEPTH, load_restricted, represented, source_tensor
from raycheck.errors import ConfigError, CorruptError

METADATA = ".metadata"
MAX_METADATA_BYTES = 1 << 30
MAX_VALUE_BYTES = 256 * 1024 * 1024
MAX_HOLES = 10_000


def read_dcp_directory(files: SourceFiles, settings: ReadSettings) -> SourceState:
    """Read the state in a DCP directory, or in the directories of a folder that `raycheck download` wrote.

    Raises ConfigError for a value that only pickle could make, unless settings.skip_values, and CorruptError for
    metadata that does not fit the files.
    """
    what = files.what(METADATA)
    contents = _contents(files, what)
    tensors = SourceTensors()
    found: dict[tuple[str | int, ...], Any] = {}
    left_out: list[str] = []
    in_order = [name for name in contents.paths if name in contents.tensors]  # the state's own, if all ranks had it
    described = {
        name: _tensor(files, contents, name, settings) for name in dict.fromkeys([*in_order, *contents.tensors])
    }
    for name, tensor in with_ties(described).items():
        found[contents.paths.get(name, (name,))] = tensors.add(tensor, name)
    for name, place in contents.values.items():
        try:
            value = _value(files, place, name, settings, tensors)
        except ConfigError as error:
            if not settings.skip_values:
                raise ConfigError(f"{error} Or leave out all such values: skip_values=True") from None
            left_out.append(name)
            continue
        found[contents.paths.get(name, (name,))] = value
    if len(found) < len(contents.tensors) + len(contents.values) - len(left_out):
        raise CorruptError(f"{what}: two entries have one path")
    holes: list[str] = []
    tree = _nested(found, holes, what)
    progress = tree.get("progress")
    progress = progress if isinstance(progress, dict) else {}
    return SourceState(
        kind="dcp",
        tree=tree,
        tensors=tensors,
        is_whole=True,
        step=count_in(progress, "step") or count_in(tree, "global_step", "step", "iteration"),
        epoch=count_in(progress, "epoch") or count_in(tree, "epoch"),
        left_out=tuple(left_out),
        notes=tuple(f"{hole}: nothing was saved at this position of a list; an empty dict is used" for hole in holes),
    )


def _contents(files: SourceFiles, what: str) -> DcpContents:
    """Read the directory's contents. Of a download, read all directories, and put their names before the files' names.

    Raises ConfigError for a download of some components only, which would hide that a part of the state is missing.
    """
    if METADATA in files.sizes:
        return read_dcp_metadata(files.read(METADATA, MAX_METADATA_BYTES), what)
    manifest = load_manifest(files.read(MANIFEST, MAX_MANIFEST_BYTES), what=files.what(MANIFEST))
    whole = DcpContents(tensors={}, values={}, paths={})
    for component in manifest.components:
        name = f"{component.name}/{METADATA}"
        if name not in files.sizes:
            raise ConfigError(
                f"{files} has no component {component.name}, so it is a part of {manifest.key}: download the rest, "
                "or name one component's folder to import it alone"
            )
        one = read_dcp_metadata(files.read(name, MAX_METADATA_BYTES), files.what(name))
        names = whole.tensors.keys() | whole.values.keys()
        if twice := names & (one.tensors.keys() | one.values.keys()):
            raise CorruptError(f"{files}: {min(twice)} is in two components")
        for key, about in one.tensors.items():
            chunks = ((offsets, sizes, _below(component.name, place)) for offsets, sizes, place in about.chunks)
            whole.tensors[key] = replace(about, chunks=tuple(chunks))
        whole.values.update((key, _below(component.name, place)) for key, place in one.values.items())
        whole.paths.update(one.paths)
    return whole


def _below(folder: str, place: ValuePlace) -> ValuePlace:
    return replace(place, file=f"{folder}/{place.file}")


def _tensor(files: SourceFiles, contents: DcpContents, name: str, settings: ReadSettings) -> SourceTensor:
    about = contents.tensors[name]
    places = {}
    for offsets, sizes, place in about.chunks:
        _check_place(files, place, name)
        places[Box(offsets, sizes)] = place

    def read(box: Box) -> torch.Tensor:
        loaded = _load(files, places[box], name, settings)
        if not isinstance(loaded, torch.Tensor) or (tuple(loaded.shape), loaded.dtype) != (box.sizes, about.dtype):
            raise CorruptError(f"{files.what(places[box].file)}: the record of {name} holds another tensor")
        source_tensor(loaded, name)  # refuses tensors whose value is not their bytes
        return loaded

    return SourceTensor(
        dtype=about.dtype,
        shape=about.shape,
        boxes=tuple(places),
        can_split=False,
        read=read,
        place=tuple((place.file, place.start) for place in places.values()) or name,
    )


def _value(files: SourceFiles, place: ValuePlace, name: str, settings: ReadSettings, tensors: SourceTensors) -> Any:
    _check_place(files, place, name)
    if place.size_bytes > MAX_VALUE_BYTES:
        raise ConfigError(f"{files.what(place.file)}: the value {name} has {place.size_bytes} bytes.")

    def represent(tensor: torch.Tensor, path: str) -> torch.Tensor:
        return tensors.add(source_tensor(tensor.clone(), f"{name}.{path}"), f"{name}.{path}")

    return represented(_load(files, place, name, settings), represent, name)


def _load(files: SourceFiles, place: ValuePlace, name: str, settings: ReadSettings) -> Any:
    """Load one record with torch's restricted loader, from a separate file, which the loader can map."""
    with tempfile.TemporaryDirectory(prefix="raycheck-import-") as folder:
        path = Path(folder) / "record"
        with path.open("wb") as file:
            for start in range(place.start, place.start + place.size_bytes, BLOCK_BYTES):
                file.write(files.range(place.file, start, min(start + BLOCK_BYTES, place.start + place.size_bytes)))
        return load_restricted(path, f"{files.what(place.file)}: {name}", verify=settings.verify)


def _check_place(files: SourceFiles, place: ValuePlace, name: str) -> None:
    size = files.check(place.file)
    is_span = type(place.start) is int and type(place.size_bytes) is int and place.start >= 0 < place.size_bytes
    if not is_span or place.start + place.size_bytes > size:
        raise CorruptError(f"{files.what(place.file)} is truncated: it has {size} bytes, and {name} lies beyond them")


def _nested(found: dict[tuple[str | int, ...], Any], holes: list[str], what: str) -> dict[str, Any]:
    """Assemble the state from its leaves by path. Numeric path elements become lists.

    holes: receives the positions in lists that have no value.
    """
    root: dict[Any, Any] = {}
    for path, value in found.items():
        node = root
        for step in path[:-1]:
            node = node.setdefault(step, {})
            if type(node) is not dict:
                raise CorruptError(f"{what}: {path} lies inside of a value")
        if not path or len(path) > MAX_DEPTH or path[-1] in node:
            raise CorruptError(f"{what}: two entries have the path {str(path)[:200]}, or it is too long")
        node[path[-1]] = value
    return {str(key): _with_lists(value, str(key), holes, what) for key, value in root.items()}


def _with_lists(node: Any, path: str, holes: list[str], what: str) -> Any:
    if type(node) is not dict:
        return node
    items = {step: _with_lists(item, f"{path}.{step}", holes, what) for step, item in node.items()}
    if not node or not all(type(step) is int for step in node):
        return items
    # DCP writes nothing for an empty dict. Later items of a list must not move up.
    if min(items) < 0 or max(items) >= len(items) + MAX_HOLES:
        raise CorruptError(f"{what}: the list {path[:200]} has {len(items)} items, and one at place {max(items)}")
    holes += [f"{path}.{at}" for at in range(max(items)) if at not in items]
    return [items.get(at, {}) for at in range(max(items) + 1)]
