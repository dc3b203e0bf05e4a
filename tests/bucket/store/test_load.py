"""Tests load: the cost of a run does not depend on other runs, on the number of its checkpoints, or on its readers."""

import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from uuid import uuid4

import pytest

from raycheck.bucket.format import object_keys
from raycheck.bucket.format.checksum import crc32
from raycheck.bucket.format.latest import MAX_BYTES
from raycheck.bucket.protocol.removal.prune_and_sweep import GRACE_S
from raycheck.bucket.reading import Checkpoint, read_latest
from raycheck.bucket.store import Store, open_store
from raycheck.bucket.store.address import join_uri
from raycheck.errors import NotFoundError
from tests.bucket.protocol.test_thousand_commits import Clock
from tests.support.histories.concurrent_driver import drop_evicted
from tests.support.histories.invariants import assert_invariants
from tests.support.samples.sample_checkpoints import Around, Driver
from tests.support.servers.http_fault_proxy import FaultProxy, fault_proxy
from tests.support.servers.memory_store import DictStore

RUNS = 200
CHECKPOINTS = 5000
READERS, WRITERS = 64, 4
READ_FOR_S, READ_FOR_AT_MOST_S = 15.0, 120.0
SAVES = 5


def read_whole(checkpoint: Checkpoint) -> int:
    """Read every object of the checkpoint and compare its checksum. Returns the number of bytes read."""
    manifest = checkpoint.read_manifest()
    checkpoint.read_index(manifest)
    total = 0
    for key, record in manifest.objects():
        data = checkpoint.store.get(key).data
        assert (len(data), crc32(data)) == (record.size_bytes, record.crc32), key
        total += len(data)
    return total


# --- many runs ---


def life(wire: FaultProxy, uri: str) -> dict[str, list[str]]:
    """Claim, save, and restore by a reader: the requests of each."""
    store, heads = open_store(uri), wire.heads
    driver, asked = Driver(store), {}

    def note(what: str) -> None:
        asked[what] = [f"{head.method} {'list' if 'list-type' in head.target else 'object'}" for head in heads]
        heads.clear()

    heads.clear()
    attempt, _ = driver.claim("g")
    note("claim")
    for save in (1, 2, 3):
        driver.save(attempt.number, save, keep_last=2)
        note(f"save {save}")
    body = read_latest(store)
    assert read_whole(Checkpoint(store, body.entry(body.head)))
    note("restore")
    return asked


@pytest.mark.slow
def test_a_run_costs_the_same_beside_two_hundred_others(s3: str) -> None:
    with fault_proxy(s3) as wire:
        bucket = join_uri(wire.uri, uuid4().hex)
        alone = life(wire, join_uri(bucket, "alone"))

        def one_more(number: int) -> None:
            driver = Driver(open_store(join_uri(s3, bucket.rpartition("/")[2].partition("?")[0] + f"/run-{number}")))
            attempt, _ = driver.claim("g")
            driver.save(attempt.number, 1)

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(one_more, range(RUNS)))
        beside = life(wire, join_uri(bucket, "run"))

    assert beside == alone
    assert not any("list" in line for what in alone if what != "claim" for line in alone[what])


# --- many checkpoints ---


class Counted(Around):
    """A store that counts the calls of each verb."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.calls: Counter[str] = Counter()

    def __getattr__(self, name: str):
        found = super().__getattr__(name)
        if not callable(found):
            return found

        def call(*args, **more):
            self.calls[name] += 1
            return found(*args, **more)

        return call


@pytest.mark.slow
def test_the_five_thousandth_checkpoint_costs_what_the_first_ones_did() -> None:
    store = Counted(Clock(DictStore()))
    driver = Driver(store)
    attempt, _ = driver.claim("g")
    costs, sizes, seconds = {}, [], []

    for save in range(1, CHECKPOINTS + 1):
        store.calls.clear()
        began = time.thread_time()
        driver.save(attempt.number, save, keep_last=50)
        seconds.append(time.thread_time() - began)
        if save in (100, CHECKPOINTS):
            costs[save] = dict(store.calls)
        sizes.append(len(store.get(object_keys.LATEST_KEY).data))
        store.inner.passed_s += 10.0
        if save % 15 == 0:  # as the coordinator does: a quarter of the grace
            drop_evicted(driver, grace_s=GRACE_S)

    store.calls.clear()
    body = read_latest(store)
    assert read_whole(Checkpoint(store, body.entry(body.head)))
    assert costs[100] == costs[CHECKPOINTS]
    assert not any(verb.startswith("list") for verb in (*costs[100], *store.calls))
    assert max(sizes) < MAX_BYTES / 4
    assert sum(seconds[-500:]) < 2 * sum(seconds[500:1000])
    assert [entry.step for entry in body.live] == [10 * save for save in range(CHECKPOINTS - 49, CHECKPOINTS + 1)]


# --- many readers ---


@pytest.mark.slow
@pytest.mark.parametrize("uri", ["file", "s3"], indirect=True)
def test_sixty_four_readers_see_nothing_but_whole_checkpoints_while_four_runs_commit(uri: str) -> None:
    """There is no grace period here: checkpoints are deleted while they are read, and the readers must be told so."""
    stores = [open_store(join_uri(uri, f"run-{number}")) for number in range(WRITERS)]
    drivers = [Driver(store) for store in stores]
    attempts = [driver.claim("g")[0].number for driver in drivers]
    for driver, attempt in zip(drivers, attempts, strict=True):
        driver.save(attempt, 1, keep_last=2)
    over = threading.Event()
    saved = [1] * WRITERS

    def write(number: int) -> None:
        while not over.is_set():
            drivers[number].save(attempts[number], saved[number] + 1, keep_last=2)
            saved[number] += 1
            drop_evicted(drivers[number], grace_s=0.0)

    def read(number: int) -> Counter[str]:
        store, seen, step = stores[number % WRITERS], Counter(), 0
        while not over.is_set():
            body = read_latest(store)
            entry = body.entry(body.head)
            assert entry.step >= step, "the head went back"
            step = entry.step
            try:
                read_whole(Checkpoint(store, entry))
                seen["whole"] += 1
            except NotFoundError:
                assert read_latest(store).entry(entry.key) is None, f"{entry.key} is live, and something of it is not"
                seen["dropped"] += 1
        return seen

    with ThreadPoolExecutor(READERS + WRITERS) as pool:
        writing = [pool.submit(write, number) for number in range(WRITERS)]
        reading = [pool.submit(read, number) for number in range(READERS)]
        deadline = time.monotonic() + READ_FOR_AT_MOST_S
        time.sleep(READ_FOR_S)
        while min(saved) < SAVES and time.monotonic() < deadline and not any(one.done() for one in writing):
            time.sleep(0.1)
        over.set()
        for one in writing:
            one.result(60)
        seen = [one.result(60) for one in reading]

    assert all(one["whole"] for one in seen)
    for store, save in zip(stores, saved, strict=True):
        assert assert_invariants(store).attempt.last_save == save >= SAVES
