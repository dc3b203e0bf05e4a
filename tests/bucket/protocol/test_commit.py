"""Tests claim, commit, fencing and take-over on real stores.

A `Driver` of sample_checkpoints.py acts as one start of one coordinator, so two of them on one store stand for two
processes. A store that fails is a small class around the real one. Every test ends by asserting the invariants.
"""

import itertools
import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from raycheck.bucket.format import object_keys
from raycheck.bucket.format.document import FORMAT_VERSION, dump
from raycheck.bucket.format.latest import MAX_ATTEMPTS_LISTED, Attempt, Entry, Latest
from raycheck.bucket.protocol import commit, write_once
from raycheck.bucket.protocol.pin_and_evict import pin
from raycheck.bucket.protocol.preflight import probe
from raycheck.bucket.protocol.removal.prune_and_sweep import GRACE_S, prune
from raycheck.bucket.protocol.swap import Register
from raycheck.bucket.protocol.write_once import put_all_once, put_once
from raycheck.bucket.store import Got, Store, open_store
from raycheck.bucket.store.interface import MAX_CONDITIONAL_BYTES, MAX_WHOLE_BYTES, Buffer, Written
from raycheck.errors import (
    ConfigError,
    ConflictError,
    CorruptError,
    FencedError,
    RaycheckError,
    SaveFailedError,
    StoreError,
    SupersededError,
)
from raycheck.settings import Retention
from tests.support.histories.invariants import assert_invariants
from tests.support.samples.sample_checkpoints import (
    Around,
    Driver,
    everything,
    latest_tree,
    put_latest_tree,
    write_checkpoint,
)
from tests.support.servers.memory_store import DictStore

WAIT_S = 60.0


def raw(store: Store) -> bytes:
    return store.get(object_keys.LATEST_KEY).data


def keys(entries) -> list[str]:
    return [entry.key for entry in entries]


# --- claim ---


def test_the_first_claim_on_an_empty_store_is_attempt_1_and_starts_fresh(store):
    attempt, restore = Driver(store).claim("g1", world_size=4)

    assert (attempt.number, attempt.group, attempt.world_size, restore) == (1, "g1", 4, None)
    assert_invariants(store)


def test_the_next_group_of_a_driver_gets_the_next_attempt_and_the_head_to_restore(store):
    ann = Driver(store)
    ann.claim("g1")
    ann.save(1, 1)
    newest = ann.save(1, 2)

    attempt, restore = ann.claim("g2")

    assert attempt.number == 2
    assert restore is not None
    assert restore.key == attempt.restore_key == newest.key
    assert_invariants(store)


def test_a_group_that_claims_again_gets_the_same_answer(store):
    ann = Driver(store)
    ann.claim("g1")
    ann.save(1, 1)
    first = ann.claim("g2")

    assert ann.claim("g2") == first
    assert Driver(store).claim("g2") == first
    assert_invariants(store)


def test_a_replaced_group_never_claims_again(store):
    ann = Driver(store)
    ann.claim("g1")
    ann.claim("g2")
    before = raw(store)

    for driver in (ann, Driver(store), Driver(store, coordinator="c2")):
        with pytest.raises(SupersededError, match="g1"):
            driver.claim("g1")
        with pytest.raises(SupersededError, match="g1"):
            driver.take_over("g1")

    assert raw(store) == before
    assert_invariants(store)


def test_a_run_lists_its_newest_50_attempts():
    ann = Driver(open_store("memory://a-run-of-many-attempts"))

    numbers = [ann.claim(f"g{i}")[0].number for i in range(MAX_ATTEMPTS_LISTED + 3)]

    assert numbers == list(range(1, MAX_ATTEMPTS_LISTED + 4))
    assert [item.number for item in ann.look().attempts] == numbers[3:]
    assert_invariants(ann.store)


# --- resume ---


def test_never_refuses_a_used_name_and_changes_nothing(store):
    ann = Driver(store)
    ann.claim("g1")
    ann.save(1, 1)
    before = raw(store)

    with pytest.raises(ConfigError, match="another run name"):
        Driver(store, "bob").claim("g9", resume="never")

    assert raw(store) == before
    assert_invariants(store)


def test_never_starts_a_new_name_and_lets_the_same_driver_restart(store):
    ann = Driver(store)
    ann.claim("g1", resume="never")
    saved = ann.save(1, 1)

    attempt, restore = ann.claim("g2", resume="never")

    assert (attempt.number, restore.key) == (2, saved.key)
    assert_invariants(store)


@pytest.mark.parametrize("resume", ["must", 10])
def test_must_and_a_step_refuse_an_empty_store_and_create_nothing(store, resume):
    with pytest.raises(ConfigError, match=f"resume={resume!r}"):
        Driver(store).claim("g1", resume=resume)

    assert everything(store) == {}
    assert_invariants(store)


def test_must_refuses_a_run_without_a_checkpoint(store):
    Driver(store).claim("g1")
    before = raw(store)

    with pytest.raises(ConfigError, match="no committed checkpoint"):
        Driver(store, "bob").claim("g2", resume="must")

    assert raw(store) == before
    assert_invariants(store)


def test_must_restores_the_head(store):
    ann = Driver(store)
    ann.claim("g1")
    saved = ann.save(1, 1)

    attempt, restore = Driver(store, "bob").claim("g2", resume="must")

    assert (attempt.number, restore.key) == (2, saved.key)
    assert_invariants(store)


def test_a_step_moves_the_head_back_to_its_newest_checkpoint(store):
    ann = Driver(store)
    ann.claim("g1")
    ann.save(1, 1, step=10)
    again = ann.save(1, 2, step=10)
    ann.save(1, 3, step=30)

    attempt, restore = Driver(store, "bob").claim("g2", resume=10)

    assert attempt.restore_key == restore.key == again.key
    body = assert_invariants(store)
    assert body.head == again.key
    assert len(body.live) == 3


def test_a_step_binds_only_the_first_claim_of_a_driver(store):
    ann = Driver(store)
    ann.claim("g1")
    ann.save(1, 1, step=10)
    ann.save(1, 2, step=20)
    bob = Driver(store, "bob")
    bob.claim("g2", resume=10)
    newest = bob.save(2, 1, step=15)

    _, restore = bob.claim("g3", resume=10)

    assert restore.key == newest.key
    assert_invariants(store)


def test_a_step_that_is_not_there_is_refused_with_those_that_are(store):
    ann = Driver(store)
    ann.claim("g1")
    ann.save(1, 1, step=10)
    before = raw(store)

    with pytest.raises(ConfigError, match=r"resume=11.*there are: 10"):
        Driver(store, "bob").claim("g2", resume=11)

    assert raw(store) == before
    assert_invariants(store)


# --- fence ---


def test_a_fenced_owner_never_commits_or_claims_again(store):
    """I4: an older attempt of another driver cannot commit."""
    ann, bob = Driver(store), Driver(store, "bob")
    ann.claim("g1")
    ann.save(1, 1)
    pending = write_checkpoint(store, attempt=1, save=2)
    attempt, _ = bob.claim("h1")
    assert attempt.number == 2
    before = raw(store)

    for again in (ann, Driver(store), Driver(store, coordinator="without memory")):
        for call in (
            lambda again=again: again.commit(pending),
            lambda again=again: again.claim("g1"),
            lambda again=again: again.claim("a new group"),
            lambda again=again: again.claim("a new group", resume="must"),
            lambda again=again: again.take_over("g1"),
            lambda again=again: again.take_over("h1"),
        ):
            with pytest.raises(FencedError, match="bob"):
                call()

    assert raw(store) == before
    bob.save(2, 1)
    with pytest.raises(FencedError):
        ann.claim("yet another group")
    assert_invariants(store)


def test_a_third_driver_fences_the_second_and_not_only_the_first(store):
    drivers = [Driver(store, owner) for owner in ("ann", "bob", "eve")]

    for i, driver in enumerate(drivers):
        driver.claim(f"g{i}")

    for driver in drivers[:2]:
        with pytest.raises(FencedError):
            driver.claim("more")
    body = assert_invariants(store)
    assert body.owners == ("ann", "bob", "eve")


def test_an_older_attempt_of_the_same_driver_cannot_commit(store):
    """I4: nor can one of the same driver."""
    ann = Driver(store)
    ann.claim("g1")
    late = write_checkpoint(store, attempt=1, save=1)
    ann.claim("g2")
    before = raw(store)

    with pytest.raises(SupersededError, match="attempt 2 is live"):
        ann.commit(late)

    assert raw(store) == before
    assert_invariants(store)


def test_a_restarted_coordinator_takes_the_attempt_over_and_the_old_one_is_out(store):
    old, new = Driver(store), Driver(store, coordinator="c2")
    claimed, _ = old.claim("g1")
    old.save(1, 1)
    of_old, of_new = (write_checkpoint(store, attempt=1, save=save) for save in (2, 3))

    taken = new.take_over("g1")

    assert (taken.number, taken.group, taken.last_save) == (1, "g1", 1)
    assert taken == replace(claimed, coordinator=new.me.coordinator, last_save=1)
    with pytest.raises(SupersededError):
        old.commit(of_old)
    assert new.commit(of_new)
    body = assert_invariants(store)
    assert len(body.live) == 2


def test_taking_over_twice_changes_nothing(store):
    Driver(store).claim("g1")
    new = Driver(store, coordinator="c2")
    first = new.take_over("g1")
    before = raw(store)

    assert new.take_over("g1") == first

    assert raw(store) == before
    assert_invariants(store)


def test_a_take_over_without_a_run_is_an_error_and_creates_nothing(store):
    with pytest.raises(CorruptError):
        Driver(store).take_over("g1")

    assert everything(store) == {}
    assert_invariants(store)


# --- commit ---


def test_a_commit_is_visible_whole_and_moves_the_head(store):
    ann = Driver(store)
    ann.claim("g1")
    manifest = write_checkpoint(store, attempt=1, save=1, step=10, world_size=2)
    assert assert_invariants(store).live == ()

    assert ann.commit(manifest)

    body = assert_invariants(store)
    (entry,) = body.live
    assert (body.head, entry.key, entry.step, entry.metrics) == (manifest.key, manifest.key, 10, manifest.metrics)
    assert entry.size_bytes == manifest.size_bytes
    assert body.attempt.last_save == 1


def test_a_commit_may_be_repeated_by_anyone_who_asks(store):
    ann = Driver(store)
    ann.claim("g1")
    manifest = ann.save(1, 1)
    before = raw(store)

    assert ann.commit(manifest)
    assert Driver(store).commit(manifest)
    assert Driver(store, coordinator="c2").commit(manifest)

    assert raw(store) == before
    assert_invariants(store)


def test_a_save_that_comes_after_a_newer_one_is_answered_superseded(store):
    ann = Driver(store)
    ann.claim("g1")
    older = write_checkpoint(store, attempt=1, save=1)
    newer = ann.save(1, 2)
    before = raw(store)

    assert ann.commit(older) is None

    assert raw(store) == before
    assert assert_invariants(store).head == newer.key


def test_one_step_saved_twice_is_two_checkpoints(store):
    ann = Driver(store)
    ann.claim("g1")

    saved = [ann.save(1, 1, step=100), ann.save(1, 2, step=100)]

    body = assert_invariants(store)
    assert keys(body.live) == [manifest.key for manifest in saved]
    assert body.head == saved[1].key


def test_a_commit_before_any_claim_is_refused_and_creates_nothing(store):
    manifest = write_checkpoint(store, attempt=1, save=1)
    before = everything(store)

    with pytest.raises(CorruptError):
        Driver(store).commit(manifest)

    assert everything(store) == before
    assert_invariants(store)


def test_a_commit_that_refers_to_what_is_no_longer_held_fails(store):
    """I3: `latest` names no checkpoint whose objects may be gone."""
    ann = Driver(store)
    ann.claim("g1")
    base = ann.save(1, 1)
    ann.save(1, 2, keep_last=1)
    late = write_checkpoint(store, attempt=1, save=3, base=base)
    before = raw(store)

    with pytest.raises(SaveFailedError, match=base.key):
        ann.commit(late)

    assert raw(store) == before
    assert_invariants(store)


def test_fields_of_a_newer_writer_survive_a_claim_and_a_commit(store):
    ann = Driver(store)
    ann.claim("g1")
    ann.save(1, 1)
    tree = latest_tree(store)
    tree["new"] = tree["newest"][0]["new"] = tree["attempts"][0]["new"] = {"x": [1, None]}
    put_latest_tree(store, tree)

    ann.save(1, 2)
    ann.claim("g2")

    after = latest_tree(store)
    assert after["new"] == after["newest"][0]["new"] == after["attempts"][0]["new"] == {"x": [1, None]}
    assert_invariants(store)


def test_a_latest_of_a_newer_format_is_left_alone(store):
    ann = Driver(store)
    ann.claim("g1")
    ann.save(1, 1)
    pending = write_checkpoint(store, attempt=1, save=2)
    known = raw(store)
    store.put(object_keys.LATEST_KEY, json.dumps({"format_version": FORMAT_VERSION + 1}).encode())

    for call in (lambda: ann.commit(pending), lambda: Driver(store, "bob").claim("h1"), lambda: ann.take_over("g1")):
        with pytest.raises(CorruptError, match=f"version {FORMAT_VERSION + 1}"):
            call()

    assert json.loads(raw(store)) == {"format_version": FORMAT_VERSION + 1}
    store.put(object_keys.LATEST_KEY, known)
    assert_invariants(store)


def test_every_swap_counts_one(store):
    ann = Driver(store)
    ann.claim("g1")
    ann.save(1, 1)
    ann.save(1, 2)
    ann.claim("g2")

    assert ann.look().counter == 6, "a claim is two: that it was answered is written after its listing"
    assert_invariants(store)


# --- answers that are lost, late, or never come ---


class LosesAnswers(Around):
    """A store that applies writes of `latest`, and reports the first `count` of them as failed."""

    def __init__(self, inner: Store, count: int = 1, then: Callable[[], object] = lambda: None) -> None:
        super().__init__(inner)
        self.count = count
        self.then = then

    def put_if_absent(self, key: str, data: bytes) -> Written:
        written = self.inner.put_if_absent(key, data)
        self._lose(key)
        return written

    def put_if_match(self, key: str, data: bytes, version: str) -> Written:
        written = self.inner.put_if_match(key, data, version)
        self._lose(key)
        return written

    def _lose(self, key: str) -> None:
        if key == object_keys.LATEST_KEY and self.count:
            self.count -= 1
            self.then()
            raise StoreError("the answer was lost")


class AppliesLate(Around):
    """A store whose first swap of `latest` times out, and is applied only when the next one is sent."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.on_its_way: tuple[str, bytes, str] | None = None
        self.landed = False

    def put_if_match(self, key: str, data: bytes, version: str) -> Written:
        if self.on_its_way is None:
            self.on_its_way = (key, data, version)
            raise StoreError("no answer")
        if not self.landed:
            self.landed = True
            self.inner.put_if_match(*self.on_its_way)
        return self.inner.put_if_match(key, data, version)


def test_a_first_claim_whose_answer_is_lost_is_made_once(store):
    attempt, restore = Driver(LosesAnswers(store)).claim("g1")

    assert (attempt.number, restore) == (1, None)
    body = assert_invariants(store)
    assert len(body.attempts) == 1
    assert body.counter == 2


def test_a_later_claim_whose_answer_is_lost_is_made_once(store):
    ann = Driver(store)
    ann.claim("g1")
    saved = ann.save(1, 1)

    attempt, restore = Driver(LosesAnswers(store)).claim("g2")

    assert (attempt.number, restore.key) == (2, saved.key)
    assert len(assert_invariants(store).attempts) == 2


def test_a_commit_whose_answer_is_lost_is_made_once(store):
    Driver(store).claim("g1")
    manifest = write_checkpoint(store, attempt=1, save=1)

    assert Driver(LosesAnswers(store)).commit(manifest)

    body = assert_invariants(store)
    assert keys(body.live) == [manifest.key]
    assert body.counter == 3


def test_a_commit_whose_answer_is_lost_counts_although_another_driver_took_over(store):
    ann = Driver(LosesAnswers(store, then=lambda: Driver(store, "bob").claim("h1")))
    Driver(store).claim("g1")
    manifest = write_checkpoint(store, attempt=1, save=1)

    assert ann.commit(manifest)

    body = assert_invariants(store)
    assert keys(body.live) == [manifest.key]
    assert (body.attempt.owner, body.attempt.restore_key) == ("bob", manifest.key)


def test_a_claim_whose_answer_is_lost_is_fenced_when_another_driver_took_over(store):
    ann = Driver(LosesAnswers(store, then=lambda: Driver(store, "bob").claim("h1")))

    with pytest.raises(FencedError):
        ann.claim("g1")

    body = assert_invariants(store)
    assert [attempt.owner for attempt in body.attempts] == ["ann", "bob"]


def test_a_swap_that_lands_late_is_judged_by_its_effect(store):
    ann = Driver(store)
    ann.claim("g1")
    manifest = write_checkpoint(store, attempt=1, save=1)

    assert Driver(AppliesLate(store)).commit(manifest)

    body = assert_invariants(store)
    assert keys(body.live) == [manifest.key]
    assert body.counter == 3


def test_a_claim_that_lands_late_is_made_once(store):
    Driver(store).claim("g1")

    attempt, _ = Driver(AppliesLate(store)).claim("g2")

    assert attempt.number == 2
    assert [item.group for item in assert_invariants(store).attempts] == ["g1", "g2"]


def test_a_take_over_whose_answer_is_lost_is_made_once(store):
    Driver(store).claim("g1")

    taken = Driver(LosesAnswers(store), coordinator="c2").take_over("g1")

    assert taken.coordinator == "ann-c2"
    assert assert_invariants(store).counter == 3


def test_an_unreachable_store_ends_in_an_error_that_says_the_outcome_is_unknown(store):
    class Unreachable(Around):
        def put_if_match(self, key: str, data: bytes, version: str) -> Written:
            raise StoreError("connection refused")

    Driver(store).claim("g1")
    manifest = write_checkpoint(store, attempt=1, save=1)
    before = everything(store)
    clock = itertools.count(0, 40.0)
    ann = Driver(store)
    ann.register = Register(Unreachable(store), monotonic=lambda: next(clock))

    with pytest.raises(StoreError, match=rf"commit of {manifest.key}.*connection refused.*is unknown"):
        ann.commit(manifest)

    assert everything(store) == before
    assert Driver(store).commit(manifest)
    assert_invariants(store)


def test_a_swap_is_computed_afresh_from_the_body_it_replaces(store):
    """A pin that came in between must not be undone by retention's older decision."""
    ann = Driver(store)
    ann.claim("g1")
    first = ann.save(1, 1)
    second = write_checkpoint(store, attempt=1, save=2)

    class PinsMeanwhile(Around):
        is_done = False

        def put_if_match(self, key: str, data: bytes, version: str) -> Written:
            if not self.is_done:
                self.is_done = True
                pin(Register(store), first.key)
            return self.inner.put_if_match(key, data, version)

    assert Driver(PinsMeanwhile(store)).commit(second, keep_last=1)

    body = assert_invariants(store)
    assert keys(body.live) == [first.key, second.key]
    assert body.evicted == ()


# --- latest lost or rolled back ---


def test_a_lost_latest_is_an_error_and_no_claim_starts_from_zero(store):
    ann = Driver(store)
    ann.claim("g1")
    ann.save(1, 1)
    store.delete(object_keys.LATEST_KEY)

    with pytest.raises(CorruptError, match="does not start from zero"):
        Driver(store, "bob").claim("h1")

    assert_invariants(store)


def test_a_lost_latest_refuses_every_later_claim_too(store):
    """I7: a user who simply starts the job again after the error must not be given a fresh run."""
    ann = Driver(store)
    ann.claim("g1")
    ann.save(1, 1)
    store.delete(object_keys.LATEST_KEY)

    for i in range(4):
        for group in ("one", "one", "two"):
            with pytest.raises(CorruptError):
                Driver(store, f"driver-{i}").claim(f"{group}-{i}")

    assert_invariants(store)


def test_a_latest_that_is_lost_while_a_claim_is_under_way_is_noticed_after_the_create(store):
    class LostMeanwhile(Around):
        is_done = False

        def put_if_absent(self, key: str, data: bytes) -> Written:
            if key == object_keys.LATEST_KEY and not self.is_done:
                self.is_done = True
                bob = Driver(self.inner, "bob")
                bob.claim("h1")
                bob.save(1, 1)
                self.inner.delete(key)
            return self.inner.put_if_absent(key, data)

    with pytest.raises(CorruptError, match="does not start from zero"):
        Driver(LostMeanwhile(store)).claim("g1")

    assert_invariants(store)


def test_a_rolled_back_latest_refuses_every_claim_of_new_drivers(store):
    """`latest` has lost attempts 2 and 3, but not their checkpoints: nobody may silently resume from before them."""
    ann = Driver(store)
    ann.claim("g1")
    ann.save(1, 1)
    old = raw(store)
    ann.claim("g2")
    ann.save(2, 1)
    ann.claim("g3")
    ann.save(3, 1)
    store.put(object_keys.LATEST_KEY, old)

    for i in range(4):
        with pytest.raises(CorruptError):
            Driver(store, f"driver-{i}").claim(f"group-{i}")

    assert_invariants(store)


def test_a_lost_latest_is_never_created_again_by_a_running_coordinator(store):
    ann = Driver(store)
    ann.claim("g1")
    ann.save(1, 1)
    pending = write_checkpoint(store, attempt=1, save=2)
    store.delete(object_keys.LATEST_KEY)
    before = everything(store)

    for call in (
        lambda: ann.commit(pending),
        lambda: ann.claim("g1"),
        lambda: ann.claim("g2"),
        lambda: ann.take_over("g1"),
        lambda: prune(ann.register),
        ann.look,
    ):
        with pytest.raises(CorruptError, match="is gone"):
            call()

    assert everything(store) == before
    assert_invariants(store)


def test_a_latest_that_went_back_to_an_older_attempt_stops_who_saw_the_newer(store):
    ann = Driver(store)
    ann.claim("g1")
    ann.save(1, 1)
    old = raw(store)
    ann.claim("g2")
    pending = write_checkpoint(store, attempt=2, save=1)
    store.put(object_keys.LATEST_KEY, old)

    for call in (lambda: ann.commit(pending), lambda: ann.claim("g3"), ann.look):
        with pytest.raises(CorruptError, match="went back"):
            call()

    assert raw(store) == old
    assert_invariants(store)


def test_a_latest_that_went_back_within_the_attempt_stops_who_saw_the_newer(store):
    ann = Driver(store)
    ann.claim("g1")
    ann.save(1, 1)
    old = raw(store)
    ann.save(1, 2)
    pending = write_checkpoint(store, attempt=1, save=3)
    store.put(object_keys.LATEST_KEY, old)

    for call in (lambda: ann.commit(pending), lambda: ann.claim("g2"), ann.look):
        with pytest.raises(CorruptError, match="went back"):
            call()

    assert raw(store) == old
    assert_invariants(store)


def test_a_slow_answer_is_not_taken_for_a_rollback(store):
    """A coordinator reads `latest` while its claim swaps it. A response from before the swap is old, not wrong."""
    ann = Driver(store)
    ann.claim("g1")

    class SlowOnce(Around):
        is_done = False

        def get(self, key: str, max_bytes: int = MAX_WHOLE_BYTES) -> Got:
            got = self.inner.get(key, max_bytes)
            if not self.is_done:
                self.is_done = True
                ann.claim("g2")
            return got

    ann.register.store = SlowOnce(store)

    assert ann.look().attempt.number in (1, 2)
    assert ann.look().attempt.number == 2
    assert_invariants(store)


def test_a_damaged_latest_is_an_error_and_is_left_alone(store):
    ann = Driver(store)
    ann.claim("g1")
    pending = write_checkpoint(store, attempt=1, save=1)
    whole = raw(store)
    store.put(object_keys.LATEST_KEY, b"{")

    for call in (lambda: ann.commit(pending), lambda: Driver(store, "bob").claim("h1"), ann.look):
        with pytest.raises(CorruptError, match="not JSON"):
            call()

    assert raw(store) == b"{"
    store.put(object_keys.LATEST_KEY, whole)
    assert_invariants(store)


# --- the probe ---


class CreatesOver(Around):
    def put_if_absent(self, key: str, data: bytes) -> Written:
        self.inner.put(key, data)


class SwapsStale(Around):
    def put_if_match(self, key: str, data: bytes, version: str) -> Written:
        self.inner.put(key, data)


class RefusesAllSwaps(Around):
    def put_if_match(self, key: str, data: bytes, version: str) -> Written:
        raise ConflictError(key)


class AppliesWhatItRefuses(Around):
    def put_if_match(self, key: str, data: bytes, version: str) -> Written:
        try:
            return self.inner.put_if_match(key, data, version)
        except ConflictError:
            self.inner.put(key, data)
            raise


@pytest.mark.parametrize("broken", [CreatesOver, SwapsStale, RefusesAllSwaps, AppliesWhatItRefuses])
def test_the_probe_refuses_a_store_without_conditions_and_touches_nothing(store, broken):
    ann = Driver(store)
    ann.claim("g1")
    ann.save(1, 1)
    before = everything(store)

    with pytest.raises(ConfigError, match=r"store"):
        probe(broken(store))

    assert everything(store) == before
    assert_invariants(store)


def test_the_probe_accepts_a_real_store_and_leaves_nothing(store):
    probe(store)

    assert everything(store) == {}


# --- write once ---


def test_put_once_accepts_equal_bytes_and_refuses_others(store):
    """I2: an object that is written once never changes."""
    put_once(store, "a", b"one")

    put_once(store, "a", b"one")
    with pytest.raises(SaveFailedError, match="other bytes"):
        put_once(store, "a", b"two")

    assert store.get("a").data == b"one"


def test_put_once_judges_a_lost_answer_by_what_is_there(store, monkeypatch):
    monkeypatch.setattr(write_once, "CHANCE", SimpleNamespace(uniform=lambda *_: 0.0))  # no pauses between attempts

    class Loses(Around):
        def put_if_absent(self, key: str, data: bytes) -> Written:
            if key != "never":
                self.inner.put_if_absent(key, data)
            raise StoreError("the answer was lost")

    put_once(Loses(store), "a", b"one")

    assert store.get("a").data == b"one"
    with pytest.raises(StoreError, match="lost"):
        put_once(Loses(store), "never", b"one")


def test_a_commit_after_a_long_upload_of_its_index_leaves_readers_their_whole_grace():
    """The manifest is written at once, and an index above 1 MiB, which says no time, long after it."""

    class Slow(DictStore):
        def put(self, key: str, data: Buffer) -> None:
            super().put(key, data)
            self.at += GRACE_S if key == "large" else 0.0

    store = Slow()
    ann = Driver(store)
    ann.claim("g1")
    first = ann.save(1, 1)
    second = write_checkpoint(store, attempt=1, save=2)
    at = put_all_once(store, {"manifest": b"a", "large": bytes(MAX_CONDITIONAL_BYTES + 1)})

    commit.commit(ann.register, ann.me, second, dump(second), Retention(keep_last=1), at=at)

    assert prune(ann.register, grace_s=GRACE_S) == (), "it was dropped a moment ago"
    assert store.head(object_keys.manifest_key(first.key))


def test_a_second_writer_of_the_same_save_cannot_change_its_manifest(store):
    """I2: manifests never change."""
    ann = Driver(store)
    ann.claim("g1")
    manifest = ann.save(1, 1)

    assert write_checkpoint(store, attempt=1, save=1) == manifest
    with pytest.raises(SaveFailedError):
        write_checkpoint(store, attempt=1, save=1, world_size=2)

    assert_invariants(store)


# --- races ---


class Remembers(Around):
    """Remembers every body of `latest` that this process wrote."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.written: list[dict[str, Any]] = []

    def put_if_absent(self, key: str, data: bytes) -> Written:
        written = self.inner.put_if_absent(key, data)
        self._remember(key, data)
        return written

    def put_if_match(self, key: str, data: bytes, version: str) -> Written:
        written = self.inner.put_if_match(key, data, version)
        self._remember(key, data)
        return written

    def _remember(self, key: str, data: bytes) -> None:
        if key == object_keys.LATEST_KEY:
            self.written.append(json.loads(data))


def together(*work: Callable[[], Any]) -> list[Any]:
    """Call all at once, each in its own thread. Returns values and raycheck errors."""
    barrier = threading.Barrier(len(work))

    def run(one: Callable[[], Any]) -> Any:
        barrier.wait(WAIT_S)
        try:
            return one()
        except RaycheckError as error:
            return error

    with ThreadPoolExecutor(len(work)) as pool:
        return [future.result(WAIT_S) for future in [pool.submit(run, one) for one in work]]


def assert_linear(*stores: Remembers) -> None:
    """Assert that each body replaced the one before: no counter twice, none left out, nothing live lost."""
    bodies = sorted((body for store in stores for body in store.written), key=lambda body: body["counter"])
    assert [body["counter"] for body in bodies] == list(range(1, len(bodies) + 1))
    for before, after in itertools.pairwise(bodies):
        held = {entry["key"] for entry in after["newest"]} | {item["key"] for item in after["newest_evicted"]}
        assert {entry["key"] for entry in before["newest"]} <= held
        assert after["newest_owners"][: len(before["newest_owners"])] == before["newest_owners"]
        assert after["attempts"][-1]["number"] - before["attempts"][-1]["number"] in (0, 1)


def test_racing_claims_of_eight_drivers_get_one_attempt_each(store):
    stores = [Remembers(store) for _ in range(8)]
    drivers = [Driver(around, f"driver-{i}") for i, around in enumerate(stores)]

    answers = together(*(lambda d=driver, i=i: d.claim(f"group-{i}") for i, driver in enumerate(drivers)))

    body = assert_invariants(store)
    assert [attempt.number for attempt in body.attempts] == list(range(1, 9))
    assert len(body.owners) == 8
    assert_linear(*stores)
    claimed = [answer[0] for answer in answers if isinstance(answer, tuple)]
    assert len({attempt.number for attempt in claimed}) == len(claimed)
    assert all(isinstance(answer, tuple | FencedError | SupersededError) for answer in answers)
    assert isinstance(answers[drivers_of(body)[-1]], tuple)


def drivers_of(body: Latest) -> list[int]:
    return [int(attempt.owner.removeprefix("driver-")) for attempt in body.attempts]


def test_racing_claims_of_one_group_are_one_attempt(store):
    drivers = [Driver(store, coordinator=f"c{i}") for i in range(4)]

    answers = together(*(lambda d=driver: d.claim("g1") for driver in drivers))

    assert {answer[0].number for answer in answers if isinstance(answer, tuple)} == {1}
    assert [attempt.number for attempt in assert_invariants(store).attempts] == [1]


def test_commits_that_race_with_another_drivers_claim_are_before_it_or_not_at_all(store):
    stores = [Remembers(store), Remembers(store)]
    ann, bob = Driver(stores[0]), Driver(stores[1], "bob")
    ann.claim("g1")
    of_ann = [write_checkpoint(store, attempt=1, save=save) for save in range(1, 7)]

    def ann_commits() -> list[str]:
        done = []
        for manifest in of_ann:
            try:
                assert ann.commit(manifest, keep_last=3)
            except FencedError:
                break
            done.append(manifest.key)
        return done

    def bob_takes_over() -> tuple[Attempt, Entry | None]:
        answer = bob.claim("h1")
        for save in (1, 2):
            bob.save(2, save, keep_last=3)
        return answer

    committed, (attempt, restore) = together(ann_commits, bob_takes_over)

    body = assert_invariants(store)
    assert_linear(*stores)
    assert (restore.key if restore else None) == (committed[-1] if committed else None) == attempt.restore_key
    history = [*keys(body.evicted), *keys(body.live)]
    assert history == [*committed, *(key for key in history if "-a2-" in key)]
    assert sum("-a2-" in key for key in history) == 2


def test_two_coordinators_of_one_attempt_commit_each_save_at_most_once(store):
    stores = [Remembers(store), Remembers(store)]
    old, new = Driver(stores[0]), Driver(stores[1], coordinator="c2")
    old.claim("g1")
    manifests = [write_checkpoint(store, attempt=1, save=save) for save in range(1, 7)]

    def old_commits() -> list[bool]:
        return [bool(old.commit(manifest)) for manifest in manifests]

    def new_takes_over_and_commits() -> list[bool]:
        new.take_over("g1")
        return [bool(new.commit(manifest)) for manifest in manifests]

    of_old, of_new = together(old_commits, new_takes_over_and_commits)

    body = assert_invariants(store)
    assert_linear(*stores)
    assert keys(body.live) == [manifest.key for manifest in manifests]
    assert of_new == [True] * 6
    assert isinstance(of_old, SupersededError) or of_old == [True] * 6


def test_threads_of_one_coordinator_swap_one_after_another(store):
    ann = Driver(Remembers(store))
    ann.claim("g1")
    manifests = [write_checkpoint(store, attempt=1, save=save) for save in range(1, 5)]

    outcomes = together(*(lambda m=manifest: bool(ann.commit(m)) for manifest in manifests))

    body = assert_invariants(store)
    assert_linear(ann.store)
    assert body.head == manifests[-1].key
    assert keys(body.live) == [manifest.key for manifest, done in zip(manifests, outcomes, strict=True) if done is True]
    assert all(outcome in (True, False) for outcome in outcomes)
