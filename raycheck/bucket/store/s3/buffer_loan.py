"""Lends the caller's buffer to a client that reads it in its own threads, and detects when they have released it."""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from threading import Lock

from raycheck.bucket.store.interface import Buffer
from raycheck.bucket.store.request_window import Flight, Share
from raycheck.errors import StoreError

RETURN_TIMEOUT_S = 300.0
"""How long a client may hold buffers after it has ended: as long as all time-outs of a request one after another."""
LOOK_EVERY_S = 0.005


class BufferLoan:
    """The parts lent to a client that may read them after its call has ended. One object serves one call.

    A memoryview cannot be released while something reads it. That shows when the client has released a part, whatever
    the client's threads do.

    share: of the window in which the parts are sent, each as one request; None if that is not counted. lent_bytes: how
    much was lent in total. source_error: what the source of the parts raised, if it did.
    """

    def __init__(self, share: Share | None = None, *, sleep: Callable[[float], None] = time.sleep) -> None:
        self.lent_bytes = 0
        self.source_error: BaseException | None = None
        self._share = share
        self._out: list[_Lent] = []
        self._lock = Lock()  # of `_out`
        self._is_over = False
        self._pull = Lock()
        self._sleep = sleep

    def lend(self, part: Buffer) -> memoryview:
        """Return a view of `part` that only the client has."""
        view = memoryview(part).cast("B")
        with self._lock:
            self._out.append(_Lent(view, len(view), self._share.begin() if self._share else None))
        self.lent_bytes += len(view)
        return view

    def look(self) -> None:
        """Find out which parts the client has released, except the newest one, which it may not have taken yet."""
        with self._lock:
            self._out = [lent for lent in self._out[:-1] if not lent.release()] + self._out[-1:]

    def _take_released(self) -> bool:
        with self._lock:
            self._out = [lent for lent in self._out if not lent.release()]
            return not self._out

    def lend_each(self, parts: Iterable[memoryview]) -> Iterator[memoryview]:
        """Lend the parts one by one, pulling each when the client requests it, in whatever thread."""
        source = iter(parts)
        while True:
            with self._pull:
                view = self._next(source)
            if view is None:
                return
            yield view

    def _next(self, source: Iterator[Buffer]) -> memoryview | None:
        if self._is_over:  # a normal end would mean to the client that it has the whole object
            raise StoreError("the upload is over")
        try:
            part = next(source, None)
        except BaseException as error:
            self.source_error = error
            raise
        return None if part is None else self.lend(part)

    def take_back(self, timeout_s: float = RETURN_TIMEOUT_S) -> bool:
        """Stop lending, and wait until the client has released every part. Return whether it has.

        From now on nothing is lent, and the source, which reads the buffer too, no longer runs.
        """
        deadline = time.monotonic() + timeout_s
        self._is_over = True
        if not self._pull.acquire(timeout=timeout_s):
            return False
        self._pull.release()
        while not self._take_released():
            if time.monotonic() > deadline:
                return False
            self._sleep(LOOK_EVERY_S)
        return True


@dataclass(frozen=True, slots=True)
class _Lent:
    view: memoryview
    size_bytes: int
    flight: Flight | None

    def release(self) -> bool:
        """Release the view unless something reads it. Return whether it is released."""
        try:
            self.view.release()
        except BufferError:
            return False
        if self.flight is not None:
            self.flight.end(self.size_bytes)
        return True
