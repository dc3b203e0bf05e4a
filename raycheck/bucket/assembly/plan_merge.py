"""Merges the plans of all ranks into one, and proves that every tensor is covered exactly once.

It works on whole columns: it finds once where each tensor's rows are among those of all ranks, then puts every column
together from runs of rows. It looks at single boxes only for tensors of which several ranks wrote equal boxes, or that
were cut along several dimensions.
"""

import math
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate, chain, pairwise, repeat

from raycheck.bucket.format.checksum import SUB_BLOCK
from raycheck.bucket.format.column_codec import spread
from raycheck.bucket.format.index import Column, Leaf, Object, Plan, Rows, Tensor
from raycheck.errors import ConfigError

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
    tensors, numbers = _numbered(plans)
    objects = [item for plan in plans for item in plan.objects]
    runs = _runs(numbers, len(tensors))
    dims = max((len(tensor.shape) for tensor in tensors), default=0)
    rows = _with_columns(_concatenated(plans, dims), _taken(runs))
    starts = list(accumulate((sum(map(len, own)) for own in runs), initial=0))
    originals = _copies(rows, starts)
    copies = list(originals)
    described = _described(rows, originals, tensors, starts, plans)
    num_crcs = tuple(sum(item.num_crcs for item in plan.objects) for plan in plans)
    cuts = [[slice(0, count)] for count in num_crcs]
    if copies:
        ends = [-1, *copies, starts[-1]]
        rows = _with_columns(rows, _taken([[range(before + 1, end) for before, end in pairwise(ends)]]))
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


def _numbered(plans: Sequence[Plan]) -> tuple[list[Tensor], list[list[int]]]:
    """Return all tensors in order of their first appearance, and for each rank the tensor number of each row."""
    tensors: dict[str, Tensor] = {}
    numbers: dict[str, int] = {}
    found: list[list[int]] = []
    before: Plan | None = None
    for plan in plans:
        if before is None or (plan.tensors, plan.starts) != (before.tensors, before.starts):
            for tensor in plan.tensors:
                known = tensors.setdefault(tensor.name, tensor)
                if (known.dtype, known.shape) != (tensor.dtype, tensor.shape):
                    raise ConfigError(
                        f"ranks disagree on {tensor.name}: {known.dtype}{list(known.shape)} and "
                        f"{tensor.dtype}{list(tensor.shape)}"
                    )
            local = [numbers.setdefault(tensor.name, len(numbers)) for tensor in plan.tensors]
            found.append(list(spread(local, (end - first for first, end in plan.rows()))))
            before = plan
        else:
            found.append(found[-1])
    return list(tensors.values()), found


def _runs(numbers: Sequence[list[int]], num_tensors: int) -> list[list[range]]:
    """Return for each tensor where its rows are once all ranks' rows are concatenated, in order of rank.

    Neighbouring ranks that hold the same tensors give one run for all of them.
    """
    runs: list[list[range]] = [[] for _ in range(num_tensors)]
    at = 0
    rank = 0
    while rank < len(numbers):
        own, end = numbers[rank], rank + 1
        while end < len(numbers) and numbers[end] is own and len(set(own)) == len(own):
            end += 1
        stop = at + len(own) * (end - rank)
        for row, number in enumerate(own):
            runs[number].append(range(at + row, stop, len(own)))
        at, rank = stop, end
    return runs


def _taken(runs: Sequence[Sequence[range]]) -> Callable[["Column[int]"], "Column[int]"]:
    """Return a function that picks these rows from a column, as slices when runs are long, else one by one."""
    whole = [run for own in runs for run in own]
    if sum(map(len, whole)) > 4 * len(whole):
        return lambda column: _joined(column[run.start : run.stop : run.step] for run in whole)
    rows = list(chain.from_iterable(whole))
    return lambda column: array("q", map(column.tolist().__getitem__, rows))


def _joined(parts: Iterable[Iterable[int]]) -> "Column[int]":
    whole = array("q")
    for part in parts:
        whole.extend(part)
    return whole


def _concatenated(plans: Sequence[Plan], dims: int) -> Rows:
    """Concatenate the columns of all ranks. Objects are numbered through all ranks."""
    first_objects = accumulate((len(plan.objects) for plan in plans), initial=0)

    def dimension(name: str, dim: int, fill: int) -> "Column[int]":
        found = ((getattr(plan, name), len(plan.object)) for plan in plans)
        return _joined(own[dim] if dim < len(own) else repeat(fill, count) for own, count in found)

    return Rows(
        object=_joined(map(first.__add__, plan.object) for plan, first in zip(plans, first_objects, strict=False)),
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
    for first, end in pairwise(starts):
        if end - first < 2 or any(len(set(column[first:end])) == end - first for column in rows.offsets):
            continue
        seen: dict[tuple[int, ...], int] = {}
        for row in range(first, end):
            box = tuple(column[row] for column in (*rows.offsets, *rows.sizes))
            if seen.setdefault(box, row) != row:
                copies[row] = seen[box]
    return copies


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
    is_cut = [min(column, default=0) != whole for column, whole in zip(counts, shape, strict=True)]
    if not any(is_cut):
        return end == first + 1
    if sum(is_cut) == 1:
        dim = is_cut.index(True)
        return _is_chain(zip(lows[dim], counts[dim], strict=True), shape[dim])
    boxes = zip(*(zip(low, count, strict=True) for low, count in zip(lows, counts, strict=True)), strict=True)
    whole = [box for box in boxes if all(size for _, size in box)]
    return sum(math.prod(size for _, size in box) for box in whole) == math.prod(shape) and _tiles(whole, shape)


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
