"""The patch of one tensor: whatever differs comes back, and nothing that a bucket may contain does anything else."""

import struct

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from raycheck.errors import CorruptError
from raycheck.published.element_patch import BLOCK_BYTES, SPARSE, WHOLE, WIDTHS, XOR, apply, encode

UNCHANGED_HEAD = struct.pack("<BI", 0, 0)


def patched(base: np.ndarray, patch: bytes) -> np.ndarray:
    made = bytearray(base.tobytes())
    apply(memoryview(patch), memoryview(made), base.itemsize, what="a tensor")
    return np.frombuffer(made, dtype=base.dtype)


def kinds(patch: bytes) -> list[int]:
    found, at = [], 0
    while at < len(patch):
        kind, size = struct.unpack_from("<BI", patch, at)
        found.append(kind)
        at += 5 + size
    return found


@given(
    st.sampled_from(WIDTHS), st.integers(0, 3000), st.sampled_from([0.0, 0.001, 0.05, 0.5, 1.0]), st.integers(0, 2**32)
)
def test_what_differs_comes_back(width: int, count: int, share: float, seed: int):
    generator = np.random.default_rng(seed)
    base = generator.integers(0, 256, count * width, dtype=np.uint8).view(f"<u{width}")
    new = np.where(generator.random(count) < share, base ^ np.array(1, base.dtype), base).astype(base.dtype)

    patch = encode(memoryview(base.tobytes()), memoryview(new.tobytes()), width)

    assert (patch is None) == bool((base == new).all())
    if patch is not None:
        assert (patched(base, patch) == new).all()


@pytest.mark.parametrize(("share", "kind"), [(0.001, SPARSE), (1.0, XOR)])
def test_the_smaller_form_is_chosen_and_unchanged_blocks_take_five_bytes(share: float, kind: int):
    generator = np.random.default_rng(0)
    base = generator.integers(0, 2**16, BLOCK_BYTES * 3 // 2, dtype=np.uint16)
    new = base.copy()
    last = new[BLOCK_BYTES:]
    last[generator.random(len(last)) < share] ^= 1

    patch = encode(memoryview(base.tobytes()), memoryview(new.tobytes()), 2)

    assert patch is not None
    assert kinds(patch) == [0, 0, kind]
    assert (patched(base, patch) == new).all()
    assert len(patch) < 0.3 * last.nbytes


def test_new_values_without_resemblance_are_never_larger_than_they_are():
    generator = np.random.default_rng(0)
    base, new = (generator.integers(0, 256, 1 << 20, dtype=np.uint8) for _ in range(2))

    patch = encode(memoryview(base.tobytes()), memoryview(new.tobytes()), 1)

    assert patch is not None
    assert kinds(patch) == [WHOLE]
    assert len(patch) <= new.nbytes + 1024
    assert (patched(base, patch) == new).all()


def frame(kind: int, data: bytes) -> bytes:
    packed = zstandard.ZstdCompressor().compress(data)
    return struct.pack("<BI", kind, len(packed)) + packed


def planes(gap: int) -> bytes:
    return struct.pack("<I", gap)


SILENT = zstandard.ZstdCompressor(write_content_size=False).compress(b"\0" * 16)
HOSTILE = {
    "nothing": b"",
    "a head that ends": b"\1\0",
    "a size beyond the end": struct.pack("<BI", XOR, 100),
    "an unknown kind": frame(7, b"\0" * 16),
    "an unchanged block with bytes": struct.pack("<BI", 0, 1) + b"\0",
    "more than the tensor": UNCHANGED_HEAD * 2,
    "no frame": struct.pack("<BI", XOR, 3) + b"abc",
    "a frame that does not say its size": struct.pack("<BI", XOR, len(SILENT)) + SILENT,
    "a frame that becomes too much": frame(XOR, b"\0" * (1 << 24)),
    "too few elements": frame(XOR, b"\0" * 14),
    "no positions": frame(SPARSE, b""),
    "half a position": frame(SPARSE, b"\0" * 5),
    "a position behind the tensor": frame(SPARSE, planes(8) + b"\1\0"),
    "a position far behind the tensor": frame(SPARSE, planes(2**32 - 1) + b"\1\0"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_no_encoder_writes_is_refused(name: str):
    with pytest.raises(CorruptError, match="a tensor"):
        apply(memoryview(HOSTILE[name]), memoryview(bytearray(16)), 2, what="a tensor")
