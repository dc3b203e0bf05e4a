"""What a start of the workers says about the end of the ones before."""

from dataclasses import replace

from ray.exceptions import RayActorError
from ray.train.v2._internal.exceptions import UserExceptionWithTraceback, WorkerHealthCheckFailedError

from raycheck.bucket.latest import Attempt, Entry
from raycheck.bucket.record import Resume, load_resume, record_resume, resumes
from raycheck.bucket.store import open_store
from raycheck.train.lifeline import Lifeline, Pulse
from raycheck.train.meeting import Arrival
from raycheck.train.ray_names import causes_of

FIRST = Attempt(
    number=1, owner="me", coordinator="c", group="g1", world_size=4, restore_key=None, last_save=3, claimed_at=1000.0
)
SECOND = replace(FIRST, number=2, group="g2", world_size=3, restore_key="step-000000120-a1-s3", claimed_at=1300.0)
ENTRY = Entry(key="step-000000120-a1-s3", step=120, committed_at=1250.0, size_bytes=1, metrics={}, manifest_crc32=1)
ARRIVALS = [Arrival(step=120, trained_s=200.0, seconds=2.0 + rank, bytes_fetched=500, what="all") for rank in range(3)]


class Clock:
    now = 50.0

    def __call__(self) -> float:
        return self.now


def ended(*, hurts: tuple[str, ...] = (), by: Attempt = SECOND, pulse: Pulse | None = None) -> Resume:
    clock = Clock()
    lifeline = Lifeline(clock)
    lifeline.claimed(None, FIRST, now=1000.0)
    if pulse is not None:
        lifeline.beat("g1", pulse)
    lifeline.hurt(hurts)
    lifeline.hurt(hurts)
    lifeline.claimed(FIRST, by, now=by.claimed_at)
    clock.now += 10.0
    resume = lifeline.resume(ENTRY, ARRIVALS)
    assert resume is not None
    return resume


def test_it_names_the_cause_and_counts_what_was_lost() -> None:
    resume = ended(hurts=("rank 2: its process died",), pulse=Pulse(step=127, trained_s=212.5, began_at=1000.0))

    assert (resume.attempt, resume.after, resume.cause) == (2, 1, "rank 2: its process died")
    assert (resume.world_size_before, resume.world_size) == (4, 3)
    assert (resume.step, resume.lost_steps, resume.lost_s) == (120, 7, 12.5)
    assert resume.since_commit_s == 60.0, "50 s until the claim, and 10 s since"
    assert (resume.restore_s, resume.restore_bytes) == (4.0, 1500)


def test_without_a_word_of_the_attempt_before_what_was_lost_is_unknown_and_not_none() -> None:
    lifeline = Lifeline(Clock())
    lifeline.claimed(FIRST, replace(SECOND, owner="another"), now=1300.0)

    resume = lifeline.resume(ENTRY, ARRIVALS)

    assert resume is not None
    assert (resume.lost_steps, resume.lost_s, resume.cause) == (None, None, "another driver took over")
    assert "unknown" in str(resume)


def test_what_was_lost_is_not_forgotten_by_a_start_that_never_restored() -> None:
    lifeline = Lifeline(Clock())
    lifeline.claimed(None, FIRST, now=1000.0)
    lifeline.beat("g1", Pulse(step=127, trained_s=212.5, began_at=1000.0))
    lifeline.claimed(FIRST, SECOND, now=1300.0)
    third = replace(SECOND, number=3, group="g3")

    lifeline.claimed(SECOND, third, now=1400.0)

    resume = lifeline.resume(ENTRY, ARRIVALS)
    assert resume is not None
    assert (resume.lost_steps, resume.lost_s) == (7, 12.5)


def test_a_start_that_restored_and_did_no_step_has_lost_none() -> None:
    lifeline = Lifeline(Clock())
    lifeline.claimed(FIRST, SECOND, now=1300.0)
    lifeline.resume(ENTRY, ARRIVALS)

    lifeline.claimed(SECOND, replace(SECOND, number=3, group="g3"), now=1400.0)

    resume = lifeline.resume(ENTRY, ARRIVALS)
    assert resume is not None
    assert (resume.lost_steps, resume.lost_s) == (0, 0.0)


def test_a_word_of_a_group_that_is_gone_does_not_count() -> None:
    lifeline = Lifeline(Clock())
    lifeline.claimed(None, FIRST, now=1000.0)
    lifeline.claimed(FIRST, SECOND, now=1300.0)

    lifeline.beat("g1", Pulse(step=500, trained_s=1.0, began_at=1000.0))

    assert lifeline.pulse is None


def test_a_group_that_ray_changed_without_an_error_was_resized() -> None:
    assert ended().cause == "Ray changed the group from 4 to 3 ranks"
    assert ended(by=replace(SECOND, world_size=4)).cause == "the same driver restarted its workers"


def test_a_runs_first_start_has_nothing_to_report() -> None:
    lifeline = Lifeline(Clock())
    lifeline.claimed(None, FIRST, now=1000.0)

    assert lifeline.resume(None, []) is None


def test_the_report_is_kept_once_and_read_back(tmp_path) -> None:
    store = open_store(f"file://{tmp_path}/run")
    resume = ended(pulse=Pulse(step=127, trained_s=212.5, began_at=1000.0))

    assert record_resume(store, resume)
    assert not record_resume(store, replace(resume, cause="another"))
    store.put("attempts/000003.start.json", b"no report")

    assert resumes(store, [1, 2, 3]) == {2: resume}
    assert load_resume(store.get("attempts/000002.start.json").data, what="it") == resume


def test_a_process_that_is_gone_is_named_before_the_errors_that_follow_from_it() -> None:
    died, taken = RayActorError(), RayActorError(preempted=True)
    errors = {
        0: UserExceptionWithTraceback(RuntimeError("gloo: connection closed by peer"), ""),
        2: WorkerHealthCheckFailedError("A worker health check failed.", failure=died),
        3: WorkerHealthCheckFailedError("A worker health check failed.", failure=taken),
    }

    assert causes_of(errors) == [
        "rank 2: its process died",
        "rank 3: its node was taken away",
        "rank 0: RuntimeError: gloo: connection closed by peer",
    ]
