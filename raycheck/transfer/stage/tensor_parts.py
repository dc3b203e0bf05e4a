"""Finds which elements of a whole tensor this rank has, and where its own tensor has them.

A DTensor records it by its mesh and placements. A plain tensor may record it in four attributes, as the
CheckpointableTensor protocol of torch 2.14 defines them: `global_shape`, and one item per box in `global_offsets`,
`local_offsets` and `local_sizes`. Two extensions serve training engines. If the tensor is one-dimensional and the whole
is not, it is flat memory, and a local offset is the number of the box's first element there. `writes_parts`, if False,
says that other ranks save these elements, perhaps in other boxes; a restore still reads them here.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise, product
from typing import Any, TypeVar

import torch
from torch.distributed.tensor import DTensor

from raycheck.errors import ConfigError

Numbers = tuple[int, ...]
Box = tuple[Numbers, Numbers]
"""Offsets and sizes of a box in a whole tensor, in elements."""
_Tensor = TypeVar("_Tensor", bound=torch.Tensor)
_ATTRIBUTES = ("global_shape", "global_offsets", "local_offsets", "local_sizes")
_WRITES = "writes_parts"


@dataclass(frozen=True, slots=True)
class Part:
    """A box of a whole tensor, and its place in the rank's own tensor.

    offsets, sizes: of the box, in elements. start: the first element of the box in the rank's tensor, by dimension, or
    its number if that tensor is flat memory.
    """

    offsets: Numbers
    sizes: Numbers
    start: Numbers

    @staticmethod
    @lru_cache(maxsize=4096)
    def whole(shape: Numbers) -> "Part":
        """Return the part of a tensor that is not divided."""
        return Part((0,) * len(shape), shape, (0,) * len(shape))

    def of(self, own: torch.Tensor) -> torch.Tensor:
        """Return the box as a view of the rank's own tensor."""
        if len(self.start) != len(self.sizes):
            return own.narrow(0, self.start[0], math.prod(self.sizes)).view(self.sizes)
        for dim, (start, size) in enumerate(zip(self.start, self.sizes, strict=True)):
            own = own.narrow(dim, start, size)
        return own


def is_described(tensor: torch.Tensor) -> bool:
    """Return whether a plain tensor records which part of a larger one it is."""
    if getattr(tensor, _ATTRIBUTES[0], None) is None:  # most tensors, and a save asks for each
        return False
    return not isinstance(tensor, DTensor) and all(hasattr(tensor, attribute) for attribute in _ATTRIBUTES)


def whole_shape(tensor: torch.Tensor) -> Numbers:
    """Return the shape of the whole tensor of which this rank has parts."""
    return tuple(getattr(tensor, _ATTRIBUTES[0]) if is_described(tensor) else tensor.shape)


def writes_parts(tensor: torch.Tensor) -> bool:
    """Return whether this rank may save the parts that it has, and not only read them."""
    return bool(getattr(tensor, _WRITES, True))


def description_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return what a plain tensor records about its parts, () if nothing."""
    if not is_described(tensor):
        return ()
    return (*(getattr(tensor, attribute) for attribute in _ATTRIBUTES), writes_parts(tensor))


def described_as(tensor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return `tensor`, or a view of it that describes itself as `other` does, if that one does and has its shape."""
    if not is_described(other) or is_described(tensor) or tensor.shape != other.shape:
        return tensor
    return describe(tensor.detach(), description_of(other))


def describe_parts(
    memory: torch.Tensor, shape: Sequence[int], parts: Iterable[Part], *, writes: bool = True
) -> torch.Tensor:
    """Describe a rank's memory as parts of a larger tensor, and return a view of it.

    The view can be a tensor of the state: every rank saves the parts that it has, and a restore reads whatever parts
    the rank has then. A parameter can be described by assigning the view to its `.data` and the view's attributes to
    it; optimizer state of the parameter's shape is taken to be divided like it.

    memory: it may have further elements, which are not saved. shape: of the whole tensor. parts: the boxes, which may
    be none; see Part. writes: False if other ranks save these elements, as the first stage of a pipeline saves weights
    that the last stage has too. Raises ConfigError for a part that is not inside the whole, or not inside the memory.
    """
    boxes = [(tuple(part.offsets), tuple(part.start), tuple(part.sizes)) for part in parts]
    lists = tuple(tuple(box[number] for box in boxes) for number in range(3))
    found = describe(memory.detach(), (tuple(shape), *lists, writes))
    described_parts("describe_parts", found)
    return found


def flat_part(memory: torch.Tensor, shape: Sequence[int], start: int) -> torch.Tensor:
    """Describe flat memory as a range of the elements of a larger tensor, and return a view of it.

    memory: one-dimensional; the view shares it. shape: of the whole tensor. start: the number of the memory's first
    element there, in row-major order. See describe_parts. Raises ConfigError for a range outside the whole tensor.
    """
    shape = tuple(shape)
    if memory.dim() != 1 or not 0 <= start <= start + len(memory) <= math.prod(shape):
        raise ConfigError(
            f"flat_part: memory of shape {list(memory.shape)} from element {start} is no range of a tensor of shape "
            f"{list(shape)}; give one-dimensional memory of at most {math.prod(shape)} elements"
        )
    return describe_parts(memory, shape, parts_of_range(shape, start, start + len(memory)))


def parts_of_range(
    sizes: Sequence[int], start: int, stop: int, *, offsets: Sequence[int] | None = None, at: int = 0
) -> list[Part]:
    """Return the parts that flat memory with a range of the elements of a box has.

    sizes: of the box. offsets: of the box in the whole tensor, zeros if the box is all of it. start, stop: the numbers
    of the range's elements in the box, in row-major order. at: where the range begins in the memory.
    """
    corner = [0] * len(sizes) if offsets is None else offsets
    parts = []
    for own_offsets, own_sizes in boxes_of_range(tuple(sizes), start, stop):
        shifted = tuple(low + own for low, own in zip(corner, own_offsets, strict=True))
        parts.append(Part(shifted, own_sizes, (at,)))
        at += math.prod(own_sizes)
    return parts


def describe(tensor: _Tensor, description: tuple[Any, ...]) -> _Tensor:
    """Have a tensor describe itself as another one does, and return it. description: see description_of."""
    for attribute, value in zip((*_ATTRIBUTES, _WRITES), description, strict=False):
        setattr(tensor, attribute, value)
    return tensor


def boxes_of_range(shape: Numbers, start: int, stop: int) -> Iterator[Box]:
    """Yield boxes that together cover the elements from `start` to before `stop`, in row-major order."""
    if start >= stop:
        return
    if len(shape) < 2:
        box: Box = ((start,), (stop - start,)) if shape else ((), ())
        yield box
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row
    if first > last:
        edges = [(last, start - last * row, stop - last * row)]
        whole = 0
    else:
        edges = [(first - 1, start - (first - 1) * row, row)] if start % row else []
        whole = last - first
    for number, low, high in edges:
        for offsets, sizes in boxes_of_range(shape[1:], low, high):
            yield (number, *offsets), (1, *sizes)
    if whole:
        yield (first, *(0 for _ in shape[1:])), (whole, *shape[1:])
    if first <= last and stop % row:
        for offsets, sizes in boxes_of_range(shape[1:], 0, stop - last * row):
            yield (last, *offsets), (1, *sizes)


def described_parts(name: str, tensor: torch.Tensor) -> list[Part]:
    """Return the parts that a plain tensor records. Raises ConfigError, naming the tensor, if they cannot be so."""
    shape, *lists, _ = description_of(tensor)
    try:
        boxes = [tuple(tuple(map(int, item)) for item in row) for row in zip(*lists, strict=True)]
        parts = [Part(offsets, sizes, start) for offsets, start, sizes in boxes]
        are_inside = all(_is_inside(part, tuple(shape), tensor) for part in parts)
    except (TypeError, ValueError):
        are_inside = False
    if not are_inside:
        given = ", ".join(f"{attribute}={getattr(tensor, attribute)!r}" for attribute in _ATTRIBUTES)
        raise ConfigError(
            f"state at {name} is a tensor of shape {list(tensor.shape)} that describes parts of a larger one which it "
            f"cannot have: {given}. Give each box its offsets and sizes in the larger tensor and its place in this one"
        )
    return parts


def _is_inside(part: Part, shape: Numbers, own: torch.Tensor) -> bool:
    """Return whether a box lies in the whole tensor, and its elements in the rank's own."""
    if not len(part.offsets) == len(part.sizes) == len(shape):
        return False
    is_in_whole = all(
        0 <= low <= low + size <= end for low, size, end in zip(part.offsets, part.sizes, shape, strict=True)
    )
    if len(part.start) == 1 and own.dim() == 1 and len(shape) != 1:
        return is_in_whole and own.is_contiguous() and 0 <= part.start[0] <= len(own) - math.prod(part.sizes)
    return (
        is_in_whole
        and len(part.start) == own.dim() == len(shape)
        and all(0 <= low <= low + size <= end for low, size, end in zip(part.start, part.sizes, own.shape, strict=True))
    )


def parts_of(name: str, tensor: torch.Tensor) -> list[Part] | None:
    """Return the parts that this rank has of a tensor, or None if its own tensor is the whole.

    Raises ConfigError, which names the tensor, for a DTensor without final values, and for a plain tensor that
    describes parts which it cannot have.
    """
    if isinstance(tensor, DTensor):
        return parts_of_dtensor(name, tensor)
    return described_parts(name, tensor) if is_described(tensor) else None


def parts_of_dtensor(name: str, tensor: DTensor) -> list[Part]:
    """Return the parts that this rank has of a DTensor. Raises ConfigError, naming it, if its values are not final."""
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:  # a rank outside the mesh has no part of the tensor
        return []
    cut: dict[int, torch.Tensor] = {}  # by dimension, the indices that this rank has, in the order of its own tensor
    placements: Sequence[Any] = tensor.placements
    for mesh_dim, placement in enumerate(placements):
        kind = type(placement).__name__
        if kind == "Replicate":
            continue
        if kind not in ("Shard", "_StridedShard"):
            raise ConfigError(
                f"state at {name} is a DTensor placed as {tensor.placements}: {placement!r} cannot be saved, since no "
                "rank has the final values. Redistribute it before you give it to the state: "
                "tensor.redistribute(placements=[...]) with Shard and Replicate"
            )
        dim = placement.dim % tensor.dim()
        pieces = _chunks(cut.get(dim, torch.arange(tensor.shape[dim])), getattr(placement, "split_factor", 1))
        mine = (_chunks(piece, tensor.device_mesh.size(mesh_dim))[coordinate[mesh_dim]] for piece in pieces)
        cut[dim] = torch.cat(list(mine))
    sizes = tuple(len(cut[dim]) if dim in cut else size for dim, size in enumerate(tensor.shape))
    if sizes != tuple(tensor.to_local().shape):
        raise ConfigError(
            f"state at {name} is a DTensor placed as {tensor.placements} over {list(tensor.shape)}, of which this rank "
            f"should have {list(sizes)} and has {list(tensor.to_local().shape)}: create it with torch's own "
            "distribute_tensor, or give DTensor.from_local the whole shape"
        )
    runs = [_runs(cut[dim]) if dim in cut else [(0, size, 0)] for dim, size in enumerate(tensor.shape)]
    return [Part(*zip(*box, strict=True)) if box else Part((), (), ()) for box in product(*runs)]


def _chunks(indices: torch.Tensor, count: int) -> list[torch.Tensor]:
    """Cut as torch.chunk does, but always into `count` pieces: the last ones may be empty."""
    size = max(1, -(-len(indices) // count))
    return [indices[size * number : size * (number + 1)] for number in range(count)]


def _runs(indices: torch.Tensor) -> list[tuple[int, int, int]]:
    """Return the runs of consecutive indices: the first index, the length, and the place among these indices."""
    breaks = ((indices[1:] - indices[:-1] != 1).nonzero().flatten() + 1).tolist()
    return [
        (int(indices[first]), end - first, first) for first, end in pairwise([0, *breaks, len(indices)]) if first < end
    ]
