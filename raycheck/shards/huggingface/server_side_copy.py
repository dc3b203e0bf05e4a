"""Describes a file of weights as ranges of the checkpoint's own objects, which the store copies by itself.

Bytes between the ranges are fetched and sent, as few as the store's smallest part allows. Ranges are whole sub-blocks,
so that their CRC-32 follows from the index. The checksum that the store returns for a copy is compared with it, and so
with what training has written.
"""

from collections.abc import Iterator, Sequence

from raycheck.bucket.format.checksum import SUB_BLOCK, combined, sub_block_lengths
from raycheck.bucket.format.index import Chunk
from raycheck.bucket.store.interface import Range
from raycheck.bucket.store.part_sizes import MAX_COPIED_BYTES, MIN_PART_BYTES, PART_SIZES
from raycheck.shards.huggingface.weight_stream import Span, Weight, WeightSource

FETCHED_BYTES = 32 * 1024 * 1024
"""About how many bytes that are not copied are collected into one part."""


def assembled(source: WeightSource, weights: Sequence[Weight], head: bytes) -> Iterator[Range | memoryview] | None:
    """Returns the parts of a file of `head` and the weights. None when nothing can be copied, or a part that is fetched
    would need too much memory."""
    parts = list(_parts(source, weights, len(head)))
    fetched = [part for part in parts if not isinstance(part, Range)]
    sizes = [sum((stop - start) * weight.dtype.itemsize for weight, start, stop in part) for part in fetched]
    if (
        len(parts) == len(fetched)
        or len(parts) > (PART_SIZES["s3"].max_parts or 0)
        or max(sizes, default=0) > 4 * FETCHED_BYTES
    ):
        return None
    return _made(source, parts, head)


def _made(source: WeightSource, parts: Sequence[Range | list[Span]], head: bytes) -> Iterator[Range | memoryview]:
    for part in parts:
        if isinstance(part, Range):
            yield part
        else:
            data = source.read(part)
            yield memoryview(head + data) if head else data
            head = b""


def _parts(source: WeightSource, weights: Sequence[Weight], head_bytes: int) -> Iterator[Range | list[Span]]:
    """Yields the parts in the order of the file: ranges to copy, and spans to fetch. The head is part of the first
    spans."""
    spans: list[Span] = []
    size = head_bytes  # of the spans, and the head before them
    for weight in weights:
        for chunk, start, stop in _runs(weight):
            length = (stop - start) * weight.dtype.itemsize
            taken = _fetched_bytes(size, length) if chunk is not None else length
            if taken:
                spans.append((weight, start, start + taken // weight.dtype.itemsize))
                size += taken
            if chunk is not None and taken < length:
                if size:
                    yield spans
                spans, size = [], 0
                yield from _ranges(source.key_of(chunk), chunk, taken)
            elif size >= FETCHED_BYTES:
                yield spans
                spans, size = [], 0
    if size:
        yield spans


def _runs(weight: Weight) -> Iterator[tuple[Chunk | None, int, int]]:
    """Yields the weight's elements in order as runs (chunk, start, stop). Each run is exactly the payload of its chunk;
    the chunk is None where no payload can be copied as it is."""
    saved = weight.saved
    chunks = sorted(saved.chunks, key=lambda chunk: chunk.offsets) if saved.is_flat else []
    at = 0
    runs = []
    for chunk in chunks:
        size = chunk.sizes[0] * saved.dtype.itemsize
        if chunk.offsets[0] == at and chunk.payload_size == size and len(chunk.crcs) == len(sub_block_lengths(size)):
            runs.append((chunk, at, at + chunk.sizes[0]))
            at += chunk.sizes[0]
    is_as_saved = weight.delta is None and weight.dtype == saved.dtype and at == saved.count
    yield from runs if is_as_saved else [(None, 0, saved.count)]


def _fetched_bytes(before: int, length: int) -> int:
    """Returns how many of a payload's `length` bytes are fetched and not copied.

    They fill up the `before` bytes that precede it to the smallest part; or the payload itself is too small for a part.
    """
    taken = 0
    while 0 < before + taken < MIN_PART_BYTES and taken < length:
        taken = min(taken + SUB_BLOCK, length)
    return length if length - taken < MIN_PART_BYTES else taken


def _ranges(key: str, chunk: Chunk, skip: int) -> Iterator[Range]:
    """Yields the ranges to copy of a payload, from `skip` bytes on (whole sub-blocks), with the CRC-32 of each."""
    left = chunk.payload_size - skip
    while left:
        length = MAX_COPIED_BYTES if left - MAX_COPIED_BYTES >= MIN_PART_BYTES else left
        first = (chunk.payload_size - left) // SUB_BLOCK
        lengths = sub_block_lengths(length)
        start = chunk.payload_offset + chunk.payload_size - left
        crc = combined(zip(chunk.crcs[first : first + len(lengths)], lengths, strict=True))
        yield Range(key, start, start + length, crc)
        left -= length
