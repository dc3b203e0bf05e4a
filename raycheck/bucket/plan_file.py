"""A plan as bytes: one zlib stream of a JSON header, one line of JSON per tensor, and columns.

What follows from the rest is not stored: sizes and places are differences to how large and where they would be
anyway, so that their columns are zeros. Hostile until it has passed `load_plan`, which guards the reader: it sizes
buffers and cuts slices by these numbers.
"""

import json
import struct
import zlib
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import reduce
from itertools import accumulate, repeat
from operator import add, le, mul, sub
from typing import Any

from raycheck.bucket.checksum import SUB_BLOCK
from raycheck.bucket.columns import packed, running, spread, unpacked
from raycheck.bucket.index import Column, Leaf, Object, Plan, Tensor
from raycheck.errors import CorruptError

MAX_DECODED_BYTES = 1 << 30
MAX_DIMS = 64
ALIGN = 64
"""Records begin at multiples of it."""

ITEM_BYTES = {
    **dict.fromkeys(("bool", "int8", "uint8", "quint8", "qint8", "float8_e4m3fn", "float8_e5m2"), 1),
    **dict.fromkeys(("float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"), 1),
    **dict.fromkeys(("float16", "bfloat16", "int16", "uint16"), 2),
    **dict.fromkeys(("float32", "int32", "uint32", "complex32"), 4),
    **dict.fromkeys(("float64", "int64", "uint64", "complex64"), 8),
    "complex128": 16,
}
"""By dtype; of one that is not here, payload sizes are stored as differences to one byte per element."""


def dump_plan(plan: Plan) -> bytes:
    lines = b"\n".join(
        json.dumps([t.name, t.dtype, t.shape, t.path], separators=(",", ":")).encode() for t in plan.tensors
    )
    columns = [(name, len(column), *packed(column)) for name, column in _columns(plan)]
    header = {
        "objects": [[item.component, item.rank, item.num_crcs] for item in plan.objects],
        "leaves": [[f.name, f.path, f.component, f.rank, f.record_offset, f.record_size] for f in plan.leaves],
        "tensors": [len(plan.tensors), len(lines)],
        "columns": [[name, count, width] for name, count, width, _ in columns],
    }
    text = json.dumps(header, separators=(",", ":")).encode()
    return zlib.compress(b"".join((struct.pack("<Q", len(text)), text, lines, *(data for *_, data in columns))), 1)


def _columns(plan: Plan) -> Iterator[tuple[str, Sequence[int]]]:
    counts = [end - first for first, end in plan.rows()]
    yield "rows", counts
    yield "object", plan.object
    for dim, column in enumerate(plan.offsets):
        yield f"offsets.{dim}", column
    for dim, column in enumerate(plan.sizes):
        yield f"sizes.{dim}", column
    yield "payload", array("q", map(sub, plan.payload_size, _expected_payloads(plan.tensors, counts, plan.sizes)))
    yield "head", array("q", map(sub, plan.payload_offset, plan.record_offset))
    yield "frame", array("q", map(sub, plan.record_size, plan.payload_size))
    yield "place", array("q", map(sub, plan.record_offset, _expected_places(plan.object, plan.record_size)))
    yield "crc", array("q", map(sub, plan.crc_at, _expected_crcs(plan.objects, plan.object, plan.payload_size)))


def _expected_payloads(
    tensors: Sequence[Tensor], counts: Sequence[int], sizes: Sequence["Column[int]"]
) -> Iterator[int]:
    """Elements of the box times bytes per element."""
    items = spread((ITEM_BYTES.get(tensor.dtype, 1) for tensor in tensors), counts)
    return reduce(lambda product, column: map(mul, product, column), sizes, items)


def _expected_places(objects: "Column[int]", record_sizes: "Column[int]") -> Iterator[int]:
    """Records one after the other, in order of the tensors, each at the next multiple of ALIGN."""
    aligned = (-(-size // ALIGN) * ALIGN for size in record_sizes)
    return running(objects, aligned, repeat(0, max(objects, default=-1) + 1))


def _expected_crcs(objects: Sequence[Object], numbers: "Column[int]", payload_sizes: "Column[int]") -> Iterator[int]:
    """Checksums one after the other in the order of the tensors, those of each object apart."""
    bases = accumulate((item.num_crcs for item in objects), initial=0)
    return running(numbers, (-(-size // SUB_BLOCK) for size in payload_sizes), bases)


MALFORMED = (
    ValueError,
    OverflowError,
    TypeError,
    KeyError,
    IndexError,
    AttributeError,
    struct.error,
    zlib.error,
    RecursionError,
)


def load_plan(data: bytes, *, what: str, known: dict[bytes, Tensor] | None = None) -> Plan:
    """Parse a plan. Raises CorruptError, naming `what`, for anything that is not a well-formed one.

    known: tensors by their line, to be added to; those of other ranks are mostly the same.
    """
    try:
        return _load_plan(data, what, {} if known is None else known)
    except CorruptError:
        raise
    except MALFORMED as error:
        raise CorruptError(f"{what} is not a plan: {type(error).__name__}: {error}") from None


def cut(data: bytes, at: int, size: int, what: str) -> bytes:
    part = data[at : at + size]
    if size < 0 or len(part) != size:
        raise CorruptError(f"{what} is cut short")
    return part


def inflated(data: bytes, what: str, room: int = MAX_DECODED_BYTES) -> bytes:
    stream = zlib.decompressobj()
    raw = stream.decompress(data, max(1, room))
    if not stream.eof:
        raise CorruptError(f"{what} is cut short, or holds more than {room} bytes")
    return raw


def _load_plan(data: bytes, what: str, known: dict[bytes, Tensor]) -> Plan:
    raw = inflated(data, what)
    (length,) = struct.unpack_from("<Q", raw)
    header = json.loads(raw[8 : 8 + length])
    num_tensors, size = header["tensors"]
    tensors = _tensors(cut(raw, 8 + length, size, what), known)
    if len(tensors) != num_tensors:
        raise CorruptError(f"{what} has {len(tensors)} tensors, not {num_tensors}")
    slices = _slices(raw, 8 + length + size, header["columns"], what)
    objects = tuple(
        Object(component=str(component), rank=int(rank), num_crcs=int(count))
        for component, rank, count in header["objects"]
    )
    leaves = tuple(
        Leaf(name=name, path=tuple(path), component=component, rank=rank, record_offset=start, record_size=size)
        for name, path, component, rank, start, size in header["leaves"]
    )
    plan = _plan(tensors, objects, leaves, slices, what)
    _check(plan, what)
    return plan


def _tensors(lines: bytes, known: dict[bytes, Tensor]) -> tuple[Tensor, ...]:
    """One JSON line each. A line that was seen before is not parsed again."""
    rows = lines.split(b"\n") if lines else []
    fresh = [row for row in rows if row not in known]
    parsed = json.loads(b"[" + b",".join(fresh) + b"]")
    for row, (name, dtype, shape, path) in zip(fresh, parsed, strict=True):
        known[row] = Tensor(name=str(name), dtype=str(dtype), shape=tuple(map(int, shape)), path=tuple(path))
    return tuple(known[row] for row in rows)


def _slices(raw: bytes, at: int, listed: Iterable[Any], what: str) -> dict[str, tuple[int, bytes, int]]:
    """Column name to count, bytes, and width."""
    found: dict[str, tuple[int, bytes, int]] = {}
    room = MAX_DECODED_BYTES
    for name, count, width in listed:
        found[name] = (count, cut(raw, at, count * width, what), width)
        at += count * width
        room -= 8 * count
        if room < 0:
            raise CorruptError(f"{what} holds more than {MAX_DECODED_BYTES} bytes")
    return found


def _plan(
    tensors: tuple[Tensor, ...],
    objects: tuple[Object, ...],
    leaves: tuple[Leaf, ...],
    slices: Mapping[str, tuple[int, bytes, int]],
    what: str,
) -> Plan:
    def column(name: str, length: int) -> "Column[int]":
        count, data, width = slices[name]
        if count != length:
            raise CorruptError(f"{what} has {count} items in the column {name!r}, not {length}")
        return unpacked(data, width)

    dims = range(max((len(tensor.shape) for tensor in tensors), default=0))
    if len(dims) > MAX_DIMS:
        raise CorruptError(f"{what} has a tensor of {len(dims)} dimensions")
    counts = column("rows", len(tensors))
    _check_range(what, "number of chunks", counts)
    num = sum(counts)
    numbers = column("object", num)
    _check_range(what, "object", numbers, len(objects))
    sizes = tuple(column(f"sizes.{dim}", num) for dim in dims)
    payload_size = array("q", map(add, column("payload", num), _expected_payloads(tensors, counts, sizes)))
    _check_range(what, "size", payload_size)
    record_size = array("q", map(add, column("frame", num), payload_size))
    record_offset = array("q", map(add, column("place", num), _expected_places(numbers, record_size)))
    return Plan(
        tensors=tensors,
        objects=objects,
        leaves=leaves,
        starts=array("q", accumulate(counts, initial=0)),
        object=numbers,
        offsets=tuple(column(f"offsets.{dim}", num) for dim in dims),
        sizes=sizes,
        record_offset=record_offset,
        record_size=record_size,
        payload_offset=array("q", map(add, column("head", num), record_offset)),
        payload_size=payload_size,
        crc_at=array("q", map(add, column("crc", num), _expected_crcs(objects, numbers, payload_size))),
    )


def _check(plan: Plan, what: str) -> None:
    counts = [end - first for first, end in plan.rows()]
    for column in (*plan.offsets, *plan.sizes, plan.record_offset, plan.record_size, plan.payload_offset, plan.crc_at):
        _check_range(what, "place or size", column)
    num_crcs = [item.num_crcs for item in plan.objects]
    _check_range(what, "number of checksums", num_crcs)
    ends = map(add, plan.crc_at, (-(-size // SUB_BLOCK) for size in plan.payload_size))
    if max(ends, default=0) > sum(num_crcs):
        raise CorruptError(f"{what} gives a chunk checksums that it does not have")
    for tensor in plan.tensors:
        if any(size < 0 for size in tensor.shape):
            raise CorruptError(f"{tensor.name} has the shape {tensor.shape}")
    for dim, (offsets, sizes) in enumerate(zip(plan.offsets, plan.sizes, strict=True)):
        wholes = [tensor.shape[dim] if dim < len(tensor.shape) else 1 for tensor in plan.tensors]
        if not all(map(le, map(add, offsets, sizes), spread(wholes, counts))):
            _refuse_outside(plan, dim, wholes)
    if not all(map(le, plan.record_offset, plan.payload_offset)):
        raise CorruptError(f"{what}: a chunk begins before its record")


def _check_range(what: str, name: str, column: Sequence[int], stop: int | None = None) -> None:
    if min(column, default=0) < 0 or (stop is not None and max(column, default=-1) >= stop):
        raise CorruptError(f"{what} has a {name} that cannot be")


def _refuse_outside(plan: Plan, dim: int, wholes: Sequence[int]) -> None:
    for tensor, whole, (first, end) in zip(plan.tensors, wholes, plan.rows(), strict=True):
        if any(map(whole.__lt__, map(add, plan.offsets[dim][first:end], plan.sizes[dim][first:end]))):
            raise CorruptError(f"a chunk of {tensor.name} lies outside its shape {tensor.shape}")
