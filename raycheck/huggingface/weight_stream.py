"""Reads tensors of a checkpoint as one stream of file bytes, in bounded memory and without a process group.

The reader assembles and verifies any run of elements of a saved tensor, whatever boxes it was saved in. Blocks end
where saved sub-blocks end, so no byte is fetched twice, unless a tensor was split across columns.
"""

import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle
from typing import Any, TypeVar, cast

import torch

from raycheck.bucket.format.checksum import SUB_BLOCK
from raycheck.bucket.format.index import Chunk, Index, Tensor, index_of
from raycheck.bucket.format.manifest import Manifest
from raycheck.bucket.reading import Checkpoint, missing_error
from raycheck.errors import ConfigError, CorruptError, NotFoundError, RaycheckError
from raycheck.transfer.read.reader import read_into
from raycheck.transfer.stage.local_box import LocalBox, boxes_of
from raycheck.transfer.stage.tensor_parts import flat_part

BLOCK_BYTES = 8 * 1024 * 1024
AHEAD = 4
"""The number of blocks in memory: one is being written, and the others are being read."""
DELTA_ELEMENTS = 4 * 1024 * 1024
_RAW = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedTensor:
    """A tensor as it was saved. is_flat: its saved boxes contain whole rows, so it can be treated as one dimension."""

    tensor: Tensor
    chunks: tuple[Chunk, ...]
    dtype: torch.dtype
    is_flat: bool

    @property
    def count(self) -> int:
        return math.prod(self.tensor.shape)

    def has_equal_bytes(self, other: "SavedTensor") -> bool:
        """Return whether both have the same boxes with equal checksums."""
        return (self.tensor.dtype, self.tensor.shape) == (other.tensor.dtype, other.tensor.shape) and sorted(
            (chunk.offsets, chunk.sizes, chunk.crcs) for chunk in self.chunks
        ) == sorted((chunk.offsets, chunk.sizes, chunk.crcs) for chunk in other.chunks)

    def cut(self, stop: int) -> int:
        """Return the last element, at or before `stop`, at which a block may end without reading a sub-block twice."""
        if stop >= self.count:
            return self.count
        if not self.is_flat:
            row = math.prod(self.tensor.shape[1:])
            return stop // row * row
        unit = SUB_BLOCK // self.dtype.itemsize
        start = max((chunk.offsets[0] for chunk in self.chunks if chunk.offsets[0] <= stop), default=0)
        return start + (stop - start) // unit * unit


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraDelta:
    """The sum that a merged LoRA adds to its weight: scaling * B @ A, transposed if is_transposed."""

    a: SavedTensor
    b: SavedTensor
    scaling: float
    is_transposed: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Weight:
    """A tensor of the file: its name, shape and dtype there, and what it is computed from."""

    name: str
    saved: SavedTensor
    shape: tuple[int, ...]
    dtype: torch.dtype
    delta: LoraDelta | None = None

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


Span = tuple[Weight, int, int]
"""A weight, and the start and the end of a range of its elements."""
T = TypeVar("T")


class WeightSource:
    """A reader of the saved tensors of one checkpoint.

    failure: the error of a read, for a caller that otherwise sees only that its upload failed.
    """

    def __init__(self, checkpoint: Checkpoint, manifest: Manifest, index: Index) -> None:
        self.failure: RaycheckError | None = None
        self._checkpoint = checkpoint
        self._prefixes = manifest.prefixes()
        self._index = index
        self._numbers = {tensor.name: number for number, tensor in enumerate(index.tensors)}
        self._factors: tuple[LoraDelta, torch.Tensor, torch.Tensor] | None = None

    def names(self) -> Collection[str]:
        return self._numbers.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._index.tensors[self._numbers[name]].shape

    def saved(self, name: str) -> SavedTensor:
        """Return the saved tensor of this name.

        Raises ConfigError for a dtype that this torch does not have, CorruptError for an impossible shape.
        """
        number = self._numbers[name]
        tensor, chunks = self._index.tensors[number], self._index.chunks_of(number)
        if min(tensor.shape, default=0) < 0:
            raise CorruptError(f"{name} has the shape {list(tensor.shape)}, which no tensor can have")
        dtype = getattr(torch, tensor.dtype, None)
        if not isinstance(dtype, torch.dtype) or dtype.itemsize not in _RAW:
            raise ConfigError(f"{name} has the type {tensor.dtype}, which cannot be exported")
        is_flat = all(chunk.sizes[1:] == tensor.shape[1:] for chunk in chunks)
        if is_flat:
            row = math.prod(tensor.shape[1:])
            chunks = tuple(
                replace(chunk, offsets=(sum(chunk.offsets[:1]) * row,), sizes=(math.prod(chunk.sizes),))
                for chunk in chunks
            )
            tensor = replace(tensor, shape=(math.prod(tensor.shape),))
        return SavedTensor(tensor=tensor, chunks=chunks, dtype=dtype, is_flat=is_flat)

    def stream(self, weights: Sequence[Weight], head: bytes, part_bytes: int) -> Iterator[memoryview]:
        """Yield `head` and then the weights' bytes, in parts of `part_bytes` (the last may be shorter).

        Each part is a separate buffer. The size of an element must not grow from one weight to the next, so that each
        weight is aligned.
        """
        left = len(head) + sum(weight.size_bytes for weight in weights)
        part = memoryview(bytearray(min(part_bytes, left)))
        filled = 0
        for block in self._blocks(weights, head):
            taken = 0
            while taken < len(block):
                assert part, "the weights have more bytes than their sizes add up to"  # otherwise this never ends
                count = min(len(block) - taken, len(part) - filled)
                part[filled : filled + count] = block[taken : taken + count]
                taken, filled = taken + count, filled + count
                if filled == len(part):
                    yield part
                    left -= filled
                    part, filled = memoryview(bytearray(min(part_bytes, left))), 0

    def _blocks(self, weights: Sequence[Weight], head: bytes) -> Iterator[memoryview]:
        """Yield `head`, and then the weights' bytes. The caller copies each block before it asks for the next one."""
        yield memoryview(head)
        buffers = [torch.empty(BLOCK_BYTES, dtype=torch.uint8) for _ in range(AHEAD)]
        converted = torch.empty(BLOCK_BYTES, dtype=torch.uint8)
        reads = (
            partial(self._read_block, spans, buffer)
            for spans, buffer in zip(_spans(weights), cycle(buffers), strict=False)
        )
        try:
            for spans, values in _in_order(reads):
                yield self._convert(spans, values, converted)
        except NotFoundError as error:
            self.failure = missing_error(self._checkpoint.store, self._checkpoint.entry.key, str(error))
            raise self.failure from None
        except RaycheckError as error:
            self.failure = error
            raise

    def _read_block(self, spans: Sequence[Span], block: torch.Tensor) -> tuple[Sequence[Span], list[torch.Tensor]]:
        """Read spans, as they were saved, into `block`. Return them with their parts of it."""
        parts: dict[int, torch.Tensor] = {}
        at = 0
        # The largest elements first, so that each part is aligned.
        for number in sorted(range(len(spans)), key=lambda number: -spans[number][0].saved.dtype.itemsize):
            weight, start, stop = spans[number]
            end = at + (stop - start) * weight.saved.dtype.itemsize
            parts[number] = block[at:end].view(weight.saved.dtype)
            at = end
        values = [parts[number] for number in range(len(spans))]
        self._read([(weight.saved, start, into) for (weight, start, _), into in zip(spans, values, strict=True)])
        return spans, values

    def _convert(self, spans: Sequence[Span], values: Sequence[torch.Tensor], block: torch.Tensor) -> memoryview:
        """Write spans, as they are in the file, into `block`, one after the other. Return the filled part."""
        at = 0
        for (weight, start, _), saved in zip(spans, values, strict=True):
            if weight.delta is not None:
                self._add(weight.delta, weight.shape, start, saved)
            end = at + len(saved) * weight.dtype.itemsize
            block[at:end].view(weight.dtype).copy_(saved)
            at = end
        return memoryview(cast("Any", block[:at].numpy()))

    def _read(self, wanted: Sequence[tuple[SavedTensor, int, torch.Tensor]]) -> None:
        """Fill each flat tensor with elements of a saved one, from the given offset."""
        boxes: list[LocalBox] = []
        numbers: dict[str, int] = {}
        tensors: list[Tensor] = []
        chunks: list[Chunk] = []
        for saved, start, into in wanted:
            name = saved.tensor.name
            if name not in numbers:
                numbers[name] = len(tensors)
                tensors.append(saved.tensor)
                chunks += [replace(chunk, tensor=numbers[name]) for chunk in saved.chunks]
            part = flat_part(into.view(_RAW[into.dtype.itemsize]), saved.tensor.shape, start)
            boxes += boxes_of(name, (name,), part, may_spread=False)
        index = index_of(tensors, chunks)
        read_into(self._checkpoint.store, self._prefixes, index, boxes, request_bytes=SUB_BLOCK)  # four at a time

    def _add(self, delta: LoraDelta, shape: tuple[int, ...], start: int, values: torch.Tensor) -> None:
        """Add a delta to `values`, the weight's elements from `start`, with the dtypes and rounding of peft's merge."""
        a, b = self._factors_of(delta)
        row = shape[1]
        step = max(1, DELTA_ELEMENTS // row)
        stop = start + len(values)
        for first in range(start // row, -(-stop // row), step):
            last = min(first + step, -(-stop // row))
            product = (b @ a[:, first:last]).T if delta.is_transposed else b[first:last] @ a
            rows = (product * delta.scaling).reshape(-1)
            low, high = max(start, first * row), min(stop, last * row)
            # peft adds in the adapter's dtype, even if the product was computed in float32.
            values[low - start : high - start] += rows[low - first * row : high - first * row].to(delta.b.dtype)

    def _factors_of(self, delta: LoraDelta) -> tuple[torch.Tensor, torch.Tensor]:
        """Return A and B, and keep them for further blocks of this weight.

        Half-precision factors become float32, as in peft's own merge on a CPU.
        """
        if self._factors is None or self._factors[0] is not delta:
            self._factors = None
            found = []
            for saved, shape in (
                (delta.a, self.shape(delta.a.tensor.name)),
                (delta.b, self.shape(delta.b.tensor.name)),
            ):
                flat = torch.empty(saved.count, dtype=saved.dtype)
                self._read([(saved, 0, flat)])
                is_half = saved.dtype in (torch.float16, torch.bfloat16)
                found.append((flat.float() if is_half else flat).view(shape))
            self._factors = (delta, found[0], found[1])
        return self._factors[1], self._factors[2]


def _in_order(calls: Iterable[Callable[[], T]]) -> Iterator[T]:
    """Yield the result of each call, in order, while the next ones run in threads.

    Call i + AHEAD begins after the result of call i was used, so that it may use the same buffer.
    """
    ahead: deque[Future[T]] = deque()
    with ThreadPoolExecutor(AHEAD, thread_name_prefix="raycheck-weights") as pool:
        try:
            for call in calls:
                if len(ahead) == AHEAD:
                    yield ahead.popleft().result()
                ahead.append(pool.submit(copy_context().run, call))
            while ahead:
                yield ahead.popleft().result()
        finally:
            for future in ahead:
                future.cancel()


def _spans(weights: Sequence[Weight]) -> Iterator[list[Span]]:
    """Cut the weights into blocks of at most BLOCK_BYTES; a block may contain many small weights."""
    batch: list[Span] = []
    room = BLOCK_BYTES
    for weight in weights:
        width = max(weight.dtype.itemsize, weight.saved.dtype.itemsize)
        at, count = 0, weight.saved.count
        while at < count:
            stop = weight.saved.cut(at + room // width)
            if stop <= at and batch:  # the rest of this block has no good place to end
                yield batch
                batch, room = [], BLOCK_BYTES
                continue
            if stop <= at:
                stop = min(count, at + room // width)
            batch.append((weight, at, stop))
            room -= (stop - at) * width
            at = stop
    if batch:
        yield batch
