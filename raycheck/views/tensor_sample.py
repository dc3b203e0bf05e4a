"""Reads some of a tensor's values by ranges within a byte budget, and computes statistics, a histogram, and a heat map.

A tensor within the budget is read completely, and its checksums are compared. Of a larger one, runs of equal length are
read, spread evenly over its bytes. A run is shorter than the 4 MiB that a checksum covers, so no checksum is compared.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from raycheck.bucket.format.checksum import sub_block_crcs
from raycheck.bucket.format.index import Chunk, Index, Tensor
from raycheck.bucket.format.manifest import Manifest
from raycheck.bucket.format.object_keys import shard_key
from raycheck.bucket.store import Store
from raycheck.errors import ConfigError, DamagedError, NotFoundError
from raycheck.views.context_pool import ContextPool
from raycheck.views.drawing import heat_svg, histogram_svg
from raycheck.views.element_types import decode, item_bytes
from raycheck.views.in_words import short_number, size
from raycheck.views.notebook import table, words
from raycheck.views.tensors import boxes_of

MAX_BYTES = 4 * 1024 * 1024
RUN_BYTES = 64 * 1024
AT_ONCE = 16
BINS = 40
MAP_ROWS, MAP_COLUMNS = 24, 48


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSample:
    """The values of one tensor, or a sample of them, summarized.

    name, dtype, shape: those of the whole tensor. count: its number of elements. sampled: how many elements were read.
    bytes_read: bytes read from the bucket. is_verified: whether the whole tensor was read and its checksums match.
    minimum, maximum, mean, std: statistics of the finite values read, None if there are none; std is the population's.
    zeros, nans, infinities: how many such values were read. edges, counts: a histogram of the finite values, with one
    more edge than counts; empty without finite values. heat: mean absolute values over a grid of the tensor's first
    dimension (rows) and all others together (columns), None for a cell of which nothing was read.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    count: int
    sampled: int
    bytes_read: int
    is_verified: bool
    minimum: float | None
    maximum: float | None
    mean: float | None
    std: float | None
    zeros: int
    nans: int
    infinities: int
    edges: tuple[float, ...]
    counts: tuple[int, ...]
    heat: tuple[tuple[float | None, ...], ...]

    def _repr_html_(self) -> str:
        """Return HTML for a notebook: statistics, a histogram, and a heat map of magnitudes."""
        proof = "checksums compared" if self.is_verified else "checksums not compared"
        facts = (
            f"{self.name} {self.dtype} {list(self.shape)}",
            f"{self.sampled} of {self.count} values",
            f"{size(self.bytes_read)} read, {proof}",
        )
        numbers = (self.minimum, self.maximum, self.mean, self.std)
        told = [*("-" if value is None else short_number(value) for value in numbers)]
        columns = ("minimum", "maximum", "mean", "std", "zeros", "NaN", "infinite")
        pictures = histogram_svg(self.name, self.edges, self.counts) if self.counts else ""
        pictures += heat_svg(self.name, self.heat) if self.heat else ""
        return words(*facts) + table(columns, [[*told, self.zeros, self.nans, self.infinities]]) + pictures


@dataclass(frozen=True, slots=True)
class ElementRun:
    """A run of elements to read from a chunk: from `start` to `stop`, in row-major order."""

    chunk: Chunk
    start: int
    stop: int


def sample_tensor(
    store: Store, manifest: Manifest, index: Index, name: str, *, max_bytes: int = MAX_BYTES
) -> TensorSample:
    """Read values of the tensor `name`, at most `max_bytes` bytes.

    Raises NotFoundError if there is no such tensor or its object is gone; ConfigError for a type that cannot be shown;
    DamagedError if the whole tensor was read and a checksum differs.
    """
    if max_bytes < 1:
        raise ConfigError(f"max_bytes={max_bytes}: give at least 1")
    tensor = tensor_named(store, manifest, index, name)
    width = item_bytes(tensor.dtype)
    chunks = list(boxes_of(index, index.tensors.index(tensor)).values())
    total = sum(chunk.payload_size for chunk in chunks)
    is_whole = total <= max_bytes
    runs = runs_of(chunks, width, max_bytes)
    parts = read_runs(store, manifest, tensor, runs)
    values = [decode(part, tensor.dtype) for part in parts]
    flat = np.concatenate(values) if values else np.zeros(0)
    finite = flat[np.isfinite(flat)]
    counts, edges = np.histogram(finite, bins=BINS) if finite.size else (np.zeros(0, int), np.zeros(0))
    return TensorSample(
        name=name,
        dtype=tensor.dtype,
        shape=tensor.shape,
        count=total // width,
        sampled=int(flat.size),
        bytes_read=sum(map(len, parts)),
        is_verified=is_whole,
        minimum=float(finite.min()) if finite.size else None,
        maximum=float(finite.max()) if finite.size else None,
        mean=float(finite.mean()) if finite.size else None,
        std=float(finite.std()) if finite.size else None,
        zeros=int((flat == 0).sum()),
        nans=int(np.isnan(flat).sum()),
        infinities=int(np.isinf(flat).sum()),
        edges=tuple(map(float, edges)),
        counts=tuple(map(int, counts)),
        heat=_heat(tensor.shape, runs, values),
    )


def tensor_named(store: Store, manifest: Manifest, index: Index, name: str) -> Tensor:
    """Return the tensor of this name. Raises NotFoundError."""
    for tensor in index.tensors:
        if tensor.name == name:
            return tensor
    raise NotFoundError(f"{store}: {manifest.key} has no tensor {name!r}; see raycheck tensors '{store}'")


def runs_of(chunks: Sequence[Chunk], width: int, max_bytes: int) -> list[ElementRun]:
    """Return the runs to read of a tensor: all of these chunks, or runs spread over them. width: element bytes."""
    total = sum(chunk.payload_size for chunk in chunks)
    if total > max_bytes:
        return list(_spread(chunks, width, total, max_bytes))
    return [ElementRun(chunk, 0, chunk.payload_size // width) for chunk in chunks if chunk.payload_size]


def read_runs(store: Store, manifest: Manifest, tensor: Tensor, runs: Sequence[ElementRun]) -> list[bytes]:
    """Return the bytes of these runs of a tensor. Compares the checksum of each run that is a complete chunk.

    Raises NotFoundError if an object is gone, and DamagedError if a checksum differs.
    """
    width = item_bytes(tensor.dtype)
    directory = {part.name: part.checkpoint for part in manifest.components}

    def read(run: ElementRun) -> bytes:
        key = shard_key(directory[run.chunk.component], run.chunk.component, run.chunk.rank)
        at = run.chunk.payload_offset
        data = bytes(store.get_range(key, at + run.start * width, at + run.stop * width))
        is_whole = len(data) == run.chunk.payload_size
        if is_whole and tuple(sub_block_crcs(memoryview(data))) != run.chunk.crcs:
            raise DamagedError(f"{store}: {tensor.name} in {key} has another checksum than the index says")
        return data

    with ContextPool(AT_ONCE, thread_name_prefix="raycheck-sample") as pool:
        return list(pool.map(read, runs))


def _spread(chunks: Sequence[Chunk], width: int, total: int, max_bytes: int) -> Iterator[ElementRun]:
    """Yield runs of equal length, each inside one chunk, with starts evenly spaced over the tensor's bytes."""
    length = max(1, min(RUN_BYTES, max_bytes) // width)
    num_runs = max(1, max_bytes // (length * width))
    ends = np.cumsum([chunk.payload_size // width for chunk in chunks])
    for place in range(num_runs):
        at = place * (total // width) // num_runs
        which = int(np.searchsorted(ends, at, side="right"))
        count = chunks[which].payload_size // width
        start = at - (int(ends[which]) - count)
        yield ElementRun(chunks[which], start, min(start + length, count))


def _heat(
    shape: tuple[int, ...], runs: Sequence[ElementRun], values: Sequence[Any]
) -> tuple[tuple[float | None, ...], ...]:
    """Return the mean absolute value of each cell of a grid over the tensor."""
    rows = shape[0] if shape else 1
    columns = int(np.prod(shape[1:], dtype=np.int64)) if len(shape) > 1 else 1
    if len(shape) == 1:
        rows, columns = 1, shape[0]  # a vector is one row
    if not rows or not columns:
        return ()
    grid = min(rows, MAP_ROWS), min(columns, MAP_COLUMNS)
    sums, counts = np.zeros(grid), np.zeros(grid, np.int64)
    for run, found in zip(runs, values, strict=True):
        place = np.zeros(len(found), np.int64)
        if shape:
            local = np.unravel_index(np.arange(run.start, run.stop), run.chunk.sizes)
            place = np.ravel_multi_index([a + b for a, b in zip(local, run.chunk.offsets, strict=True)], shape)
        is_finite = np.isfinite(found)
        row, column = place[is_finite] // columns, place[is_finite] % columns
        cell = row * grid[0] // rows, column * grid[1] // columns
        np.add.at(sums, cell, np.abs(found[is_finite]))
        np.add.at(counts, cell, 1)
    means = np.divide(sums, counts, out=np.zeros(grid), where=counts > 0)
    return tuple(
        tuple(float(value) if count else None for value, count in zip(*line, strict=True))
        for line in zip(means, counts, strict=True)
    )
