"""Describes a box of a tensor that this rank has, whether the tensor is plain, replicated by DDP, or a DTensor.

A tensor may be several boxes on a rank (tensor_parts.py). A DTensor on a mesh of all ranks records which rank has which
of its boxes. Plain tensors, and DTensors on some of the ranks, may be on several ranks without recording it. The ranks
agree on who writes those (replica_agreement.py). Whatever several ranks may have is compared at every save
(replica_digests.py).
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache, lru_cache

import torch
from torch.distributed.tensor import DTensor

from raycheck.transfer.stage.tensor_parts import (
    Part,
    parts_of,
    whole_shape,
    writes_parts,
)

TRAIN = "train"
"""The component of everything that training changes."""
Place = tuple[str, tuple[str | int, ...]]
"""A tensor's name, and its path in the state."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalBox:
    """A box of a tensor that this rank has. local: the live memory of the box.

    name, path: the tensor's in the state. shape: the whole tensor's. offsets, sizes: the box's, in elements.
    aliases: further names of the same memory (tied weights), which is stored once.
    is_unique: no other rank writes this box; otherwise the agreement says which rank does.
    is_first_replica: this rank is the first of the mesh that holds the box.
    has_replicas: other ranks may hold this very box.
    may_spread: the box is equal on every holder by construction (parameters and optimizer state), so that any of them
        may write it. False for buffers, which the first holder's forward defines.
    part: where the rank's own tensor has the box; None when the box is all of it.
    component: where the box is saved. cast_from: the saved dtype, when the box is read into another dtype.
    """

    name: str
    path: tuple[str | int, ...]
    local: torch.Tensor
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    aliases: tuple[Place, ...] = ()
    is_unique: bool
    is_first_replica: bool
    may_spread: bool
    has_replicas: bool = False
    part: Part | None = None
    component: str = TRAIN
    cast_from: torch.dtype | None = None

    @property
    def dtype(self) -> str:
        """Return the dtype as the index names it, such as "float32"."""
        return str(self.local.dtype).removeprefix("torch.")

    @property
    def size_bytes(self) -> int:
        """Return the size of the box in bytes."""
        return math.prod(self.sizes) * self.local.element_size()

    def within(self, own: torch.Tensor) -> torch.Tensor:
        """Return the box's memory in the rank's own tensor, of which it may be a part."""
        return own if self.part is None else self.part.of(own.detach())

    @property
    def box_name(self) -> str:
        """Return a name of this box of this tensor, which is equal on all ranks."""
        return box_name(self.name, self.offsets)

    @property
    def is_held(self) -> bool:
        """Return whether this rank has something to write.

        It does not for a further replica, nor for the empty end of an uneven shard.
        """
        return self.is_first_replica and self.has_bytes

    @property
    def has_bytes(self) -> bool:
        """Return whether this rank has the box, and not only the empty end of an uneven shard."""
        return 0 not in self.sizes or 0 in self.shape


def box_name(name: str, offsets: tuple[int, ...]) -> str:
    """Return a name of the box of a tensor that begins at these offsets."""
    return f"{name}@{','.join(map(str, offsets))}"


def boxes_of(
    name: str, path: tuple[str | int, ...], tensor: torch.Tensor, *, may_spread: bool, world_size: int = 1
) -> list[LocalBox]:
    """Return this rank's boxes of `tensor`, which share its memory.

    A rank without a part of it has one box without elements, or no box if the tensor has no dimensions.

    Raises ConfigError, which names the tensor, for a DTensor without final values, and for a plain tensor that
    describes parts which it cannot have.
    """
    shape = whole_shape(tensor)
    if isinstance(tensor, DTensor):
        own, mesh = tensor.to_local().detach(), tensor.device_mesh
        coordinate = mesh.get_coordinate()  # None on a rank outside the mesh, which has no part of the tensor
        replicated = [dim for dim, placement in enumerate(tensor.placements) if placement.is_replicate()]
        is_unique = mesh.size() == world_size
        is_first_replica = coordinate is not None and not any(coordinate[dim] for dim in replicated)
        has_replicas = coordinate is not None and (not is_unique or any(mesh.size(dim) > 1 for dim in replicated))
    else:
        own, is_unique, is_first_replica = tensor.detach(), False, writes_parts(tensor)
        has_replicas = is_first_replica and world_size > 1  # what is only read here may be cut otherwise there
    parts = parts_of(name, tensor)
    if parts is None:
        parts = [Part.whole(shape)]
    if not parts and shape:
        nothing = (0,) * len(shape)
        sizes = tuple(own.shape) if isinstance(tensor, DTensor) else shape if 0 in shape else nothing
        parts, own = [Part(nothing, sizes, nothing)], own.as_strided(sizes, strides_of(sizes))  # tied ones share it
    return [
        LocalBox(
            name=name,
            path=path,
            local=own if part.sizes == tuple(own.shape) else part.of(own),
            shape=shape,
            offsets=part.offsets,
            sizes=part.sizes,
            part=None if part.sizes == tuple(own.shape) else part,
            is_unique=is_unique,
            is_first_replica=is_first_replica,
            may_spread=may_spread,
            has_replicas=has_replicas,
        )
        for part in parts
    ]


def merge_tied(boxes: Iterable[LocalBox]) -> list[LocalBox]:
    """Merge boxes of the same memory into one under the first name, and keep the other names as its aliases."""
    boxes = list(boxes)
    addresses = [box.local.data_ptr() for box in boxes]
    at_address = Counter(addresses)
    first: dict[object, LocalBox] = {}
    for address, box in zip(addresses, boxes, strict=True):
        is_alone = address and at_address[address] == 1  # then it is tied to none
        key = address if is_alone else memory_key(box)
        known = first.get(key)
        first[key] = box if known is None else replace(known, aliases=(*known.aliases, (box.name, box.path)))
    return list(first.values())


def memory_key(box: LocalBox) -> tuple[object, ...]:
    """Return a key that is equal for two boxes exactly when they are the same box of the same memory.

    Boxes without elements and boxes on the meta device have no address. Their storage identifies them, so that a rank
    without rows of a tied weight comes to the same result as the others.
    """
    local = box.local
    address = local.data_ptr() or (local.untyped_storage()._cdata, local.storage_offset())  # noqa: SLF001
    return (address, local.device, local.dtype, local.stride(), box.shape, box.offsets, box.sizes)


@lru_cache(maxsize=4096)
def strides_of(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor of these sizes, in elements."""
    return tuple(math.prod(sizes[dim + 1 :]) for dim in range(len(sizes)))


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a contiguous tensor as a flat uint8 tensor on the same memory.

    view(-1) alone would keep the stride of a single element. That may be 0, as in an expanded tensor, and torch refuses
    to view such a tensor as bytes.
    """
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor's elements in order, from a copy if they are not in that order in memory."""
    return as_bytes(tensor.detach().resolve_conj().resolve_neg().contiguous())


def without_memory(box: LocalBox) -> LocalBox:
    """Return the box with an empty meta tensor as its local tensor: keeping it does not keep its memory alive."""
    return replace(box, local=_nothing_of(box.local.dtype))


@cache
def _nothing_of(dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(0, dtype=dtype, device="meta")


def boxes_to_write(boxes: Iterable[LocalBox], *, rank: int, writers: Mapping[str, int]) -> list[LocalBox]:
    """Return the boxes that this rank writes.

    writers: the agreed writer, by the box's name. A box that is missing there is written by the rank that its mesh
    names; without one, it is newer than the agreement: every holder writes it, and the commit keeps the first.
    """

    def is_written(box: LocalBox) -> bool:
        writer = None if box.is_unique and not box.has_replicas else writers.get(box.box_name)
        return box.is_first_replica if writer is None else writer == rank

    return [box for box in boxes if box.has_bytes and is_written(box)]
