"""A file of weights as ranges of the checkpoint's own objects, which the store copies by itself, with as few bytes in
between fetched and sent as its least part allows.

Ranges are whole sub-blocks, so that their CRC-32 follows from the index: what the store says that it has copied is
compared with what training has written.
"""

from collections.abc import Iterator, Sequence

from raycheck.bucket.format.checksum import SUB_BLOCK, combined, sub_block_lengths
from raycheck.bucket.format.index import Chunk
from raycheck.bucket.store.interface import Range
from raycheck.bucket.store.part_sizes import MAX_COPIED_BYTES, MIN_PART_BYTES, PART_SIZES
from raycheck.shards.huggingface.weight_stream import Span, Weight, WeightSource

FETCHED_BYTES = 32 * 1024 * 1024
"""How much of what is not copied makes a part, give or take a weight."""


def assembled(source: WeightSource, weights: Sequence[Weight], head: bytes) -> Iterator[Range | memoryview] | None:
    """The parts of a file of `head` and the weights. None where nothing can be copied, or too much has to be held."""
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
    """In the order of the file. A head is part of what is fetched first."""
    spans: list[Span] = []
    size = head_bytes  # with that of the spans
    for weight in weights:
        for chunk, start, stop in _runs(weight):
            length = (stop - start) * weight.dtype.itemsize
            taken = _taken(size, length) if chunk is not None else length
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
    """Its elements in order, each run with the chunk whose payload is just that; None where there is no such one."""
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


def _taken(before: int, length: int) -> int:
    """How many bytes of a payload are fetched, to make what comes before it a part or since there are too few."""
    taken = 0
    while 0 < before + taken < MIN_PART_BYTES and taken < length:
        taken = min(taken + SUB_BLOCK, length)
    return length if length - taken < MIN_PART_BYTES else taken


def _ranges(key: str, chunk: Chunk, skip: int) -> Iterator[Range]:
    """A payload from a sub-block on."""
    left = chunk.payload_size - skip
    while left:
        length = MAX_COPIED_BYTES if left - MAX_COPIED_BYTES >= MIN_PART_BYTES else left
        first = (chunk.payload_size - left) // SUB_BLOCK
        lengths = sub_block_lengths(length)
        start = chunk.payload_offset + chunk.payload_size - left
        crc = combined(zip(chunk.crcs[first : first + len(lengths)], lengths, strict=True))
        yield Range(key, start, start + length, crc)
        left -= length
