"""A record with its payload is byte for byte what the installed torch writes, and what torch and zipfile read."""

import io
import math
import resource
import struct
import zipfile

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raycheck.bucket.format.checksum import crc32
from raycheck.transfer.stage.torch_record import TorchRecord, record_for

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
    torch.bool,
    torch.complex64,
    torch.complex128,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
]
SHAPES = [
    (),
    (0,),
    (1,),
    (3, 0, 2),
    (7,),
    (5, 3),
    (1, 1, 1),
    (13, 1, 17),
    (2, 1, 3, 1, 2, 1, 1, 1, 1, 1, 1, 2),
    (100_003,),
    (257, 129),
]
ids = [str(dtype).removeprefix("torch.") for dtype in DTYPES]


@pytest.mark.parametrize("dtype", DTYPES, ids=ids)
def test_frame_and_payload_are_what_torch_save_writes(dtype: torch.dtype):
    for shape in SHAPES:
        tensor = random_tensor(dtype, shape, seed=1)

        record = record_of(tensor)

        assert record == torch_saved(tensor), shape


@pytest.mark.parametrize("dtype", DTYPES, ids=ids)
def test_torch_load_and_zipfile_accept_the_record(dtype: torch.dtype):
    for shape in SHAPES:
        tensor = random_tensor(dtype, shape, seed=2)
        record = record_of(tensor)

        loaded = torch.load(io.BytesIO(record), weights_only=True)

        assert (loaded.dtype, loaded.shape) == (tensor.dtype, tensor.shape)
        assert raw(loaded) == raw(tensor)
        with zipfile.ZipFile(io.BytesIO(record)) as archive:
            assert archive.testzip() is None


@settings(max_examples=60, deadline=None)
@given(dtype=st.sampled_from(DTYPES), shape=st.lists(st.integers(0, 6), max_size=12), seed=st.integers(0, 1000))
def test_any_small_shape_is_what_torch_save_writes(dtype: torch.dtype, shape: list[int], seed: int):
    shape = shape if math.prod(shape) < 10_000 else shape[:4]
    tensor = random_tensor(dtype, tuple(shape), seed=seed)

    record = record_of(tensor)

    assert record == torch_saved(tensor)


def test_one_template_serves_payloads_with_any_checksum():
    frame = record_for(torch.float32, (33,))
    tensors = [random_tensor(torch.float32, (33,), seed=seed) for seed in range(50)]

    records = [record_of(tensor) for tensor in tensors]

    assert frame is record_for(torch.float32, (33,))
    assert records == [torch_saved(tensor) for tensor in tensors]


def test_the_payload_begins_at_a_multiple_of_64_that_no_constant_gives():
    frames = [record_for(dtype, shape) for dtype in DTYPES for shape in SHAPES]

    starts = {len(frame.head) for frame in frames}

    assert all(start % 64 == 0 for start in starts)
    assert len(starts) > 1


def test_a_frame_beyond_4_gib_is_a_zip64_and_touches_no_memory():
    size = (1 << 32) + 1024
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    frame = record_for(torch.uint8, (size,))
    tail = bytes(frame.sealed_tail(0xDEADBEEF))

    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown_kib < 64 * 1024
    assert frame.payload_size == size
    assert len(frame.head) % 64 == 0
    assert len(frame.head) < 1024
    assert len(tail) < 2048
    # The descriptor of the payload: signature, checksum, and both sizes in 8 bytes each.
    assert struct.unpack_from("<IIQQ", tail) == (0x08074B50, 0xDEADBEEF, size, size)
    members = {member.filename: member for member in zipfile.ZipFile(Holed(frame, tail)).infolist()}
    assert members["archive/data/0"].file_size == size
    assert members["archive/data/0"].CRC == 0xDEADBEEF
    identity = tail[tail.index(frame.id_prefix) :][:40]
    assert identity.isdigit()
    assert crc32(identity) == members["archive/.data/serialization_id"].CRC


@pytest.mark.parametrize("over", [-64, 0, 64])
def test_frames_around_4_gib_parse_and_only_their_checksum_fields_change(over: int):
    frame = record_for(torch.uint8, ((1 << 32) + over,))

    one, two = frame.sealed_tail(1), frame.sealed_tail(2)

    places = {at + i for at in (*frame.payload_crc_at, *frame.id_crc_at) for i in range(4)}
    places |= set(range(frame.id_digits_at, frame.id_digits_at + 20))
    assert {at for at in range(len(one)) if one[at] != two[at]} <= places
    for tail in (one, two):
        with zipfile.ZipFile(Holed(frame, bytes(tail))) as archive:
            assert archive.getinfo("archive/data/0").file_size == (1 << 32) + over
            assert archive.read("archive/version") == b"3\n"


class Holed(io.RawIOBase):
    """The record with a payload of zeros that is not there."""

    def __init__(self, frame: TorchRecord, tail: bytes) -> None:
        super().__init__()
        self._writes = [(0, frame.head), (len(frame.head) + frame.payload_size, tail)]
        self._at = 0
        self._size = frame.record_size

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, self._size)[whence]
        return self._at

    def read(self, size: int = -1) -> bytes:
        stop = self._size if size < 0 else min(self._at + size, self._size)
        out = bytearray(stop - self._at)
        for start, written in self._writes:
            low, high = max(start, self._at), min(start + len(written), stop)
            if low < high:
                out[low - self._at : high - self._at] = written[low - start : high - start]
        self._at = stop
        return bytes(out)


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...], *, seed: int) -> torch.Tensor:
    """Random bytes, seen as `dtype`: NaNs and all."""
    generator = torch.Generator().manual_seed(seed)
    count = math.prod(shape)
    high = 2 if dtype is torch.bool else 256
    data = torch.randint(0, high, (count * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return data.view(dtype).view(shape)


def record_of(tensor: torch.Tensor) -> bytes:
    frame = record_for(tensor.dtype, tuple(tensor.shape))
    payload = raw(tensor)
    assert len(payload) == frame.payload_size
    record = frame.head + payload + bytes(frame.sealed_tail(crc32(payload)))
    assert len(record) == frame.record_size
    return record


def torch_saved(tensor: torch.Tensor) -> bytes:
    sink = io.BytesIO()
    torch.save(tensor.clone(), sink)
    return sink.getvalue()


def raw(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().flatten().view(torch.uint8).numpy())
