"""Measures how fast a store is from this machine, and how much of that raycheck gets.

Two things are compared on the same bytes. One is plain requests (a PUT of a small object per part, a GET of a range),
with every part size and every number of requests at a time. The other is raycheck's own transfers: `put_parts`, and
ranged reads as a restore makes them, with the checksums that a save and a restore compute. Rounds are interleaved, so
that a store that gets slower meanwhile does so for all. Plain requests go through the same store client: they show what
raycheck could get by cutting otherwise, not what another client could get. Nothing here knows a run, torch or Ray.
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


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Way:
    """Describes how an object is moved: in requests of `part_bytes` each, `in_flight` of them at a time."""

    part_bytes: int
    in_flight: int

    @property
    def wave_bytes(self) -> int:
        """Returns the bytes under way at any moment.

        An object must have at least as many to say anything about this way.
        """
        return self.part_bytes * self.in_flight


WAYS = tuple(Way(part_bytes=size * MIB, in_flight=count) for size, count in product((8, 16, 32, 64), (2, 4, 8, 16)))
OWN_READ = Way(part_bytes=16 * MIB, in_flight=8)
"""How a restore reads (shards/transfer/reader.py)."""


@dataclass(frozen=True, slots=True)
class Series:
    """Holds the samples of one thing in the order they were taken: speeds in bytes per second, latencies in seconds."""

    samples: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.samples)


@dataclass(frozen=True, kw_only=True, slots=True)
class Direction:
    """Holds the speeds of writing, or those of reading. plain: of plain requests, by way; own: of raycheck."""

    plain: Mapping[Way, Series]
    own: Series

    @property
    def best(self) -> Way:
        return max(self.plain, key=lambda way: self.plain[way].median)

    @property
    def share(self) -> float:
        """Returns raycheck's speed as a share of that of the best plain requests."""
        return self.own.median / self.plain[self.best].median

    @property
    def noise(self) -> float:
        """Returns half the range of a way's samples as a share of their median, for the median way.

        0 where everything was measured once.
        """
        spreads = [(max(item.samples) - min(item.samples)) / 2 / item.median for item in self.plain.values()]
        return statistics.median(spreads)

    @property
    def alike(self) -> tuple[Way, ...]:
        """Returns the best way, and all others that are as fast within the noise."""
        enough = self.plain[self.best].median * (1 - self.noise)
        return tuple(way for way in sorted(self.plain) if self.plain[way].median >= enough)


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """Holds all that was measured.

    latencies: by the name of the request. size_bytes: what each sample of a speed moved. left_out: ways that needed
    larger objects or more time.
    """

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

    token: a random text that names the scratch objects; use each once. On a slow store objects are smaller, ways are
    left out and rounds are fewer, so that the budget holds. Raises ConfigError when the size is too small or a
    permission is missing, StoreError when the store or a delete failed.
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
        size, fitting = _choose_size(ways, size_bytes, rates, deadline - clock())
        puts, gets = _rounds(_Bench(scratch, data[:size], clock), fitting, lambda: clock() > deadline)
    return Measured(
        latencies=latencies,
        writing=_direction(puts, ways),
        reading=_direction(gets, ways),
        size_bytes=size,
        left_out=tuple(way for way in ways if way not in puts),
    )


def _latencies(scratch: Scratch, clock: Callable[[], float], until: float) -> dict[str, Series]:
    """Measure the latencies of small requests. Each round uses an object of its own, since Google limits the writes to
    one object; the first round is not counted."""
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
    """Returns bytes that no store can compress or deduplicate."""
    data = bytearray(size_bytes)
    for at in range(0, size_bytes, 16 * MIB):
        block = os.urandom(min(16 * MIB, size_bytes - at))
        data[at : at + len(block)] = block
    return data


def _choose_size(
    ways: Sequence[Way], size_bytes: int, rates: tuple[float, float], left_s: float
) -> tuple[int, tuple[Way, ...]]:
    """Returns the object size, and the ways that fit into it: `size_bytes` halved until all of those can be measured
    in the time that is left. rates: bytes per second of a first write and a first read."""
    least = min(way.wave_bytes for way in ways)
    while True:
        fitting = tuple(way for way in ways if way.wave_bytes <= size_bytes)
        round_s = sum((len(fitting) + 1) * size_bytes / rate for rate in rates)
        if round_s * MIN_ROUNDS <= left_s or size_bytes // 2 < least:
            return size_bytes, fitting
        size_bytes //= 2


Speeds = dict[Way | None, list[float]]
"""Bytes per second by way; the key None is raycheck's own transfer."""


def _rounds(bench: "_Bench", ways: Sequence[Way], is_over: Callable[[], bool]) -> tuple[Speeds, Speeds]:
    """Measure raycheck's own transfers and all ways in turns, for ROUNDS or until the time is over. Returns the speeds
    of writing and of reading. However short the time is, raycheck's own and one way are measured once."""
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
    """Takes single samples, in bytes per second, on objects of one size. What a sample writes is deleted after its time
    was taken."""

    def __init__(self, scratch: Scratch, data: memoryview, clock: Callable[[], float]) -> None:
        self._scratch = scratch
        self._store = scratch.store
        self._data = data
        self._clock = clock
        self._crcs = sub_block_crcs(data)
        self._target = memoryview(
            bytearray(data)
        )  # a copy, since the pages of zeros would be faulted in while the time is taken
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
        """Yields the parts, and computes the checksums that a save computes: of sub-blocks, and of the whole shard."""
        whole = 0
        for at, until in self._spans(part_bytes):
            part = self._data[at:until]
            sub_block_crcs(part)
            whole = crc32(part, whole)
            yield part

    def _fetch(self, at: int, until: int) -> None:
        self._store.get_range(self._object, at, until)

    def _restore(self, at: int, until: int) -> None:
        """Read a range as a restore does: check it, and copy it to its place."""
        data = memoryview(self._store.get_range(self._object, at, until))
        if sub_block_crcs(data) != self._crcs[at // SUB_BLOCK : -(-until // SUB_BLOCK)]:
            raise CorruptError(f"{self._store}: {self._object}: other bytes came back than were written")
        self._target[at:until] = data
