"""A piece: the box of one tensor that this rank holds, whatever shards it (plain, DDP, FSDP2's DTensor).

No process group is asked: a DTensor knows its own box, and which rank writes a replicated tensor follows from the
list that all ranks share.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

SPREAD_FROM_BYTES = 1 << 20
"""Replicated parameters from this size on are spread over the ranks by bytes; smaller tensors stay with rank 0,
since every tensor that lies elsewhere costs each reader one more object to open."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """`local` is the live tensor of this rank's box: offsets and sizes in elements, inside the global shape.

    is_sharded: other ranks hold other boxes. may_spread: equal on every rank by construction (parameters and
    optimizer state), so that any rank may write it; False for buffers, which only rank 0's forward defines.
    """

    name: str
    path: tuple[str | int, ...]
    local: torch.Tensor
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    is_sharded: bool
    is_first_replica: bool
    may_spread: bool

    @property
    def dtype(self) -> str:
        return str(self.local.dtype).removeprefix("torch.")

    @property
    def size_bytes(self) -> int:
        return math.prod(self.sizes) * self.local.element_size()


def piece_of(name: str, path: tuple[str | int, ...], tensor: torch.Tensor, *, may_spread: bool) -> Piece:
    """This rank's piece of `tensor`; it shares memory with it."""
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        shape = tuple(tensor.shape)
        return Piece(
            name=name,
            path=path,
            local=tensor,
            shape=shape,
            offsets=(0,) * len(shape),
            sizes=shape,
            is_sharded=False,
            is_first_replica=True,
            may_spread=may_spread,
        )
    (box,) = tensor.__create_chunk_list__() or (None,)  # type: ignore[no-untyped-call]
    local = tensor.to_local()
    coordinate: list[int] = list(tensor.device_mesh.get_coordinate() or ())
    replicas = [at for at, placement in zip(coordinate, tensor.placements, strict=True) if placement.is_replicate()]
    return Piece(
        name=name,
        path=path,
        local=local,
        shape=tuple(tensor.shape),
        offsets=tuple(box.offsets) if box else (0,) * tensor.dim(),
        sizes=tuple(local.shape),
        is_sharded=True,
        is_first_replica=not any(replicas),
        may_spread=False,
    )


def mine(pieces: Iterable[Piece], *, rank: int, world_size: int) -> list[Piece]:
    """The pieces that this rank writes: every box exactly once over all ranks."""
    keep: list[Piece] = []
    spread: list[Piece] = []
    for piece in pieces:
        if piece.is_sharded:
            if piece.is_first_replica and (0 not in piece.sizes or 0 in piece.shape):
                keep.append(piece)
        elif piece.may_spread and piece.size_bytes >= SPREAD_FROM_BYTES:
            spread.append(piece)
        elif rank == 0:
            keep.append(piece)
    load = [0] * world_size
    for piece in sorted(spread, key=lambda piece: (-piece.size_bytes, piece.name)):
        owner = load.index(min(load))
        load[owner] += piece.size_bytes
        if owner == rank:
            keep.append(piece)
    return keep
