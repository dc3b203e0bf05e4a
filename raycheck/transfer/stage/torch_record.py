"""Frames raw tensor bytes as one `torch.save` record, so that stock DCP reads our shards.

Passing the payload through `torch.save` would cost ten times a copy. Instead torch writes a template once per dtype and
shape, with the payload skipped, so a new torch brings its own layout. Only five fields depend on the payload, all
through its CRC-32. No position in the layout is hard-coded here: all come from the template's own central directory.
"""

import io
import re
import struct
import zipfile
from dataclasses import dataclass
from functools import lru_cache
from typing import IO, TYPE_CHECKING, cast

import torch

from raycheck.bucket.format.checksum import crc32

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_CENTRAL = b"PK\x01\x02"
_DESCRIPTOR = b"PK\x07\x08"


@dataclass(frozen=True, kw_only=True, slots=True)
class TorchRecord:
    """The bytes of a record before and after a payload of `payload_size` bytes.

    The other fields locate the bytes of the tail that depend on the payload's CRC-32. Their offsets count from the
    first byte of the tail.
    """

    head: bytes
    tail: bytes
    payload_size: int
    payload_crc_at: tuple[int, ...]
    id_digits_at: int
    id_crc_at: tuple[int, ...]
    id_prefix: bytes
    fold_before: tuple[int, ...]
    fold_after: tuple[int, ...]

    @property
    def record_size(self) -> int:
        """Return the size of the whole record in bytes."""
        return len(self.head) + self.payload_size + len(self.tail)

    def sealed_tail(self, payload_crc: int) -> bytearray:
        """Return the tail for a payload with this CRC-32. Head, payload and tail are exactly what torch writes."""
        tail = bytearray(self.tail)
        if self.payload_size == 0:
            return tail  # torch does not fold in the checksum of an empty payload
        folded = 0
        for crc in (*self.fold_before, payload_crc, *self.fold_after):
            folded ^= (crc + 0x9E3779B9 + (folded << 6) + (folded >> 2)) & 0xFFFFFFFFFFFFFFFF
            folded &= 0xFFFFFFFFFFFFFFFF
        digits = f"{folded:020d}".encode()
        tail[self.id_digits_at : self.id_digits_at + 20] = digits
        for at in self.payload_crc_at:
            struct.pack_into("<I", tail, at, payload_crc)
        for at in self.id_crc_at:
            struct.pack_into("<I", tail, at, crc32(self.id_prefix + digits))
        return tail


@lru_cache(maxsize=65536)
def record_for(dtype: torch.dtype, shape: tuple[int, ...]) -> TorchRecord:
    """Return the record of a contiguous tensor of this dtype and shape, as the installed torch writes it."""
    sparse = _Sparse()
    template = torch.empty(shape, dtype=dtype)
    if hasattr(torch.serialization, "skip_data"):
        with torch.serialization.skip_data():
            torch.save(template, cast("IO[bytes]", sparse))
    else:
        torch.save(template, cast("IO[bytes]", sparse))
    return _parse(sparse, payload_size=template.numel() * template.element_size())


class _Sparse(io.RawIOBase):
    """A file that keeps what was written and reads zeros elsewhere, so a skipped payload of 4 GiB costs nothing."""

    def __init__(self) -> None:
        super().__init__()
        self._writes: list[tuple[int, bytes]] = []
        self._at = 0
        self._end = 0

    def writable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, self._end)[whence]
        self._end = max(self._end, self._at)
        return self._at

    def write(self, data: "ReadableBuffer") -> int:
        written = bytes(data)
        self._writes.append((self._at, written))
        self._at += len(written)
        self._end = max(self._end, self._at)
        return len(written)

    def read(self, size: int | None = -1) -> bytes:
        count = self._end - self._at if size is None or size < 0 else min(size, self._end - self._at)
        out = bytearray(count)
        for start, written in self._writes:
            low, high = max(start, self._at), min(start + len(written), self._at + count)
            if low < high:
                out[low - self._at : high - self._at] = written[low - start : high - start]
        self._at += count
        return bytes(out)

    def between(self, start: int, stop: int) -> bytes:
        self._at = start
        return self.read(stop - start)


def _parse(sparse: _Sparse, *, payload_size: int) -> TorchRecord:
    """Split a template into head and tail, and find the fields that depend on the payload.

    Raises RuntimeError for a torch whose records have another layout.
    """
    with zipfile.ZipFile(sparse) as archive:
        members = archive.infolist()
        central_at = archive.start_dir
    by_suffix = {member.filename.partition("/")[2]: member for member in members}
    payload, identity = by_suffix["data/0"], by_suffix[".data/serialization_id"]
    payload_at = _data_offset(sparse, payload)
    tail_at = payload_at + payload_size
    sparse.seek(0, 2)
    head, tail = sparse.between(0, payload_at), sparse.between(tail_at, sparse.seek(0, 2))
    central = _central_entries(tail, central_at - tail_at)
    id_at = _data_offset(sparse, identity) - tail_at
    id_value = tail[id_at : id_at + identity.file_size]
    if not re.fullmatch(rb"\d{40}", id_value):
        raise RuntimeError(f"this torch ({torch.__version__}) writes an unknown serialization id {id_value!r}")
    order = sorted(members, key=lambda member: member.header_offset)
    place = order.index(payload)
    folds = [member.CRC for member in order if member is not identity]
    return TorchRecord(
        head=head,
        tail=tail,
        payload_size=payload_size,
        payload_crc_at=(4, central[payload.filename]) if payload_size else (),
        id_digits_at=id_at + 20,
        id_crc_at=(_descriptor_crc(tail, id_at + 40), central[identity.filename]),
        id_prefix=id_value[:20],
        fold_before=tuple(folds[:place]),
        fold_after=tuple(folds[place + 1 :]),
    )


def _data_offset(sparse: _Sparse, member: zipfile.ZipInfo) -> int:
    local = sparse.between(member.header_offset, member.header_offset + 30)
    name_size, extra_size = struct.unpack_from("<HH", local, 26)
    return member.header_offset + 30 + int(name_size) + int(extra_size)


def _central_entries(tail: bytes, at: int) -> dict[str, int]:
    """Return, by file name, the offset of its CRC-32 in the central directory, which begins at `at`."""
    found = {}
    while tail[at : at + 4] == _CENTRAL:
        name_size, extra_size, comment_size = struct.unpack_from("<HHH", tail, at + 28)
        found[tail[at + 46 : at + 46 + name_size].decode()] = at + 16
        at += 46 + name_size + extra_size + comment_size
    return found


def _descriptor_crc(tail: bytes, at: int) -> int:
    if tail[at : at + 4] != _DESCRIPTOR:
        raise RuntimeError(f"this torch ({torch.__version__}) writes records without data descriptors")
    return at + 4
