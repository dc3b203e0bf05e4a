"""How fast a store is from this machine, and how much of that raycheck gets, measured on the store itself.

Two things are compared on the same bytes: plain requests (a PUT of a small object per part, a GET of a range) in every
way of cutting and overlapping them, and raycheck's own: `put_parts`, and ranged reads as a restore makes them, with the
checksums that a save and a restore compute. Rounds are interleaved, so that a store that gets slower meanwhile does so
for all. Plain requests go through the same store client: they say what raycheck could get by other cutting, not what
another client could. Nothing here knows a run, torch or Ray.
"""

import os
import random
import socket
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product

from raycheck.bucket.format.checksum import SUB_BLOCK, crc32, sub_block_crcs
from raycheck.bucket.protocol.preflight import probe_node
from raycheck.bucket.store import Store
from raycheck.cli.bench.scratch_objects import Scratch
from raycheck.errors import ConfigError, CorruptError

MIB = 1024 * 1024
ROUNDS = 5
MIN_ROUNDS = 3
LATENCIES = 20
LATENCY_SHARE = 0.1
SMALL_BYTES = 4096
NOTICEABLE = 0.1


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Way:
    """How to move an object: requests of `part_bytes` each, `in_flight` of them at a time."""

    part_bytes: int
    in_flight: int

    @property
    def wave_bytes(self) -> int:
        """What is under way at any moment; objects smaller than that say nothing about this way."""
        return self.part_bytes * self.in_flight


WAYS = tuple(Way(part_bytes=size * MIB, in_flight=count) for size, count in product((8, 16, 32, 64), (2, 4, 8, 16)))
OWN_READ = Way(part_bytes=16 * MIB, in_flight=8)
"""How a restore reads (shards/reader.py)."""


@dataclass(frozen=True, slots=True)
class Series:
    """One thing measured several times, in order. Of speeds in bytes per second, of latencies in seconds."""

    samples: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.samples)


@dataclass(frozen=True, kw_only=True, slots=True)
class Direction:
    """Writing, or reading. plain: the speed of plain requests by way; own: raycheck's."""

    plain: Mapping[Way, Series]
    own: Series

    @property
    def best(self) -> Way:
        return max(self.plain, key=lambda way: self.plain[way].median)

    @property
    def share(self) -> float:
        """raycheck's speed as a share of the best plain requests."""
        return self.own.median / self.plain[self.best].median

    @property
    def noise(self) -> float:
        """How far the samples of one way lie from their middle, as a share of it, for the way in the middle. 0 where
        everything was measured once."""
        spreads = [(max(item.samples) - min(item.samples)) / 2 / item.median for item in self.plain.values()]
        return statistics.median(spreads)

    @property
    def alike(self) -> tuple[Way, ...]:
        """The best way, and those that the noise does not let tell from it."""
        enough = self.plain[self.best].median * (1 - self.noise)
        return tuple(way for way in sorted(self.plain) if self.plain[way].median >= enough)

    @property
    def recommended(self) -> Way:
        """Of those the one that holds the least memory, unless it looked noticeably slower: on a noisy store all are
        alike."""
        enough = self.plain[self.best].median * (1 - NOTICEABLE)
        quick = [way for way in self.alike if self.plain[way].median >= enough]
        return min(quick, key=lambda way: (way.wave_bytes, way.in_flight))


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """latencies: by name of the request. size_bytes: what each sample moved. left_out: ways that did not fit."""

    latencies: Mapping[str, Series]
    writing: Direction
    reading: Direction
    size_bytes: int
    left_out: tuple[Way, ...]


def measure(
    store: Store,
    *,
    token: str,
    size_bytes: int,
    budget_s: float,
    ways: Sequence[Way] = WAYS,
    clock: Callable[[], float] = time.monotonic,
) -> Measured:
    """Measure for about `budget_s`, with objects of at most `size_bytes`; holds up to three times that in memory.

    token: names the scratch objects, and is used once. On a slow store objects are smaller, ways are left out and
    rounds are fewer, so that the budget holds. Raises ConfigError when the size is too small or a permission is
    missing, StoreError when the store or a delete failed.
    """
    deadline = clock() + budget_s
    first = min(ways, key=lambda way: way.wave_bytes)
    if size_bytes < first.wave_bytes:
        raise ConfigError(f"objects of {size_bytes} bytes are too small to measure with; give {first.wave_bytes}")
    probe_node(store, node=socket.gethostname())
    with Scratch(store, token) as scratch:
        latencies = _latencies(scratch, clock, clock() + budget_s * LATENCY_SHARE)
        data = memoryview(_random_bytes(size_bytes))
        trial = _Bench(scratch, data[: first.wave_bytes], clock)
        rates = trial.put_plain(first), trial.get_plain(first)
        size, fitting = _plan(ways, size_bytes, rates, deadline - clock())
        puts, gets = _rounds(_Bench(scratch, data[:size], clock), fitting, lambda: clock() > deadline)
    return Measured(
        latencies=latencies,
        writing=_direction(puts, ways),
        reading=_direction(gets, ways),
        size_bytes=size,
        left_out=tuple(way for way in ways if way not in puts),
    )


def _latencies(scratch: Scratch, clock: Callable[[], float], until: float) -> dict[str, Series]:
    """Each round on an object of its own: Google limits the writes to one object. The first round is not counted."""
    store, body = scratch.store, os.urandom(SMALL_BYTES)
    found: dict[str, list[float]] = {"get": [], "create": [], "swap": []}

    def timed(name: str, call: Callable[[], object]) -> None:
        began = clock()
        call()
        found[name].append(clock() - began)

    def once(key: str) -> None:
        timed("create", lambda: store.put_if_absent(key, body))
        version = store.get(key).version
        timed("get", lambda: store.get(key))
        timed("swap", lambda: store.put_if_match(key, body[::-1], version))

    for number in range(1 + LATENCIES):
        if number > MIN_ROUNDS and clock() > until:
            break
        scratch.run([partial(once, scratch.new_key())])
    return {name: Series(tuple(samples[1:])) for name, samples in found.items()}


def _random_bytes(size_bytes: int) -> bytearray:
    """What no store can compress or deduplicate."""
    data = bytearray(size_bytes)
    for at in range(0, size_bytes, 16 * MIB):
        piece = os.urandom(min(16 * MIB, size_bytes - at))
        data[at : at + len(piece)] = piece
    return data


def _plan(
    ways: Sequence[Way], size_bytes: int, rates: tuple[float, float], left_s: float
) -> tuple[int, tuple[Way, ...]]:
    """The largest objects, halved so often, with which all ways that fit into them can be measured in time."""
    least = min(way.wave_bytes for way in ways)
    while True:
        fitting = tuple(way for way in ways if way.wave_bytes <= size_bytes)
        round_s = sum((len(fitting) + 1) * size_bytes / rate for rate in rates)
        if round_s * MIN_ROUNDS <= left_s or size_bytes // 2 < least:
            return size_bytes, fitting
        size_bytes //= 2


Speeds = dict[Way | None, list[float]]
"""Bytes per second by way; None stands for raycheck's own."""


def _rounds(bench: "_Bench", ways: Sequence[Way], is_over: Callable[[], bool]) -> tuple[Speeds, Speeds]:
    """raycheck's own and at least one way are measured once, however short the time."""
    chance = random.Random(0)
    order: list[Way | None] = [None, *sorted(ways, key=lambda way: way.wave_bytes)]
    puts: Speeds = {}
    gets: Speeds = {}
    for _ in range(ROUNDS):
        for way in order:
            if is_over() and len(puts) > 1:
                return puts, gets
            puts.setdefault(way, []).append(bench.put_own() if way is None else bench.put_plain(way))
            gets.setdefault(way, []).append(bench.get_own() if way is None else bench.get_plain(way))
        chance.shuffle(order)
    return puts, gets


def _direction(speeds: Speeds, ways: Sequence[Way]) -> Direction:
    plain = {way: Series(tuple(speeds[way])) for way in ways if way in speeds}
    return Direction(plain=plain, own=Series(tuple(speeds[None])))


class _Bench:
    """Samples of one size, each in bytes per second. What a sample writes is deleted outside the clock."""

    def __init__(self, scratch: Scratch, data: memoryview, clock: Callable[[], float]) -> None:
        self._scratch = scratch
        self._store = scratch.store
        self._data = data
        self._clock = clock
        self._crcs = sub_block_crcs(data)
        self._target = memoryview(bytearray(data))  # not zeros, whose pages would be made as they are first written
        self._object = scratch.new_key()
        scratch.run([partial(self._send, self._object)])

    def put_plain(self, way: Way) -> float:
        spans = [(self._scratch.new_key(), at, until) for at, until in self._spans(way.part_bytes)]
        jobs = [partial(self._store.put, key, self._data[at:until]) for key, at, until in spans]
        speed = self._speed(jobs, way.in_flight)
        self._scratch.delete(key for key, _, _ in spans)
        return speed

    def put_own(self) -> float:
        key = self._scratch.new_key()
        speed = self._speed([partial(self._send, key)], 1)
        self._scratch.delete([key])
        return speed

    def get_plain(self, way: Way) -> float:
        return self._speed([partial(self._fetch, *span) for span in self._spans(way.part_bytes)], way.in_flight)

    def get_own(self) -> float:
        jobs = [partial(self._restore, *span) for span in self._spans(OWN_READ.part_bytes)]
        return self._speed(jobs, OWN_READ.in_flight)

    def _speed(self, jobs: Sequence[Callable[[], None]], at_once: int) -> float:
        began = self._clock()
        self._scratch.run(jobs, at_once=at_once)
        return len(self._data) / max(self._clock() - began, 1e-9)

    def _spans(self, part_bytes: int) -> Iterator[tuple[int, int]]:
        for at in range(0, len(self._data), part_bytes):
            yield at, min(at + part_bytes, len(self._data))

    def _send(self, key: str) -> None:
        size = len(self._data)
        self._store.put_parts(key, self._scratch.watched(self._sealed(self._store.part_bytes(size))), size)

    def _sealed(self, part_bytes: int) -> Iterator[memoryview]:
        """Parts with the checksums that a save computes: of sub-blocks, and of the whole shard."""
        whole = 0
        for at, until in self._spans(part_bytes):
            part = self._data[at:until]
            sub_block_crcs(part)
            whole = crc32(part, whole)
            yield part

    def _fetch(self, at: int, until: int) -> None:
        self._store.get_range(self._object, at, until)

    def _restore(self, at: int, until: int) -> None:
        """As a restore does it: checked, and copied to where it belongs."""
        data = memoryview(self._store.get_range(self._object, at, until))
        if sub_block_crcs(data) != self._crcs[at // SUB_BLOCK : -(-until // SUB_BLOCK)]:
            raise CorruptError(f"{self._store.uri}: {self._object}: other bytes came back than were written")
        self._target[at:until] = data
