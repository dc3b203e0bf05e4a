"""A checkpoint's index: where every tensor's bytes lie, with checksums, and every value that is not a tensor.

Binary, versioned, columnar: magic, then one zlib stream of a JSON header and little-endian columns. A reader fetches
exactly the bytes it needs from it and unpickles nothing. Its bytes are a pure function of what it holds.
"""

import json
import math
import struct
import sys
import zlib
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from raycheck.bucket.checksum import SUB_BLOCK
from raycheck.bucket.document import FORMAT_VERSION, check_format_version
from raycheck.errors import ConfigError, CorruptError

MAGIC = b"RCIX"
MAX_DECODED_BYTES = 1 << 30


@dataclass(frozen=True, kw_only=True, slots=True)
class Tensor:
    """A tensor as a whole. dtype is torch's name without "torch."; shape is global; path is its place in the state."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: tuple[str | int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """A box of a tensor, written by one rank: where it lies in the tensor, and where its bytes lie in the object.

    offsets, sizes: elements per dimension. record_*: the torch.save record in the shard object, in bytes.
    payload_*: the raw little-endian row-major bytes inside the record. crcs: one CRC-32 per 4 MiB of payload.
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
class Index:
    """`values` are the trees (see lossless.py) that all ranks share, `rank_values` those of each rank, in order."""

    tensors: tuple[Tensor, ...]
    chunks: tuple[Chunk, ...]
    leaves: tuple[Leaf, ...] = ()
    values: Mapping[str, Any] = field(default_factory=dict)
    rank_values: tuple[Mapping[str, Any], ...] = ()


_COLUMNS = ("tensor", "object", "record_offset", "record_size", "payload_offset", "payload_size")


def dump_index(index: Index) -> bytes:
    objects = sorted({(chunk.component, chunk.rank) for chunk in index.chunks})
    number_of = {item: i for i, item in enumerate(objects)}
    columns: dict[str, list[int]] = {
        "tensor": [chunk.tensor for chunk in index.chunks],
        "object": [number_of[chunk.component, chunk.rank] for chunk in index.chunks],
        **{name: [getattr(chunk, name) for chunk in index.chunks] for name in _COLUMNS[2:]},
        "offsets": [n for chunk in index.chunks for n in chunk.offsets],
        "sizes": [n for chunk in index.chunks for n in chunk.sizes],
        "crcs": [n for chunk in index.chunks for n in chunk.crcs],
    }
    header = {
        "format_version": FORMAT_VERSION,
        "tensors": [[t.name, t.dtype, t.shape, t.path] for t in index.tensors],
        "objects": objects,
        "leaves": [[f.name, f.path, f.component, f.rank, f.record_offset, f.record_size] for f in index.leaves],
        "values": index.values,
        "rank_values": index.rank_values,
        "columns": [[name, len(column)] for name, column in columns.items()],
    }
    text = json.dumps(header, allow_nan=False, separators=(",", ":")).encode()
    parts = [struct.pack("<Q", len(text)), text]
    for column in columns.values():
        words = array("Q", column)
        if sys.byteorder == "big":
            words.byteswap()
        parts.append(words.tobytes())
    return MAGIC + zlib.compress(b"".join(parts), 1)


_MALFORMED = (
    ValueError,
    OverflowError,
    TypeError,
    KeyError,
    IndexError,
    StopIteration,
    struct.error,
    zlib.error,
    RecursionError,
)


def load_index(data: bytes, *, what: str) -> Index:
    """Parse an index. Raises CorruptError, naming `what`, for anything that is not a well-formed one."""
    try:
        index = _load(data, what)
        _check(index)
    except CorruptError:
        raise
    except _MALFORMED as error:
        raise CorruptError(f"{what} is not an index: {type(error).__name__}: {error}") from None
    return index


def _load(data: bytes, what: str) -> Index:
    if data[:4] != MAGIC:
        raise CorruptError(f"{what} is not an index: it does not begin with {MAGIC!r}")
    stream = zlib.decompressobj()
    raw = stream.decompress(data[4:], MAX_DECODED_BYTES)
    if not stream.eof:
        raise CorruptError(f"{what} is cut short, or holds more than {MAX_DECODED_BYTES} bytes")
    (length,) = struct.unpack_from("<Q", raw)
    header = json.loads(raw[8 : 8 + length])
    check_format_version(header, what=what)
    columns: dict[str, list[int]] = {}
    at = 8 + length
    for name, count in header["columns"]:
        words = array("Q")
        words.frombytes(raw[at : at + 8 * count])
        if len(words) != count:
            raise CorruptError(f"{what} is cut short in the column {name!r}")
        if sys.byteorder == "big":
            words.byteswap()
        columns[name] = words.tolist()
        at += 8 * count
    tensors = tuple(
        Tensor(name=str(name), dtype=str(dtype), shape=tuple(map(int, shape)), path=tuple(path))
        for name, dtype, shape, path in header["tensors"]
    )
    return Index(
        tensors=tensors,
        chunks=tuple(_chunks(tensors, header["objects"], columns)),
        leaves=tuple(
            Leaf(
                name=name,
                path=tuple(path),
                component=component,
                rank=rank,
                record_offset=start,
                record_size=size,
            )
            for name, path, component, rank, start, size in header["leaves"]
        ),
        values=dict(header["values"]),
        rank_values=tuple(dict(item) for item in header["rank_values"]),
    )


def _chunks(tensors: tuple[Tensor, ...], objects: list[Any], columns: dict[str, list[int]]) -> list[Chunk]:
    offsets, sizes, crcs = (iter(columns[name]) for name in ("offsets", "sizes", "crcs"))
    chunks = []
    for row in zip(*(columns[name] for name in _COLUMNS), strict=True):
        tensor, object_number, record_offset, record_size, payload_offset, payload_size = row
        dims = len(tensors[tensor].shape)
        component, rank = objects[object_number]
        chunks.append(
            Chunk(
                tensor=tensor,
                component=str(component),
                rank=int(rank),
                offsets=tuple(_take(offsets, dims)),
                sizes=tuple(_take(sizes, dims)),
                record_offset=record_offset,
                record_size=record_size,
                payload_offset=payload_offset,
                payload_size=payload_size,
                crcs=tuple(_take(crcs, -(-payload_size // SUB_BLOCK))),
            )
        )
    return chunks


def _take(column: Any, count: int) -> list[int]:
    return [next(column) for _ in range(count)] if count < 1 << 24 else _refuse(count)


def _refuse(count: int) -> list[int]:
    raise ValueError(f"{count} items in one chunk")


def _check(index: Index) -> None:
    """Guards the reader: it sizes buffers and cuts slices by these numbers."""
    for tensor in index.tensors:
        if any(size < 0 for size in tensor.shape):
            raise CorruptError(f"{tensor.name} has the shape {tensor.shape}")
    for chunk in index.chunks:
        tensor = index.tensors[chunk.tensor]
        ends = [start + size for start, size in zip(chunk.offsets, chunk.sizes, strict=True)]
        if any(end > whole for end, whole in zip(ends, tensor.shape, strict=True)):
            raise CorruptError(f"a chunk of {tensor.name} lies outside its shape {tensor.shape}")
        if chunk.payload_offset < chunk.record_offset:
            raise CorruptError(f"a chunk of {tensor.name} begins before its record")


def merge(sections: Sequence[Index]) -> Index:
    """The whole index from each rank's section, in order of rank; of a box that several ranks wrote, the first one's.
    Raises ConfigError that names a tensor which two ranks describe differently."""
    tensors: dict[str, Tensor] = {}
    numbers: dict[str, int] = {}
    chunks: dict[tuple[object, ...], Chunk] = {}
    leaves: dict[str, Leaf] = {}
    for section in sections:
        for tensor in section.tensors:
            known = tensors.setdefault(tensor.name, tensor)
            numbers.setdefault(tensor.name, len(numbers))
            if (known.dtype, known.shape) != (tensor.dtype, tensor.shape):
                raise ConfigError(
                    f"ranks disagree on {tensor.name}: {known.dtype}{list(known.shape)} and "
                    f"{tensor.dtype}{list(tensor.shape)}"
                )
        local = [numbers[tensor.name] for tensor in section.tensors]
        for chunk in section.chunks:
            number = local[chunk.tensor]
            chunks.setdefault((number, chunk.offsets, chunk.sizes), replace(chunk, tensor=number))
        for leaf in section.leaves:
            leaves.setdefault(leaf.name, leaf)
    return Index(
        tensors=tuple(tensors.values()),
        chunks=tuple(chunks.values()),
        leaves=tuple(leaves.values()),
        values=sections[0].values,
        rank_values=tuple(values for section in sections for values in section.rank_values),
    )


def places(index: Index) -> dict[str, tuple[str, int, int]]:
    """Where each tensor's first bytes lie (component, rank, offset): equal for names that share them (tied weights)."""
    found: dict[str, tuple[str, int, int]] = {}
    for chunk in index.chunks:
        if chunk.payload_size:
            found.setdefault(index.tensors[chunk.tensor].name, (chunk.component, chunk.rank, chunk.record_offset))
    return found


def uncovered(index: Index) -> list[str]:
    """Names of tensors whose chunks do not cover them exactly once, so that no save with a hole is ever committed."""
    seen: dict[int, list[Chunk]] = {}
    for chunk in index.chunks:
        seen.setdefault(chunk.tensor, []).append(chunk)
    return [
        tensor.name for number, tensor in enumerate(index.tensors) if not _covers(tensor.shape, seen.get(number, []))
    ]


def _covers(shape: tuple[int, ...], chunks: list[Chunk]) -> bool:
    if sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(shape):
        return False
    if math.prod(shape) == 0:
        return bool(chunks)
    # Equal volume and no overlap is an exact cover. Sorted by the first dimension, only neighbours that still reach
    # into it can overlap.
    ordered = sorted((chunk for chunk in chunks if math.prod(chunk.sizes)), key=lambda chunk: chunk.offsets)
    for i, one in enumerate(ordered):
        for other in ordered[i + 1 :]:
            if shape and other.offsets[0] >= one.offsets[0] + one.sizes[0]:
                break
            if all(
                a < b + size_b and b < a + size_a
                for a, size_a, b, size_b in zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
            ):
                return False
    return True
