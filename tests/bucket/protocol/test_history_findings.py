"""Tests each fault that test_histories.py has found, by the shortest history that shows it.

In most of them, an error was missing until `latest` recorded which attempts were answered (step 10).
"""

from collections.abc import Callable

import pytest

from raycheck.bucket.format import object_keys
from raycheck.bucket.protocol.repair import repair
from raycheck.bucket.store import Got, Store
from raycheck.bucket.store.interface import MAX_WHOLE_BYTES, Written
from raycheck.errors import CorruptError, StoreError, SupersededError
from tests.support.samples.sample_checkpoints import Around, Driver
from tests.support.servers.memory_store import DictStore


class Creates(Around):
    """A store that calls `before` before the first write of `latest`, and may lose the response to that write."""

    def __init__(self, inner: Store, before: Callable[[], object], *, is_lost: bool = False) -> None:
        super().__init__(inner)
        self.before: Callable[[], object] | None = before
        self.is_lost = is_lost

    def put_if_absent(self, key: str, data: bytes) -> Written:
        before, self.before = (self.before, None) if key == object_keys.LATEST_KEY else (None, self.before)
        if before:
            before()
        written = self.inner.put_if_absent(key, data)
        if before and self.is_lost:
            raise StoreError("the answer was lost")
        return written


def bob_creates_latest_over_anns_checkpoints(store: Store, *, is_lost: bool = False) -> Driver:
    """Bob finds no run, and pauses. Ann claims, saves, and loses `latest`. Then Bob continues his claim."""

    def meanwhile() -> None:
        ann = Driver(store)
        ann.claim("g1")
        ann.save(1, 1)
        store.delete(object_keys.LATEST_KEY)

    return Driver(Creates(store, meanwhile, is_lost=is_lost), "bob")


def test_a_first_claim_whose_answer_is_lost_still_looks_for_what_it_may_have_overwritten():
    bob = bob_creates_latest_over_anns_checkpoints(DictStore(), is_lost=True)

    with pytest.raises(CorruptError, match="does not know the checkpoint"):
        bob.claim("h1")


def test_a_claim_that_was_refused_over_a_lost_latest_is_refused_when_it_is_repeated():
    store = DictStore()
    bob = bob_creates_latest_over_anns_checkpoints(store)
    with pytest.raises(CorruptError, match="does not know the checkpoint"):
        bob.claim("h1")

    for again in (bob, Driver(store, "bob", "c2")):
        with pytest.raises(CorruptError):
            again.claim("h1")


def test_nobody_starts_fresh_after_a_claim_that_was_refused_over_a_lost_latest():
    store = DictStore()
    bob = bob_creates_latest_over_anns_checkpoints(store)
    with pytest.raises(CorruptError, match="does not know the checkpoint"):
        bob.claim("h1")

    with pytest.raises(CorruptError):
        Driver(store, "eve").claim("e1")


def test_repair_takes_no_latest_for_sound_that_a_refused_claim_created_over_checkpoints():
    store = DictStore()
    bob = bob_creates_latest_over_anns_checkpoints(store)
    with pytest.raises(CorruptError, match="repair"):
        bob.claim("h1")

    assert [entry.key for entry in repair(store).latest.live] == ["step-000000010-a1-s1"]


class FailsOnce(Around):
    """A store that refuses the n-th GET of any manifest, as a busy store does."""

    def __init__(self, inner: Store, number: int) -> None:
        super().__init__(inner)
        self.left = number

    def get(self, key: str, max_bytes: int = MAX_WHOLE_BYTES) -> Got:
        if key.endswith("/manifest.json"):
            self.left -= 1
            if not self.left:
                raise StoreError("503, please reduce your request rate")
        return self.inner.get(key, max_bytes)


def a_run_without_its_latest() -> DictStore:
    store = DictStore()
    ann = Driver(store)
    ann.claim("g1")
    ann.save(1, 1)
    ann.save(1, 2)
    store.delete(object_keys.LATEST_KEY)
    return store


def test_repair_lists_nothing_when_the_first_read_of_a_manifest_fails():
    store = a_run_without_its_latest()

    with pytest.raises(StoreError, match="503"):
        repair(FailsOnce(store, 1))

    assert object_keys.LATEST_KEY not in store.objects


def test_repair_leaves_no_checkpoint_out_because_the_store_fails_in_its_verification():
    store = a_run_without_its_latest()

    with pytest.raises(StoreError, match="503"):
        repair(FailsOnce(store, 2))

    assert object_keys.LATEST_KEY not in store.objects


def test_a_claim_that_is_repeated_after_its_restore_source_was_evicted_is_no_lost_latest():
    ann = Driver(DictStore())
    ann.claim("g1")
    ann.save(1, 1)
    ann.claim("g2")
    ann.save(2, 1, keep_last=1)

    with pytest.raises(SupersededError, match="was answered"):  # CorruptError would end the run
        ann.claim("g2")
