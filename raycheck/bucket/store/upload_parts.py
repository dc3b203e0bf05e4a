"""Sends one object from a buffer of the caller: several parts at a time, each as a body that is read piece by piece.

A body is sent as copies of 1 MiB, so that what a connection still has after a failed request is never the caller's
buffer. This is faster than passing a whole part, which asyncio would copy at once and cut again.
"""

from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Self, TypeVar

from raycheck.bucket.store.interface import Buffer

PIECE_BYTES = 1024 * 1024
T = TypeVar("T")
P = TypeVar("P")


def send_parts(parts: Iterable[P], start: Callable[[int, P], Future[T]], *, in_flight: int) -> list[T]:
    """Return the result of `start` for each part; it is called with the part's number, from 1, and the part.

    Up to `in_flight` parts are sent at a time, while the next one is pulled. If this raises, every request that was
    started has ended: the buffer behind the parts is free again.
    """
    sent: list[Future[T]] = []
    try:
        for number, part in enumerate(parts, 1):
            sent.append(start(number, part))
            flying = [future for future in sent if not future.done()]
            if len(flying) >= in_flight:
                wait(flying, return_when=FIRST_COMPLETED)
            for future in sent:
                if future.done():
                    future.result()
        return [future.result() for future in sent]
    except BaseException:
        wait(sent)  # each ends by its attempts and their time-outs
        raise


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
