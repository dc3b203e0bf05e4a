"""Reads published versions of a run's weights from a local folder.

An independent implementation. It was written from raycheck/bucket/FORMAT.md alone ("Objects", step 34 and steps 42 to
46), without any of raycheck's code; names of JSON fields that FORMAT.md does not state are those of a published bucket.
"""

import json
import math
import re
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import zstandard

FORMAT_VERSION = 5
LIST_LIMIT = 1 << 20
RECORD_LIMIT = 4 << 20  # FORMAT.md gives none for version.json: that of an export's record
BLOCK = 4 << 20
SEAL = re.compile(rb'"crc32"\s*:\s*"([0-9a-f]{8})"\s*\}\s*\Z')
DIRECTORY = re.compile(r"version-[0-9]{9,}-[0-9a-f]{8}")
WRONG_TYPES = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError)
FAILURES = (ValueError, OSError, zstandard.ZstdError, *WRONG_TYPES)

Files = dict[str, bytes]


def read_version(place: str, directory: str | None = None) -> Files:
    """The newest version's files (or those of the one in `directory`), from the newest whole version up to it."""

    def read() -> Files:
        versions = _up_to(place, directory)
        start = max((i for i, version in enumerate(versions) if version["is_whole"]), default=None)
        _check(start is not None, "no whole version is listed")
        files = _make(versions[start], place, {}, is_patched=False)
        return _follow(versions[start + 1 :], place, files, versions[start]["directory"])

    return _twice(read)


def read_from(base_files: Files, base_directory: str, place: str) -> Files:
    """The newest version's files, made from those of the version `base_directory` by the patches after it."""

    def read() -> Files:
        versions = _up_to(place, None)
        if versions[-1]["directory"] == base_directory:
            files = _record(place, versions[-1])["files"]
            return {name: _whole(name, base_files[name], file) for name, file in files.items()}
        first = next((i for i, version in enumerate(versions) if version["base"] == base_directory), None)
        _check(first is not None, f"no listed version is based on {base_directory}")
        return _follow(versions[first:], place, base_files, base_directory)

    return _twice(read)


def _follow(versions: list[dict], place: str, files: Files, has: str) -> Files:
    for version in versions:
        _check(version["base"] == has, f"{version['directory']} is not based on {has}")
        files, has = _make(version, place, files, is_patched=True), version["directory"]
    return files


def _up_to(place: str, directory: str | None) -> list[dict]:
    versions = _document(_bytes(Path(place, "versions.json"), LIST_LIMIT))["versions"]
    names = [version["directory"] for version in versions]
    _check(bool(names), "no version is published")
    _check(all(DIRECTORY.fullmatch(name) for name in names) and len(set(names)) == len(names), f"directories: {names}")
    _check(directory is None or directory in names, f"{directory} is not listed")
    return versions if directory is None else versions[: names.index(directory) + 1]


def _record(place: str, version: dict) -> dict:
    data = _bytes(Path(place, version["directory"], "version.json"), RECORD_LIMIT)
    _check(zlib.crc32(data) == version["record_crc32"], f"{version['directory']}: not the record that the list names")
    record = _document(data)
    for field in ("directory", "checkpoint", "step", "base"):
        _check(record[field] == version[field], f"{version['directory']}: {field} is not that of the list")
    is_whole = all(file["is_stored"] for file in record["files"].values())
    _check(is_whole or not version["is_whole"], f"{version['directory']}: not whole, but the list says so")
    return record


def _make(version: dict, place: str, before: Files, is_patched: bool) -> Files:
    files, folder = {}, Path(place, version["directory"])
    for name, file in _record(place, version)["files"].items():
        size, crc = file["size_bytes"], file["crc32"]
        if name in before and (len(before[name]), zlib.crc32(before[name])) == (size, crc):
            files[name] = before[name]
        elif is_patched and file["base"] is not None:
            data = bytearray(before[file["base"]])
            for patch in file["patches"]:
                _apply(_fetch(folder, patch["name"], patch), data, patch["name"])
            files[name] = _whole(name, bytes(data), file)
        else:
            _check(file["is_stored"], f"{version['directory']}/{name} is neither stored, nor patched, nor kept")
            files[name] = _fetch(folder, name, file)
    return files


def _apply(patch: bytes, data: bytearray, where: str) -> None:
    changes, metadata = _header(patch)
    tensors, _ = _header(data)
    _check(metadata["format"] == "raycheck-patch-1", f"{where}: unknown format {metadata['format']}")
    checksums = json.loads(metadata["crc32"])
    for name, (dtype, _, start, end) in changes.items():
        begin = start
        _, shape, first, last = tensors[name]
        old, new = (int(digits, 16) for digits in checksums[name])
        size, rest = divmod(last - first, math.prod(shape))
        _check(dtype == "U8" and size in (1, 2, 4, 8) and not rest, f"{where}: {name} has an unknown type")
        tensor = memoryview(data)[first:last]
        _check(zlib.crc32(tensor) == old, f"{where}: {name} is not that of the base")
        for at in range(0, len(tensor), BLOCK):
            _check(begin + 5 <= end, f"{where}: {name} ends early")
            kind, length = patch[begin], int.from_bytes(patch[begin + 1 : begin + 5], "little")
            begin += 5 + length
            _check(begin <= end, f"{where}: {name} ends early")
            _block(kind, patch[begin - length : begin], np.frombuffer(tensor[at : at + BLOCK], f"<u{size}"))
        _check(begin == end, f"{where}: {name} has too many blocks")
        _check(zlib.crc32(tensor) == new, f"{where}: {name} is wrong after the patch")


def _block(kind: int, frame: bytes, elements: np.ndarray) -> None:
    size, count = elements.itemsize, len(elements)
    if kind == 0:
        _check(not frame, "an unchanged block has content")
        return
    length, each = zstandard.frame_content_size(frame), 4 + size if kind == 2 else size
    fits = 0 <= length <= count * each and length % each == 0 and (kind == 2 or length == count * each)
    _check(kind in (1, 2, 3) and fits, f"a block of kind {kind} has {length} bytes")
    raw = zstandard.ZstdDecompressor().decompress(frame, allow_extra_data=False)
    if kind == 1:
        elements ^= _integers(raw, size)
    elif kind == 2:
        split = length // each * 4
        positions = np.cumsum(_integers(raw[:split], 4).astype(np.int64) + 1) - 1
        _check(not len(positions) or positions[-1] < count, "a change is outside of its block")
        elements[positions] ^= _integers(raw[split:], size)
    else:
        elements[:] = _integers(raw, size)


def _integers(planes: bytes, size: int) -> np.ndarray:
    return np.ascontiguousarray(np.frombuffer(planes, np.uint8).reshape(size, -1).T).view(f"<u{size}").reshape(-1)


def _header(data: bytes | bytearray) -> tuple[dict[str, tuple[str, list[int], int, int]], dict[str, str]]:
    """The tensors of a safetensors file, by name (type, shape, first byte and end in the file), and its metadata."""
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(bytes(data[8:start]))
    metadata, tensors = header.pop("__metadata__", {}), {}
    for name, entry in header.items():
        begin, end = (start + offset for offset in entry["data_offsets"])
        _check(start <= begin <= end <= len(data), f"{name} is outside of its file")
        tensors[name] = (entry["dtype"], entry["shape"], begin, end)
    return tensors, metadata


def _document(data: bytes) -> dict:
    document, seal = json.loads(data.decode("utf-8")), SEAL.search(data)
    version = document["format_version"]
    _check(type(version) is int and 1 <= version <= FORMAT_VERSION, f"unknown format version: {version}")
    _check(seal is not None or (version == 1 and "crc32" not in document), "a document has no checksum")
    _check(seal is None or zlib.crc32(data[: seal.start(1)]) == int(seal[1], 16), "a document is damaged")
    return document


def _fetch(folder: Path, name: str, file: dict) -> bytes:
    _check(not {"", ".", ".."} & set(name.split("/")) and "\\" not in name, f"not the name of a file: {name!r}")
    return _whole(name, _bytes(Path(folder, name), file["size_bytes"]), file)


def _whole(name: str, data: bytes, file: dict) -> bytes:
    right = (len(data), zlib.crc32(data)) == (file["size_bytes"], file["crc32"])
    _check(right, f"{name} has another size or checksum than the record says")
    return data


def _bytes(path: Path, limit: int) -> bytes:
    with path.open("rb") as file:
        data = file.read(limit + 1)
    _check(len(data) <= limit, f"{path} has more than {limit} bytes")
    return data


def _twice(read: Callable[[], Files]) -> Files:
    """Reads everything again, the list too, before anything is reported as damaged or missing."""
    try:
        return read()
    except FAILURES:
        pass
    try:
        return read()
    except FAILURES as e:
        raise ValueError(f"{type(e).__name__}: {e}") from e


def _check(is_right: bool, otherwise: str) -> None:
    if not is_right:
        raise ValueError(otherwise)
