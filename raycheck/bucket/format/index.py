"""Defines a checkpoint's index: where each tensor's bytes are, with checksums, and all values that are not tensors.

It is kept in columns, since a large run has a million boxes: a `Chunk` is created only for requested ones. The `Plan`,
which stays the same from save to save, is separate from the checksums and values, which change. index_codec.py and
plan_codec.py convert an index to bytes, plan_merge.py merges the plans of all ranks.
"""

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

from raycheck.bucket.format.checksum import SUB_BLOCK

Column = array
"""A column of 64-bit integers; one of checksums has 32 bits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tensor:
    """A tensor as a whole.

    dtype: torch's name without "torch.". shape: the global one, in elements. path: its place in the state.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: tuple[str | int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """A box of a tensor that one rank wrote: its place in the tensor, and the place of its bytes in the object.

    tensor: the tensor's number in the index. offsets, sizes: elements per dimension. record_*: the torch.save record in
    the shard object, in bytes. payload_*: the raw little-endian row-major bytes inside the record, as offset in the
    object and size. crcs: one CRC-32 per 4 MiB of payload.
    """

    tensor: int
    component: str
    rank: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    record_offset: int
    record_size: int
    payload_offset: int
    payload_size: int
    crcs: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Leaf:
    """A non-tensor leaf as stock DCP sees it: a torch.save record that only stock tools read."""

    name: str
    path: tuple[str | int, ...]
    component: str
    rank: int
    record_offset: int
    record_size: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Object:
    """A shard object. num_crcs: the number of its payloads' checksums in the index, one per 4 MiB of each."""

    component: str
    rank: int
    num_crcs: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """The boxes, one row each, in columns.

    A row of a tensor with fewer dimensions than others has offset 0 and size 1 in the rest of them. object: the
    object's number in the plan. head: bytes of the record before its payload. frame: bytes of the record around its
    payload, before and after. crc_at: where the row's checksums begin among those of its object.
    """

    object: "Column[int]"
    offsets: tuple["Column[int]", ...]
    sizes: tuple["Column[int]", ...]
    record_offset: "Column[int]"
    head: "Column[int]"
    frame: "Column[int]"
    payload_size: "Column[int]"
    crc_at: "Column[int]"


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan(Rows):
    """The places of all tensors' bytes, without checksums and values. It changes only when the state changes its form.

    The rows of tensor i are those from `starts[i]` to `starts[i + 1]`. All checksums of an index are in the order of
    `objects`.
    """

    tensors: tuple[Tensor, ...]
    objects: tuple[Object, ...]
    leaves: tuple[Leaf, ...]
    starts: "Column[int]"

    def rows(self) -> Iterator[tuple[int, int]]:
        """Yield the first row of each tensor, and the row after its last one."""
        return pairwise(self.starts)

    def crc_bases(self) -> list[int]:
        """Return where each object's checksums begin among all checksums."""
        return list(accumulate((item.num_crcs for item in self.objects), initial=0))


@dataclass(frozen=True, kw_only=True, slots=True)
class Index:
    """A checkpoint's index.

    crcs: the checksums, of 32 bits. values: the trees (see values.py) that all ranks share, by entry. rank_values: the
    trees of each rank, in rank order.
    """

    plan: Plan
    crcs: "Column[int]"
    values: Mapping[str, Any] = field(default_factory=dict)
    rank_values: tuple[Mapping[str, Any], ...] = ()
    _crc_bases: list[int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_crc_bases", self.plan.crc_bases())

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.plan.tensors

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        return self.plan.leaves

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        """Return all boxes, by tensor and then by rank. A large run has far too many for this: see chunks_of."""
        return tuple(chunk for number in range(len(self.tensors)) for chunk in self.chunks_of(number))

    def chunks_of(self, tensor: int) -> tuple[Chunk, ...]:
        """Return all boxes of the tensor with this number, in rank order."""
        return tuple(self._chunk(tensor, row) for row in self._rows_of(tensor))

    def chunks_in(self, tensor: int, offsets: Sequence[int], sizes: Sequence[int]) -> tuple[Chunk, ...]:
        """Return the boxes of one tensor that contain elements of the given box, in rank order."""
        rows: Iterable[int] = self._rows_of(tensor)
        for start, size, lows, counts in zip(offsets, sizes, self.plan.offsets, self.plan.sizes, strict=False):
            stop = start + size
            rows = [row for row in rows if lows[row] < stop and lows[row] + counts[row] > start]
        return tuple(self._chunk(tensor, row) for row in rows)

    def _rows_of(self, tensor: int) -> range:
        return range(self.plan.starts[tensor], self.plan.starts[tensor + 1])

    def _chunk(self, tensor: int, row: int) -> Chunk:
        plan, dims = self.plan, len(self.plan.tensors[tensor].shape)
        written, place, payload_size = plan.objects[plan.object[row]], plan.record_offset[row], plan.payload_size[row]
        crc_at = self._crc_bases[plan.object[row]] + plan.crc_at[row]
        return Chunk(
            tensor=tensor,
            component=written.component,
            rank=written.rank,
            offsets=tuple(column[row] for column in plan.offsets[:dims]),
            sizes=tuple(column[row] for column in plan.sizes[:dims]),
            record_offset=place,
            record_size=payload_size + plan.frame[row],
            payload_offset=place + plan.head[row],
            payload_size=payload_size,
            crcs=tuple(self.crcs[crc_at : crc_at - -payload_size // SUB_BLOCK]),
        )


def index_of(
    tensors: Sequence[Tensor],
    chunks: Iterable[Chunk],
    *,
    leaves: Sequence[Leaf] = (),
    values: Mapping[str, Any] | None = None,
    rank_values: Sequence[Mapping[str, Any]] = (),
) -> Index:
    """Make the index of these boxes. Boxes at one place share their checksums."""
    ordered = sorted(chunks, key=lambda chunk: chunk.tensor)
    names = sorted({(chunk.component, chunk.rank) for chunk in ordered})
    crcs: dict[tuple[str, int], list[int]] = {name: [] for name in names}
    at: dict[tuple[object, ...], int] = {}
    for chunk in ordered:
        own = crcs[chunk.component, chunk.rank]
        if at.setdefault(_place(chunk), len(own)) == len(own):
            own += chunk.crcs
    numbers = {name: number for number, name in enumerate(names)}
    counts = Counter(chunk.tensor for chunk in ordered)
    dims = range(max((len(tensor.shape) for tensor in tensors), default=0))
    plan = Plan(
        tensors=tuple(tensors),
        objects=tuple(Object(component=name, rank=rank, num_crcs=len(crcs[name, rank])) for name, rank in names),
        leaves=tuple(leaves),
        starts=array("q", accumulate((counts[number] for number in range(len(tensors))), initial=0)),
        object=array("q", (numbers[chunk.component, chunk.rank] for chunk in ordered)),
        offsets=tuple(array("q", (c.offsets[dim] if dim < len(c.offsets) else 0 for c in ordered)) for dim in dims),
        sizes=tuple(array("q", (c.sizes[dim] if dim < len(c.sizes) else 1 for c in ordered)) for dim in dims),
        record_offset=array("q", (chunk.record_offset for chunk in ordered)),
        head=array("q", (chunk.payload_offset - chunk.record_offset for chunk in ordered)),
        frame=array("q", (chunk.record_size - chunk.payload_size for chunk in ordered)),
        payload_size=array("q", (chunk.payload_size for chunk in ordered)),
        crc_at=array("q", (at[_place(chunk)] for chunk in ordered)),
    )
    return Index(
        plan=plan,
        crcs=array("I", (crc for own in crcs.values() for crc in own)),
        values=values or {},
        rank_values=tuple(rank_values),
    )


def _place(chunk: Chunk) -> tuple[object, ...]:
    return chunk.component, chunk.rank, chunk.payload_offset, chunk.crcs


def places(index: Index) -> dict[str, tuple[str, int, int]]:
    """Return where each tensor's first bytes are, as (component, rank, offset), by name.

    Names that share their bytes (tied weights) have equal places. Tensors without elements are omitted.
    """
    plan = index.plan
    found: dict[str, tuple[str, int, int]] = {}
    for tensor, (first, end) in zip(plan.tensors, plan.rows(), strict=True):
        row = next((row for row in range(first, end) if plan.payload_size[row]), None)
        if row is not None:
            written = plan.objects[plan.object[row]]
            found[tensor.name] = (written.component, written.rank, plan.record_offset[row])
    return found
