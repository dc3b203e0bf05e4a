"""Sends one object from a buffer of the caller, in parts, each as a body that is read piece by piece.

A body is sent as copies of 1 MiB, so that what a connection still has after a failed request is never the caller's
buffer. This is faster than passing a whole part, which asyncio would copy at once and cut again.
"""

from collections.abc import AsyncIterator, Iterable, Iterator
from itertools import chain
from typing import Self

from raycheck.bucket.store.interface import Buffer

PIECE_BYTES = 1024 * 1024


def with_first_bytes(parts: Iterable[memoryview]) -> tuple[int, Iterator[memoryview]]:
    """Pull the first part. Return its size in bytes, 0 if there is none, and an iterator over all parts."""
    rest = iter(parts)
    first = next(rest, memoryview(b""))
    return len(first), chain((first,), rest)


class RequestBody:
    """The bytes of a request, yielded in pieces each time it is iterated. After `with`, nothing can read the buffers.

    An iterator may outlive its request: a failure cancels aiohttp's writer, which the event loop ends a turn later.
    """

    def __init__(self, *buffers: Buffer) -> None:
        self._views = [memoryview(buffer).cast("B") for buffer in buffers]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for view in self._views:
            view.release()

    @property
    def size_bytes(self) -> int:
        return sum(len(view) for view in self._views)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for view in self._views:
            for at in range(0, len(view), PIECE_BYTES):
                yield bytes(view[at : at + PIECE_BYTES])
