"""Compares the values of one tensor in two checkpoints within a byte budget: norms, and the size of the change.

If both saved it in the same boxes, the same runs of elements are read. Otherwise the full tensor is read from both.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from raycheck.bucket.format.index import Index, Tensor
from raycheck.bucket.format.manifest import Manifest
from raycheck.bucket.store import Store
from raycheck.errors import ConfigError
from raycheck.views.element_types import decode, item_bytes
from raycheck.views.in_words import short_number, size
from raycheck.views.notebook import table, words
from raycheck.views.tensor_sample import MAX_BYTES, ElementRun, read_runs, runs_of, tensor_named
from raycheck.views.tensors import boxes_of

Documents = tuple[Manifest, Index]


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorChange:
    """The change of one tensor's values, or of a sample of them, between two checkpoints.

    name, dtype, shape: those of the tensor in the second checkpoint. count: its number of elements. sampled: how many
    elements were read. bytes_read: from both. norm_before, norm_after, norm_change: the Euclidean norms of the values
    read, and of their difference. max_change: the largest absolute difference. changed: how many values differ.
    not_finite: how many are not finite in at least one of the two; norms and max_change exclude these.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    count: int
    sampled: int
    bytes_read: int
    norm_before: float
    norm_after: float
    norm_change: float
    max_change: float
    changed: int
    not_finite: int

    def _repr_html_(self) -> str:
        """Return HTML for a notebook: the norms as a table."""
        read = f"{self.sampled} of {self.count} values, {size(self.bytes_read)} read"
        columns = ("norm before", "norm after", "norm of the change", "largest change", "changed", "not finite")
        norms = (self.norm_before, self.norm_after, self.norm_change, self.max_change)
        row = [*map(short_number, norms), self.changed, self.not_finite]
        return words(f"{self.name} {self.dtype} {list(self.shape)}", read) + table(columns, [row])


def compare_tensor(
    store: Store, before: Documents, after: Documents, name: str, *, max_bytes: int = MAX_BYTES
) -> TensorChange:
    """Read the tensor `name` of two checkpoints of one run, at most `max_bytes` bytes in total, and compare the values.

    before, after: the manifest and the index of each. Raises NotFoundError if one of them has no such tensor;
    ConfigError for different shapes, for a type that cannot be compared, and for a tensor that was saved in different
    boxes and exceeds the budget; DamagedError if the checksum of a fully read box differs.
    """
    sides = [(manifest, index, tensor_named(store, manifest, index, name)) for manifest, index in (before, after)]
    first, second = (tensor for _, _, tensor in sides)
    _check(first, second, max_bytes)
    boxes = [boxes_of(index, index.tensors.index(tensor)) for _, index, tensor in sides]
    is_alike = boxes[0].keys() == boxes[1].keys()
    widths = [item_bytes(tensor.dtype) for _, _, tensor in sides]
    count, half = int(np.prod(first.shape, dtype=np.int64)), max(1, max_bytes // 2)
    if not is_alike and count * max(widths) > half:
        raise ConfigError(
            f"{name} was saved in different boxes in the two checkpoints, so it must be read completely: give "
            f"max_bytes={2 * count * max(widths)} or more"
        )
    wider = widths.index(max(widths))
    chosen = runs_of(list(boxes[wider].values()), widths[wider], half)
    values, bytes_read = [], 0
    for (manifest, _, tensor), own, width in zip(sides, boxes, widths, strict=True):
        if is_alike:
            runs = [ElementRun(own[run.chunk.offsets, run.chunk.sizes], run.start, run.stop) for run in chosen]
        else:
            runs = runs_of(list(own.values()), width, half)
        parts = read_runs(store, manifest, tensor, runs)
        bytes_read += sum(map(len, parts))
        found = [decode(part, tensor.dtype) for part in parts]
        values.append(np.concatenate([np.zeros(0), *found]) if is_alike else _whole(tensor, runs, found))
    return _described(second, *values, count=count, bytes_read=bytes_read)


def _check(first: Tensor, second: Tensor, max_bytes: int) -> None:
    if max_bytes < 1:
        raise ConfigError(f"max_bytes={max_bytes}: give at least 1")
    if first.shape != second.shape:
        raise ConfigError(f"{first.name} has the shape {list(first.shape)} before and {list(second.shape)} after")
    if "complex" in first.dtype + second.dtype:
        raise ConfigError(f"{first.name}: complex values cannot be compared; restore the tensor with torch to do so")


def _whole(tensor: Tensor, runs: Iterable[ElementRun], values: Iterable[Any]) -> Any:
    """Return all elements of a tensor in row-major order. runs, values: its boxes, each complete."""
    whole = np.zeros(tensor.shape)
    for run, found in zip(runs, values, strict=True):
        box = tuple(slice(at, at + size) for at, size in zip(run.chunk.offsets, run.chunk.sizes, strict=True))
        whole[box] = found.reshape(run.chunk.sizes)
    return whole.ravel()


def _described(tensor: Tensor, before: Any, after: Any, *, count: int, bytes_read: int) -> TensorChange:
    is_finite = np.isfinite(before) & np.isfinite(after)
    is_equal = (before == after) | (np.isnan(before) & np.isnan(after))
    old, new = before[is_finite], after[is_finite]
    change = new - old
    return TensorChange(
        name=tensor.name,
        dtype=tensor.dtype,
        shape=tensor.shape,
        count=count,
        sampled=int(before.size),
        bytes_read=bytes_read,
        norm_before=float(np.linalg.norm(old)),
        norm_after=float(np.linalg.norm(new)),
        norm_change=float(np.linalg.norm(change)),
        max_change=float(np.abs(change).max(initial=0.0)),
        changed=int((~is_equal).sum()),
        not_finite=int((~is_finite).sum()),
    )
