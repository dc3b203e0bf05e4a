"""Reads and writes a plan as bytes: one zlib stream of a JSON header, one line of JSON per tensor, and columns.

A plan from a bucket is hostile until it has passed `load_plan`: readers size buffers and cut slices by its numbers.
"""

import json
import struct
import sys
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, zip_longest
from operator import add, le
from typing import Any

from raycheck.bucket.format.checksum import SUB_BLOCK
from raycheck.bucket.format.column_codec import spread, unpack_column
from raycheck.bucket.format.decompression import MAX_DECODED_BYTES, DecompressionBudget, deflate
from raycheck.bucket.format.index import Column, Leaf, Object, Plan, Tensor
from raycheck.errors import ConfigError, CorruptError

MAX_DIMS = 64
PLAN_ROOM_BYTES = 16 << 20
TENSORS = 100_000
TENSORS_PER_CHECKSUM = 16
"""Limits the tensors and boxes by the checksums, which do not compress. Each box with elements has its own checksum in
the index, unless several names share its bytes. So there are not many more tensors and boxes than checksums."""
CRC_BYTES = 4


def dump_plan(plan: Plan) -> bytes:
    """Write a plan. Raises ConfigError when it is larger than readers allow."""
    num_crcs = sum(item.num_crcs for item in plan.objects)
    if max(len(plan.tensors), len(plan.object)) > _max_tensors(num_crcs):
        raise ConfigError(
            f"the index would have {len(plan.tensors)} tensors in {len(plan.object)} boxes and {num_crcs} checksums: "
            f"too many of them are empty, or share their bytes. Readers accept {_max_tensors(num_crcs)}"
        )
    lines = b"\n".join(
        json.dumps([t.name, t.dtype, t.shape, t.path], separators=(",", ":")).encode() for t in plan.tensors
    )
    columns = [(name, len(column), *_encode_column(plan, name, column)) for name, column in _named_columns(plan)]
    header = {
        "objects": [[item.component, item.rank, item.num_crcs] for item in plan.objects],
        "leaves": [[f.name, f.path, f.component, f.rank, f.record_offset, f.record_size] for f in plan.leaves],
        "tensors": [len(plan.tensors), len(lines)],
        "columns": [column[:4] for column in columns],
    }
    text = json.dumps(header, separators=(",", ":")).encode()
    whole = b"".join((struct.pack("<Q", len(text)), text, lines, *(data for *_, data in columns)))
    if len(whole) > MAX_DECODED_BYTES:
        raise ConfigError(
            f"the index of {len(plan.tensors)} tensors in {len(plan.object)} boxes would have {len(whole)} bytes, and "
            f"readers accept {MAX_DECODED_BYTES}: shard over fewer ranks, or save fewer tensors"
        )
    return deflate(whole, stored=CRC_BYTES * num_crcs, parsed=8 + len(text) + len(lines))


def _max_tensors(num_crcs: int) -> int:
    return TENSORS + TENSORS_PER_CHECKSUM * num_crcs


def _named_columns(plan: Plan) -> Iterator[tuple[str, "Column[int]"]]:
    yield "rows", array("q", (end - first for first, end in plan.rows()))
    yield "object", plan.object
    for dim, column in enumerate(plan.offsets):
        yield f"offsets.{dim}", column
    for dim, column in enumerate(plan.sizes):
        yield f"sizes.{dim}", column
    yield "record_offset", plan.record_offset
    yield "head", plan.head
    yield "frame", plan.frame
    yield "payload_size", plan.payload_size
    yield "crc_at", plan.crc_at


def _encode_column(plan: Plan, name: str, column: "Column[int]") -> tuple[int, str, memoryview]:
    """Encode a column. Return width, coding and bytes.

    A plain column keeps 64 bits per number, so that readers need not convert it. The exception is the column that would
    not compress.

    Where many ranks have boxes of each tensor, the boxes differ only in their offsets: these are written as
    differences, all other columns plain. Where a tensor has few boxes, neighbors are at equal distances: all columns
    are written as differences.
    """
    import numpy as np

    is_wide = len(plan.object) > 2 * len(plan.tensors)
    numbers = np.asarray(column, np.int64)
    as_steps = not is_wide or (name.startswith("offsets.") and bool(numbers.any()))
    low, high = 0, len(plan.objects) if name == "object" else (1 << 63) - 1
    if as_steps:
        numbers = np.diff(numbers, prepend=0)
        low, high = int(numbers.min(initial=0)), int(numbers.max(initial=0))
    width = next(width for width in (1, 2, 4, 8) if -(1 << 8 * width - 1) <= low and high < 1 << 8 * width - 1)
    return width, "steps" if as_steps else "plain", numbers.astype(f"<i{width}", copy=False).data


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


@dataclass(frozen=True, slots=True)
class ParsedParts:
    """The parsed parts of earlier plans, by their bytes: the plans of all ranks mostly have equal parts."""

    tensors: dict[bytes, Tensor] = field(default_factory=dict)
    lines: dict[bytes, tuple[Tensor, ...]] = field(default_factory=dict)
    columns: dict[tuple[bytes, int, str], "Column[int]"] = field(default_factory=dict)
    inside: set[tuple[int, ...]] = field(default_factory=set)
    """A dimension, and the ids of parts, which are kept here, that put all boxes inside their tensors in it."""
    of_part: dict[tuple[str, int], Any] = field(default_factory=dict)
    """What was computed from a part, by what it is and the id of the part, which is kept here."""

    def once(self, what: str, part: Any, compute: Callable[[Any], Any]) -> Any:
        """Return what is computed from a part, which other plans have computed already."""
        at = what, id(part)
        if at not in self.of_part:
            self.of_part[at] = compute(part)
        return self.of_part[at]


def load_plan(data: bytes, *, what: str, known: ParsedParts | None = None, num_crcs: int | None = None) -> Plan:
    """Parse a plan. Raises CorruptError, naming `what`, for anything that is not a well-formed one.

    known: parts of other ranks' plans, which are not parsed again. num_crcs: the number of checksums that came with the
    plan; None for a plan that a rank reports, which only MAX_DECODED_BYTES limits.
    """
    stored = MAX_DECODED_BYTES if num_crcs is None else len(data) + CRC_BYTES * num_crcs
    try:
        return _load_plan(
            data, what, known or ParsedParts(), DecompressionBudget(stored, what=what, room=PLAN_ROOM_BYTES), num_crcs
        )
    except CorruptError:
        raise
    except MALFORMED as error:
        raise CorruptError(f"{what} is not a plan: {type(error).__name__}: {error}") from None


def cut(data: bytes, at: int, size: int, what: str) -> bytes:
    """Return `size` bytes from `at` on. Raises CorruptError when there are fewer."""
    found = data[at : at + size]
    if size < 0 or len(found) != size:
        raise CorruptError(f"{what} is truncated")
    return found


def _load_plan(data: bytes, what: str, known: ParsedParts, budget: DecompressionBudget, num_crcs: int | None) -> Plan:
    raw = budget.inflate(data)
    (length,) = struct.unpack_from("<Q", raw)
    header = budget.parse(cut(raw, 8, length, what))
    objects = tuple(_object(item) for item in header["objects"])
    if num_crcs is not None and sum(item.num_crcs for item in objects) != num_crcs:
        raise CorruptError(f"{what} has {num_crcs} checksums, which does not match its objects")
    num_tensors, size = header["tensors"]
    slices = _slices(raw, 8 + length + size, header["columns"], what)
    num_chunks = len(slices["object"][0]) // max(1, slices["object"][1])
    if num_crcs is not None and max(num_tensors, num_chunks) > _max_tensors(num_crcs):
        raise CorruptError(f"{what} has more tensors or boxes than {num_crcs} checksums allow")
    tensors = _tensors(cut(raw, 8 + length, size, what), num_tensors, known, budget, what)

    def column(name: str, length: int) -> "Column[int]":
        if len(slices[name][0]) != length * slices[name][1]:
            raise CorruptError(f"{what} has a column {name!r} of another length")
        return _column(slices[name], known.columns, what)

    leaves = tuple(_leaf(item) for item in header["leaves"])
    counts = column("rows", len(tensors))
    wholes = known.once("wholes", tensors, _wholes)
    starts = known.once("starts", counts, lambda counts: array("q", accumulate(counts, initial=0)))
    num, dims = starts[-1], range(len(wholes))
    plan = Plan(
        tensors=tensors,
        objects=objects,
        leaves=leaves,
        starts=starts,
        object=column("object", num),
        offsets=tuple(column(f"offsets.{dim}", num) for dim in dims),
        sizes=tuple(column(f"sizes.{dim}", num) for dim in dims),
        record_offset=column("record_offset", num),
        head=column("head", num),
        frame=column("frame", num),
        payload_size=column("payload_size", num),
        crc_at=column("crc_at", num),
    )
    _check(plan, wholes, counts, known, what)
    return plan


def _object(item: Any) -> Object:
    component, rank, count = item
    return Object(component=_text(component), rank=_number(rank), num_crcs=_number(count))


def _leaf(item: Any) -> Leaf:
    name, path, component, rank, start, size = item
    return Leaf(
        name=_text(name),
        path=_path(path),
        component=_text(component),
        rank=_number(rank),
        record_offset=_number(start),
        record_size=_number(size),
    )


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{str(value)[:80]!r} is not a text")
    return value


def _number(value: object) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError(f"{str(value)[:80]!r} is not a place, size or count")
    return value


def _path(value: object) -> tuple[str | int, ...]:
    if not isinstance(value, list) or not set(map(type, value)) <= {str, int}:
        raise TypeError(f"{str(value)[:80]!r} is not a place in the state")
    return tuple(value)


def _tensors(
    lines: bytes, number: object, known: ParsedParts, budget: DecompressionBudget, what: str
) -> tuple[Tensor, ...]:
    """Parse the tensors, one JSON line each. A line that was seen before is not parsed again."""
    found = known.lines.get(lines)
    if number != (lines.count(b"\n") + bool(lines) if found is None else len(found)):
        raise CorruptError(f"{what} does not have the {number} tensors that it states")
    if found is not None:
        return found
    rows = lines.split(b"\n") if lines else []
    fresh = [row for row in rows if row not in known.tensors]
    parsed = budget.parse(b"[" + b",".join(fresh) + b"]")
    for row, (name, dtype, shape, path) in zip(fresh, parsed, strict=True):
        tensor = Tensor(
            name=_text(name), dtype=sys.intern(_text(dtype)), shape=tuple(map(_number, shape)), path=_path(path)
        )
        known.tensors[row] = tensor
    return known.lines.setdefault(lines, tuple(map(known.tensors.__getitem__, rows)))


def _slices(raw: bytes, at: int, listed: Iterable[Any], what: str) -> dict[str, tuple[bytes, int, str]]:
    """Cut out the columns. Returns bytes, width and coding by the column's name."""
    found: dict[str, tuple[bytes, int, str]] = {}
    room = MAX_DECODED_BYTES
    for name, count, width, coding in listed:
        found[name] = (cut(raw, at, _number(count) * _number(width), what), width, coding)
        at += count * width
        room -= 8 * count
        if room < 0:
            raise CorruptError(f"{what} has more than {MAX_DECODED_BYTES} bytes")
    return found


def _column(
    encoded: tuple[bytes, int, str], known: dict[tuple[bytes, int, str], "Column[int]"], what: str
) -> "Column[int]":
    if encoded in known:
        return known[encoded]
    data, width, coding = encoded
    if coding not in ("steps", "plain"):
        raise CorruptError(f"{what} has a column coded as {coding!r}")
    column = unpack_column(data, width, as_steps=coding == "steps")
    if min(column, default=0) < 0:
        raise CorruptError(f"{what} has a place or size below 0")
    return known.setdefault(encoded, column)


def _wholes(tensors: Sequence[Tensor]) -> list[tuple[int, ...]]:
    """Return the sizes of all tensors in each dimension, 1 where a tensor has fewer."""
    most = max((len(tensor.shape) for tensor in tensors), default=0)
    if most > MAX_DIMS:
        raise ValueError(f"a tensor has {most} dimensions")
    return list(zip_longest(*(tensor.shape for tensor in tensors), fillvalue=1))


def _highest(column: "Column[int]") -> int:
    return max(column, default=-1)


def _check(
    plan: Plan, wholes_of: Sequence[Sequence[int]], counts: "Column[int]", known: ParsedParts, what: str
) -> None:
    """Check that boxes are inside their tensors and have objects and checksums.

    All columns have the same length here, and no number is negative.
    """
    top_object, top_size, top_crc, most_rows = (
        known.once("highest", column, _highest) for column in (plan.object, plan.payload_size, plan.crc_at, counts)
    )
    if top_object >= len(plan.objects) or any(item.num_crcs < 0 for item in plan.objects):
        raise CorruptError(f"{what} puts a box into an object that it does not list")
    if top_crc - -top_size // SUB_BLOCK > min((item.num_crcs for item in plan.objects), default=0):
        for row, at, size in zip(plan.object, plan.crc_at, plan.payload_size, strict=True):
            if at - -size // SUB_BLOCK > plan.objects[row].num_crcs:
                raise CorruptError(f"{what} gives a box more checksums than its object has")
    has_one_each = most_rows == 1 and len(plan.object) == len(plan.tensors)
    for dim, (offsets, sizes, wholes) in enumerate(zip(plan.offsets, plan.sizes, wholes_of, strict=True)):
        parts = (dim, *map(id, (plan.tensors, counts, offsets, sizes)))
        if parts in known.inside:
            continue
        if not all(map(le, map(add, offsets, sizes), wholes if has_one_each else spread(wholes, counts))):
            _refuse_outside(plan, dim, wholes)
        known.inside.add(parts)


def _refuse_outside(plan: Plan, dim: int, wholes: Sequence[int]) -> None:
    for tensor, whole, (first, end) in zip(plan.tensors, wholes, plan.rows(), strict=True):
        if any(map(whole.__lt__, map(add, plan.offsets[dim][first:end], plan.sizes[dim][first:end]))):
            raise CorruptError(f"a box of {tensor.name} is outside its shape {tensor.shape}")
