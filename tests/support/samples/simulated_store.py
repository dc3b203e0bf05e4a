"""A store in virtual time, to which objects are sent through raycheck's windows, and the best fixed number for it.

It carries so many bytes per second on one connection, and so many on all of them together; each request waits for
`latency_s` first. Above `limit` requests at a time, or so many per second, it refuses one, which is sent again after a
pause, as retry.py does.
"""

import heapq
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

from raycheck.bucket.store.part_sizes import PartSizes
from raycheck.bucket.store.request_window import FIRST, Flight, RequestWindow, Share

MB = 1e6
OBJECT_BYTES = 512 * 1024 * 1024
LEAST, MOST = 4, 64
FIXED = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64)
SAVES = 8
LOOK_S = 0.05
"""How often a client that waits looks whether one more request may begin."""


@dataclass
class Request:
    share: Share
    size_bytes: int
    left: float
    flight: Flight
    speed: float
    attempt: int = 0


@dataclass
class Job:
    """One object that is sent through a window, and when it was complete."""

    window: RequestWindow
    parts: list[int]
    share: Share = field(init=False)
    ended_at: float = math.inf

    def __post_init__(self) -> None:
        self.share = Share(self.window)


class SimulatedStore:
    """See the module. each, total: bytes per second. noise: how much the speeds of connections differ."""

    def __init__(
        self,
        *,
        each: float,
        total: float = math.inf,
        latency_s: float = 0.001,
        limit: float = math.inf,
        requests_per_s: float = math.inf,
        noise: float = 0.0,
    ) -> None:
        self.now = 0.0
        self.refusals = 0
        self.total, self.limit = total, limit
        self._each, self._latency_s, self._noise = each, latency_s, noise
        self._chance = random.Random(1)
        self._gap_s, self._next_at = 1 / requests_per_s, 0.0
        self._served: list[Request] = []
        self._arriving: list[tuple[float, int, Request]] = []
        self._numbers = count()

    def clock(self) -> float:
        return self.now

    def send(self, jobs: Sequence[Job]) -> list[float]:
        """Seconds until each object is complete; they are sent at the same time."""
        began = self.now
        for job in jobs:
            job.share.__enter__()
        while any(job.ended_at == math.inf for job in jobs):
            for job in jobs:
                self._begin(job)
            self._pass_time(LOOK_S if any(job.parts for job in jobs) else math.inf)
            self._end_requests()
            self._take_arrivals()
            for job in jobs:
                if job.ended_at == math.inf and not job.parts and not job.share.flying:
                    job.ended_at = self.now
                    job.share.__exit__()
        return [job.ended_at - began for job in jobs]

    def _begin(self, job: Job) -> None:
        while job.parts and job.share.may_begin():
            size = job.parts.pop(0)
            speed = self._each * max(0.3, 1 + self._noise * self._chance.gauss(0, 1))
            self._arrives(Request(job.share, size, size, job.share.begin(), speed), self._latency_s)

    def _arrives(self, request: Request, in_s: float) -> None:
        heapq.heappush(self._arriving, (self.now + in_s, next(self._numbers), request))

    def _speed(self, request: Request) -> float:
        return min(request.speed, self.total / len(self._served))

    def _pass_time(self, at_most: float) -> None:
        ends = [request.left / self._speed(request) for request in self._served]
        arrives = [self._arriving[0][0] - self.now] if self._arriving else []
        step = min(ends + arrives + [at_most])
        for request in self._served:
            request.left -= step * self._speed(request)
        self.now += step

    def _end_requests(self) -> None:
        for request in [request for request in self._served if request.left < 1]:
            self._served.remove(request)
            request.flight.end(request.size_bytes)

    def _take_arrivals(self) -> None:
        while self._arriving and self._arriving[0][0] <= self.now + 1e-9:
            request = heapq.heappop(self._arriving)[2]
            if len(self._served) < self.limit and self._next_at < self.now + 1:  # a burst of a second's requests
                self._next_at = max(self._next_at, self.now) + self._gap_s
                self._served.append(request)
                continue
            self.refusals += 1
            request.flight.refused()
            request.attempt += 1
            self._arrives(request, self._chance.uniform(0.5, 1) * 0.1 * 3 ** min(4, request.attempt))


def window_in(
    store: SimulatedStore, least: int = LEAST, most: int = MOST, first: int = 0, rises_to: int = 0
) -> RequestWindow:
    return RequestWindow(least=least, most=most, first=first, rises_to=rises_to, clock=store.clock)


def new_window(store: SimulatedStore) -> RequestWindow:
    """The window of a process that has sent nothing yet, as `window_of` makes it."""
    return window_in(store, first=FIRST, rises_to=MOST)


def parts_for(window: RequestWindow, size_bytes: int = OBJECT_BYTES) -> list[int]:
    part = PartSizes().part_bytes_of(size_bytes, window.size)
    return [min(part, size_bytes - at) for at in range(0, size_bytes, part)]


def mean_s(
    store: SimulatedStore, window: RequestWindow, *, saves: int = SAVES, size_bytes: int = OBJECT_BYTES
) -> float:
    return sum(store.send([Job(window, parts_for(window, size_bytes))])[0] for _ in range(saves)) / saves


def best_fixed_s(*, size_bytes: int = OBJECT_BYTES, **shape: float) -> float:
    def of(number: int) -> float:
        store = SimulatedStore(**shape)
        return mean_s(store, window_in(store, number, number), saves=3, size_bytes=size_bytes)

    return min(map(of, FIXED))
