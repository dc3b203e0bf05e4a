"""Decompresses parts of an index within limits, against decompression bombs.

A few kilobytes in a hostile bucket can decompress to gigabytes, and those parse to many times as much. So the
decompressed bytes, and the Python objects made from them, are limited in proportion to the bytes that really came from
the store. A writer whose data would exceed a limit compresses it less.
"""

import json
import zlib
from typing import Any

from raycheck.errors import CorruptError

MAX_DECODED_BYTES = 1 << 30
ROOM_BYTES = 64 << 20
BYTES_PER_BYTE = 64
OBJECTS = 1_000_000
OBJECTS_PER_BYTE = 4


class DecompressionBudget:
    """The amount to which all compressed parts of one object together may decompress.

    stored: the bytes that were read of the object. room: the bytes to which any object may decompress, however small it
    is.
    """

    def __init__(self, stored: int, *, what: str, room: int = ROOM_BYTES) -> None:
        self._what = what
        self._bytes = min(MAX_DECODED_BYTES, room + BYTES_PER_BYTE * stored)
        self._objects = OBJECTS + OBJECTS_PER_BYTE * stored

    def inflate(self, data: bytes) -> bytes:
        """Decompress a zlib stream. Raises CorruptError when it has more bytes than are left."""
        stream = zlib.decompressobj()
        raw = stream.decompress(data, max(1, self._bytes))
        if not stream.eof:
            raise CorruptError(f"{self._what} is truncated, or has more than {self._bytes} bytes")
        self._bytes -= len(raw)
        return raw

    def parse(self, text: bytes) -> Any:
        """Parse JSON.

        Raises CorruptError when it has more lists, objects and strings than are left, and ValueError when it is not
        JSON.
        """
        self._objects -= _objects_in(text)
        if self._objects < 0:
            raise CorruptError(f"{self._what} has more lists, objects and texts than one of its size may")
        return json.loads(text)


def deflate(text: bytes, *, stored: int = 0, parsed: int | None = None) -> bytes:
    """Compress to a zlib stream that stays within every reader's limits.

    stored: the bytes next to the stream in its object, which raise these limits. parsed: how many bytes of the text,
    from its beginning, may be JSON; None for all.
    """
    data = zlib.compress(text, 1)
    seen = len(data) + stored
    if len(text) > BYTES_PER_BYTE * seen or _objects_in(text[:parsed]) > OBJECTS_PER_BYTE * seen:
        return zlib.compress(text, 0)
    return data


def _objects_in(text: bytes) -> int:
    """Return an upper bound for the lists, objects and strings in a JSON text.

    Numbers do not count: they take little more memory than their text.
    """
    return text.count(b"[") + text.count(b"{") + text.count(b'"') // 2
