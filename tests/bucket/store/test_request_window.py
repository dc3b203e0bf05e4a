"""Tests the number of requests in flight against a simulated store in virtual time: as good as the best fixed number.

The store carries so many bytes per second on one connection, and so many on all of them together; each request waits
for `latency_s` first. Above `limit` requests at a time, or so many per second, it refuses one, which is sent again
after a pause, as retry.py does.
"""

import heapq
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, product

import pytest

from raycheck.bucket.store.part_sizes import PartSizes
from raycheck.bucket.store.request_window import (
    FIRST,
    UNANSWERED_S,
    Flight,
    RequestWindow,
    Share,
    fewest_requests,
    window_of,
)

MB = 1e6
OBJECT_BYTES = 512 * 1024 * 1024
LEAST, MOST = 4, 64
FIXED = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64)
WARM_UPS, SAVES = 4, 8
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


def window_in(store: SimulatedStore, least: int = LEAST, most: int = MOST, first: int = 0) -> RequestWindow:
    return RequestWindow(least=least, most=most, first=first, clock=store.clock)


def new_window(store: SimulatedStore) -> RequestWindow:
    """The window of a process that has sent nothing yet, as `window_of` makes it."""
    return window_in(store, first=FIRST)


def parts_for(window: RequestWindow, size_bytes: int = OBJECT_BYTES) -> list[int]:
    part = PartSizes().part_bytes_of(size_bytes, window.size)
    return [min(part, size_bytes - at) for at in range(0, size_bytes, part)]


def mean_s(store: SimulatedStore, window: RequestWindow, *, saves: int = SAVES) -> float:
    return sum(store.send([Job(window, parts_for(window))])[0] for _ in range(saves)) / saves


def best_fixed_s(**shape: float) -> float:
    def of(number: int) -> float:
        store = SimulatedStore(**shape)
        return mean_s(store, window_in(store, number, number), saves=3)

    return min(map(of, FIXED))


def shapes() -> Iterator[dict[str, float]]:
    for each, total in ((10, math.inf), (10, 110), (50, 1000), (50, 300), (400, 1000)):
        for latency_s, limit, noise in product((0.001, 0.04), (math.inf, 16), (0.0, 0.15)):
            yield {"each": each * MB, "total": total * MB, "latency_s": latency_s, "limit": limit, "noise": noise}


def test_it_is_nearly_as_fast_as_the_best_fixed_number() -> None:
    found = {}
    for shape in shapes():
        store = SimulatedStore(**shape)
        window = window_in(store)
        mean_s(store, window, saves=WARM_UPS)
        found[tuple(shape.values())] = best_fixed_s(**shape) / mean_s(store, window)

    assert min(found.values()) > 0.8, found
    assert sum(found.values()) / len(found) > 0.93, found


def test_a_new_window_is_nearly_as_fast_as_the_best_fixed_number_from_the_first_object_on() -> None:
    first, warm = {}, {}
    for shape in shapes():
        store, best_s, name = SimulatedStore(**shape), best_fixed_s(**shape), tuple(shape.values())
        window = new_window(store)
        first[name] = best_s / mean_s(store, window, saves=1)
        mean_s(store, window, saves=WARM_UPS)
        warm[name] = best_s / mean_s(store, window)

    assert min(first.values()) > 0.75, first
    assert sum(first.values()) / len(first) > 0.93, first
    assert min(warm.values()) > 0.8, warm
    assert sum(warm.values()) / len(warm) > 0.93, warm


def test_a_new_window_doubles_once_while_no_answer_comes() -> None:
    store = SimulatedStore(each=MB)
    window = window_in(store, first=8)

    with Share(window) as share:
        for _ in range(8):
            assert share.may_begin()
            share.begin()
        assert not share.may_begin()
        store.now = UNANSWERED_S
        for _ in range(8):
            assert share.may_begin()
            share.begin()
        store.now = 2 * UNANSWERED_S
        assert not share.may_begin()


def test_a_new_window_does_not_double_where_answers_come_or_the_store_refuses() -> None:
    for happens in (lambda flight: flight.end(MB), Flight.refused):
        store = SimulatedStore(each=MB)
        window = window_in(store, first=8)
        with Share(window) as share:
            flights = [share.begin() for _ in range(8)]
            happens(flights[0])
            share.begin()
            store.now = 1.0

            assert not share.may_begin()
            assert window.size <= 8


def test_a_new_window_is_halved_by_the_first_refusals() -> None:
    store = SimulatedStore(each=10 * MB)
    window = new_window(store)

    with Share(window) as share:
        for flight in [share.begin() for _ in range(32)]:
            flight.refused()

    assert window.size == 16


def test_a_new_window_shrinks_to_its_least_size_where_one_connection_carries_all() -> None:
    store = SimulatedStore(each=400 * MB, total=400 * MB)
    window = new_window(store)
    mean_s(store, window, saves=2 * SAVES)

    assert window.size <= 2 * LEAST


def test_it_grows_within_the_first_object() -> None:
    store = SimulatedStore(each=50 * MB)
    window = window_in(store)

    mean_s(store, window, saves=1)

    assert window.size >= 16


def test_it_does_not_grow_where_one_connection_carries_all() -> None:
    store = SimulatedStore(each=400 * MB, total=400 * MB)
    window = window_in(store)
    sizes = []
    for _ in range(20):
        mean_s(store, window, saves=1)
        sizes.append(window.size)

    assert max(sizes) <= 2 * LEAST
    assert sum(size == LEAST for size in sizes) > 10


def test_it_leaves_a_store_that_refuses_requests_alone() -> None:
    store = SimulatedStore(each=10 * MB, limit=16)
    window = window_in(store)
    mean_s(store, window, saves=WARM_UPS)
    before = store.refusals

    mean_s(store, window, saves=20)

    assert window.size <= 20
    assert store.refusals - before < 20 * len(parts_for(window)) // 20  # one in twenty


def test_it_falls_below_its_least_size_only_where_the_store_refuses() -> None:
    store = SimulatedStore(each=10 * MB, limit=2)
    window = window_in(store)
    mean_s(store, window, saves=WARM_UPS)
    assert window.size <= 3

    store.limit = math.inf
    mean_s(store, window, saves=20)
    assert window.size >= 16


def test_it_finds_out_when_the_store_has_become_faster() -> None:
    store = SimulatedStore(each=50 * MB, total=300 * MB)
    window = window_in(store)
    mean_s(store, window, saves=WARM_UPS)
    assert window.size <= 12

    store.total = math.inf
    mean_s(store, window, saves=20)
    assert window.size >= 32


def test_the_saves_of_a_process_share_it_equally() -> None:
    store = SimulatedStore(each=10 * MB, limit=16)
    window = window_in(store)
    mean_s(store, window, saves=WARM_UPS)

    one, other = store.send([Job(window, parts_for(window)) for _ in range(2)])

    assert one == pytest.approx(other, rel=0.1)


def test_processes_of_which_a_store_refuses_requests_get_similar_windows() -> None:
    store = SimulatedStore(each=10 * MB, requests_per_s=40)
    windows = [window_in(store) for _ in range(4)]
    for _ in range(4 * WARM_UPS):
        store.send([Job(window, parts_for(window)) for window in windows])

    took = store.send([Job(window, parts_for(window)) for window in windows])

    assert store.refusals
    assert max(took) < 2 * min(took)


def test_many_saves_have_at_least_one_request_each() -> None:
    store = SimulatedStore(each=10 * MB)
    window = window_in(store, 2, 2)

    assert len(store.send([Job(window, parts_for(window)) for _ in range(5)])) == 5


def test_a_short_object_says_nothing_about_a_large_window() -> None:
    store = SimulatedStore(each=10 * MB)
    window = window_in(store)
    mean_s(store, window, saves=WARM_UPS)
    before = window.size

    for _ in range(100):
        store.send([Job(window, [1024 * 1024] * 3)])

    assert window.size == before


def test_slices_of_live_tensors_keep_to_the_least_size() -> None:
    window = window_in(SimulatedStore(each=MB), 4, 4)
    window.size = 64
    with fewest_requests():
        share = Share(window)
    with share:
        for _ in range(4):
            assert share.may_begin()
            share.begin()

        assert not share.may_begin()


@pytest.mark.parametrize(
    ("ranks", "part_mib", "least", "most"),
    [("", 16, 4, 64), ("255", 16, 4, 64), ("1024", 32, 1, 8), ("4096", 64, 1, 4)],
)
def test_one_of_many_ranks_sends_few_large_parts(
    monkeypatch: pytest.MonkeyPatch, ranks: str, part_mib: int, least: int, most: int
) -> None:
    monkeypatch.setenv("WORLD_SIZE", ranks)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    window = window_of(f"bucket of {ranks}", "uploads", least=4)

    assert (window.size, window.most) == (least, most)
    assert PartSizes().part_bytes_of(8 << 30, window.size) == part_mib << 20
    assert PartSizes().part_bytes_of(8 << 30, window.most) * window.most <= 512 << 20
    assert PartSizes().part_bytes_of(0, window.size) == 5 << 20


@pytest.mark.parametrize(
    ("ranks", "on_node", "first"), [(1, 1, 32), (8, 8, 16), (64, 8, 16), (128, 8, 8), (256, 8, 4), (4096, 8, 1)]
)
def test_the_ranks_of_a_group_begin_with_about_a_thousand_requests_together(
    monkeypatch: pytest.MonkeyPatch, ranks: int, on_node: int, first: int
) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(on_node))

    assert window_of(f"bucket of {ranks} that begin", "uploads", least=4, first=FIRST).size == first


def test_all_stores_of_one_bucket_have_one_window_in_each_direction(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    window = window_of("bucket", "uploads", least=4)

    assert window_of("bucket", "uploads", least=4) is window
    assert window_of("bucket", "reads", least=4) is not window
    assert window_of("other", "uploads", least=4) is not window
    assert window.most == 32
