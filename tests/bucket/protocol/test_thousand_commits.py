"""Tests a thousand commits of one run: `latest` stays within its size limit, whoever writes it.

The test moves the bucket's clock forward, so that grace periods and pauses of hours pass in seconds.
"""

import time
from contextlib import suppress
from dataclasses import replace
from uuid import uuid4

import pytest

from raycheck.bucket.format import object_keys
from raycheck.bucket.format.document import dump
from raycheck.bucket.format.latest import COMMIT_BYTES, MAX_ATTEMPTS_LISTED, Evicted, Latest
from raycheck.bucket.protocol.removal.prune_and_sweep import GRACE_S, MAX_EVICTED
from raycheck.bucket.store import Got, Store, open_store
from raycheck.bucket.store.interface import MAX_WHOLE_BYTES
from raycheck.errors import ConfigError, SaveFailedError
from tests.support.histories.concurrent_driver import drop_evicted
from tests.support.histories.invariants import assert_invariants
from tests.support.samples.sample_checkpoints import Around, Driver

COMMITS = 1000
PRUNE_EVERY_S = GRACE_S / 4  # as the coordinator does
NEW_GROUP_EVERY, NEW_DRIVER_EVERY = 12, 90
KEEP_LAST = 10


class Clock(Around):
    """A store that moves the bucket's clock forward."""

    passed_s = 0.0

    def get(self, key: str, max_bytes: int = MAX_WHOLE_BYTES) -> Got:
        got = self.inner.get(key, max_bytes)
        return replace(got, at=got.at + self.passed_s)


def size(store: Store) -> int:
    return len(store.get(object_keys.LATEST_KEY).data)


@pytest.mark.parametrize(
    ("commit_every_s", "bound"),
    [
        pytest.param(10.0, 24 * 1024, id="one in ten seconds", marks=pytest.mark.slow),
        pytest.param(1.0, 48 * 1024, id="one a second", marks=pytest.mark.slow),
        pytest.param(600.0, 24 * 1024, id="one in ten minutes", marks=pytest.mark.slow),
    ],
)
def test_latest_stays_small_over_a_thousand_commits_of_many_attempts_and_drivers(commit_every_s, bound):
    store = Clock(open_store(f"memory://{uuid4().hex}"))
    pruned_at, sizes, driver, number, save = 0.0, [], None, 0, 0

    for commit in range(COMMITS):
        if driver is None or commit % NEW_DRIVER_EVERY == 0:
            driver = Driver(store, uuid4().hex[:16], uuid4().hex[:16])
        if commit % NEW_DRIVER_EVERY == 0 or commit % NEW_GROUP_EVERY == 0:
            attempt, _ = driver.claim(uuid4().hex[:16])
            number, save = attempt.number, 0
        save += 1
        driver.save(number, save, step=commit + 1, keep_last=KEEP_LAST)
        store.passed_s += commit_every_s
        if store.passed_s - pruned_at >= PRUNE_EVERY_S:
            drop_evicted(driver, grace_s=GRACE_S)
            pruned_at = store.passed_s
        sizes.append(size(store))

    body = assert_invariants(store)
    assert [entry.step for entry in body.live] == list(range(COMMITS - KEEP_LAST + 1, COMMITS + 1))
    assert len(body.attempts) == MAX_ATTEMPTS_LISTED < body.attempt.number
    assert len(body.evicted) <= MAX_EVICTED + PRUNE_EVERY_S / commit_every_s
    assert max(sizes) <= bound
    assert max(sizes[-COMMITS // 4 :]) <= 1.05 * max(sizes[: -COMMITS // 4]), "it keeps growing"
    names = store.list_names(object_keys.CHECKPOINTS_PREFIX)
    assert set(names) == {item.key for item in (*body.live, *body.evicted)}


@pytest.mark.slow
def test_a_latest_full_of_evicted_names_can_still_be_claimed_and_pruned():
    """Commits that are faster than prunes fill `latest`. Such a save may fail, but the run must not be lost."""
    store = open_store(f"memory://{uuid4().hex}")
    ann, bob = Driver(store, "ann"), Driver(store, "bob")
    ann.claim("g1")
    fill(ann, up_to=COMMIT_BYTES - 1000)
    save_until_full(ann)

    attempt, _ = bob.claim("h1")
    drop_evicted(bob, grace_s=GRACE_S)
    bob.save(attempt.number, 1, keep_last=1)

    body = assert_invariants(store)
    assert len(body.evicted) <= MAX_EVICTED + 1


def fill(driver: Driver, *, up_to: int) -> None:
    """Write the `latest` that this many commits leave, without making them all."""
    body, now = driver.look(), time.time()

    def with_names(number: int) -> Latest:
        names = [f"step-{save:09d}-a1-s{save}" for save in range(1000, 1000 + number)]
        return replace(body, evicted=tuple(Evicted(key=name, at=now) for name in names))

    name_bytes = (len(dump(with_names(100))) - len(dump(with_names(0)))) / 100
    driver.store.put(object_keys.LATEST_KEY, dump(with_names(int((up_to - len(dump(body))) / name_bytes))))


def save_until_full(driver: Driver) -> None:
    """Save until `latest` is full. It need not become full: a commit may make room for itself."""
    with suppress(ConfigError, SaveFailedError):
        for save in range(1, 100):
            driver.save(1, save, keep_last=1)
