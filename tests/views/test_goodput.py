"""A run's goodput, and what it could be at best, from `latest`, manifests and the records of attempts."""

import math
import time
from dataclasses import replace

import pytest

from raycheck.bucket.attempt_records import ResumeRecord, record_end, record_resume
from raycheck.bucket.format.latest import load_latest
from raycheck.bucket.format.object_keys import LATEST_KEY
from raycheck.bucket.protocol.rewind import rewind
from raycheck.catalog.listing import RunSummary, find_runs
from raycheck.views.attempts import AttemptHistory, Ending
from raycheck.views.goodput import goodput_limit
from raycheck.views.history import read_history
from raycheck.views.in_words import goodput_text
from tests.support.samples.many_runs import place
from tests.support.samples.sample_checkpoints import Driver, latest_tree, put_latest_tree
from tests.support.servers.memory_store import DictStore


def attempt(number: int, ending: Ending, *, seconds: float | None, restore_s: float | None = None) -> AttemptHistory:
    began = 1000.0 * number
    return AttemptHistory(
        number=number,
        world_size=2,
        began_at=began,
        ended_at=None if seconds is None else began + seconds,
        ending=ending,
        cause="",
        restored=None if restore_s is None else "step-000000010-a1-s1",
        restore_s=restore_s,
        start_step=None,
        lost_steps=None,
        lost_s=None,
        commits=(),
    )


TWICE = (
    attempt(1, "preempted", seconds=500.0),
    attempt(2, "failed", seconds=300.0, restore_s=4.0),
    attempt(3, "finished", seconds=200.0, restore_s=6.0),
)


def test_the_limit_is_that_of_young_and_daly() -> None:
    between_s = (500.0 + 300.0 + 200.0) / 2

    limit = goodput_limit(TWICE, blocked_s=0.9)

    assert limit == pytest.approx(1 - math.sqrt(2 * 0.9 / between_s) - 5.0 / between_s)
    assert goodput_limit(TWICE, blocked_s=1e9) == 0.0


def test_a_live_attempt_counts_with_the_time_that_it_has_lived_so_far() -> None:
    live = (*TWICE[:2], attempt(3, "live", seconds=None, restore_s=6.0))

    assert goodput_limit(live, blocked_s=0.9, until=3200.0) == goodput_limit(TWICE, blocked_s=0.9)


@pytest.mark.parametrize(
    "attempts",
    [
        (TWICE[0], replace(TWICE[1], ending="finished")),
        (TWICE[0], replace(TWICE[1], ending="resized")),
        (TWICE[0], replace(TWICE[1], ending="by hand")),
        (TWICE[0], replace(TWICE[1], restore_s=None)),
        tuple(replace(item, ended_at=item.began_at) for item in TWICE),
    ],
)
def test_no_limit_is_told_for_less_than_two_failures_or_without_a_time(attempts) -> None:
    assert goodput_limit(attempts, blocked_s=0.9) is None
    assert goodput_limit(TWICE, blocked_s=None) is None


def test_it_is_said_in_words() -> None:
    assert goodput_text(0.9312, 0.964) == "93.1 %, of 96.4 % at best"
    assert goodput_text(0.9312, None) == "93.1 %"
    assert goodput_text(None, 0.964) == "unknown"


def trained() -> tuple[DictStore, Driver]:
    """A run that began 100 s before its newest commit, of step 20, which has 60 s of training; step 10 has 30 s."""
    store = DictStore(at=time.time())
    driver = Driver(store)
    driver.claim("g")
    for number, seconds in ((1, 30.0), (2, 60.0)):
        driver.save(1, number, began_at=store.at - 100.0, trained_s=seconds)
    return store, driver


def listed(store: DictStore) -> RunSummary:
    """The run in a listing of the folder above it."""
    above = DictStore(at=store.at)
    place(above, "run", store.objects)
    (run,) = find_runs(above)
    return run


def test_a_listing_knows_the_goodput_from_latest_alone() -> None:
    store, _ = trained()

    assert listed(store).goodput == pytest.approx(0.6)
    assert read_history(store).goodput == pytest.approx(0.6)


def test_after_a_rewind_latest_tells_no_goodput_and_the_manifest_does() -> None:
    store, driver = trained()
    rewind(driver.register, driver.look().live[0].key)

    assert listed(store).goodput is None
    assert read_history(store).goodput == pytest.approx(0.3)


def test_a_run_without_a_begin_has_no_goodput_and_its_latest_says_nothing_of_it() -> None:
    store = DictStore(at=time.time())
    driver = Driver(store)
    driver.claim("g")
    driver.save(1, 1)

    assert not {"trained"} & latest_tree(store).keys()
    assert not {"by_notice"} & latest_tree(store)["newest"][0].keys(), "what was written before has the same bytes"
    assert listed(store).goodput is None


def test_the_history_of_a_run_that_failed_twice_has_the_limit() -> None:
    store = DictStore(at=time.time())
    driver = Driver(store)
    before, _ = driver.claim("g1", world_size=2)
    driver.save(1, 1, world_size=2)
    for number in (2, 3):
        store.at += 100.0
        now, entry = driver.claim(f"g{number}", world_size=2)
        assert entry is not None
        assert record_end(store, before, by=now, cause="rank 1: its process died")
        resume = ResumeRecord(
            attempt=number, after=before.number, cause="", restored=entry.key, step=10, world_size_before=2,
            world_size=2, lost_steps=0, lost_s=0.0, since_commit_s=0.0, restore_s=2.0, restore_bytes=1, what="all",
        )  # fmt: skip
        assert record_resume(store, resume)
        before = now

    history = read_history(store)

    first = history.attempts[0].began_at
    between_s = (store.at - first) / 2
    assert history.goodput_limit == pytest.approx(1 - math.sqrt(2 * 0.1 / between_s) - 2.0 / between_s)


def test_a_raycheck_that_knows_neither_field_keeps_both() -> None:
    """As a writer preserves what it does not know: here fields that a later raycheck may add."""
    store, driver = trained()
    tree = latest_tree(store)
    tree["later"], tree["newest"][0]["later"] = {"a": 1}, True
    put_latest_tree(store, tree)
    driver.look()
    driver.save(1, 3, began_at=store.at - 100.0, trained_s=90.0)

    body = load_latest(store.get(LATEST_KEY).data, what="latest")
    assert body.unknown == {"later": {"a": 1}}
    assert body.live[0].unknown == {"later": True}
    assert body.trained is not None
    assert body.trained.key == body.head
