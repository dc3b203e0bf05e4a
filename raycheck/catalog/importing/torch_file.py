"""Reads torch.save files with torch's restricted loader, mapped from disk. No other pickle is ever loaded.

The file is first validated as an archive: a compressed member may decompress to any size, and torch writes none.
"""

import pickle
import zipfile
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from raycheck.catalog.importing.source_files import SourceFiles
from raycheck.catalog.importing.source_tensors import Box, SourceTensor, SourceTensors
from raycheck.errors import ConfigError, CorruptError

MAX_PICKLE_BYTES = 256 * 1024 * 1024
MAX_MEMBERS = 4_000_000
MAX_VALUES = 10_000_000
MAX_DEPTH = 100
Represent = Callable[[torch.Tensor, str], torch.Tensor]
"""A function that takes a loaded tensor and its path, and returns the tensor on the meta device that represents it."""


def read_torch_file(files: SourceFiles, name: str, tensors: SourceTensors, *, verify: bool) -> Any:
    """Return the contents of a file, with tensors on the meta device in place of its tensors.

    verify: compare all bytes with the checksums that torch wrote. Raises ConfigError for what only pickle could make,
    CorruptError for a file that is truncated, or that torch did not write.
    """
    what = files.what(name)

    def represent(tensor: torch.Tensor, path: str) -> torch.Tensor:
        return tensors.add(source_tensor(tensor, f"{what}: {path}"), f"{what}: {path}")

    return represented(load_restricted(files.local(name), what, verify=verify), represent, what)


def load_restricted(path: Path, what: str, *, verify: bool) -> Any:
    """Load a file with torch's restricted loader. Its tensors are mapped from disk."""
    _check_archive(path, what, verify=verify)
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        raise ConfigError(_advice(path, what, error)) from None
    except Exception as error:  # noqa: BLE001  a hostile archive makes torch raise anything
        raise CorruptError(f"{what} cannot be read: {type(error).__name__}: {str(error)[:300]}") from None


def represented(value: Any, represent: Represent, what: str) -> Any:
    """Return a copy of a nested value with a representation in place of each tensor.

    Raises CorruptError for one that is nested too deeply, or has too many values: small pickles can describe both.
    """
    left = MAX_VALUES

    def visit(value: Any, path: str, depth: int) -> Any:
        nonlocal left
        left -= 1
        if left < 0 or depth > MAX_DEPTH:
            raise CorruptError(f"{what}: {path[:100]} is nested deeper than {MAX_DEPTH} levels, or there are too many")
        if isinstance(value, torch.Tensor):
            return represent(value, path)
        if isinstance(value, dict):
            items = {key: visit(item, f"{path}.{key}" if path else str(key), depth + 1) for key, item in value.items()}
            if type(value) is OrderedDict:
                return OrderedDict(items)
            return defaultdict(value.default_factory, items) if isinstance(value, defaultdict) else items
        if type(value) in (list, tuple, deque):
            found = [visit(item, f"{path}.{at}", depth + 1) for at, item in enumerate(value)]
            return deque(found, value.maxlen) if type(value) is deque else type(value)(found)
        return value

    return visit(value, "", 0)


def source_tensor(tensor: torch.Tensor, what: str) -> SourceTensor:
    """Return the description of a loaded tensor. Raises ConfigError if its value is not its bytes."""
    tensor = tensor.detach()
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        raise ConfigError(
            f"{what} is a {type(tensor).__qualname__}: it is the part of one rank. Name the folder with the files of "
            "all ranks"
        )
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
        raise ConfigError(f"{what} is a {tensor.layout} tensor; only dense, unquantized ones are imported")
    if tensor.is_meta:
        raise ConfigError(f"{what} was saved on the meta device, without any values")
    if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
        raise ConfigError(f"{what} repeats its elements (an expanded tensor): save it again after .contiguous()")
    shape = tuple(tensor.shape)

    def read(box: Box) -> torch.Tensor:
        return tensor[tuple(slice(start, start + size) for start, size in zip(box.offsets, box.sizes, strict=True))]

    return SourceTensor(
        dtype=tensor.dtype,
        shape=shape,
        boxes=(Box((0,) * len(shape), shape),),
        can_split=True,
        read=read,
        place=(tensor.data_ptr(), tensor.dtype, shape, tensor.stride(), tensor.is_conj(), tensor.is_neg()),
    )


def _check_archive(path: Path, what: str, *, verify: bool) -> None:
    size = path.stat().st_size
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
            _check_members(members, size, what)
            broken = archive.testzip() if verify else None
    except zipfile.BadZipFile as error:
        raise CorruptError(_no_archive(path, what, error)) from None
    except (OSError, ValueError, NotImplementedError, RuntimeError) as error:
        raise CorruptError(f"{what} cannot be read: {error}") from None
    if broken is not None:
        raise CorruptError(f"{what}: {broken[:100]!r} in it does not have the checksum that was written with it")


def _check_members(members: list[zipfile.ZipInfo], size: int, what: str) -> None:
    if len(members) > MAX_MEMBERS or sum(member.file_size for member in members) > size:
        raise CorruptError(f"{what} names more bytes than it has")
    for member in members:
        if member.compress_type != zipfile.ZIP_STORED or member.file_size != member.compress_size:
            raise CorruptError(f"{what}: {member.filename[:100]!r} in it is compressed; torch.save compresses nothing")
        if member.filename.endswith(".pkl") and member.file_size > MAX_PICKLE_BYTES:
            raise CorruptError(f"{what} has {member.file_size} bytes of pickle, more than the {MAX_PICKLE_BYTES} read")


def _no_archive(path: Path, what: str, error: Exception) -> str:
    with path.open("rb") as file:
        start = file.read(4)
    if start[:1] == b"\x80":
        return (
            f"{what} is a bare pickle, or from before torch 1.6, and can neither be mapped nor checked. If "
            "you trust it, load it and save it again: torch.save(torch.load(file, weights_only=True), new_file)"
        )
    is_cut = start == b"PK\x03\x04"
    return f"{what} is truncated: its end is missing" if is_cut else f"{what} is not a file of torch.save: {error}"


def _advice(path: Path, what: str, error: Exception) -> str:
    try:
        found = ", ".join(torch.serialization.get_unsafe_globals_in_checkpoint(path))
    except Exception:  # noqa: BLE001  it may refuse the same file for another reason
        found = ""
    reason = f"holds objects of other kinds ({found[:500]})" if found else str(error).partition("\n")[0][:500]
    return (
        f"{what} {reason}: only pickle could make them, which may run any code, so nothing was loaded. If you trust "
        "the file, load it with weights_only=False and save its state dicts alone, as torch.save({'model': ...})"
    )
