"""Measures what a commit, a claim and a look cost in a run with 10, 1,000 and 100,000 live checkpoints.

`python -m tests.bench.many_checkpoints`. The store is in memory, so times are CPU times of raycheck alone; requests and
bytes are what a real store would see. Each time is also given as a ratio to that of the run with 10.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import replace

from raycheck.bucket.format import object_keys
from raycheck.bucket.format.label import Label
from raycheck.bucket.format.latest import Entry, Latest
from raycheck.bucket.format.object_keys import CheckpointName
from raycheck.bucket.protocol import name_and_score
from raycheck.bucket.protocol.pin_and_evict import evict
from raycheck.bucket.protocol.removal.delete import delete_checkpoint
from raycheck.bucket.protocol.swap import Register
from raycheck.bucket.reading import read_latest, read_newest
from raycheck.bucket.store import Got, Store
from raycheck.bucket.store.interface import MAX_WHOLE_BYTES, Written
from raycheck.settings import Retention
from tests.support.samples.sample_checkpoints import Around, Driver, write_checkpoint
from tests.support.servers.memory_store import DictStore

SIZES = (10, 1000, 100_000)
COMMITS = 200
KEEP = Retention(keep_every_steps=1)


class Counting(Around):
    """Counts the requests for `latest` and pages, and their bytes."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.requests = self.size_bytes = 0

    def _count(self, key: str, data: bytes) -> None:
        if key == object_keys.LATEST_KEY or key.startswith(object_keys.PAGES_PREFIX):
            self.requests += 1
            self.size_bytes += len(data)

    def get(self, key: str, max_bytes: int = MAX_WHOLE_BYTES) -> Got:
        got: Got = self.inner.get(key, max_bytes)
        self._count(key, got.data)
        return got

    def put_if_match(self, key: str, data: bytes, version: str) -> Written:
        self._count(key, data)
        written: Written = self.inner.put_if_match(key, data, version)
        return written

    def put_if_absent(self, key: str, data: bytes) -> Written:
        self._count(key, data)
        written: Written = self.inner.put_if_absent(key, data)
        return written


def a_run(count: int) -> Counting:
    """Make a run with this many live checkpoints, of which all but the newest are entries alone."""
    store = Counting(DictStore(at=time.time()))
    driver = Driver(store)  # type: ignore[arg-type]
    driver.claim("g1")
    metrics = {"loss": 0.123456, "accuracy": 0.9, "lr": 1e-4}

    def full(body: Latest, now: float) -> Latest:
        names = (CheckpointName(attempt=1, save=save, step=10 * save) for save in range(1, count))
        entries = tuple(
            Entry(
                key=str(name), step=name.step, committed_at=now, size_bytes=1, metrics=metrics, manifest_crc32=2**32 - 1
            )
            for name in names
        )
        attempts = (replace(body.attempt, last_save=count - 1),)
        return replace(body, newest=entries, head=entries[-1].key, attempts=attempts)

    Register(store).edit(full, what="fill")  # type: ignore[arg-type]
    driver.look()
    driver.save(1, count, keep_last=None, rules={"keep_every_steps": 1})
    return store


def measured(store: Counting, call: Callable[[], object], times: int = 1) -> tuple[float, float, float]:
    """Return the seconds (median), requests and bytes per call (means)."""
    requests, size_bytes, took = store.requests, store.size_bytes, []
    for _ in range(times):
        began = time.perf_counter()
        call()
        took.append(time.perf_counter() - began)
    return statistics.median(took), (store.requests - requests) / times, (store.size_bytes - size_bytes) / times


def rows(count: int) -> dict[str, tuple[float, float, float]]:
    store = a_run(count)
    driver = Driver(store)  # type: ignore[arg-type]
    found = {"claim": measured(store, lambda: driver.claim("g2"))}
    saves = iter(range(1, 10**6))
    waiting = [write_checkpoint(store, attempt=2, save=next(saves), step=10 * (count + n)) for n in range(COMMITS)]  # type: ignore[arg-type]
    left = iter(waiting)
    found["commit"] = measured(store, lambda: driver.commit(next(left), keep_last=None, keep_every_steps=1), COMMITS)
    worst = max(_took(driver, write_checkpoint(store, attempt=2, save=next(saves), step=10**8 + n)) for n in range(130))  # type: ignore[arg-type]
    found["slowest of 130 commits"] = (worst, 0.0, 0.0)
    found["look at the newest"] = measured(store, lambda: read_newest(store), 20)  # type: ignore[arg-type]
    found["list all"] = measured(store, lambda: read_latest(store))  # type: ignore[arg-type]
    oldest = read_latest(store).live[0].key  # type: ignore[arg-type]
    register = Register(store)  # type: ignore[arg-type]
    found["name the oldest"] = measured(store, lambda: name_and_score.name(register, oldest, Label(name="first")))
    found["delete the oldest by hand"] = measured(store, lambda: delete_checkpoint(Register(store), oldest))  # type: ignore[arg-type]
    found["apply the rules to all"] = measured(store, lambda: evict(register, KEEP))
    found["size of latest"] = (0.0, 1.0, float(len(store.get(object_keys.LATEST_KEY).data)))
    return found


def _took(driver: Driver, manifest: object) -> float:
    began = time.perf_counter()
    driver.commit(manifest, keep_last=None, keep_every_steps=1)  # type: ignore[arg-type]
    return time.perf_counter() - began


def main() -> None:
    found = {count: rows(count) for count in SIZES}
    for what in found[SIZES[0]]:
        for count in SIZES:
            seconds, requests, size_bytes = found[count][what]
            base = found[SIZES[0]][what][0] or 1.0
            print(
                f"{what:24} {count:7} live: {1000 * seconds:9.2f} ms ({seconds / base:7.1f}x) "
                f"{requests:6.2f} requests {size_bytes / 1024:9.1f} KiB"
            )


if __name__ == "__main__":
    main()
