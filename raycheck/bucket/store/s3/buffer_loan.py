"""Lends the caller's buffer to a client that reads it in threads of its own, and sees when they have let go of it."""

import time
from collections.abc import Callable, Iterable, Iterator
from threading import Lock

from raycheck.bucket.store.interface import Buffer
from raycheck.errors import StoreError

RETURN_TIMEOUT_S = 300.0
"""How long a client may hold buffers after it has ended: all time-outs of a request one after another."""
_LOOK_EVERY_S = 0.005


class BufferLoan:
    """Parts lent to a client that may read them after its call has ended. Single use.

    A view with exports cannot be released: so it is seen when the client has let go, whatever its own threads do.
    """

    def __init__(self, *, sleep: Callable[[float], None] = time.sleep) -> None:
        self.lent_bytes = 0
        self.source_error: BaseException | None = None
        self._out: list[memoryview] = []
        self._is_over = False
        self._pull = Lock()
        self._sleep = sleep

    def lend(self, part: Buffer) -> memoryview:
        """A view of `part` that is the client's alone."""
        view = memoryview(part).cast("B")
        self._out = [out for out in self._out if not _is_back(out)]
        self._out.append(view)
        self.lent_bytes += len(view)
        return view

    def lend_each(self, parts: Iterable[memoryview]) -> Iterator[memoryview]:
        """The same for each of them, pulled as the client wants them, in whatever thread."""
        source = iter(parts)
        while True:
            with self._pull:
                view = self._next(source)
            if view is None:
                return
            yield view

    def _next(self, source: Iterator[Buffer]) -> memoryview | None:
        if self._is_over:  # not a normal end: the client would take what it has for the whole object
            raise StoreError("the upload is over")
        try:
            part = next(source, None)
        except BaseException as error:
            self.source_error = error
            raise
        return None if part is None else self.lend(part)

    def is_back(self, timeout_s: float = RETURN_TIMEOUT_S) -> bool:
        """Whether all has come back, after waiting for it; from now on nothing is lent. The source, which reads the
        buffer too, is not at work any more."""
        deadline = time.monotonic() + timeout_s
        self._is_over = True
        if not self._pull.acquire(timeout=timeout_s):
            return False
        self._pull.release()
        while not all(map(_is_back, self._out)):
            if time.monotonic() > deadline:
                return False
            self._sleep(_LOOK_EVERY_S)
        return True


def _is_back(view: memoryview) -> bool:
    try:
        view.release()
    except BufferError:
        return False
    return True
