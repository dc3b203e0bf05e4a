"""Compares two checkpoints tensor by tensor from the checksums in their indexes: no byte of a tensor is read.

Each box of a tensor has a CRC-32 for every 4 MiB. Equal boxes are compared block by block, so the result also says how
much of a tensor may have changed. If the boxes differ because the world size changed, the checksum of the whole tensor
is computed from those of its blocks; this requires boxes of whole rows. Two blocks that differ have equal checksums by
chance with a probability of 1 in 4 billion; a change within 32 consecutive bits is always detected.
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from raycheck.bucket.format.checksum import SUB_BLOCK, combined, sub_block_lengths
from raycheck.bucket.format.index import Chunk, Index, Tensor
from raycheck.views.in_words import size
from raycheck.views.notebook import table, words
from raycheck.views.tensors import Box, boxes_of

Change = Literal["equal", "changed", "added", "removed", "reformed", "unknown"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorDifference:
    """The difference of one tensor between two checkpoints.

    change: "equal" or "changed", according to the checksums; "added" or "removed": only the second or only the first
    checkpoint has it; "reformed": its shape or dtype differs; "unknown": the two checkpoints split it across columns
    differently, so its checksums cannot be compared. size_bytes: the size of its values in the second checkpoint, or in
    the only one that has it. changed_bytes: how many of these are in blocks that differ; None if unknown. before,
    after: dtype and shape as text, None where the tensor does not exist.
    """

    name: str
    change: Change
    size_bytes: int
    changed_bytes: int | None
    before: str | None
    after: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointDifference:
    """The differences of a second checkpoint from a first one.

    before, after: their names. tensors: every tensor of either, those of the first checkpoint first. values_changed,
    values_added, values_removed: the entries whose non-tensor values differ, or that only one checkpoint has.
    """

    before: str
    after: str
    tensors: tuple[TensorDifference, ...]
    values_changed: tuple[str, ...]
    values_added: tuple[str, ...]
    values_removed: tuple[str, ...]

    @property
    def counts(self) -> Mapping[Change, int]:
        """Return the number of tensors per kind of change, without kinds that have none."""
        return Counter(item.change for item in self.tensors)

    def _repr_html_(self) -> str:
        """Return HTML for a notebook: the tensors and values that differ."""
        counts = ", ".join(f"{count} {change}" for change, count in sorted(self.counts.items())) or "no tensors"
        values = (("changed", self.values_changed), ("added", self.values_added), ("removed", self.values_removed))
        told = [f"values {what}: {', '.join(names)}" for what, names in values if names]
        rows = [
            (item.name, item.change, item.after or item.before, size(item.size_bytes),
             None if item.changed_bytes is None else size(item.changed_bytes))
            for item in self.tensors
            if item.change != "equal"
        ]  # fmt: skip
        columns = ("tensor", "change", "form", "size", "in blocks that changed")
        return words(f"from {self.before} to {self.after}", counts, *told) + (table(columns, rows) if rows else "")


def compare_indexes(before: Index, after: Index, *, names: tuple[str, str]) -> CheckpointDifference:
    """Compare two indexes. names: the names of their checkpoints, first and second."""
    numbers = {tensor.name: number for number, tensor in enumerate(after.tensors)}
    found = []
    for number, tensor in enumerate(before.tensors):
        other = numbers.pop(tensor.name, None)
        found.append(_only(before, number, "removed") if other is None else _compare(before, number, after, other))
    found += [_only(after, number, "added") for number in numbers.values()]
    ours, theirs = _values(before), _values(after)
    return CheckpointDifference(
        before=names[0],
        after=names[1],
        tensors=tuple(found),
        values_changed=tuple(sorted(name for name in ours.keys() & theirs.keys() if ours[name] != theirs[name])),
        values_added=tuple(sorted(theirs.keys() - ours.keys())),
        values_removed=tuple(sorted(ours.keys() - theirs.keys())),
    )


def _values(index: Index) -> dict[str, object]:
    """Return the trees of values by entry, followed by those of single ranks."""
    names = {*index.values, *(name for values in index.rank_values for name in values)}
    return {name: [index.values.get(name), *(values.get(name) for values in index.rank_values)] for name in names}


def _only(index: Index, number: int, change: Literal["added", "removed"]) -> TensorDifference:
    tensor, size = index.tensors[number], sum(chunk.payload_size for chunk in boxes_of(index, number).values())
    form = form_of(tensor)
    return TensorDifference(
        name=tensor.name,
        change=change,
        size_bytes=size,
        changed_bytes=size,
        before=form if change == "removed" else None,
        after=form if change == "added" else None,
    )


def _compare(before: Index, ours: int, after: Index, theirs: int) -> TensorDifference:
    old, new = before.tensors[ours], after.tensors[theirs]
    old_boxes, new_boxes = boxes_of(before, ours), boxes_of(after, theirs)
    size = sum(chunk.payload_size for chunk in new_boxes.values())
    change: Change
    changed: int | None
    if (old.dtype, old.shape) != (new.dtype, new.shape):
        change, changed = "reformed", None
    elif old_boxes.keys() == new_boxes.keys():
        changed = sum(_changed_bytes(old_boxes[box], new_boxes[box]) for box in new_boxes)
        change = "changed" if changed else "equal"
    else:
        sums = _whole_crc(old, old_boxes), _whole_crc(new, new_boxes)
        if None in sums:
            change, changed = "unknown", None
        else:
            change, changed = ("equal", 0) if sums[0] == sums[1] else ("changed", None)
    return TensorDifference(
        name=new.name,
        change=change,
        size_bytes=size,
        changed_bytes=changed,
        before=form_of(old),
        after=form_of(new),
    )


def form_of(tensor: Tensor) -> str:
    """Return dtype and shape as text, such as "float32 [4096, 128]"."""
    return f"{tensor.dtype} {list(tensor.shape)}"


def _changed_bytes(old: Chunk, new: Chunk) -> int:
    if old.payload_size != new.payload_size or len(old.crcs) != len(new.crcs):
        return new.payload_size
    lengths = sub_block_lengths(new.payload_size)
    return sum(size for size, a, b in zip(lengths, old.crcs, new.crcs, strict=True) if a != b)


def _whole_crc(tensor: Tensor, boxes: Mapping[Box, Chunk]) -> int | None:
    """Return the CRC-32 of the tensor's bytes in row-major order, or None if its boxes are not consecutive rows."""
    at, parts = 0, []
    for (offsets, sizes), chunk in sorted(boxes.items()):
        if 0 in sizes:
            continue
        is_rows = bool(sizes) and (offsets[0], sizes[1:]) == (at, tensor.shape[1:])
        if not is_rows or len(chunk.crcs) != math.ceil(chunk.payload_size / SUB_BLOCK):
            return None
        at += sizes[0]
        parts += list(zip(chunk.crcs, sub_block_lengths(chunk.payload_size), strict=True))
    return combined(parts) if tensor.shape and at == tensor.shape[0] else None
