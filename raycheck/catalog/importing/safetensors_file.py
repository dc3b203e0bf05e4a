"""Reads the header of a safetensors file and ranges of its tensors; a file in a bucket is never copied completely."""

import json
import math
from collections.abc import Iterator
from typing import Any, cast

import torch

from raycheck.catalog.importing.source_files import BLOCK_BYTES, SourceFiles
from raycheck.catalog.importing.source_tensors import Box, SourceTensor, check_shape
from raycheck.errors import ConfigError, CorruptError
from raycheck.huggingface.export_contents import SAFETENSORS_DTYPES

MAX_HEADER_BYTES = 100_000_000
"""The library's own limit."""
_DTYPES = {name: dtype for dtype, name in SAFETENSORS_DTYPES.items()}


def tensors_of(files: SourceFiles, name: str) -> Iterator[tuple[str, SourceTensor]]:
    """Yield each tensor of a file with its name. Raises CorruptError for a file that violates the format."""
    what = files.what(name)
    header, at = _header(files, name, what)
    end = files.check(name) - at
    spans: list[tuple[int, int]] = []
    for key, about in header.items():
        if key == "__metadata__":
            continue
        if not isinstance(about, dict) or not isinstance(about.get("shape"), list):
            raise CorruptError(f"{what}: {key[:200]!r} is described wrongly")
        dtype, offsets = about.get("dtype"), about.get("data_offsets")
        if dtype not in _DTYPES:
            raise ConfigError(f"{what}: {key[:200]!r} has the type {str(dtype)[:20]}, which torch does not support")
        shape = check_shape(tuple(about["shape"]), f"{what}: {key[:200]!r}")
        match offsets:
            case [int(start), int(stop)] if 0 <= start <= stop <= end:
                spans.append((start, stop))
            case _:
                raise CorruptError(f"{what} is truncated, or its header is wrong: {key[:200]!r} lies outside of it")
        needed = math.prod(shape) * _DTYPES[dtype].itemsize
        if stop - start != needed:
            raise CorruptError(f"{what}: {key[:200]!r} has {stop - start} bytes; its shape and dtype need {needed}")
        yield key, _tensor(files, name, at + start, shape, _DTYPES[dtype])
    _check_spans(spans, end, what)


def _header(files: SourceFiles, name: str, what: str) -> tuple[dict[str, object], int]:
    size = files.check(name)
    length = int.from_bytes(bytes(files.range(name, 0, 8)), "little") if size >= 8 else size
    if length > min(MAX_HEADER_BYTES, size - 8):
        raise CorruptError(f"{what} is truncated, or no safetensors file: its header would have {length} bytes")
    try:
        header = json.loads(bytes(files.range(name, 8, 8 + length)))
    except (ValueError, RecursionError) as error:
        raise CorruptError(f"{what}: its header is not JSON: {error}") from None
    if not isinstance(header, dict):
        raise CorruptError(f"{what}: its header is not a JSON object")
    return header, 8 + length


def _check_spans(spans: list[tuple[int, int]], end: int, what: str) -> None:
    at = 0
    for start, stop in sorted(spans):
        if start != at:
            raise CorruptError(f"{what}: its tensors overlap or leave a hole at byte {at}")
        at = stop
    if at != end:
        raise CorruptError(f"{what}: {end - at} bytes after its tensors belong to none")


def _tensor(files: SourceFiles, name: str, start: int, shape: tuple[int, ...], dtype: torch.dtype) -> SourceTensor:
    row = math.prod(shape[1:]) * dtype.itemsize

    def read(box: Box) -> torch.Tensor:
        first = start + (box.offsets[0] * row if shape else 0)
        count = box.count * dtype.itemsize
        if not count:
            return torch.empty(box.sizes, dtype=dtype)
        flat = torch.empty(count, dtype=torch.uint8)
        view = memoryview(cast("Any", flat.numpy()))
        for at in range(0, count, BLOCK_BYTES):
            stop = min(at + BLOCK_BYTES, count)
            view[at:stop] = files.range(name, first + at, first + stop)
        return flat.view(dtype).view(box.sizes)

    whole = Box((0,) * len(shape), shape)
    return SourceTensor(
        dtype=dtype, shape=shape, boxes=(whole,), can_split=True, read=read, place=(files.uri, name, start, dtype)
    )
