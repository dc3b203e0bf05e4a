"""Writes DCP's own `.metadata` for a component, so that stock torch reads it. raycheck never reads it: it is a pickle.

It is written opcode by opcode and without torch: a coordinator needs torch for nothing else, and a million boxes as
objects would cost it half a minute. Only a few integers vary from box to box; `struct` puts them between bytes that are
equal for a whole tensor. Objects are made by calls of their classes with the arguments that every torch since 2.6
takes; fields that a newer one adds get its defaults.
"""

import io
import pickle
import struct
from collections.abc import Iterable, Mapping, Sequence
from itertools import count, repeat
from operator import add

from raycheck.bucket.format.index import Leaf, Plan, Tensor
from raycheck.bucket.format.object_keys import shard_file

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
    out = _Pickle()
    own = [item.component == component for item in plan.objects]
    files = {number: out.keep(_plain(shard_file(item.rank))) for number, item in enumerate(plan.objects) if own[number]}
    spans = [(tensor, *span) for tensor, span in zip(plan.tensors, plan.rows(), strict=True)]
    found = [(tensor, rows) for tensor, first, end in spans if (rows := _rows(plan, first, end, own))]
    leaves = [leaf for leaf in plan.leaves if leaf.component == component]
    out.write(out["Metadata"], _DICT)
    names = [_write_tensor(out, plan, tensor, rows) for tensor, rows in found]
    for leaf in leaves:
        out.write(_plain(leaf.name), out["BytesStorageMetadata"], _ARGS[0], _CALL)
    out.write(b"u", _DICT)
    things: list[Tensor | Leaf] = [*(tensor for tensor, _ in found), *leaves]
    for thing in things:
        out.write(_plain(thing.name), _plain(thing.path))
    out.write(b"u", _DICT)
    for (_, rows), known_as in zip(found, names, strict=True):
        _write_places(out, plan, rows, known_as, files)
    for leaf in leaves:
        out.write(out["MetadataIndex"], _plain(leaf.name), _ARGS[1], _CALL, out["_StorageInfo"])
        out.write(*map(_plain, (shard_file(leaf.rank), leaf.record_offset, leaf.record_size)), _ARGS[3], _CALL)
    out.write(b"u", _ARGS[3], _CALL, b".")
    return out.data()


def _rows(plan: Plan, first: int, end: int, own: Sequence[bool]) -> Sequence[int]:
    """Return the rows of a tensor that are in the component: nearly always all."""
    return range(first, end) if all(own) else [row for row in range(first, end) if own[plan.object[row]]]


def _write_tensor(out: "_Pickle", plan: Plan, tensor: Tensor, rows: Sequence[int]) -> int:
    """Write a tensor's name and what stock torch knows of it.

    Returns the number of the name in the memo. Those of its chunks' offsets come next.
    """
    dims = len(tensor.shape)
    columns = [_taken(column, rows) for column in plan.sizes[:dims]]
    is_even = all(len(set(column)) == 1 for column in columns)
    sizes = [tuple(column[0] for column in columns)] if is_even else list(zip(*columns, strict=True))
    for size in dict.fromkeys(sizes):
        if size not in out.sizes:
            out.sizes[size] = out.keep(out["Size"] + _plain(size) + _ARGS[1] + _CALL)
    dtype = out.dtype(tensor.dtype)
    name = out.memoize(_plain(tensor.name))
    out.write(out["TensorStorageMetadata"], out["TensorProperties"], dtype, _ARGS[1], _CALL)
    out.write(out["Size"], _plain(tensor.shape), _ARGS[1], _CALL, b"](")
    opened, closed = (b"", _ARGS[dims]) if dims < len(_ARGS) else (b"(", b"t")
    row = _Row(len(rows))
    row.constant(out["ChunkStorageMetadata"] + out["Size"] + opened)
    for column in plan.offsets[:dims]:
        row.integers(_taken(column, rows))
    row.constant(closed + _ARGS[1] + _CALL + _MEMOIZE)
    row.references(repeat(out.sizes[sizes[0]]) if is_even else map(out.sizes.__getitem__, sizes))
    row.constant(_ARGS[2] + _CALL)
    out.write_rows(row, memoized=len(rows))
    out.write(b"e", _ARGS[3], _CALL)
    return name


def _write_places(out: "_Pickle", plan: Plan, rows: Sequence[int], name: int, files: Mapping[int, int]) -> None:
    """Write the map from each chunk to its file, offset and size. files: the pickle memo's id of each file name."""
    sizes = _taken(plan.payload_size, rows)
    row = _Row(len(rows))
    row.constant(out["MetadataIndex"] + _reference(name))
    row.references(count(name + 1))
    row.integers(range(len(rows)))
    row.constant(_ARGS[3] + _CALL + out["_StorageInfo"])
    row.references(map(files.__getitem__, _taken(plan.object, rows)))
    row.integers(_taken(plan.record_offset, rows))
    row.integers([*map(add, sizes, _taken(plan.frame, rows))])
    row.constant(_ARGS[3] + _CALL)
    out.write_rows(row, memoized=0)


def _taken(column: Sequence[int], rows: Sequence[int]) -> Sequence[int]:
    return column[rows.start : rows.stop] if isinstance(rows, range) else [column[row] for row in rows]


class _Row:
    """The opcodes of many similar things: one format of `struct`, and a column of arguments for each field."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._format = "<"
        self._columns: list[Iterable[object]] = []

    def constant(self, data: bytes) -> None:
        self._format += f"{len(data)}s"
        self._columns.append(repeat(data, self._count))

    def references(self, numbers: Iterable[int]) -> None:
        """Add references to the things that were memoized under these numbers."""
        self.constant(b"j")
        self._format += "I"
        self._columns.append(numbers)

    def integers(self, column: Sequence[int]) -> None:
        is_long = max(column) >= 1 << 31
        self.constant(b"\x8a\x08" if is_long else b"J")
        self._format += "q" if is_long else "i"
        self._columns.append(column)

    def data(self) -> bytes:
        return b"".join(map(struct.Struct(self._format).pack, *self._columns))


class _Pickle:
    """A pickle being written. Its memo numbers things in the order in which they were memoized.

    sizes: the memo's numbers of the chunks' sizes.
    """

    def __init__(self) -> None:
        self._parts = [b"\x80\x04"]
        self._memoized = 0
        self._names: dict[str, int] = {}
        self._dtypes: dict[str, int] = {}
        self.sizes: dict[tuple[int, ...], int] = {}
        for name, module in _MODULES.items():
            self._names[name] = self.keep(_global(module, name))

    def write(self, *opcodes: bytes) -> None:
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

    def write_rows(self, row: _Row, *, memoized: int) -> None:
        self.write(row.data())
        self._memoized += memoized

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
    """Return the opcodes for plain data, without memo, frame and ends."""
    sink = io.BytesIO()
    pickler = pickle.Pickler(sink, protocol=3)
    pickler.fast = True
    pickler.dump(value)
    return sink.getvalue()[2:-1]
