"""Writes DCP's own `.metadata` for a component, so that stock torch reads it. raycheck never reads it: it is a pickle.

It is written opcode by opcode and without torch: a coordinator needs torch for nothing else, and a million boxes as
objects would cost it half a minute. Only a few integers vary from box to box; numpy, or `struct` for a few boxes, puts
them between bytes that are equal for all. Objects are made by calls of their classes with the arguments that
every torch since 2.6 takes; fields that a newer one adds get its defaults.
"""

import struct
from array import array
from collections.abc import Sequence
from itertools import repeat
from typing import TYPE_CHECKING

from raycheck.bucket.assembly.numbers import FEW_BOXES, numbers_of
from raycheck.bucket.format.index import Column, Plan, Tensor
from raycheck.bucket.format.object_keys import shard_file

if TYPE_CHECKING:
    from raycheck.bucket.assembly.numbers import Numbers

_METADATA, _FILESYSTEM = "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"
_MODULES = {
    "Size": "torch",
    "Metadata": _METADATA,
    "TensorStorageMetadata": _METADATA,
    "TensorProperties": _METADATA,
    "ChunkStorageMetadata": _METADATA,
    "BytesStorageMetadata": _METADATA,
    "MetadataIndex": _METADATA,
    "_StorageInfo": _FILESYSTEM,
}
_CALL, _POP, _MEMOIZE, _DICT = b"R", b"0", b"\x94", b"}("
_ARGS = (b")", b"\x85", b"\x86", b"\x87")
"""Opcodes by count: each makes a tuple of that many topmost items of the stack."""


def dcp_metadata(plan: Plan, component: str) -> bytes:
    """Return the bytes of `.metadata`: a pure function of the plan, so that another coordinator writes them, too."""
    import numpy as np

    out = _Pickle()
    own = [item.component == component for item in plan.objects]
    spans = [(tensor, *span) for tensor, span in zip(plan.tensors, plan.rows(), strict=True)]
    found = [(tensor, rows) for tensor, first, end in spans if (rows := _rows(plan, first, end, own))]
    leaves = [(leaf, _plain(leaf.name)) for leaf in plan.leaves if leaf.component == component]
    ranks = {item.rank for item in plan.objects} | {leaf.rank for leaf, _ in leaves}
    files = {rank: _plain(shard_file(rank)) for rank in ranks}
    file_numbers = np.array(
        [out.keep(files[item.rank]) if is_own else -1 for item, is_own in zip(plan.objects, own, strict=True)], np.int64
    )
    out.write(out["Metadata"], _DICT)
    names = [_write_tensor(out, plan, tensor, rows) for tensor, rows in found]
    storage = out["BytesStorageMetadata"] + _ARGS[0] + _CALL
    out.write(*(name + storage for _, name in leaves))
    out.write(b"u", _DICT)
    out.write(*(_plain(tensor.name) + _plain(tensor.path) for tensor, _ in found))
    out.write(*(name + _plain(leaf.path) for leaf, name in leaves))
    out.write(b"u", _DICT)
    if found:
        _write_places(out, plan, [rows for _, rows in found], names, file_numbers)
    before, between, after = out["MetadataIndex"], _ARGS[1] + _CALL + out["_StorageInfo"], _ARGS[3] + _CALL
    for leaf, name in leaves:
        place = files[leaf.rank] + _plain(leaf.record_offset) + _plain(leaf.record_size)
        out.write(before + name + between + place + after)
    out.write(b"u", _ARGS[3], _CALL, b".")
    return out.data()


def _write_places(
    out: "_Pickle", plan: Plan, rows_of: Sequence[Sequence[int]], names: Sequence[int], file_numbers: "Numbers"
) -> None:
    """Write where each box is. rows_of: by tensor. names: see _write_tensor. file_numbers: the memo's, by object."""
    import numpy as np

    counts = np.array([len(rows) for rows in rows_of])
    rows = np.concatenate([numbers_of(rows) for rows in rows_of])
    known_as = np.repeat(np.array(names), counts)
    number = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    row = _Row(len(rows))
    row.constant(out["MetadataIndex"])
    row.references(known_as)
    row.references(known_as + 1 + number)
    row.integers(number)
    row.constant(_ARGS[3] + _CALL + out["_StorageInfo"])
    row.references(file_numbers[numbers_of(plan.object)[rows]])
    row.integers(numbers_of(plan.record_offset)[rows])
    row.integers((numbers_of(plan.payload_size) + numbers_of(plan.frame))[rows])
    row.constant(_ARGS[3] + _CALL)
    out.write(row.data())


def _rows(plan: Plan, first: int, end: int, own: Sequence[bool]) -> Sequence[int]:
    """Return the rows of a tensor that are in the component: nearly always all."""
    return range(first, end) if all(own) else [row for row in range(first, end) if own[plan.object[row]]]


def _write_tensor(out: "_Pickle", plan: Plan, tensor: Tensor, rows: Sequence[int]) -> int:
    """Write a tensor's name and what stock torch knows of it.

    Returns the number of the name in the memo. Those of its chunks' offsets come next.
    """
    dims = len(tensor.shape)
    sizes = [_taken(column, rows) for column in plan.sizes[:dims]]
    offsets = [_taken(column, rows) for column in plan.offsets[:dims]]
    form: tuple[object, ...] | None = None
    if len(rows) <= FEW_BOXES:  # many tensors have the same
        form = (len(rows), tensor.dtype, tensor.shape, *(column.tobytes() for column in (*sizes, *offsets)))
    known = out.properties.get(form) if form else None
    if known is None:
        known = _properties(out, tensor, len(rows), sizes, offsets)
    if form:
        out.properties[form] = known
    name = out.memoize(_plain(tensor.name))
    out.write_memoizing(known, len(rows))
    return name


def _properties(
    out: "_Pickle",
    tensor: Tensor,
    count: int,
    size_columns: Sequence["Column[int]"],
    offset_columns: Sequence["Column[int]"],
) -> bytes:
    """Return the opcodes of what stock torch knows of a tensor. They memoize the offsets of each of its chunks."""
    dims = len(tensor.shape)
    is_even = all(_is_even(column) for column in size_columns)
    sizes = [tuple(column[0] for column in size_columns)] if is_even else list(zip(*size_columns, strict=True))
    for size in dict.fromkeys(sizes):
        if size not in out.sizes:
            out.sizes[size] = out.keep(out["Size"] + _plain(size) + _ARGS[1] + _CALL)
    dtype = out.dtype(tensor.dtype)
    opened, closed = (b"", _ARGS[dims]) if dims < len(_ARGS) else (b"(", b"t")
    row = _Row(count)
    row.constant(out["ChunkStorageMetadata"] + out["Size"] + opened)
    for column in offset_columns:
        row.integers(column)
    row.constant(closed + _ARGS[1] + _CALL + _MEMOIZE)
    if is_even:
        row.constant(b"j" + struct.pack("<I", out.sizes[sizes[0]]))
    else:
        row.references([out.sizes[size] for size in sizes])
    row.constant(_ARGS[2] + _CALL)
    before = out["TensorStorageMetadata"] + out["TensorProperties"] + dtype + _ARGS[1] + _CALL
    shape = out["Size"] + _plain(tensor.shape) + _ARGS[1] + _CALL
    return before + shape + b"](" + row.data() + b"e" + _ARGS[3] + _CALL


def _taken(column: "Column[int]", rows: Sequence[int]) -> "Column[int]":
    return column[rows.start : rows.stop] if isinstance(rows, range) else array("q", (column[row] for row in rows))


def _is_even(column: "Column[int]") -> bool:
    """Return whether all numbers are equal. column: at least one number."""
    if len(column) <= FEW_BOXES:
        return column.count(column[0]) == len(column)
    return bool((numbers_of(column) == column[0]).all())


class _Row:
    """The opcodes of many similar things: bytes that are equal for all of them, and columns of integers between."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._parts: list[bytes | tuple[str, Sequence[int] | Numbers]] = []

    def constant(self, data: bytes) -> None:
        self._parts.append(data)

    def references(self, numbers: "Sequence[int] | Numbers") -> None:
        """Add references to the things that were memoized under these numbers."""
        self._parts += b"j", ("I", numbers)

    def integers(self, column: "Sequence[int] | Numbers") -> None:
        highest = max(column) if self._count <= FEW_BOXES else int(numbers_of(column).max())
        is_long = highest >= 1 << 31
        self._parts += (b"\x8a\x08", ("q", column)) if is_long else (b"J", ("i", column))

    def data(self) -> bytes | bytearray:
        return self._packed_by_struct() if self._count <= FEW_BOXES else self._packed_by_numpy()

    def _packed_by_struct(self) -> bytes:
        form = "".join(f"{len(part)}s" if isinstance(part, bytes) else part[0] for part in self._parts)
        columns = [repeat(part, self._count) if isinstance(part, bytes) else part[1] for part in self._parts]
        return b"".join(map(struct.Struct(f"<{form}").pack, *columns))

    def _packed_by_numpy(self) -> bytearray:
        """Repeat one row with gaps, and put a column into each gap."""
        import numpy as np

        row, columns = b"", []
        for part in self._parts:
            if isinstance(part, bytes):
                row += part
            else:
                columns.append((len(row), *part))
                row += bytes(struct.calcsize(f"<{part[0]}"))
        whole = bytearray(row) * self._count
        for at, code, column in columns:
            gap = np.dtype({"names": ["gap"], "formats": [f"<{code}"], "offsets": [at], "itemsize": len(row)})
            np.frombuffer(whole, gap)["gap"] = numbers_of(column)
        return whole


class _Pickle:
    """A pickle being written. Its memo numbers things in the order in which they were memoized.

    sizes: the memo's numbers of the chunks' sizes. properties: what was written of tensors of few boxes, by their form.
    """

    def __init__(self) -> None:
        self._parts: list[bytes | bytearray] = [b"\x80\x04"]
        self._memoized = 0
        self._names: dict[str, int] = {}
        self._dtypes: dict[str, int] = {}
        self.sizes: dict[tuple[int, ...], int] = {}
        self.properties: dict[tuple[object, ...], bytes] = {}
        for name, module in _MODULES.items():
            self._names[name] = self.keep(_global(module, name))

    def write(self, *opcodes: bytes | bytearray) -> None:
        self._parts += opcodes

    def memoize(self, opcodes: bytes) -> int:
        """Write a thing and memoize it under the number that is returned."""
        self.write(opcodes, _MEMOIZE)
        self._memoized += 1
        return self._memoized - 1

    def keep(self, opcodes: bytes) -> int:
        """Memoize a thing for later and leave nothing on the stack."""
        number = self.memoize(opcodes)
        self.write(_POP)
        return number

    def write_memoizing(self, opcodes: bytes, count: int) -> None:
        """Write opcodes that memoize so many things."""
        self.write(opcodes)
        self._memoized += count

    def __getitem__(self, name: str) -> bytes:
        """Return the opcodes that refer to a class of torch."""
        return _reference(self._names[name])

    def dtype(self, name: str) -> bytes:
        if name not in self._dtypes:
            self._dtypes[name] = self.keep(_global("torch", name))
        return _reference(self._dtypes[name])

    def data(self) -> bytes:
        return b"".join(self._parts)


def _reference(number: int) -> bytes:
    return b"h" + bytes((number,)) if number < 256 else b"j" + struct.pack("<I", number)


def _global(module: str, name: str) -> bytes:
    return _plain(module) + _plain(name) + b"\x93"


def _plain(value: object) -> bytes:
    """Return the opcodes for a text, an integer of at most 64 bits, or a tuple of these, without memo and frame."""
    if isinstance(value, str):
        text = value.encode("utf-8", "surrogatepass")
        return b"X" + len(text).to_bytes(4, "little") + text
    if isinstance(value, int):
        is_long = not -1 << 31 <= value < 1 << 31
        return b"\x8a\x08" + value.to_bytes(8, "little", signed=True) if is_long else b"J" + struct.pack("<i", value)
    assert isinstance(value, tuple), "the plan has nothing else"
    items = b"".join(map(_plain, value))
    return items + _ARGS[len(value)] if len(value) < len(_ARGS) else b"(" + items + b"t"
