"""Tests how `latest` records the end of training (step 33), and what later claims and readers conclude from it."""

from dataclasses import replace

import pytest

from raycheck.bucket.attempt_records import AttemptRecord, read_record, record_end, record_failure
from raycheck.bucket.format.document import dump
from raycheck.bucket.format.latest import load_latest
from raycheck.bucket.protocol.damage import go_back
from raycheck.bucket.protocol.pin_and_evict import pin
from raycheck.bucket.protocol.repair import repair
from raycheck.bucket.protocol.rewind import rewind
from raycheck.bucket.protocol.swap import Register
from raycheck.bucket.run_status import SILENT_S, read_status, status_of
from raycheck.bucket.store import open_store
from raycheck.errors import CorruptError, FencedError, SupersededError
from tests.support.histories.invariants import assert_invariants
from tests.support.samples.sample_checkpoints import Driver, latest_tree, put_latest_tree
from tests.support.samples.sample_runs import B, F, current, finished, old


@pytest.fixture
def driver(tmp_path):
    """Make a driver that has claimed and saved twice."""
    made = Driver(open_store(f"file://{tmp_path}/run"))
    made.claim("g1")
    made.save(1, 1)
    made.save(1, 2)
    return made


def test_the_end_is_put_down_once_and_names_attempt_and_head(driver) -> None:
    body = driver.finish("g1")
    again = driver.finish("g1")

    assert body.is_finished
    assert body == again, "the second finds its effect there"
    assert (body.finished.attempt, body.finished.key) == (1, body.head)
    assert_invariants(driver.store)


def test_an_attempt_that_is_over_cannot_call_the_run_finished(driver) -> None:
    driver.claim("g2")
    with pytest.raises(SupersededError):
        driver.finish("g1")
    other = Driver(driver.store, "bob")
    other.claim("h1")
    with pytest.raises(FencedError):
        driver.finish("g2")

    assert other.look().finished is None


def test_a_claim_keeps_the_end_readable_and_a_commit_takes_it_off(driver) -> None:
    driver.finish("g1")
    bob = Driver(driver.store, "bob")

    attempt, entry = bob.claim("h1")

    claimed = bob.look()
    assert claimed.ends_with(entry.key), "what it restores is the end of the run"
    assert not claimed.is_finished, "and yet it has been begun again"
    bob.save(attempt.number, 1, step=30)
    assert bob.look().finished is None
    assert_invariants(driver.store)


def test_an_end_survives_an_attempt_that_comes_to_nothing(driver) -> None:
    driver.finish("g1")
    driver.claim("g2")

    _, entry = driver.claim("g3")

    assert driver.look().ends_with(entry.key)


@pytest.mark.parametrize("is_head", [True, False], ids=["the end itself", "before it"])
def test_what_was_rewound_is_to_be_trained_on_and_has_not_finished(driver, is_head) -> None:
    head = driver.finish("g1").head
    key = head if is_head else driver.look().live[0].key

    body = rewind(driver.register, key)

    assert body.finished is None
    assert read_status(driver.store).state == "idle"


def test_who_resumes_from_an_earlier_step_does_not_begin_at_the_end(driver) -> None:
    driver.finish("g1")

    Driver(driver.store, "bob").claim("h1", resume=10)

    assert driver.look().finished is None


def test_a_group_that_goes_back_behind_a_damaged_end_does_not_begin_at_the_end(driver) -> None:
    driver.finish("g1")
    _, entry = driver.claim("g2")
    assert driver.look().ends_with(entry.key)

    go_back(driver.register, driver.me, group="g2", key=entry.key, problem="a proof")

    assert driver.look().finished is None


def test_a_repair_keeps_the_end_of_a_readable_body() -> None:
    world = finished()
    store = world.inner
    body = load_latest(store.get("latest").data, what="latest")
    store.put("latest", dump(replace(body, proven=1)))  # as one that was put back: it does not know its attempt

    new = repair(store).latest

    assert new.finished == body.finished
    assert new.ends_with(F)


def test_an_end_that_an_older_raycheck_went_past_counts_for_nothing(driver) -> None:
    """An older raycheck keeps the field, which it does not know, and moves head."""
    driver.finish("g1")
    tree = latest_tree(driver.store)
    tree["head"] = tree["newest"][0]["key"]
    put_latest_tree(driver.store, tree)

    body = driver.look()

    assert body.finished is not None
    assert not body.is_finished
    assert not body.ends_with(body.head)


@pytest.mark.parametrize("bad", [{"attempt": 1, "key": "../x", "at": 1.0}, {"attempt": 1}, [], "yes"])
def test_a_hostile_end_is_refused(driver, bad) -> None:
    tree = latest_tree(driver.store)
    put_latest_tree(driver.store, tree | {"finished": bad})

    with pytest.raises(CorruptError):
        driver.look()


def test_a_body_without_an_end_is_written_as_before() -> None:
    assert b"finished" not in old().inner.get("latest").data


# --- how a run stands ---


def test_a_run_that_is_claimed_runs_until_it_was_silent_for_long(driver) -> None:
    body = driver.look()
    claimed = body.attempt.claimed_at

    fresh = status_of(body, None, now=claimed + 60)
    silent = status_of(body, None, now=claimed + SILENT_S + 60)

    assert fresh.state == "running"
    assert "last commit" in fresh.text
    assert silent.state == "silent"
    assert "(died, or between commits)" in silent.text


def test_a_run_that_commits_seldom_is_given_more_time(driver) -> None:
    body = driver.look()
    first, second = body.live
    seldom = replace(body, newest=(first, replace(second, committed_at=first.committed_at + 10_000)))

    assert status_of(seldom, None, now=first.committed_at + 10_000 + 25_000).state == "running"
    assert status_of(seldom, None, now=first.committed_at + 10_000 + 35_000).state == "silent"


def test_a_run_that_finished_says_so_until_it_is_begun_again(driver) -> None:
    driver.finish("g1")
    assert read_status(driver.store).text.startswith("finished at step 20")

    driver.claim("g2")

    assert read_status(driver.store).state == "running"


def test_a_driver_that_gave_up_is_told_from_one_that_was_killed(driver) -> None:
    attempt = driver.look().attempt
    assert record_failure(driver.store, attempt, at=attempt.claimed_at, cause="TypeError: x", is_final=True)

    status = read_status(driver.store)

    assert (status.state, status.is_final) == ("died", True)
    assert "TypeError: x" in status.text
    by, _ = driver.claim("g2")
    assert not record_end(driver.store, attempt, by=by, cause="another"), "the first word stays"
    assert read_status(driver.store).state == "running", "another attempt is live"
    record = read_record(driver.store, 1)
    assert (record.cause, record.ended_by_attempt) == ("TypeError: x", 1)


def test_a_record_that_no_driver_was_final_about_is_written_as_before(driver) -> None:
    attempt = driver.look().attempt

    assert b"is_final" not in dump(AttemptRecord(attempt=attempt, ended_by_attempt=2, ended_at=1.0, cause="x"))


def test_a_repaired_run_waits_for_somebody_to_start_it() -> None:
    world = old()
    world.inner.delete("latest")
    repair(world.inner)

    assert read_status(world.inner).state == "idle"


def test_the_register_of_an_old_coordinator_still_finishes_after_a_pin() -> None:
    """The swap is computed again from the body that it finds."""
    world = old()
    driver = current(world.open())
    pin(Register(world.open()), B, pinned=False)

    assert driver.finish("g2").is_finished
