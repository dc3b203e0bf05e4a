"""A box: the box of one tensor that this rank holds, whatever shards it (plain, DDP, FSDP2's DTensor).

A DTensor on a mesh of all ranks knows which of its boxes are whose. What may lie on several ranks without knowing it
(plain tensors, DTensors on a part of the ranks) has its writer settled by the ranks' agreement (replica_agreement.py).
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch.distributed.tensor import DTensor

from raycheck.errors import ConfigError

TRAIN = "train"
"""The component of all that training changes."""
Place = tuple[str, tuple[str | int, ...]]
"""A tensor's name, and its path in the state."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalBox:
    """`local` is the live tensor of this rank's box: offsets and sizes in elements, inside the global shape.

    aliases: further names of the same memory (tied weights), stored once. is_unique: no other rank writes this box;
    otherwise the agreement says who does. may_spread: equal on every holder by construction (parameters and optimizer
    state), so that any of them may write it; False for buffers, which only the first holder's forward defines.
    component: the one it is saved in. cast_from: the saved dtype, when it is read into another one.
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
    component: str = TRAIN
    cast_from: torch.dtype | None = None

    @property
    def dtype(self) -> str:
        return str(self.local.dtype).removeprefix("torch.")

    @property
    def size_bytes(self) -> int:
        return math.prod(self.sizes) * self.local.element_size()

    @property
    def box_name(self) -> str:
        """Names this box of this tensor, on every rank alike."""
        return f"{self.name}@{','.join(map(str, self.offsets))}"

    @property
    def is_held(self) -> bool:
        """Whether this rank has something to write: not a further replica, nor the empty end of an uneven shard."""
        return self.is_first_replica and (0 not in self.sizes or 0 in self.shape)


def box_of(
    name: str, path: tuple[str | int, ...], tensor: torch.Tensor, *, may_spread: bool, world_size: int = 1
) -> LocalBox:
    """This rank's box of `tensor`; it shares memory with it. Raises ConfigError, naming it, for one that is cut
    into several boxes on this rank."""
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        shape = tuple(tensor.shape)
        return LocalBox(
            name=name,
            path=path,
            local=tensor,
            shape=shape,
            offsets=(0,) * len(shape),
            sizes=shape,
            is_unique=False,
            is_first_replica=True,
            may_spread=may_spread,
        )
    chunks = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]
    if len(chunks) > 1 or any(placement.is_partial() for placement in tensor.placements):
        raise ConfigError(
            f"state at {name} is a DTensor placed as {tensor.placements}, which is no single box on each rank; "
            "redistribute it to Shard or Replicate before it is saved"
        )
    local = tensor.to_local()
    coordinate = tensor.device_mesh.get_coordinate()  # None on a rank outside the mesh, which holds nothing of it
    replicas = [
        at for at, placement in zip(coordinate or (), tensor.placements, strict=False) if placement.is_replicate()
    ]
    return LocalBox(
        name=name,
        path=path,
        local=local,
        shape=tuple(tensor.shape),
        offsets=tuple(chunks[0].offsets) if chunks else (0,) * tensor.dim(),
        sizes=tuple(local.shape),
        is_unique=tensor.device_mesh.size() == world_size,
        is_first_replica=coordinate is not None and not any(replicas),
        may_spread=may_spread,
    )


def merge_tied(boxes: Iterable[LocalBox]) -> list[LocalBox]:
    """The boxes with those that are the same memory drawn together under the first one's name."""
    first: dict[tuple[object, ...], LocalBox] = {}
    for box in boxes:
        key = memory_key(box)
        known = first.get(key)
        first[key] = box if known is None else replace(known, aliases=(*known.aliases, (box.name, box.path)))
    return list(first.values())


def memory_key(box: LocalBox) -> tuple[object, ...]:
    """Equal for two boxes that are one: the same box of the same memory. Boxes without elements, and those on the meta
    device, have no address; they are known by their storage, so that ranks without rows of a tied weight judge as the
    others do."""
    local = box.local
    address = local.data_ptr() or (local.untyped_storage()._cdata, local.storage_offset())  # noqa: SLF001
    return (address, local.device, local.dtype, local.stride(), box.shape, box.offsets, box.sizes)


def strides_of(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Of a contiguous tensor, in elements."""
    return tuple(math.prod(sizes[dim + 1 :]) for dim in range(len(sizes)))


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor. Not by view(-1) alone: that keeps the stride of a single element, be it 0 as in
    an expanded one, and torch refuses to see bytes in it."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def without_memory(box: LocalBox) -> LocalBox:
    """What is known of a box, to be kept: its memory must be able to go."""
    return replace(box, local=torch.empty(box.local.shape, dtype=box.local.dtype, device="meta"))


def boxes_to_write(boxes: Iterable[LocalBox], *, rank: int, writers: Mapping[str, int]) -> list[LocalBox]:
    """The boxes that this rank writes. `writers`: the agreed writer by box. A box that is not in it is new since the
    agreement: every holder writes it, and the commit keeps the first."""
    return [box for box in boxes if box.is_held and (box.is_unique or writers.get(box.box_name, rank) == rank)]
