"""Reads the weights that FSDP2 trainers such as SkyRL's write with torch.save, one file per rank, with DTensors in it.

`model_world_size_4_rank_0.pt` and so on. Every rank's file has a part of each tensor, and its mesh and placements say
which. The files `optim_...` number their parameters, and `extra_state_...` differs per rank: both are left out.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from raycheck.catalog.importing.source_files import SourceFiles
from raycheck.catalog.importing.source_tensors import Box, SourceTensor, SourceTensors, check_shape, with_ties
from raycheck.catalog.importing.state_in_source import ReadSettings, SourceState
from raycheck.catalog.importing.torch_file import load_restricted, represented, source_tensor
from raycheck.errors import ConfigError, CorruptError

RANK_FILE = re.compile(r"(model|optim|extra_state)_world_size_(\d{1,6})_rank_(\d{1,6})\.pt")
_STEP = re.compile(r"(?:global_)?step_?(\d{1,9})")


def read_rank_files(files: SourceFiles, settings: ReadSettings) -> SourceState:
    """Read the files of all ranks.

    Raises CorruptError if one is missing or the parts do not fit, and ConfigError for an unknown placement.
    """
    matches = [match for name in files.sizes if (match := RANK_FILE.fullmatch(name))]
    sizes = {int(match[2]) for match in matches}
    models = {int(match[3]): match[0] for match in matches if match[1] == "model"}
    if len(sizes) != 1 or not models:
        raise CorruptError(f"{files}: files of {sorted(sizes)} ranks; only one complete set can be imported")
    (world_size,) = sizes
    tensors = SourceTensors()
    tree = {"model": _joined(files, models, world_size, tensors, settings)}
    left_out = tuple(
        sorted({f"{kind}_world_size_{world_size}_rank_*.pt" for kind in {m[1] for m in matches} - {"model"}})
    )
    texts = {name: files.read(f"huggingface/{name}", 1 << 24).decode(errors="replace") for name in _configs(files)}
    step = next((int(match[1]) for part in reversed(files.uri.split("/")) if (match := _STEP.fullmatch(part))), None)
    return SourceState(kind="fsdp", tree=tree, tensors=tensors, texts=texts, step=step, left_out=left_out)


def _configs(files: SourceFiles) -> list[str]:
    return [name for name in ("config.json", "generation_config.json") if f"huggingface/{name}" in files.sizes]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Parts:
    """The parts of one tensor on all ranks, by box."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: dict[Box, torch.Tensor]


def _joined(
    files: SourceFiles, names: Mapping[int, str], world_size: int, tensors: SourceTensors, settings: ReadSettings
) -> Any:
    """Return the full state: rank 0's, with every tensor assembled from its parts."""
    missing = sorted(set(range(world_size)) - set(names))
    if missing:
        raise CorruptError(f"{files}: the files of ranks {missing[:10]} of {world_size} are missing")

    found: dict[str, _Parts] = {}
    first: Any = None
    known = 0
    for rank in range(world_size):
        what = files.what(names[rank])
        loaded = load_restricted(files.local(names[rank]), what, verify=settings.verify)
        tree = represented(loaded, _collector(found, rank, what), what)
        first, known = (tree, len(found)) if rank == 0 else (first, known)
        if len(found) > known:
            raise ConfigError(
                f"{what}: {list(found)[known]} is not in rank 0's file: a pipeline is not imported this way"
            )
    joined = with_ties({path: _tensor(parts, path) for path, parts in found.items()})
    return represented(first, lambda _, path: tensors.add(joined[path], path), str(files))


def _collector(found: dict[str, _Parts], rank: int, what: str) -> Callable[[torch.Tensor, str], torch.Tensor]:
    def collect(tensor: torch.Tensor, path: str) -> torch.Tensor:
        shape, box, local = _part_of(tensor, rank, f"{what}: {path}")
        known = found.setdefault(path, _Parts(dtype=local.dtype, shape=shape, parts={}))
        if (known.dtype, known.shape) != (local.dtype, shape):
            raise CorruptError(f"{what}: {path} is {local.dtype}{list(shape)} here, but not on other ranks")
        if box.count or not math.prod(shape):
            known.parts.setdefault(box, local)  # of replicas, the lowest rank's is used, as in a save
        return local

    return collect


def _tensor(parts: _Parts, name: str) -> SourceTensor:
    def read(box: Box) -> torch.Tensor:
        for whole, local in parts.parts.items():
            starts = [at - low for at, low in zip(box.offsets, whole.offsets, strict=True)]
            ends = [at + size for at, size in zip(starts, box.sizes, strict=True)]
            if min(starts, default=0) >= 0 and all(e <= s for e, s in zip(ends, whole.sizes, strict=True)):
                return local[tuple(slice(start, stop) for start, stop in zip(starts, ends, strict=True))]
        raise CorruptError(f"{name} has no part at {box.offsets}")

    return SourceTensor(
        dtype=parts.dtype, shape=parts.shape, boxes=tuple(parts.parts), can_split=True, read=read, place=name
    )


def _part_of(tensor: torch.Tensor, rank: int, what: str) -> tuple[tuple[int, ...], Box, torch.Tensor]:
    """Return the shape of a tensor, and this rank's box of it."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    if not isinstance(tensor, DTensor):
        shape = tuple(tensor.shape)
        source_tensor(tensor, what)
        return shape, Box((0,) * len(shape), shape), tensor.detach()
    local, spec = tensor._local_tensor.detach(), tensor._spec  # noqa: SLF001  to_local needs a process group
    source_tensor(local, what)
    shape = check_shape(tuple(spec.shape), what)
    mesh: torch.Tensor = spec.mesh.mesh
    places = (mesh == rank).nonzero().tolist()
    if len(places) != 1 or len(places[0]) != len(spec.placements):
        raise CorruptError(f"{what}: its mesh does not have rank {rank} once")
    offsets, sizes = [0] * len(shape), list(shape)
    for at, count, placement in zip(places[0], mesh.shape, spec.placements, strict=True):
        if type(placement) is Shard and 0 <= placement.dim < len(shape):
            _cut(offsets, sizes, placement.dim, at, count)
        elif type(placement) is not Replicate:
            raise ConfigError(
                f"{what} is placed as {spec.placements}; parts by rows or columns (Shard) and copies (Replicate) are "
                "imported. Save the training once with torch DCP, and import that"
            )
    if tuple(local.shape) != tuple(sizes):
        raise CorruptError(f"{what}: the part of rank {rank} is {list(local.shape)}, and should be {sizes}")
    return shape, Box(tuple(offsets), tuple(sizes)), local


def _cut(offsets: list[int], sizes: list[int], dim: int, at: int, count: int) -> None:
    """Select part `at` of `count` along a dimension, split as by torch.chunk: all parts but the last ones are full."""
    full = -(-sizes[dim] // count)
    start = min(at * full, sizes[dim])
    offsets[dim], sizes[dim] = offsets[dim] + start, min(full, sizes[dim] - start)
