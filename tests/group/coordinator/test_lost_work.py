"""Tests that a start of the workers reports why the previous attempt ended, and how much work was lost."""

from dataclasses import replace
from typing import Any, cast
from uuid import uuid4

import pytest

from raycheck.bucket.attempt_records import AttemptRecord, ResumeRecord, load_resume, read_resumes, record_resume
from raycheck.bucket.format.latest import Attempt, Entry
from raycheck.bucket.store import Store, open_store
from raycheck.bucket.store.interface import Written
from raycheck.group.coordinator.lost_work import LostWork
from raycheck.group.coordinator.messages import Arrival, HeartbeatMessage
from raycheck.group.coordinator.run_log import RunLog
from tests.support.samples.sample_checkpoints import Around

FIRST = Attempt(
    number=1, owner="me", coordinator="c", group="g1", world_size=4, restore_key=None, last_save=3, claimed_at=1000.0
)
SECOND = replace(FIRST, number=2, group="g2", world_size=3, restore_key="step-000000120-a1-s3", claimed_at=1300.0)
ENTRY = Entry(key="step-000000120-a1-s3", step=120, committed_at=1250.0, size_bytes=1, metrics={}, manifest_crc32=1)
ARRIVALS = [Arrival(step=120, trained_s=200.0, seconds=2.0 + rank, bytes_fetched=500, what="all") for rank in range(3)]


GONE = "its driver was killed or replaced by another one"


class Clock:
    now = 50.0

    def __call__(self) -> float:
        return self.now


def ended(
    *, failures: tuple[str, ...] = (), by: Attempt = SECOND, heartbeat: HeartbeatMessage | None = None
) -> ResumeRecord:
    clock = Clock()
    lost_work = LostWork(clock)
    lost_work.claimed(None, FIRST, now=1000.0)
    if heartbeat is not None:
        lost_work.heartbeat("g1", heartbeat)
    lost_work.group_failed(failures)
    lost_work.group_failed(failures)
    lost_work.claimed(FIRST, by, now=by.claimed_at)
    clock.now += 10.0
    resume = lost_work.resume(ENTRY, ARRIVALS)
    assert resume is not None
    return resume


def test_it_names_the_cause_and_counts_what_was_lost() -> None:
    resume = ended(
        failures=("rank 2: its process died",), heartbeat=HeartbeatMessage(step=127, trained_s=212.5, began_at=1000.0)
    )

    assert (resume.attempt, resume.after, resume.cause) == (2, 1, "rank 2: its process died")
    assert (resume.world_size_before, resume.world_size) == (4, 3)
    assert (resume.step, resume.lost_steps, resume.lost_s) == (120, 7, 12.5)
    assert resume.since_commit_s == 60.0, "50 s until the claim, and 10 s since"
    assert (resume.restore_s, resume.restore_bytes) == (4.0, 1500)


def test_how_far_a_driver_has_come_is_not_forgotten_when_a_later_attempt_ends_earlier() -> None:
    lost_work = LostWork(Clock())
    lost_work.claimed(None, FIRST, now=1000.0)
    lost_work.heartbeat("g1", HeartbeatMessage(step=150, trained_s=300.0, began_at=1000.0))
    lost_work.claimed(FIRST, SECOND, now=1300.0)
    first = lost_work.resume(ENTRY, ARRIVALS)
    lost_work.heartbeat("g2", HeartbeatMessage(step=125, trained_s=210.0, began_at=1000.0))
    lost_work.claimed(SECOND, replace(SECOND, number=3, group="g3"), now=1400.0)
    second = lost_work.resume(ENTRY, ARRIVALS)

    assert (first.lost_steps, first.furthest_step) == (30, 150)
    assert (second.lost_steps, second.furthest_step) == (5, 150)


def test_without_a_heartbeat_of_the_attempt_before_what_was_lost_is_unknown_and_not_none() -> None:
    lost_work = LostWork(Clock())
    lost_work.claimed(FIRST, replace(SECOND, owner="another"), now=1300.0)

    resume = lost_work.resume(ENTRY, ARRIVALS)

    assert resume is not None
    assert (resume.lost_steps, resume.lost_s, resume.cause) == (None, None, GONE)
    assert "unknown" in str(resume)


def started_by(owner: str, *, before: Attempt = FIRST, **said: Any) -> ResumeRecord:
    """Return what a new driver's first start reports. said: what the bucket says about the previous driver's end."""
    lost_work = LostWork(Clock())
    lost_work.claimed(before, replace(SECOND, owner=owner), now=1300.0, **said)
    resume = lost_work.resume(ENTRY, ARRIVALS)
    assert resume is not None
    return resume


def test_a_run_that_had_finished_was_not_taken_over_and_has_lost_nothing() -> None:
    resume = started_by("another", had_finished=True)

    assert (resume.cause, resume.lost_steps, resume.lost_s) == ("it had finished", 0, 0.0)
    assert started_by("me", had_finished=True).cause == "it had finished"


def test_what_a_driver_said_when_it_gave_up_is_the_cause() -> None:
    record = AttemptRecord(attempt=FIRST, ended_by_attempt=1, ended_at=1200.0, cause="rank 0: TypeError: x")

    resume = started_by("another", record=record)

    assert (resume.cause, resume.lost_steps) == ("its driver gave up: rank 0: TypeError: x", None)


def test_a_copied_or_rewound_run_was_taken_from_nobody() -> None:
    by_hand = "the run was rewound, repaired or copied"

    assert started_by("another", before=replace(FIRST, number=0)).cause == by_hand
    assert started_by("another", before=replace(FIRST, world_size=0)).cause == by_hand


def test_only_a_step_that_was_completed_here_counts_as_training() -> None:
    """A rank's last heartbeat states its step even if the rank has not completed one since it started."""
    lost_work = LostWork(Clock())
    lost_work.claimed(None, FIRST, now=1000.0)
    lost_work.resume(ENTRY, ARRIVALS)
    lost_work.heartbeat("g1", HeartbeatMessage(step=120, trained_s=200.0, began_at=1000.0))
    assert not lost_work.has_trained

    lost_work.heartbeat("g1", HeartbeatMessage(step=121, trained_s=201.0, began_at=1000.0))
    lost_work.claimed(FIRST, SECOND, now=1300.0)
    lost_work.resume(ENTRY, ARRIVALS)

    assert lost_work.has_trained, "a later start does not forget it"


def test_a_coordinator_without_memory_takes_training_for_granted() -> None:
    lost_work = LostWork(Clock())

    lost_work.claimed(FIRST, SECOND, now=1300.0)

    assert lost_work.has_trained, "the same driver had an attempt before"
    other = LostWork(Clock())
    other.claimed(FIRST, replace(SECOND, owner="another"), now=1300.0)
    assert not other.has_trained


def test_what_was_lost_is_not_forgotten_by_a_start_that_never_restored() -> None:
    lost_work = LostWork(Clock())
    lost_work.claimed(None, FIRST, now=1000.0)
    lost_work.heartbeat("g1", HeartbeatMessage(step=127, trained_s=212.5, began_at=1000.0))
    lost_work.claimed(FIRST, SECOND, now=1300.0)
    third = replace(SECOND, number=3, group="g3")

    lost_work.claimed(SECOND, third, now=1400.0)

    resume = lost_work.resume(ENTRY, ARRIVALS)
    assert resume is not None
    assert (resume.lost_steps, resume.lost_s) == (7, 12.5)


def test_a_start_that_restored_and_did_no_step_has_lost_none() -> None:
    lost_work = LostWork(Clock())
    lost_work.claimed(FIRST, SECOND, now=1300.0)
    lost_work.resume(ENTRY, ARRIVALS)

    lost_work.claimed(SECOND, replace(SECOND, number=3, group="g3"), now=1400.0)

    resume = lost_work.resume(ENTRY, ARRIVALS)
    assert resume is not None
    assert (resume.lost_steps, resume.lost_s) == (0, 0.0)


def test_a_heartbeat_of_a_group_that_is_gone_does_not_count() -> None:
    lost_work = LostWork(Clock())
    lost_work.claimed(None, FIRST, now=1000.0)
    lost_work.claimed(FIRST, SECOND, now=1300.0)

    lost_work.heartbeat("g1", HeartbeatMessage(step=500, trained_s=1.0, began_at=1000.0))

    assert lost_work.newest is None


def test_a_group_that_ray_changed_without_an_error_was_resized() -> None:
    assert ended().cause == "Ray changed the group from 4 to 3 ranks"
    assert ended(by=replace(SECOND, world_size=4)).cause == "the same driver restarted its workers"


def test_a_runs_first_start_has_nothing_to_report() -> None:
    lost_work = LostWork(Clock())
    lost_work.claimed(None, FIRST, now=1000.0)

    assert lost_work.resume(None, []) is None


def test_the_report_is_kept_once_and_read_back(tmp_path) -> None:
    store = open_store(f"file://{tmp_path}/run")
    resume = ended(heartbeat=HeartbeatMessage(step=127, trained_s=212.5, began_at=1000.0))

    assert record_resume(store, resume)
    assert not record_resume(store, replace(resume, cause="another"))
    store.put("attempts/000003.start.json", b"no report")

    assert read_resumes(store, [1, 2, 3]) == {2: resume}
    assert load_resume(store.get("attempts/000002.start.json").data, what="it") == resume


def test_a_record_that_fails_in_its_own_thread_is_told(caplog: pytest.LogCaptureFixture) -> None:
    class Strange(Around):
        def put_if_absent(self, key: str, data: bytes) -> Written:
            raise TypeError("an answer of another form")

    store = open_store(f"memory://{uuid4().hex}")
    run_log = RunLog(cast("Store", Strange(store)))

    run_log.claimed(FIRST, SECOND, None)
    run_log._documents.shutdown(wait=True)

    (record,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert "the record of its end was not written" in record.getMessage()
    assert "attempt=1" in record.getMessage()
