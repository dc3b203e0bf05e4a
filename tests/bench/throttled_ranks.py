"""`python -m tests.bench.throttled_ranks`: thousands of ranks save and load at one prefix with a limit of requests.

The ranks are simulated in virtual time, with raycheck's own windows, part sizes and pauses. The store accepts 3,500
writes or 5,500 reads per second, as S3 documents it for a prefix that it has not divided, with a second's burst, and
refuses the others by 503. A connection carries 50 MB/s after 20 ms. Each rank has 8 GiB, and saves or loads twice with
the same window. One rank in so many is simulated, with its part of the limit.

obstore repeats a refused request of an upload on its own, and tells nobody; s3fs tells the window, which shrinks. A
range that is refused to obstore goes through s3fs.
"""

import argparse
import heapq
import math
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Literal

from raycheck.bucket.format.checksum import SUB_BLOCK
from raycheck.bucket.store.interface import READS_IN_FLIGHT
from raycheck.bucket.store.part_sizes import PART_SIZES, fewest_in_flight, most_in_flight, piece_bytes
from raycheck.bucket.store.request_window import GROUP_FIRST, Flight, RequestWindow, Share
from raycheck.bucket.store.retry import pause_bounds
from raycheck.bucket.store.s3.obstore_store import MAX_PAUSE, MAX_RETRIES
from raycheck.settings import SaveSettings
from raycheck.transfer.read.reader import REQUEST_BYTES

EACH_BYTES_PER_S, LATENCY_S = 50e6, 0.02
SHARD_BYTES = 8 << 30
TURNS = 2
SIMULATED = 32
"""How many of the ranks are simulated."""
MOST = 32
"""What a window may grow to with eight ranks on a node."""
WRITES_PER_S, READS_PER_S = 3500, 5500
Client = Literal["obstore", "s3fs"]


@dataclass
class Outcome:
    """failed: how many ranks gave up. seconds: until the last one was ready. requests, refused: of all ranks."""

    failed: int = 0
    seconds: float = 0.0
    requests: int = 0
    refused: int = 0


@dataclass
class Rank:
    """One rank's transfer. parts: what is still to send; None before the upload has begun."""

    share: Share
    parts: list[int] | None = None
    is_completing: bool = False
    has_failed: bool = False


@dataclass
class Request:
    rank: Rank
    size_bytes: int
    flight: Flight | None = None
    attempt: int = 1
    pause_s: float = 0.1


@dataclass
class ThrottledStore:
    """A prefix in virtual time, and the ranks that send to it. client: how a refused request is repeated."""

    client: Client
    is_upload: bool
    per_s: float
    deadline_s: float = SaveSettings().save_timeout_s
    now: float = 0.0
    outcome: Outcome = field(default_factory=Outcome)

    def __post_init__(self) -> None:
        self._chance = random.Random(0)
        self._next_at = 0.0
        self._coming: list[tuple[float, int, Callable[[Request], None], Request]] = []
        self._numbers = count()

    def clock(self) -> float:
        return self.now

    def run(self, ranks: list[Rank]) -> Outcome:
        began, self.outcome = self.now, Outcome()
        self._ends_at = began + self.deadline_s
        for rank in ranks:
            self._at(began, self._arrives if self.is_upload else self._ends, Request(rank, 0))
        while self._coming:
            self.now, _, happens, request = heapq.heappop(self._coming)
            happens(request)
        self.outcome.seconds = self.now - began
        return self.outcome

    def _at(self, when: float, happens: Callable[[Request], None], request: Request) -> None:
        heapq.heappush(self._coming, (when, next(self._numbers), happens, request))

    def _arrives(self, request: Request) -> None:
        self.outcome.requests += 1
        if self._next_at < self.now + 1:
            self._next_at = max(self._next_at, self.now) + 1 / self.per_s
            self._at(self.now + LATENCY_S + request.size_bytes / EACH_BYTES_PER_S, self._ends, request)
            return
        self.outcome.refused += 1
        pause_s = self._pause_after_refusal(request)
        request.attempt += 1
        if request.attempt > self._tries or self.now + pause_s > self._ends_at:
            self._fails(request)
        else:
            self._at(self.now + LATENCY_S + pause_s, self._arrives, request)

    def _pause_after_refusal(self, request: Request) -> float:
        if self.client == "obstore":
            pause_s = request.pause_s
            request.pause_s = min(MAX_PAUSE.total_seconds(), self._chance.uniform(0.1, 2 * pause_s))
            return pause_s
        if request.flight is not None:
            request.flight.refused()
        return self._chance.uniform(*pause_bounds(request.attempt))

    @property
    def _tries(self) -> float:
        return 1 + MAX_RETRIES if self.client == "obstore" else math.inf

    def _fails(self, request: Request) -> None:
        """One of its requests has failed for good: the rank sends nothing more."""
        self.outcome.failed += not request.rank.has_failed
        request.rank.has_failed = True
        request.rank.parts = []
        if request.flight is not None:
            request.flight.end(0)

    def _ends(self, request: Request) -> None:
        rank = request.rank
        if rank.is_completing:
            return
        if request.flight is None:
            rank.parts = [] if rank.has_failed else parts_of(rank.share.window.size, is_upload=self.is_upload)
        else:
            request.flight.end(request.size_bytes)
        assert rank.parts is not None
        while rank.parts and rank.share.may_begin():
            self._arrives(Request(rank, rank.parts.pop(), rank.share.begin()))
        if not rank.parts and not rank.share.flying and not rank.has_failed:
            rank.is_completing = True
            if self.is_upload:
                self._arrives(Request(rank, 0))


def parts_of(in_flight: int, *, is_upload: bool) -> list[int]:
    part = PART_SIZES["s3"].part_bytes_of(SHARD_BYTES, in_flight)
    if not is_upload:
        part = piece_bytes(SHARD_BYTES, in_flight, SUB_BLOCK, REQUEST_BYTES) // SUB_BLOCK * SUB_BLOCK
    return [min(part, SHARD_BYTES - at) for at in range(0, SHARD_BYTES, part)]


@contextmanager
def world_of(ranks: int) -> Iterator[None]:
    """Have this process be one of so many ranks inside the block."""
    before = os.environ.get("WORLD_SIZE")
    os.environ["WORLD_SIZE"] = str(ranks)
    try:
        yield
    finally:
        del os.environ["WORLD_SIZE"]
        if before is not None:
            os.environ["WORLD_SIZE"] = before


def transferred(ranks: int, client: Client, *, is_upload: bool) -> list[Outcome]:
    """What happens when so many ranks save, or load, in the same moment, each in a process of its own; TURNS times."""
    limit = (WRITES_PER_S if is_upload else READS_PER_S) * SIMULATED / ranks
    store = ThrottledStore(client, is_upload, limit)
    with world_of(ranks):
        least = fewest_in_flight(PART_SIZES["s3"].in_flight if is_upload else READS_IN_FLIGHT)
        sizes = {"least": least, "most": most_in_flight(MOST), "rises_to": 2 * GROUP_FIRST // ranks}
        windows = [RequestWindow(**sizes, clock=store.clock) for _ in range(SIMULATED)]
        found = []
        for _ in range(TURNS):
            shares = [Share(window).__enter__() for window in windows]
            found.append(store.run([Rank(share) for share in shares]))
            for share in shares:
                share.__exit__()
        return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.throttled_ranks", description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=(256, 1024, 4096))
    print(f"| | ranks | of {SIMULATED} failed | s | requests of a rank | of these refused |\n|---|---|---|---|---|---|")
    for ranks in parser.parse_args().ranks:
        rows: dict[str, tuple[Client, bool]] = {
            "save, obstore": ("obstore", True),
            "save, s3fs": ("s3fs", True),
            "load": ("s3fs", False),
        }
        for name, (client, is_upload) in rows.items():
            found = transferred(ranks, client, is_upload=is_upload)
            cells = (
                [f"{one.failed}" for one in found],
                [f"{one.seconds:.0f}" for one in found],
                [f"{one.requests / SIMULATED:.0f}" for one in found],
                [f"{one.refused / SIMULATED:.0f}" for one in found],
            )
            print(f"| {name} | {ranks:,} | " + " | ".join(", ".join(cell) for cell in cells) + " |", flush=True)


if __name__ == "__main__":
    main()
