"""Reads and writes an index as bytes. Bytes from a bucket are hostile until they have passed `load_index`.

After magic and header come three parts: the plan, which a coordinator rewrites without parsing while it stays the same;
the checksums, uncompressed since they do not compress; and the values, one zlib stream per rank. The bytes are a pure
function of the contents of the index.
"""

import json
import struct
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from raycheck.bucket.format.column_codec import little_endian
from raycheck.bucket.format.decompression import DecompressionBudget, deflate
from raycheck.bucket.format.document import FORMAT_VERSION, check_format_version
from raycheck.bucket.format.index import Column, Index, Plan
from raycheck.bucket.format.plan_codec import CRC_BYTES, MALFORMED, cut, dump_plan, load_plan
from raycheck.errors import CorruptError

MAGIC = b"RCIX"
MAX_HEADER_BYTES = 16 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class IndexParts:
    """The encoded parts of an index.

    values: the shared values, then those of each rank, each as a zlib stream of JSON.
    """

    plan: bytes
    checksums: bytes
    values: tuple[bytes, ...]


def dump_index(index: Index) -> bytes:
    return join_parts(parts_of(index))


def parts_of(index: Index) -> IndexParts:
    return IndexParts(
        plan=dump_plan(index.plan),
        checksums=little_endian(array("I", index.crcs)).tobytes(),
        values=tuple(dump_values(tree) for tree in (index.values, *index.rank_values)),
    )


def join_parts(parts: IndexParts) -> bytes:
    header = {
        "format_version": FORMAT_VERSION,
        "parts": [
            ["plan", len(parts.plan)],
            ["checksums", len(parts.checksums)],
            ["values", sum(map(len, parts.values))],
        ],
        "values": [len(stream) for stream in parts.values],
    }
    text = json.dumps(header, separators=(",", ":")).encode()
    return b"".join((MAGIC, struct.pack("<Q", len(text)), text, parts.plan, parts.checksums, *parts.values))


def dump_values(tree: Mapping[str, Any]) -> bytes:
    return deflate(json.dumps(tree, allow_nan=False, separators=(",", ":")).encode())


def load_index(data: bytes, *, what: str, values: bool = True) -> Index:
    """Parse an index. Raises CorruptError, naming `what`, for anything that is not a well-formed one.

    values: False leaves out the values, for callers that need only the tensors' places.
    """
    try:
        parts = _split(data, what)
        plan = load_plan(parts.plan, what=what, num_crcs=len(parts.checksums) // CRC_BYTES)
        crcs = load_checksums(parts.checksums, plan)
        shared, *own = _load_values(parts.values, what) if values else [{}]
    except CorruptError:
        raise
    except MALFORMED as error:
        raise CorruptError(f"{what} is not an index: {type(error).__name__}: {error}") from None
    return Index(plan=plan, crcs=crcs, values=shared, rank_values=tuple(own))


def load_checksums(data: bytes, plan: Plan) -> "Column[int]":
    """Read the checksums. Raises ValueError when their number differs from the plan's."""
    crcs = array("I")
    crcs.frombytes(data)
    if len(crcs) != sum(item.num_crcs for item in plan.objects):
        raise ValueError(f"{len(crcs)} checksums")
    return little_endian(crcs)


def _split(data: bytes, what: str) -> IndexParts:
    if data[:4] != MAGIC:
        raise CorruptError(f"{what} is not an index: it does not begin with {MAGIC!r}")
    (length,) = struct.unpack_from("<Q", data, 4)
    if length > MAX_HEADER_BYTES:
        raise CorruptError(f"{what} has a header of {length} bytes")
    header = json.loads(cut(data, 12, length, what))
    check_format_version(header, what=what)
    found: dict[str, bytes] = {}
    at = 12 + length
    for name, size in header["parts"]:
        found[name] = cut(data, at, size, what)
        at += size
    values = []
    at = 0
    for size in header["values"]:
        values.append(cut(found["values"], at, size, what))
        at += size
    return IndexParts(plan=found["plan"], checksums=found["checksums"], values=tuple(values))


def _load_values(streams: Sequence[bytes], what: str) -> list[dict[str, Any]]:
    trees = []
    budget = DecompressionBudget(sum(map(len, streams)), what=what)
    for stream in streams:
        tree = budget.parse(budget.inflate(stream))
        if not isinstance(tree, dict):
            raise CorruptError(f"{what} has values without names")
        trees.append(tree)
    return trees
