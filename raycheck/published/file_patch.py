"""Writes the patches of all changed tensors of a file as safetensors files, and applies these to the file in place.

A patch file contains one tensor of bytes for each changed tensor, under its name. Its metadata say what every tensor
must be before, and is after: a JSON object of [CRC-32 of the base, CRC-32 of the result] by name, in hexadecimal.
"""

import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from raycheck.bucket.format.checksum import crc32
from raycheck.errors import CorruptError
from raycheck.published.element_patch import apply, encode
from raycheck.published.weights_file import WeightsHead, mapped, read_head

PATCH_FILE_BYTES = 256 * 1024 * 1024
"""A patch file ends with the tensor that brings it to this size: it is in memory as a whole."""
FORMAT = "raycheck-patch-1"


def patches_of(base: Path, new: Path) -> Iterator[bytes] | None:
    """Return the patch files that turn `base` into `new`, none if they are equal.

    Return None when they have other tensors, or the same in other places.
    """
    with mapped(base) as before, mapped(new) as after:
        if len(before) != len(after):
            return None
        head = read_head(after, what=str(new))
        if before[: len(head.data)] != head.data:
            return None
    return _patch_files(base, new, head)


def _patch_files(base: Path, new: Path, head: WeightsHead) -> Iterator[bytes]:
    with mapped(base) as before, mapped(new) as after:
        patches: dict[str, bytes] = {}
        sums: dict[str, list[str]] = {}
        size = 0
        for name, item in head.tensors.items():
            old, now = before[item.start : item.stop], after[item.start : item.stop]
            patch = encode(old, now, item.width)
            if patch is None:
                continue
            patches[name], sums[name] = patch, [f"{crc32(old):08x}", f"{crc32(now):08x}"]
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


def apply_patches(patch_file: memoryview, file: memoryview, *, what: str) -> frozenset[str]:
    """Turn the tensors of `file` that a patch file names into the new ones. Return their names.

    what: names the patch file in errors. Raises CorruptError, before this tensor is changed, when the base is not the
    one that the patch was made from, and when the result is not what it must be.
    """
    head, patches = read_head(file, what="the file to be patched"), read_head(patch_file, what=what)
    try:
        sums: Any = json.loads(patches.metadata["crc32"]) if patches.metadata["format"] == FORMAT else None
        expected = {name: (int(sums[name][0], 16), int(sums[name][1], 16)) for name in patches.tensors}
    except (KeyError, IndexError, TypeError, ValueError, RecursionError):
        raise CorruptError(f"{what} is not a file of patches") from None
    for name, item in patches.tensors.items():
        place = head.tensors.get(name)
        if place is None:
            raise CorruptError(f"{what}: the base has no tensor {name}")
        target = file[place.start : place.stop]
        before, after = expected[name]
        if crc32(target) != before:
            raise CorruptError(f"{what}: {name} is not the base that the patch was made from")
        apply(patch_file[item.start : item.stop], target, place.width, what=f"{what}: {name}")
        if crc32(target) != after:
            raise CorruptError(f"{what}: {name} is not what it must be after the patch")
    return frozenset(patches.tensors)
