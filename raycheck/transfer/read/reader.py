"""Reads tensors back: ranged GETs at the index's offsets, straight into the live tensors.

This works at any world size: each wanted box is assembled from whatever boxes were saved. Every 4 MiB sub-block is
verified, even when only part of an object is read. Nothing is unpickled.
"""

import ctypes
import math
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass, field
from operator import mul
from threading import Lock

import numpy as np
import torch

from raycheck.bucket.format.checksum import READS, SUB_BLOCK, crc32
from raycheck.bucket.format.index import Chunk, Index, Tensor
from raycheck.bucket.format.object_keys import shard_file
from raycheck.bucket.reading import RangeReader
from raycheck.bucket.store import Store
from raycheck.bucket.store.interface import READS_IN_FLIGHT
from raycheck.bucket.store.moved_bytes import moved_bytes
from raycheck.bucket.store.part_sizes import piece_bytes
from raycheck.bucket.store.request_window import RequestWindow
from raycheck.bucket.store.retry import deadline
from raycheck.bucket.store.send_each import send_each
from raycheck.errors import CorruptError, DamagedError, NotFoundError, StoreError
from raycheck.transfer.collector_pause import collector_paused
from raycheck.transfer.read.restore_proof import WrittenBytes, written_bytes
from raycheck.transfer.stage.local_box import LocalBox, as_bytes, strides_of

REQUEST_BYTES = 16 * 1024 * 1024
GAP_BYTES = 64 * 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class Read:
    """A copy from a saved box (`chunk`) into a live box.

    start, stop: the bytes of the saved box's payload to fetch, in whole sub-blocks.
    first, sizes, strides: the elements to copy; `first` counts from the first element of the saved box.
    target_low: the offset in the live box at which they are written.
    A copy that is contiguous on both sides has one dimension.
    """

    tensor: Tensor
    chunk: Chunk
    box: LocalBox
    start: int
    stop: int
    first: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    target_low: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One ranged GET of an object, bytes start..stop, and the reads that it serves, in order.

    written: how many bytes of each box were written, once that has happened. lock: held while it happens, since the
        request may be sent twice: the slower answer must not reach tensors that are already in use.
    """

    key: str
    start: int
    stop: int
    reads: tuple[Read, ...]
    written: list[tuple[LocalBox, int]] = field(default_factory=list)
    lock: Lock = field(default_factory=Lock)

    def __len__(self) -> int:
        return self.stop - self.start


def read_into(
    store: RangeReader,
    prefixes: dict[str, str],
    index: Index,
    boxes: Sequence[LocalBox],
    *,
    request_bytes: int | None = None,
    written: WrittenBytes | None = None,
) -> int:
    """Fill the live tensors of `boxes` from the shards that the index names. Return the bytes fetched.

    prefixes: maps each component to the prefix of its directory. request_bytes: the most that one request fetches, a
    multiple of the sub-block; None: what suits the number of requests in flight. written: counts the bytes written into
    each box. Raises DamagedError, which names rank, component, tensor and sub-block, and NotFoundError for a missing
    object. After an error the tensors are partly restored and must not be used.
    """
    window = _window(store)
    if request_bytes is None:
        size_bytes = sum(box.local.nbytes for box in boxes)
        request_bytes = piece_bytes(size_bytes, window.size, SUB_BLOCK, REQUEST_BYTES) // SUB_BLOCK * SUB_BLOCK
    with collector_paused():
        requests = list(_requests(prefixes, _reads(index, boxes, request_bytes), request_bytes))
    moved_bytes().want(sum(map(len, requests)))
    pool = ThreadPoolExecutor(window.most, thread_name_prefix="raycheck-read")

    def start(_: int, request: Request) -> Future[list[tuple[LocalBox, int]]]:
        return pool.submit(copy_context().run, _serve, store, request)

    try:
        for counts in send_each(requests, start, window=window, may_repeat=True):
            if written is not None:
                written.add_all(counts)
    finally:
        pool.shutdown(wait=False)  # a request that was too slow may still run
    return sum(map(len, requests))


def _window(store: RangeReader) -> RequestWindow:
    """Return the window for reads. It stays as it is for a reader of something else than a bucket."""
    return store.reads if isinstance(store, Store) else RequestWindow(least=READS_IN_FLIGHT, most=READS_IN_FLIGHT)


def _reads(index: Index, boxes: Sequence[LocalBox], request_bytes: int) -> Iterator[Read]:
    """Yield the copies that fill all boxes. Raises CorruptError for a box that the index does not cover."""
    numbers = {tensor.name: number for number, tensor in enumerate(index.tensors)}
    for box in boxes:
        number = numbers[box.name]
        covered = 0
        for chunk in index.chunks_in(number, box.offsets, box.sizes):
            low, sizes = _shared_part(chunk, box)
            if all(size > 0 for size in sizes):
                covered += math.prod(sizes)
                yield from _reads_of_box(index.tensors[number], chunk, box, low, sizes, request_bytes)
        if covered != math.prod(box.sizes):
            raise CorruptError(f"the checkpoint's index does not cover {box.name} at {box.offsets}")


def _shared_part(chunk: Chunk, box: LocalBox) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the offsets and sizes of the overlap of a saved box and a live box. A size is 0 or less if none."""
    if (chunk.offsets, chunk.sizes) == (box.offsets, box.sizes):  # true of nearly all boxes at the same world size
        return box.offsets, box.sizes
    low = tuple(map(max, chunk.offsets, box.offsets))
    high = (min(a + n, b + m) for a, n, b, m in zip(chunk.offsets, chunk.sizes, box.offsets, box.sizes, strict=True))
    return low, tuple(b - a for a, b in zip(low, high, strict=True))


def _reads_of_box(  # noqa: PLR0917
    tensor: Tensor, chunk: Chunk, box: LocalBox, low: tuple[int, ...], sizes: tuple[int, ...], request_bytes: int
) -> Iterator[Read]:
    """Yield the copies from one saved box into one live box.

    They are cut at sub-blocks where both sides are contiguous, otherwise at rows. low, sizes: the overlap of the two
    boxes in the tensor.
    """
    item = _saved_dtype(box).itemsize
    if chunk.payload_size != math.prod(chunk.sizes) * item or len(chunk.crcs) != -(-chunk.payload_size // SUB_BLOCK):
        raise CorruptError(f"{tensor.name}: a saved box of {chunk.sizes} has {chunk.payload_size} bytes")

    def read(first: int, end: int, extent: tuple[int, ...], into: tuple[int, ...], strides: tuple[int, ...]) -> Read:
        """first, end: the range of elements of the saved box."""
        return Read(
            tensor=tensor,
            chunk=chunk,
            box=box,
            start=first * item // SUB_BLOCK * SUB_BLOCK,
            stop=min(-(-end * item // SUB_BLOCK) * SUB_BLOCK, chunk.payload_size),
            first=first,
            sizes=extent,
            strides=strides,
            target_low=into,
        )

    if sizes == chunk.sizes == box.sizes and chunk.payload_size <= request_bytes and box.local.is_contiguous():
        count = math.prod(sizes)  # all of a small tensor, as nearly always at the same world size
        yield read(0, count, (count,), (0,), (1,))
        return
    inside = tuple(a - b for a, b in zip(low, chunk.offsets, strict=True))
    target = tuple(a - b for a, b in zip(low, box.offsets, strict=True))
    strides = strides_of(chunk.sizes)
    if sizes[1:] == chunk.sizes[1:] == box.sizes[1:] and box.local.is_contiguous():
        at = inside[0] * strides[0] if sizes else 0
        stop = at + math.prod(sizes)
        shift = (target[0] * strides[0] if sizes else 0) - at
        while at < stop:
            until = min(stop, (at * item // SUB_BLOCK * SUB_BLOCK + request_bytes) // item)
            yield read(at, until, (until - at,), (at + shift,), (1,))
            at = until
        return
    rows = max(1, request_bytes // (strides[0] * item))
    for skip in range(0, sizes[0], rows):
        extent = (min(rows, sizes[0] - skip), *sizes[1:])
        first = sum(map(mul, (inside[0] + skip, *inside[1:]), strides))
        end = first + sum(map(mul, (n - 1 for n in extent), strides)) + 1
        yield read(first, end, extent, (target[0] + skip, *target[1:]), strides)


def _requests(prefixes: dict[str, str], reads: Iterator[Read], request_bytes: int) -> Iterator[Request]:
    """Yield the requests by object and offset. Reads that are close to each other share one request."""
    by_key: dict[str, list[Read]] = {}
    for read in reads:
        key = prefixes[read.chunk.component] + shard_file(read.chunk.rank)
        by_key.setdefault(key, []).append(read)
    for key, group in by_key.items():
        group.sort(key=_start_in_object)
        batch: list[Read] = []
        first = end = 0
        for read in group:
            start, stop = _start_in_object(read), read.chunk.payload_offset + read.stop
            if batch and (start - end > GAP_BYTES or max(end, stop) - first > request_bytes):
                yield Request(key=key, start=first, stop=end, reads=tuple(batch))
                batch = []
            first, end = (first, max(end, stop)) if batch else (start, stop)
            batch.append(read)
        yield Request(key=key, start=first, stop=end, reads=tuple(batch))


def _start_in_object(read: Read) -> int:
    return read.chunk.payload_offset + read.start


def _serve(store: RangeReader, request: Request) -> list[tuple[LocalBox, int]]:
    """Fetch a request and copy it into the boxes. Return how many bytes of each box were written.

    Bytes that fail the check are fetched again before they count as damaged: they may have been corrupted in transit.
    """
    for attempt in range(1, READS + 1):
        if time.monotonic() > deadline():  # not every store obeys it
            raise StoreError(f"{request.key}: no time is left to read it")
        try:
            with moved_bytes().at(request.key):
                data = memoryview(store.get_range(request.key, request.start, request.stop))
            with request.lock:
                if not request.written:
                    request.written[:] = [(read.box, _checked_copy(data, request, read)) for read in request.reads]
        except CorruptError as error:
            if attempt == READS:
                raise _damaged(request, error) from None
        except NotFoundError:
            if attempt == READS:
                raise
        else:
            return request.written
    raise AssertionError("the last attempt returns or raises")


def _checked_copy(data: memoryview, request: Request, read: Read) -> int:
    """Verify the bytes of a read and copy them into its box. Return how many were written."""
    begin = _start_in_object(read) - request.start
    payload = data[begin : begin + read.stop - read.start]
    _verify(payload, read)
    return _place(payload, read)


def _verify(payload: memoryview, read: Read) -> None:
    """Raise DamagedError for a sub-block whose checksum is not the one in the index."""
    first = read.start // SUB_BLOCK
    for number, at in enumerate(range(0, len(payload), SUB_BLOCK), first):
        if crc32(payload[at : at + SUB_BLOCK]) != read.chunk.crcs[number]:
            raise DamagedError(
                f"shard of rank {read.chunk.rank}, component {read.chunk.component}: tensor {read.tensor.name}, "
                f"sub-block {number} does not match its checksum in the index"
            )


def _damaged(request: Request, error: CorruptError) -> DamagedError:
    """Return the error to raise. If an object ends too early, the error names the tensors that are missing from it."""
    if isinstance(error, DamagedError):
        return error
    chunk, names = request.reads[0].chunk, dict.fromkeys(read.tensor.name for read in request.reads)
    return DamagedError(
        f"shard of rank {chunk.rank}, component {chunk.component}: {error}; tensors {', '.join(list(names)[:8])}"
    )


def _place(payload: memoryview, read: Read) -> int:
    """Copy the wanted elements from whole sub-blocks into the live tensor. Return how many bytes were written."""
    local, dtype = read.box.local.detach(), _saved_dtype(read.box)
    item = dtype.itemsize
    skip = read.first - read.start // item
    if len(read.sizes) == 1 and dtype == local.dtype and _is_plain(local):
        # Contiguous on both sides: copied straight from the received bytes.
        low, count = read.target_low[0] * item, read.sizes[0] * item
        target = as_bytes(local).numpy()[low : low + count]
        np.copyto(target, np.frombuffer(payload, np.uint8)[skip * item :][:count])
        return int(target.nbytes)
    saved = _to_read(payload).view(dtype).as_strided(read.sizes, read.strides, skip)
    into = local.view(-1) if len(read.sizes) != local.dim() else local
    for dim, (start, size) in enumerate(zip(read.target_low, read.sizes, strict=True)):
        into = into.narrow(dim, start, size)
    into.copy_(saved)  # waits also for a device, so that the received bytes are not freed before
    return written_bytes(into)


def _to_read(payload: memoryview) -> torch.Tensor:
    """Return received bytes as a flat tensor, over the same memory. Only read it, and only while they are referenced.

    Torch takes no memory that is read-only, and Python would hold its lock while it copied it.
    """
    received = np.frombuffer(payload, np.uint8)
    return torch.frombuffer((ctypes.c_uint8 * received.size).from_address(received.ctypes.data), dtype=torch.uint8)


def _saved_dtype(box: LocalBox) -> torch.dtype:
    return box.cast_from or box.local.dtype


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether the tensor's memory is on this host, contiguous, and holds exactly its bytes."""
    return tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
