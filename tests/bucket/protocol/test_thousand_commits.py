"""Tests a thousand commits of one run: `latest` stays within its bound, whoever writes it.

The bucket's clock is set forward here, so that grace and pauses of hours pass in seconds.
"""

from dataclasses import replace
from uuid import uuid4

import pytest

from raycheck.bucket.format import object_keys
from raycheck.bucket.format.latest import MAX_ATTEMPTS_LISTED
from raycheck.bucket.protocol.removal.prune_and_sweep import GRACE_S
from raycheck.bucket.store import Got, Store, open_store
from raycheck.bucket.store.interface import MAX_WHOLE_BYTES
from tests.support.histories.concurrent_driver import drop_evicted
from tests.support.histories.invariants import assert_invariants
from tests.support.samples.sample_checkpoints import Around, Driver

COMMITS = 1000
PRUNE_EVERY_S = GRACE_S / 4  # as the coordinator does
NEW_GROUP_EVERY, NEW_DRIVER_EVERY = 12, 90
KEEP_LAST = 10


class Clock(Around):
    """Sets the bucket's clock forward."""

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
    assert len(body.evicted) <= (GRACE_S + PRUNE_EVERY_S) / commit_every_s
    assert max(sizes) <= bound
    assert max(sizes[-COMMITS // 4 :]) <= 1.05 * max(sizes[: -COMMITS // 4]), "it keeps growing"
    names = store.list_names(object_keys.CHECKPOINTS_PREFIX)
    assert set(names) == {item.key for item in (*body.live, *body.evicted)}
