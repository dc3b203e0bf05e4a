"""Finds out, while requests are sent, how many of them should be in flight at a time.

One connection to a cloud's store carries some 50 MB/s, and one to a store on the same machine as much as ten do. So a
window tries one size after another. It keeps a larger one if more bytes per second arrive with it, and a smaller one if
no fewer do. It shrinks at once when the store refuses a request because there are too many, or does not answer in time.
What it has found lasts as long as the process, for all uploads and restores of one bucket. A new window doubles as long
as no answer comes. One for reads begins with half of what it may have, since a restarted job waits for its first
restore.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Self

from raycheck.bucket.store.moved_bytes import moved_bytes
from raycheck.bucket.store.part_sizes import fewest_in_flight, most_in_flight, ranks_in_group, ranks_on_node

logger = logging.getLogger("raycheck")
MOST = 64
"""The most requests that one process keeps in flight in one direction of a bucket."""
NODE_MOST = 256
"""The same for all ranks of a node. No rank can see the others' requests, so each may use its part of these."""
FIRST = MOST // 2
"""The most with which a new window begins, where more requests of the same bytes take little more CPU time."""
GROUP_FIRST = 1024
"""The most with which the new windows of all ranks of a group begin together, and half of what they rise to while no
answer comes. S3 takes some thousands in a second."""
RISES_TO = 16
"""What a new window at least rises to. More would cost CPU time through s3fs, where a busy host answers late, too."""
GAIN = 1.02
"""How many times as many bytes per second must arrive for a larger size to be kept."""
LOSS = 0.985
"""How many times as many must still arrive for a smaller one."""
STEP = 1.15
"""How many times as large the next size is, or as small: after doubling or halving has failed, or with refusals."""
UNANSWERED_S = 0.05
"""How long a new window is full, without any answer, before it doubles: such connections do not keep this host busy."""
MIN_SAMPLES = 4
MOST_PATIENCE = 16
BARRED_S = 1.0
MOST_BARRED_S = 20.0
_is_small: ContextVar[bool] = ContextVar("is_small", default=False)


@contextmanager
def fewest_requests() -> Iterator[None]:
    """Keep what this thread sends inside the block at the least size of the windows: its parts take scarce memory."""
    token = _is_small.set(True)
    try:
        yield
    finally:
        _is_small.reset(token)


@dataclass(slots=True)
class Flight:
    """One request in flight. began_at, area, trial, samples: the state of the window when it began."""

    share: "Share"
    began_at: float
    area: float
    trial: int
    samples: "_Samples | None"

    def refused(self) -> bool:
        """Record that the store refused the request because there are too many, or did not answer in time.

        Return whether the request is still needed.
        """
        self.share.window.refused(self)
        return not self.share.has_failed

    def end(self, size_bytes: int) -> None:
        """Record that the request has ended. size_bytes: what it carried; 0 if it failed."""
        self.share.moved.add(size_bytes)
        self.share.window.end(self, size_bytes)


class Share:
    """The part of a window that one upload or one restore may use, inside `with`. Others use the rest.

    has_failed: whether a request has failed, so that the others are no longer needed.
    """

    def __init__(self, window: "RequestWindow") -> None:
        self.window = window
        self.flying = 0
        self.has_failed = False
        self.moved = moved_bytes()
        self._is_small = _is_small.get()

    def __enter__(self) -> Self:
        self.window.add(self)
        return self

    def __exit__(self, *_: object) -> None:
        self.window.remove(self)

    def may_begin(self) -> bool:
        """Return whether one more request may begin now."""
        self.window.look()
        return self.flying < (min(self.window.least, self.window.part) if self._is_small else self.window.part)

    def wait_to_begin(self) -> None:
        """Wait until one more request may begin, or one has failed."""
        self.window.wait_until(lambda: self.has_failed or self.may_begin())

    def begin(self) -> Flight:
        """Record that a request begins."""
        return self.window.begin(self)


class RequestWindow:
    """How many requests to one bucket are in flight in one direction, for all threads of a process.

    size: how many may be; `first` to begin with. flying: how many are. least, most: the bounds of `size`, which falls
    below `least` only where the store refuses requests. rises_to: up to which size it doubles while no answer comes.
    clock: in seconds.
    """

    def __init__(
        self,
        *,
        least: int,
        most: int,
        first: int = 0,
        rises_to: int = 0,
        clock: Callable[[], float] = time.monotonic,
        name: str = "",
    ) -> None:
        self.least = min(least, most)
        self.most = most
        self.size = max(self.least, min(first, most))
        self._clock = clock
        self._name = name
        self._changed = threading.Condition()
        self._shares: list[Share] = []
        self.flying = 0
        self._area = 0.0  # the integral of the number in flight over time, up to _seen_at
        self._seen_at = clock()
        self._rises_to = min(rises_to, most)
        self._is_new = self._rises_to > self.size  # until a request has ended or was refused, or it is this large
        self._last_began_at = self._seen_at
        self._trial = 0  # counts the changes of the size
        self._samples = _Samples(self.size)
        self._kept = self.size  # the best size so far; `size` differs while another one is tried
        self._kept_rate: float | None = None
        self._grows = True  # whether the next trial is of a larger size
        # How far the next trial goes up, and down. What has begun with few does not have to come down far.
        self._strides = {True: 2.0, False: 2.0 if self.size > self.least else STEP}
        self._patience = 1  # how many times the kept size is measured before the next trial
        self._waited = 0
        self._barred_s = BARRED_S
        self._barred_until = -1.0

    @property
    def part(self) -> int:
        """Return how many requests each share may have in flight."""
        return max(1, -(-self.size // max(1, len(self._shares))))

    def add(self, share: Share) -> None:
        """Divide the window with one more share."""
        with self._changed:
            self._shares.append(share)

    def remove(self, share: Share) -> None:
        """Divide the window without this share."""
        with self._changed:
            self._shares.remove(share)
            self._changed.notify_all()

    def wait_until(self, is_true: Callable[[], bool]) -> None:
        """Wait until a condition is true that depends on the window."""
        with self._changed:
            while not is_true():
                self._changed.wait(UNANSWERED_S if self._is_new else 1.0)  # so that Ctrl-C is handled

    def look(self) -> None:
        """Double a new window that has been full for a while without any answer."""
        with self._changed:
            is_full = self._is_new and self.flying >= self.size
            if is_full and self._clock() >= self._last_began_at + UNANSWERED_S:
                self._resize(min(self._rises_to, 2 * self.size))
                self._is_new = self.size < self._rises_to
                self._strides[False] = 2.0
                self._keep(None)

    def begin(self, share: Share) -> Flight:
        """Record that a request of `share` begins."""
        with self._changed:
            now = self._last_began_at = self._tick()
            self.flying += 1
            share.flying += 1
            return Flight(share, now, self._area, self._trial, self._samples if self._samples.take() else None)

    def end(self, flight: Flight, size_bytes: int) -> None:
        """Record that a request has ended, and judge the size once enough of them have. size_bytes: see Flight.end."""
        with self._changed:
            now = self._tick()
            self._is_new = False
            self.flying -= 1
            flight.share.flying -= 1
            if flight.samples is self._samples:
                self._samples.add(size_bytes, now - flight.began_at, self._area - flight.area)
                if self._samples.left == 0:
                    rate, in_flight = self._samples.rate, self._samples.in_flight
                    self._samples = _Samples(self.size)
                    if in_flight > 0.6 * self.size:  # fewer say nothing about this size
                        self._judge(rate)
            self._changed.notify_all()

    def refused(self, flight: Flight) -> None:
        """Shrink, at most once for the requests that began with the same size."""
        with self._changed:
            now = self._tick()
            if flight.trial != self._trial:
                return
            if self.size > self._kept:
                self._set(self._kept)
            else:
                self._set(max(1, self.size // 2 if self._is_new else min(self.size - 1, int(self.size / STEP))))
                self._keep(None)
            self._is_new = False
            if now >= self._barred_until:
                self._barred_s = min(MOST_BARRED_S, 2 * self._barred_s)
            self._barred_until = now + self._barred_s
            self._strides = {True: STEP, False: STEP}

    def _tick(self) -> float:
        now = self._clock()
        self._area += self.flying * (now - self._seen_at)
        self._seen_at = now
        return now

    def _judge(self, rate: float) -> None:
        """Keep the size that was tried or go back, and try another one. rate: bytes per second with this size."""
        stride = self._strides[self._grows]
        if self._kept_rate is None or self.size == self._kept:
            self._kept_rate = rate if self._kept_rate is None or not self._waited else (self._kept_rate + rate) / 2
            self._waited += 1
            if self._waited >= self._patience or stride > STEP:
                self._try()
        elif rate >= self._kept_rate * (GAIN if self.size > self._kept else LOSS):
            self._keep(rate)
            self._patience = max(1, self._patience // 2)
            self._try()
        else:
            self._patience = min(MOST_PATIENCE, 2 * self._patience)
            self._strides[self._grows] = self._strides[True] = STEP
            self._grows = not self._grows
            self._set(self._kept)

    def _try(self) -> None:
        """Try a larger or a smaller size next."""
        self._waited = 0
        stride = self._strides[self._grows]
        larger = min(self.most, max(self.size + 1, int(self.size * stride)))
        smaller = max(self.least, min(self.size - 1, int(self.size / stride)))
        if self._grows and larger > self.size and self._seen_at >= self._barred_until:
            self._set(larger)
        elif not self._grows and smaller < self.size:
            self._set(smaller)
        else:
            self._grows = not self._grows

    def _keep(self, rate: float | None) -> None:
        self._kept, self._kept_rate = self.size, rate

    def _set(self, size: int) -> None:
        self._resize(size)
        self._trial += 1

    def _resize(self, size: int) -> None:
        if size != self.size:
            logger.debug("%s: %d requests in flight (were %d)", self._name, size, self.size)
            self.size = size
        self._samples = _Samples(size)


class _Samples:
    """Sums over the first requests that begin with one size: their bytes, their seconds, and for each the integral of
    the number in flight while it lasted. They count once all of them have ended, since the fastest ones end first."""

    def __init__(self, size: int) -> None:
        self._to_begin = self.left = max(MIN_SAMPLES, size)
        self._size_bytes = 0
        self._seconds = 0.0
        self._area = 0.0

    def take(self) -> bool:
        """Return whether a request that begins now is one of them."""
        self._to_begin -= 1
        return self._to_begin >= 0

    def add(self, size_bytes: int, seconds: float, area: float) -> None:
        """Add one of them, which has ended."""
        self.left -= 1
        self._size_bytes += size_bytes
        self._seconds += seconds
        self._area += area

    @property
    def in_flight(self) -> float:
        """Return how many requests were in flight while one lasted, on average."""
        return self._area / self._seconds if self._seconds else 0.0

    @property
    def rate(self) -> float:
        """Return the bytes per second of all requests together: those of one, times how many there were."""
        return self.in_flight * self._size_bytes / self._seconds if self._seconds else 0.0


_windows: dict[tuple[Hashable, str], RequestWindow] = {}
os.register_at_fork(after_in_child=_windows.clear)  # a forked child has none of the threads that hold their locks


def window_of(bucket_id: Hashable, way: str, *, least: int, first: int = 0) -> RequestWindow:
    """Return this process's window for requests to a bucket. way: what they do, such as "uploads".

    least: the smallest size to which it shrinks on its own, unless there are hundreds of ranks. first: the size with
    which it begins if there are few; at least `least`.
    """
    least = fewest_in_flight(least)
    most = most_in_flight(min(MOST, NODE_MOST // ranks_on_node()))
    share = GROUP_FIRST // ranks_in_group()
    first = min(first, most // 2, share)
    rises_to = min(2 * share, max(2 * first, RISES_TO))
    bucket = " ".join(str(part) for part in bucket_id if part) if isinstance(bucket_id, tuple) else bucket_id
    most = max(least, most)
    made = RequestWindow(least=least, most=most, first=first, rises_to=rises_to, name=f"{bucket}: {way}")
    return _windows.setdefault((bucket_id, way), made)
