"""Measures the history of a run of a million steps with a commit every 100: to write, to merge and to read it.

`python -m tests.bench.long_history`. The store is in memory, so times are CPU times of raycheck alone; requests and
bytes are what a real store would see. Commits and writes are the coordinator's own: each commit is made in a thread
while the history of the one before it is written in another, and both compete for the interpreter.
"""

import argparse
import asyncio
import math
import random
import statistics
import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread

from raycheck.bucket.format.object_keys import HISTORY_PREFIX
from raycheck.bucket.protocol.removal.prune_and_sweep import prune
from raycheck.bucket.store import Got, Store
from raycheck.bucket.store.interface import MAX_WHOLE_BYTES, Listed, Written
from raycheck.group.coordinator.history_writer import HistoryWriter
from raycheck.group.coordinator.messages import StepRows
from raycheck.settings import Retention
from raycheck.views.history import read_history
from tests.support.samples.sample_checkpoints import Around, Driver, write_checkpoint
from tests.support.servers.memory_store import DictStore

EVERY = 100
KEEP_LAST = 10
PRUNE_EVERY = 200
METRICS = ("loss", "lr", "grad_norm")
BEAT_S = 0.0005
BIG_BYTES = 1024 * 1024
"""A write of a segment of at least this size is a large merge."""


class Counting(Around):
    """Counts the requests for segments, and their bytes."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.requests = self.size_bytes = self.written_bytes = self.newest_bytes = 0

    def _count(self, key: str, size_bytes: int) -> bool:
        if is_counted := key.startswith(HISTORY_PREFIX):
            self.requests += 1
            self.size_bytes += size_bytes
        return is_counted

    def list_objects(self, prefix: str) -> Iterator[Listed]:
        found = list(self.inner.list_objects(prefix))
        self._count(prefix, 0)
        return iter(found)

    def get(self, key: str, max_bytes: int = MAX_WHOLE_BYTES) -> Got:
        got: Got = self.inner.get(key, max_bytes)
        self._count(key, len(got.data))
        return got

    def put_if_absent(self, key: str, data: bytes) -> Written:
        self._note_put(key, data)
        written: Written = self.inner.put_if_absent(key, data)
        return written

    def put(self, key: str, data: bytes) -> Written:
        self._note_put(key, data)
        written: Written = self.inner.put(key, data)
        return written

    def _note_put(self, key: str, data: bytes) -> None:
        if self._count(key, len(data)):
            self.written_bytes += len(data)
            self.newest_bytes = len(data)

    def delete(self, key: str) -> None:
        self._count(key, 0)
        self.inner.delete(key)


class Beats:
    """Measures for how long at a time other threads keep the interpreter to themselves."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        self._is_over = False
        self._thread = Thread(target=self._beat, daemon=True)

    def _beat(self) -> None:
        before = time.perf_counter()
        while not self._is_over:
            time.sleep(BEAT_S)
            now = time.perf_counter()
            self.longest_s = max(self.longest_s, now - before - BEAT_S)
            before = now

    def take(self) -> float:
        longest, self.longest_s = self.longest_s, 0.0
        return longest

    @contextmanager
    def running(self) -> Iterator[None]:
        self._thread.start()
        try:
            yield
        finally:
            self._is_over = True
            self._thread.join()


def rows_of(save: int, chance: random.Random) -> StepRows:
    """Make what rank 0 reports with a save: a loss in single precision, as tensors have it, and two Python numbers."""
    steps = array("q", range((save - 1) * EVERY + 1, save * EVERY + 1))
    values = {
        "loss": array("f", (2 + 8 / math.sqrt(step) + chance.gauss(0, 0.1) for step in steps)),
        "lr": array("d", (1e-4 * math.cos(step / 1e6) for step in steps)),
        "grad_norm": array("d", (chance.lognormvariate(0, 0.3) for _ in steps)),
        "": array("d", (1.7e9 + 0.31 * step for step in steps)),
    }
    rows = {name: (steps, array("d", column)) for name, column in values.items()}
    return StepRows(attempt=1, rows=rows, sent_at=1.7e9)


class Measured:
    """The seconds of commits, and what writing the history took, by kind."""

    def __init__(self) -> None:
        self.alone: list[float] = []
        self.beside: dict[str, list[float]] = {"a small write": [], "a large merge": []}
        self.writes: list[tuple[float, float, float, int]] = []  # seconds, longest hold, late loop, bytes

    def show(self, label: str, seconds: list[float]) -> None:
        if seconds:
            ordered = sorted(seconds)
            print(
                f"{label:44} {len(ordered):6}: median {1e3 * statistics.median(ordered):8.2f} ms, "
                f"99 % {1e3 * ordered[int(0.99 * (len(ordered) - 1))]:8.2f}, longest {1e3 * ordered[-1]:8.2f}"
            )


async def train(store: Counting, saves: int) -> Measured:
    """Make all commits, each while the history of the one before it is written."""
    driver, chance, beats, found = Driver(store), random.Random(0), Beats(), Measured()  # type: ignore[arg-type]
    driver.claim("g1")
    writer = HistoryWriter(driver.register)
    rules = Retention(keep_last=KEEP_LAST)

    def commit(save: int) -> float:
        manifest = write_checkpoint(store, attempt=1, save=save, step=EVERY * save)  # type: ignore[arg-type]
        began = time.perf_counter()
        assert driver.commit(manifest, keep_last=KEEP_LAST)
        return time.perf_counter() - began

    with beats.running():
        for save in range(1, saves + 1):
            loop_at, beats.longest_s, began = time.perf_counter(), 0.0, time.perf_counter()
            writer.start()
            writing = writer._task
            assert writing is not None
            took = await asyncio.to_thread(commit, save)
            late = 0.0
            while not writing.done():
                loop_at = time.perf_counter()
                await asyncio.sleep(BEAT_S)
                late = max(late, time.perf_counter() - loop_at - BEAT_S)
            seconds, size = time.perf_counter() - began, store.newest_bytes
            found.writes.append((seconds, beats.take(), late, size))
            found.beside["a large merge" if size >= BIG_BYTES else "a small write"].append(took)
            store.newest_bytes = 0
            writer.reported(rows_of(save, chance), now=1.7e9)
            writer.committed()
            if save % PRUNE_EVERY == 0:
                prune(driver.register, rules, grace_s=0.0)
        found.alone = [commit(saves + more) for more in range(1, 201)]
        writer.committed()
        await writer.finish()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1_000_000)
    saves = parser.parse_args().steps // EVERY
    store = Counting(DictStore(at=1.7e9))
    found = asyncio.run(train(store, saves))
    print(f"{saves * EVERY} steps of {len(METRICS)} metrics, {saves} commits")
    print(
        f"requests per commit: {store.requests / saves:.2f}; bytes written: {store.written_bytes / saves / 1024:.1f} KiB"
    )
    found.show("a commit alone", found.alone)
    for what, seconds in found.beside.items():
        found.show(f"a commit beside {what}", seconds)
    found.show("a write, with its merges", [item[0] for item in found.writes])
    found.show("longest time without the interpreter", [item[1] for item in found.writes])
    found.show("longest delay of the event loop", [item[2] for item in found.writes])
    for seconds, hold, late, size in sorted(found.writes, key=lambda item: -item[3])[:5]:
        print(
            f"  merge to {size / 2**20:6.1f} MiB: {seconds:6.3f} s, interpreter kept for {1e3 * hold:6.1f} ms, "
            f"event loop late by {1e3 * late:6.1f} ms"
        )
    requests, size_bytes, began = store.requests, store.size_bytes, time.perf_counter()
    history = read_history(store)  # type: ignore[arg-type]
    took = time.perf_counter() - began
    rows = history.rows()
    print(
        f"read: {store.requests - requests} requests for segments, {(store.size_bytes - size_bytes) / 2**20:.1f} MiB, "
        f"{took:.2f} s; {len(history.commits)} commits, {len(rows)} rows, one per {history.every} steps where thinned"
    )


if __name__ == "__main__":
    main()
