"""Finds which elements of which tensors a parameter of Megatron-core is, and cuts ranges of it into boxes.

Megatron records where a rank's parameter lies by ShardedTensors. A factory makes several of them: the two halves of a
gated layer, which each tensor-parallel rank has side by side, are two tensors of the whole model. DistributedOptimizer
cuts the rank's parameter further, into flat ranges that disregard its shape.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from raycheck.errors import ConfigError
from raycheck.state.entries.engine_model import elements_of
from raycheck.transfer.stage.tensor_parts import Numbers, Part, describe_parts, description_of, parts_of_range


class ParameterPiece(NamedTuple):
    """A run of elements of a rank's own parameter, which is a box of one tensor of the model.

    name, shape: of the tensor. offsets, sizes: of the box in it. first: the number of its first element in the rank's
    parameter. is_padded: the first dimension may be longer or shorter elsewhere, as a vocabulary that is padded to a
    multiple of the degree is. writes: False for a copy that another rank saves.
    """

    name: str
    shape: Numbers
    offsets: Numbers
    sizes: Numbers
    first: int
    is_padded: bool = False
    writes: bool = True

    @property
    def stop(self) -> int:
        """Return the number after that of the last element in the rank's parameter."""
        return self.first + math.prod(self.sizes)


@dataclass(frozen=True)
class PieceRange:
    """The range of one tensor of the model that is in memory that an engine trains.

    memory: it may have more of other tensors. at, size: the range of the memory in question, in elements. parts: the
    boxes of the tensor in that range. The rest as in ParameterPiece.
    """

    memory: torch.Tensor
    at: int
    size: int
    name: str
    shape: Numbers
    parts: tuple[Part, ...]
    is_padded: bool
    writes: bool

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the range's part of the memory, or of what is laid out like it."""
        return describe_parts(elements_of(self, flat), self.shape, self.parts, writes=self.writes)


def ranges_of(pieces: Sequence[ParameterPiece], memory: torch.Tensor, start: int) -> Iterator[PieceRange]:
    """Yield what memory has of each tensor: it is the rank's parameter from its element `start` on."""
    stop = start + memory.numel()
    for name in dict.fromkeys(piece.name for piece in pieces):
        own = [piece for piece in pieces if piece.name == name]
        parts = [
            part
            for piece in own
            if (low := max(start, piece.first)) < (high := min(stop, piece.stop))
            for part in parts_of_range(
                piece.sizes, low - piece.first, high - piece.first, offsets=piece.offsets, at=low - start
            )
        ]
        if parts:
            at = min(part.start[0] for part in parts)
            size = max(part.start[0] + math.prod(part.sizes) for part in parts) - at
            moved = tuple(replace(part, start=(part.start[0] - at,)) for part in parts)
            first = own[0]
            yield PieceRange(memory, at, size, name, first.shape, moved, first.is_padded, first.writes)


def pieces_of(key: str, sharded: Any) -> list[ParameterPiece]:
    """Return the pieces of a rank's parameter, in order. sharded: Megatron's ShardedTensor or factory for it.

    Raises ConfigError, naming it, if the pieces are not runs of its elements that cover all of them.
    """
    own = sharded.data
    build = getattr(sharded, "build_fn", None)
    if build is None:
        _refuse_hidden_halves(key, own)
        return [_piece(key, sharded, 0)]
    probe = torch.empty(own.shape, dtype=own.dtype, device="meta")
    pieces = []
    for tensor in _leaves(build(sharded.key, probe, sharded.replica_id, None)):
        is_view = tensor.data.untyped_storage()._cdata == probe.untyped_storage()._cdata  # noqa: SLF001
        if not is_view or not tensor.data.is_contiguous():
            break
        pieces.append(_piece(key, tensor, tensor.data.storage_offset()))
    pieces.sort(key=lambda piece: piece.first)
    ends = [0, *(piece.stop for piece in pieces)]
    if [piece.first for piece in pieces] != ends[:-1] or ends[-1] != own.numel():
        raise ConfigError(
            f"the parameter {key} is made of {len(pieces)} tensors by a factory that does not cut it along its first "
            "dimension. raycheck cannot save that; give the module a factory that does, or save with "
            "megatron.core.dist_checkpointing"
        )
    return pieces


def _refuse_hidden_halves(key: str, parameter: Any) -> None:
    """Raise ConfigError for a parameter of which each rank has several strided pieces, and no factory names them."""
    if getattr(parameter, "partition_stride", 1) > 1:
        raise ConfigError(
            f"the parameter {key} is fused: each tensor-parallel rank has {parameter.partition_stride} pieces of it "
            "side by side, and its module gives them as one ShardedTensor. Another degree would mix the pieces. "
            "Give the module a ShardedTensorFactory that names them, as megatron.core.transformer.mlp.MLP has"
        )


def _piece(key: str, sharded: Any, first: int) -> ParameterPiece:
    if sharded.prepend_axis_num or sharded.flattened_range is not None:
        raise ConfigError(
            f"the parameter {key} is one of several that Megatron stacks into {sharded.key}, although it was asked to "
            "keep them apart. raycheck cannot save that; save with megatron.core.dist_checkpointing"
        )
    replica = sharded.replica_id
    return ParameterPiece(
        sharded.key,
        tuple(sharded.global_shape),
        tuple(sharded.global_offset),
        tuple(sharded.local_shape),
        first,
        bool(sharded.allow_shape_mismatch),
        isinstance(replica, int) or not replica[0],  # the first number is above 0 for copies on other pipeline stages
    )


def _leaves(tree: Any) -> Iterator[Any]:
    if isinstance(tree, dict | list | tuple):
        for item in tree.values() if isinstance(tree, dict) else tree:
            yield from _leaves(item)
    else:
        yield tree


def without_rows(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """Describe the same memory as parts of a tensor that has only this number of rows. The memory must be flat."""
    shape, *lists, writes = description_of(tensor)
    parts = [
        Part(offsets, (min(sizes[0], rows - offsets[0]), *sizes[1:]), start)
        for offsets, start, sizes in zip(*lists, strict=True)
        if offsets[0] < rows
    ]
    return describe_parts(tensor, (rows, *shape[1:]), parts, writes=writes)
