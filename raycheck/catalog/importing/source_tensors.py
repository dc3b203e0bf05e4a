"""The tensors of a source, whose bytes are read box by box and only when their shard is staged.

While the state is converted, each tensor is represented by one on the meta device. So a checkpoint may be larger than
memory, and the entries treat it like a live state.
"""

import math
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass

import torch

from raycheck.errors import CorruptError

MAX_DIMENSIONS = 64
MAX_ELEMENTS = 1 << 62
MAX_ALIKE = 4


@dataclass(frozen=True, slots=True)
class Box:
    """A box of a tensor: offsets and sizes, in elements."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def count(self) -> int:
        """Return the number of elements."""
        return math.prod(self.sizes)


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceTensor:
    """One tensor of a source.

    boxes: its boxes in the source, which cover it exactly once. can_split: whether `read` accepts a part of such a box,
    by rows, without reading more than that. read: returns the elements of a box, in memory or mapped from a file.
    place: the same for all names of one tensor (tied weights).
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    can_split: bool
    read: Callable[[Box], torch.Tensor]
    place: Hashable

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def pieces(self, max_bytes: int) -> Iterator[Box]:
        """Yield boxes of at most `max_bytes`, if rows are that small and boxes can be split."""
        for box in self.boxes:
            rows = box.sizes[0] if box.sizes else 1
            row_bytes = max(1, box.count // max(rows, 1) * self.dtype.itemsize)
            step = max(1, max_bytes // row_bytes)
            if not self.can_split or rows <= step:
                yield box
                continue
            for first in range(0, rows, step):
                yield Box((box.offsets[0] + first, *box.offsets[1:]), (min(step, rows - first), *box.sizes[1:]))


class SourceTensors:
    """The mapping from tensors on the meta device to the source tensors that they represent."""

    def __init__(self) -> None:
        self._by_place: dict[Hashable, torch.Tensor] = {}
        self._by_storage: dict[int, SourceTensor] = {}
        self._made: list[torch.Tensor] = []  # kept alive, because a storage is identified by its address

    def add(self, tensor: SourceTensor, name: str) -> torch.Tensor:
        """Return the tensor on the meta device that represents `tensor`; tied tensors share one.

        Raises CorruptError, naming `name`, for boxes that do not cover the shape.
        """
        _check(tensor, name)
        known = self._by_place.get(tensor.place)
        if known is not None and (known.dtype, tuple(known.shape)) == (tensor.dtype, tensor.shape):
            return known
        made = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        if 0 not in tensor.shape:
            self._by_place[tensor.place] = made
        self._by_storage[_storage(made)] = tensor
        self._made.append(made)
        return made

    def of(self, represented: torch.Tensor) -> SourceTensor:
        """Return the source tensor that `represented` stands for."""
        return self._by_storage[_storage(represented)]


def with_ties(tensors: Mapping[str, SourceTensor]) -> dict[str, SourceTensor]:
    """Return the tensors with one place for those with equal bytes: tied weights stored twice in the source.

    Only weights whose shape few others share are compared, such as an embedding and its tied head. Optimizer slots are
    not compared.
    """
    alike: dict[object, list[str]] = {}
    for name, tensor in tensors.items():
        if len(tensor.shape) > 1 and "state" not in name.split("."):
            alike.setdefault((tensor.dtype, tensor.shape, tensor.boxes), []).append(name)
    found = dict(tensors)
    for names in alike.values():
        if len(names) <= MAX_ALIKE:
            for at, name in enumerate(names):
                first = next((other for other in names[:at] if _hold_equal_bytes(found[other], found[name])), None)
                found[name] = found[name] if first is None else found[first]
    return found


def _hold_equal_bytes(one: SourceTensor, other: SourceTensor) -> bool:
    for box in one.boxes:
        here, there = (tensor.read(box).contiguous() for tensor in (one, other))
        if not torch.equal(here.flatten().view(torch.uint8), there.flatten().view(torch.uint8)):
            return False
    return True


def check_shape(shape: tuple[object, ...], what: str) -> tuple[int, ...]:
    """Return a shape that a tensor can have. Raises CorruptError for any other."""
    sizes = tuple(size for size in shape if type(size) is int and size >= 0)
    if len(sizes) != len(shape) or len(shape) > MAX_DIMENSIONS or math.prod(max(s, 1) for s in sizes) > MAX_ELEMENTS:
        raise CorruptError(f"{what} has the shape {str(list(shape))[:200]}, which no tensor can have")
    return sizes


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001  on the meta device a storage has no address


def _check(tensor: SourceTensor, name: str) -> None:
    shape = check_shape(tensor.shape, name)
    for box in tensor.boxes:
        fits = len(box.offsets) == len(box.sizes) == len(shape) and all(
            start >= 0 and size >= 0 and start + size <= whole
            for start, size, whole in zip(box.offsets, box.sizes, shape, strict=True)
        )
        if not fits:
            raise CorruptError(f"{name}: the source has a box at {box.offsets} of {box.sizes}, outside of {shape}")
    if sum(box.count for box in tensor.boxes) != math.prod(shape):
        raise CorruptError(f"{name}: the source's boxes do not cover its shape {list(shape)} exactly once")
