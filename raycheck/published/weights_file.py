"""Reads the header of a safetensors file, and finds its tensors' bytes in it."""

import json
import mmap
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raycheck.errors import CorruptError

WEIGHTS = ".safetensors"
MAX_HEAD_BYTES = 100_000_000
"""The limit of the safetensors library."""
WIDTH = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E4M3FNUZ", "F8_E5M2", "F8_E5M2FNUZ"), 1),
}
"""The bytes of an element, by the name of its type."""
_LENGTH = 8


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """The place of a tensor's bytes in its file, and the bytes of an element."""

    start: int
    stop: int
    width: int


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightsHead:
    """The header of a safetensors file. data: its bytes. metadata: the file's own texts."""

    data: bytes
    tensors: Mapping[str, StoredTensor]
    metadata: Mapping[str, str]


def read_head(file: memoryview, *, what: str) -> WeightsHead:
    """Read the header of a file. Raises CorruptError for anything that is not a safetensors file."""
    length = int.from_bytes(file[:_LENGTH], "little")
    if len(file) < _LENGTH or length > min(MAX_HEAD_BYTES, len(file) - _LENGTH):
        raise CorruptError(f"{what} is not a safetensors file")
    data = bytes(file[: _LENGTH + length])
    try:
        tree = json.loads(data[_LENGTH:])
        metadata = {str(name): str(text) for name, text in tree.pop("__metadata__", {}).items()}
        tensors = {name: _tensor(item, len(data), len(file)) for name, item in tree.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise CorruptError(f"{what} is not a safetensors file: its header cannot be read") from None
    return WeightsHead(data=data, tensors=tensors, metadata=metadata)


def _tensor(item: Any, base: int, size: int) -> StoredTensor:
    first, end = item["data_offsets"]
    width = WIDTH[item["dtype"]]
    if type(first) is not int or type(end) is not int:
        raise TypeError
    start, stop = base + first, base + end
    if not base <= start <= stop <= size or (stop - start) % width:
        raise ValueError
    return StoredTensor(start, stop, width)


@contextmanager
def mapped(path: Path) -> Iterator[memoryview]:
    """Map a file into memory, to be read. It stays mapped as long as anything refers to the bytes."""
    with path.open("rb") as file:
        is_empty = not os.fstat(file.fileno()).st_size
        yield memoryview(b"" if is_empty else mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
