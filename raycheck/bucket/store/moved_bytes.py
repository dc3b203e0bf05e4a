"""Counts how far one rank's upload or restore is: bytes moved of bytes wanted, and the objects at hand."""

import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from raycheck.bucket.store.retry import LEAST_LEFT_S, ends_by
from raycheck.errors import StoppedError, StoreError

PLAUSIBLE_BYTES_PER_S = 10e6
"""One connection to a cloud's store carries several times as much."""


class MovedBytes:
    """How far an upload or a restore is, counted where the requests are made, in whatever thread.

    began: by time.monotonic. limit_s: how many seconds all of it may take. wanted: the number of bytes to move; None
    while that is not known. done: how many have been moved. A byte counts when its request has ended.
    """

    def __init__(
        self, limit_s: float = math.inf, late: Callable[[StoreError], StoreError] = lambda error: error
    ) -> None:
        """late: makes the error that is raised when the time is over, from that of a request."""
        self.began = time.monotonic()
        self.limit_s = limit_s
        self.wanted: int | None = None
        self.done = 0
        self._timeout_s = limit_s
        self._late = late
        self._lock = threading.Lock()
        self._failed = ""
        self._is_stopped = False
        self._at_hand: dict[str, int] = {}  # how many requests of each object are in progress, oldest first

    @property
    def seconds(self) -> float:
        """Return for how long it has been going on."""
        return time.monotonic() - self.began

    @property
    def is_late(self) -> bool:
        """Return whether its time has passed before all bytes were moved."""
        return self.seconds >= self.limit_s - LEAST_LEFT_S and (self.wanted is None or self.done < self.wanted)

    @property
    def object(self) -> str:
        """Return the object that has been at hand for longest, or that has failed; "" for none."""
        with self._lock:
            return next(iter(self._at_hand), self._failed)

    def want(self, size_bytes: int) -> None:
        """Count bytes that are to be moved."""
        with self._lock:
            self.wanted = (self.wanted or 0) + size_bytes

    def add(self, size_bytes: int) -> None:
        """Count bytes that were moved."""
        with self._lock:
            self.done += size_bytes

    def stop(self) -> None:
        """Begin no further request."""
        self._is_stopped = True

    @contextmanager
    def at(self, key: str) -> Iterator[None]:
        """Have an object at hand inside the block. Raises StoppedError after `stop`."""
        if self._is_stopped:
            raise StoppedError(f"{key}: stopped before it was read")
        with self._lock:
            self._at_hand[key] = self._at_hand.get(key, 0) + 1
        try:
            yield
        except BaseException:
            self._failed = key
            raise
        finally:
            with self._lock:
                self._at_hand[key] -= 1
                if not self._at_hand[key]:
                    del self._at_hand[key]

    @contextmanager
    def given_time_for(self, size_bytes: int, saved_bytes: int) -> Iterator[None]:
        """Bound the requests of this thread inside the block, which read this many bytes.

        They have the time of a save, in proportion if there is more to read than the rank with the largest shards has
        saved (saved_bytes). They are never required to be faster than PLAUSIBLE_BYTES_PER_S.
        """
        in_proportion = self._timeout_s * max(1.0, size_bytes / max(1, saved_bytes))
        self.limit_s = max(self.limit_s, in_proportion, size_bytes / PLAUSIBLE_BYTES_PER_S)
        if self.limit_s == math.inf:
            yield
            return
        try:
            with ends_by(self.began + self.limit_s):
                yield
        except StoreError as error:
            if self.is_late:
                raise self._late(error) from error
            raise


_moved: ContextVar[MovedBytes | None] = ContextVar("moved", default=None)


@contextmanager
def counting(moved: MovedBytes) -> Iterator[None]:
    """Count in `moved` what this thread moves inside the block."""
    token = _moved.set(moved)
    try:
        yield
    finally:
        _moved.reset(token)


def moved_bytes() -> MovedBytes:
    """Return what counts the bytes that this thread moves; one that nobody reads where nobody counts."""
    return _moved.get() or MovedBytes()


def counted(parts: Iterable[memoryview]) -> Iterator[memoryview]:
    """Yield the parts, and count each when the next one is asked for: a store sends them one by one."""
    moved = moved_bytes()
    for part in parts:
        yield part
        moved.add(len(part))
