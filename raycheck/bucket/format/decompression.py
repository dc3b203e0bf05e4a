"""Compressed parts of an index, unpacked within bounds.

A few kilobytes in a hostile bucket can unpack to gigabytes, and those parse to many times as much again. So what is
unpacked, and how many Python objects become of it, is bounded by the bytes that really came from the store, which an
attacker pays for and a reader sees coming. A writer that would be above a bound compresses less.
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
    """What the compressed parts of one object may unpack to, all of them together. came: bytes that were read."""

    def __init__(self, came: int, *, what: str, room: int = ROOM_BYTES) -> None:
        self._what = what
        self._bytes = min(MAX_DECODED_BYTES, room + BYTES_PER_BYTE * came)
        self._objects = OBJECTS + OBJECTS_PER_BYTE * came

    def inflate(self, data: bytes) -> bytes:
        """Raises CorruptError for more than is left."""
        stream = zlib.decompressobj()
        raw = stream.decompress(data, max(1, self._bytes))
        if not stream.eof:
            raise CorruptError(f"{self._what} is cut short, or holds more than {self._bytes} bytes")
        self._bytes -= len(raw)
        return raw

    def parse(self, text: bytes) -> Any:
        """JSON. Raises CorruptError for more lists, objects and strings than are left, ValueError for what is none."""
        self._objects -= _objects_in(text)
        if self._objects < 0:
            raise CorruptError(f"{self._what} holds more lists, objects and texts than one of its size may")
        return json.loads(text)


def deflate(text: bytes, *, came: int = 0) -> bytes:
    """A zlib stream that any reader takes. came: bytes that lie beside it in its object, and count for it."""
    data = zlib.compress(text, 1)
    seen = len(data) + came
    if len(text) > BYTES_PER_BYTE * seen or _objects_in(text) > OBJECTS_PER_BYTE * seen:
        return zlib.compress(text, 0)
    return data


def _objects_in(text: bytes) -> int:
    """At most so many lists, objects and strings become of it. Numbers are not counted: there are few bytes of memory
    for each byte of theirs."""
    return text.count(b"[") + text.count(b"{") + text.count(b'"') // 2
