"""Writes the patches of all changed tensors of a file as safetensors files, and applies these to the file in place.

Step 46. A patch file contains one tensor of bytes for each changed tensor, under its name. Its metadata say what every
tensor must be before, and is after: a JSON object of [CRC-32 of the base, CRC-32 of the result] by name.
"""

import json
import os
import struct
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

from raycheck.bucket.format.checksum import crc32
from raycheck.errors import CorruptError
from raycheck.published.element_patch import apply, encode
from raycheck.published.weights_file import StoredTensor, mapped, read_head

PATCH_FILE_BYTES = 256 * 1024 * 1024
"""A patch file ends with the tensor that brings it to this size: it is in memory as a whole."""
TENSORS_AT_ONCE = 256
"""So many are compared, in threads, before the next ones are: their patches are in memory."""
FORMAT = "raycheck-patch-1"


def have_equal_heads(base: Path, new: Path) -> bool:
    """Return whether two files have the same tensors in the same places, so that one can be a patch of the other."""
    with mapped(base) as before, mapped(new) as after:
        head = read_head(after, what=str(new))
        return len(before) == len(after) and before[: len(head.data)] == head.data


def patch_files(base: Path, new: Path) -> Iterator[bytes]:
    """Yield the patch files that turn `base` into `new`, none if they are equal. Their heads must be equal."""
    with mapped(base) as before, mapped(new) as after, ThreadPoolExecutor(os.cpu_count()) as pool:

        def encoded(item: StoredTensor) -> tuple[bytes | None, list[str]]:
            old, now = before[item.start : item.stop], after[item.start : item.stop]
            patch = encode(old, now, item.width)
            return patch, [f"{crc32(one):08x}" for one in (old, now)] if patch is not None else []

        patches: dict[str, bytes] = {}
        sums: dict[str, list[str]] = {}
        size = 0
        tensors = iter(read_head(after, what=str(new)).tensors.items())
        while some := dict(islice(tensors, TENSORS_AT_ONCE)):
            for name, (patch, found) in zip(some, pool.map(encoded, some.values()), strict=True):
                if patch is None:
                    continue
                patches[name], sums[name] = patch, found
                size += len(patch)
                if size >= PATCH_FILE_BYTES:
                    yield _patch_file(patches, sums)
                    patches, sums, size = {}, {}, 0
        if patches:
            yield _patch_file(patches, sums)


def _patch_file(patches: Mapping[str, bytes], sums: Mapping[str, list[str]]) -> bytes:
    header: dict[str, object] = {"__metadata__": {"format": FORMAT, "crc32": json.dumps(sums)}}
    at = 0
    for name, patch in patches.items():
        header[name] = {"dtype": "U8", "shape": [len(patch)], "data_offsets": [at, at + len(patch)]}
        at += len(patch)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return b"".join((struct.pack("<Q", len(text)), text, *patches.values()))


def apply_patches(patch_file: bytes, path: Path, *, what: str) -> frozenset[str]:
    """Turn the tensors of the file at `path` that a patch file names into the new ones. Return their names.

    what: names the patch file in errors. Raises CorruptError, before this tensor is changed, when the base is not the
    one that the patch was made from, and when the result is not what it must be.
    """
    data = memoryview(patch_file)
    patches = read_head(data, what=what)
    try:
        sums: Any = json.loads(patches.metadata["crc32"]) if patches.metadata["format"] == FORMAT else None
        expected = {name: (int(sums[name][0], 16), int(sums[name][1], 16)) for name in patches.tensors}
    except (KeyError, IndexError, TypeError, ValueError, RecursionError):
        raise CorruptError(f"{what} is not a file of patches") from None
    with mapped(path) as file:
        places = read_head(file, what=str(path)).tensors
    # Not through the mapping: a disk that becomes full would then kill this process.
    with path.open("r+b") as target:
        for name, item in patches.tensors.items():
            if name not in places:
                raise CorruptError(f"{what}: the base has no tensor {name}")
            place, (before, after) = places[name], expected[name]
            target.seek(place.start)
            values = bytearray(target.read(place.stop - place.start))
            if crc32(values) != before:
                raise CorruptError(f"{what}: {name} is not the base that the patch was made from")
            apply(data[item.start : item.stop], memoryview(values), place.width, what=f"{what}: {name}")
            if crc32(values) != after:
                raise CorruptError(f"{what}: {name} is not what it must be after the patch")
            target.seek(place.start)
            target.write(values)
        target.flush()
        os.fsync(target.fileno())
    return frozenset(patches.tensors)
