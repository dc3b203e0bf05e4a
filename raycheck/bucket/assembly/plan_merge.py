"""Merges the plans of all ranks into one, and proves that every tensor is covered exactly once.

It works on whole columns, with numpy: it finds once where each tensor's rows are among those of all ranks, then picks
the rows of every column in this order. It looks at single boxes only for tensors of which several ranks wrote equal
boxes, or whose boxes are not the cells of a grid.
"""

import math
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from typing import TYPE_CHECKING

from raycheck.bucket.assembly.numbers import FEW_BOXES, column_of, numbers_of
from raycheck.bucket.format.checksum import SUB_BLOCK
from raycheck.bucket.format.index import Column, Leaf, Object, Plan, Rows, Tensor
from raycheck.errors import ConfigError

if TYPE_CHECKING:
    from raycheck.bucket.assembly.numbers import Numbers

Box = tuple[tuple[int, int], ...]
"""A box of a tensor: offset and size in each dimension, in elements."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Copy:
    """A box of a tensor that two ranks wrote. ranks: the one whose bytes are kept, and the other. crcs: where the box's
    checksums are among each rank's checksums."""

    tensor: str
    ranks: tuple[int, int]
    crcs: tuple[slice, slice]


@dataclass(frozen=True, kw_only=True, slots=True)
class MergedPlan:
    """The plan of a whole checkpoint.

    num_crcs: the number of each rank's checksums. cuts: the slices of each rank's checksums that the index keeps.
    copies: what several ranks wrote.
    """

    plan: Plan
    num_crcs: tuple[int, ...]
    cuts: tuple[tuple[slice, ...], ...]
    copies: tuple[Copy, ...]

    @property
    def has_copies(self) -> bool:
        """Return whether several ranks wrote one box."""
        return bool(self.copies)


def merge_plans(plans: Sequence[Plan]) -> MergedPlan:
    """Merge the ranks' plans, in order of rank. Of a box that several ranks wrote, it keeps the lowest rank's.

    Raises ConfigError, which names a tensor that two ranks describe differently.
    """
    import numpy as np

    tensors, numbers = _numbered(plans)
    objects = [item for plan in plans for item in plan.objects]
    dims = max((len(tensor.shape) for tensor in tensors), default=0)
    rows = _with_columns(_concatenated(plans, dims), _taken(np.argsort(numbers, kind="stable")))
    starts = list(accumulate(np.bincount(numbers, minlength=len(tensors)).tolist(), initial=0))
    originals = _copies(rows, starts)
    copies = list(originals)
    described = _described(rows, originals, tensors, starts, plans)
    num_crcs = tuple(sum(item.num_crcs for item in plan.objects) for plan in plans)
    cuts = [[slice(0, count)] for count in num_crcs]
    if copies:
        rows = _with_columns(rows, _taken(np.delete(np.arange(starts[-1]), copies)))
        starts = [start - bisect_left(copies, start) for start in starts]
        rows, objects, cuts = _without_crcs_of_copies(rows, objects, [len(plan.objects) for plan in plans])
    leaves: dict[str, Leaf] = {}
    for plan in plans:
        for leaf in plan.leaves:
            leaves.setdefault(leaf.name, leaf)
    whole = Plan(
        tensors=tuple(tensors),
        objects=tuple(objects),
        leaves=tuple(leaves.values()),
        starts=array("q", starts),
        **{item.name: getattr(rows, item.name) for item in fields(rows)},
    )
    return MergedPlan(plan=whole, num_crcs=num_crcs, cuts=tuple(map(tuple, cuts)), copies=described)


def _with_columns(rows: Rows, change: Callable[["Column[int]"], "Column[int]"]) -> Rows:
    """Return the rows with every column changed."""
    return Rows(
        object=change(rows.object),
        offsets=tuple(map(change, rows.offsets)),
        sizes=tuple(map(change, rows.sizes)),
        record_offset=change(rows.record_offset),
        head=change(rows.head),
        frame=change(rows.frame),
        payload_size=change(rows.payload_size),
        crc_at=change(rows.crc_at),
    )


def _numbered(plans: Sequence[Plan]) -> tuple[list[Tensor], "Numbers"]:
    """Return all tensors in order of their first appearance, and the tensor number of each row of all ranks."""
    import numpy as np

    tensors: dict[str, Tensor] = {}
    numbers: dict[str, int] = {}
    known: dict[tuple[int, int], Numbers] = {}  # by the ids of tensors and starts, which plans mostly share
    found: list[Numbers] = [np.empty(0, np.int64)]
    for plan in plans:
        at = id(plan.tensors), id(plan.starts)
        if at not in known:
            for tensor in plan.tensors:
                first = tensors.setdefault(tensor.name, tensor)
                if (first.dtype, first.shape) != (tensor.dtype, tensor.shape):
                    raise ConfigError(
                        f"ranks disagree on {tensor.name}: {first.dtype}{list(first.shape)} and "
                        f"{tensor.dtype}{list(tensor.shape)}"
                    )
            local = [numbers.setdefault(tensor.name, len(numbers)) for tensor in plan.tensors]
            known[at] = np.repeat(np.array(local, np.int64), np.diff(numbers_of(plan.starts)))
        found.append(known[at])
    return list(tensors.values()), np.concatenate(found)


def _taken(order: "Numbers") -> Callable[["Column[int]"], "Column[int]"]:
    """Return a function that picks these rows from a column."""
    import numpy as np

    def picked(column: "Column[int]") -> "Column[int]":
        rows = array("q", (0,)) * len(order)
        np.take(numbers_of(column), order, out=numbers_of(rows), mode="clip")  # "raise" would buffer the result
        return rows

    return picked


def _joined(parts: Iterable["Column[int]"]) -> "Column[int]":
    whole = array("q")
    whole.frombytes(b"".join(parts))
    return whole


def _concatenated(plans: Sequence[Plan], dims: int) -> Rows:
    """Concatenate the columns of all ranks. Objects are numbered through all ranks."""
    import numpy as np

    counts = [len(plan.object) for plan in plans]
    first_objects = list(accumulate((len(plan.objects) for plan in plans), initial=0))[:-1]

    def dimension(name: str, dim: int, fill: int) -> "Column[int]":
        found = zip((getattr(plan, name) for plan in plans), counts, strict=True)
        return _joined(own[dim] if dim < len(own) else array("q", (fill,)) * count for own, count in found)

    return Rows(
        object=column_of(numbers_of(_joined(plan.object for plan in plans)) + np.repeat(first_objects, counts)),
        offsets=tuple(dimension("offsets", dim, 0) for dim in range(dims)),
        sizes=tuple(dimension("sizes", dim, 1) for dim in range(dims)),
        record_offset=_joined(plan.record_offset for plan in plans),
        head=_joined(plan.head for plan in plans),
        frame=_joined(plan.frame for plan in plans),
        payload_size=_joined(plan.payload_size for plan in plans),
        crc_at=_joined(plan.crc_at for plan in plans),
    )


def _copies(rows: Rows, starts: Sequence[int]) -> dict[int, int]:
    """Return the rows whose box an earlier row of that tensor has, in order, each with that row."""
    copies: dict[int, int] = {}
    for first, end in _with_equal_hashes(rows, starts):
        seen: dict[tuple[int, ...], int] = {}
        for row in range(first, end):
            box = tuple(column[row] for column in (*rows.offsets, *rows.sizes))
            if seen.setdefault(box, row) != row:
                copies[row] = seen[box]
    return copies


def _with_equal_hashes(rows: Rows, starts: Sequence[int]) -> list[tuple[int, int]]:
    """Return the first row, and the row after the last one, of each tensor of which boxes may be equal.

    Equal boxes have equal hashes. So only these tensors are looked at box by box.
    """
    import numpy as np

    counts = np.diff(starts)
    hashes = np.repeat(np.arange(len(counts), dtype=np.uint64), counts)
    for column in (*rows.offsets, *rows.sizes):
        hashes = (hashes ^ (hashes >> np.uint64(29))) * np.uint64(0x9E3779B97F4A7C15) + numbers_of(column).view(
            np.uint64
        )
    ordered = np.sort(hashes)
    twice = np.flatnonzero(np.isin(hashes, ordered[1:][ordered[1:] == ordered[:-1]]))
    tensors = np.unique(np.searchsorted(starts, twice, side="right") - 1).tolist()
    return [(starts[tensor], starts[tensor + 1]) for tensor in tensors]


def _described(
    rows: Rows, copies: Mapping[int, int], tensors: Sequence[Tensor], starts: Sequence[int], plans: Sequence[Plan]
) -> tuple[Copy, ...]:
    """Describe the copies that have bytes. copies: as found among the rows of all ranks."""
    places = [
        (rank, base)
        for rank, plan in enumerate(plans if copies else ())
        for base in accumulate((item.num_crcs for item in plan.objects[:-1]), initial=0)
        if plan.objects
    ]

    def crcs(row: int) -> tuple[int, slice]:
        rank, base = places[rows.object[row]]
        first = base + rows.crc_at[row]
        return rank, slice(first, first - -rows.payload_size[row] // SUB_BLOCK)

    found = []
    for row, original in copies.items():
        if rows.payload_size[row]:
            (kept_by, kept), (other, own) = crcs(original), crcs(row)
            name = tensors[bisect_right(starts, row) - 1].name
            found.append(Copy(tensor=name, ranks=(kept_by, other), crcs=(kept, own)))
    return tuple(found)


def _without_crcs_of_copies(
    rows: Rows, objects: Sequence[Object], num_objects: Sequence[int]
) -> tuple[Rows, list[Object], list[list[slice]]]:
    """Leave out the checksums of copied boxes.

    num_objects: the number of each rank's objects. Returns rows and objects that count only the kept checksums, and
    the kept slices of each rank's checksums.
    """
    rank_of = [rank for rank, count in enumerate(num_objects) for _ in range(count)]
    base_of = [0] * len(objects)
    for item in range(1, len(objects)):
        if rank_of[item] == rank_of[item - 1]:
            base_of[item] = base_of[item - 1] + objects[item - 1].num_crcs
    kept, until = [0] * len(objects), [0] * len(objects)
    cuts: list[list[slice]] = [[] for _ in num_objects]
    moved: dict[tuple[int, int], int] = {}
    for item, start, size in sorted(set(zip(rows.object, rows.crc_at, rows.payload_size, strict=True))):
        stop = start - -size // SUB_BLOCK
        begin = max(start, until[item])
        moved.setdefault((item, start), kept[item] - (begin - start))
        if stop > begin:
            cuts[rank_of[item]].append(slice(begin + base_of[item], stop + base_of[item]))
            kept[item] += stop - begin
            until[item] = stop
    crc_at = array("q", (moved[row] for row in zip(rows.object, rows.crc_at, strict=True)))
    objects = [replace(item, num_crcs=count) for item, count in zip(objects, kept, strict=True)]
    return replace(rows, crc_at=crc_at), objects, cuts


def uncovered(plan: Plan) -> list[str]:
    """Return the names of tensors whose chunks do not cover them exactly once.

    So no save with a hole is ever committed.
    """
    return [
        tensor.name
        for tensor, (first, end) in zip(plan.tensors, plan.rows(), strict=True)
        if not _covers(plan, tensor.shape, first, end)
    ]


def _covers(plan: Plan, shape: tuple[int, ...], first: int, end: int) -> bool:
    if 0 in shape or not shape:
        return end > first if shape else end == first + 1
    lows = [column[first:end] for column in plan.offsets[: len(shape)]]
    counts = [column[first:end] for column in plan.sizes[: len(shape)]]
    if end - first > FEW_BOXES and _is_grid(lows, counts, shape):
        return True
    is_cut = [min(column, default=0) != whole for column, whole in zip(counts, shape, strict=True)]
    if not any(is_cut):
        return end == first + 1
    if sum(is_cut) == 1:
        dim = is_cut.index(True)
        return _is_chain(zip(lows[dim], counts[dim], strict=True), shape[dim])
    boxes = zip(*(zip(low, count, strict=True) for low, count in zip(lows, counts, strict=True)), strict=True)
    whole = [box for box in boxes if all(size for _, size in box)]
    return sum(math.prod(size for _, size in box) for box in whole) == math.prod(shape) and _tiles(whole, shape)


def _is_grid(lows: Sequence["Column[int]"], counts: Sequence["Column[int]"], shape: tuple[int, ...]) -> bool:
    """Return whether the boxes are all cells of a grid that covers `shape`, each of them once.

    The grid has the boxes' own spans in each dimension. The boxes are all of its cells when these spans follow each
    other without gaps, and no two boxes are the same cell, and there are as many boxes as cells.
    """
    import numpy as np

    cells, num_cells = np.zeros(len(lows[0]), np.int64), 1
    for low, count, whole in zip(map(numbers_of, lows), map(numbers_of, counts), shape, strict=True):
        if not low.any() and (count == whole).all():
            continue  # the dimension is not cut
        if (low[:-1] < low[1:]).all():  # as unique would find, which sorts
            offsets, first = low, np.arange(len(low))
            place = first
        else:
            offsets, first, place = np.unique(low, return_index=True, return_inverse=True)
        sizes = count[first]
        ends = offsets + sizes
        is_chain = offsets[0] == 0 and ends[-1] == whole and (sizes > 0).all() and (ends[:-1] == offsets[1:]).all()
        num_cells *= len(offsets)
        if not is_chain or num_cells > len(cells) or (count != sizes[place]).any():
            return False
        cells = cells * len(offsets) + place
    return num_cells == len(cells) and bool((np.bincount(cells) == 1).all())


def _is_chain(spans: Iterable[tuple[int, int]], whole: int) -> bool:
    """Return whether spans of (start, size) cover 0 to `whole`, each number once."""
    at = 0
    for start, size in sorted(spans):
        if size and start != at:
            return False
        at += size
    return at == whole


def _tiles(boxes: Sequence[Box], shape: tuple[int, ...]) -> bool:
    """Return whether boxes, which together are as large as `shape`, cover it.

    If they cut a dimension into slices, each slice is checked separately. If there is no such dimension, they cover
    `shape` when no two of them overlap.
    """
    if not shape:
        return len(boxes) == 1
    for dim, whole in enumerate(shape):
        slices: dict[tuple[int, int], list[Box]] = {}
        for box in boxes:
            slices.setdefault(box[dim], []).append((*box[:dim], *box[dim + 1 :]))
        if _is_chain(slices, whole):
            rest = (*shape[:dim], *shape[dim + 1 :])
            return all(_tiles(group, rest) for group in slices.values())
    return not _overlaps(sorted(boxes))


def _overlaps(ordered: Sequence[Box]) -> bool:
    """Return whether any two boxes overlap. Sorted by the first dimension, only near neighbours can."""
    for i, one in enumerate(ordered):
        for other in ordered[i + 1 :]:
            if other[0][0] >= sum(one[0]):
                break
            if all(a < b + n and b < a + m for (a, m), (b, n) in zip(one, other, strict=True)):
                return True
    return False
