"""The history of a run, from the documents that its drivers wrote."""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import pytest

from raycheck.bucket.attempt_records import HAD_FINISHED, ResumeRecord, record_end, record_resume
from raycheck.bucket.format.latest import Attempt, dump_latest
from raycheck.bucket.history.attempt_facts import facts_of
from raycheck.bucket.history.facts import Facts
from raycheck.bucket.history.metric_rows import MetricRows
from raycheck.bucket.history.segments import record_facts
from raycheck.bucket.protocol.repair import repair
from raycheck.bucket.protocol.rewind import rewind
from raycheck.bucket.protocol.sharing.fork import fork
from raycheck.errors import DeniedError
from raycheck.group.coordinator.lost_work import LostWork
from raycheck.views.attempts import AttemptHistory
from raycheck.views.history import RunHistory, read_history
from tests.support.samples.many_runs import a_run
from tests.support.samples.sample_checkpoints import Around, Driver
from tests.support.servers.memory_store import DictStore


def attempt_of(number: int, *, owner: str = "ann", world_size: int = 2) -> Attempt:
    return Attempt(
        number=number,
        owner=owner,
        coordinator=owner,
        group=f"g{number}",
        world_size=world_size,
        restore_key=None,
        claimed_at=0.0,
    )


def told(before: Attempt, after: Attempt, *, failures: tuple[str, ...] = (), had_finished: bool = False) -> str:
    """The cause that the coordinator writes when `after` follows `before`."""
    work = LostWork()
    work.claimed(None, before, now=0.0)
    work.group_failed(failures)
    work.claimed(before, after, now=1.0, had_finished=had_finished)
    return work.cause


def two_attempts(cause: str) -> list[AttemptHistory]:
    store = DictStore(at=time.time())
    driver = Driver(store)
    first, _ = driver.claim("g1", world_size=2)
    driver.save(1, 1, world_size=2)
    second, _ = driver.claim("g2", world_size=2)
    assert record_end(store, first, by=second, cause=cause)
    driver.save(2, 1, world_size=2)
    return list(read_history(store).attempts)


@pytest.mark.parametrize(
    ("cause", "ending"),
    [
        (lambda: told(attempt_of(1), attempt_of(2), failures=("rank 1: its node was taken away",)), "preempted"),
        (lambda: told(attempt_of(1), attempt_of(2), failures=("rank 1: its process died",)), "failed"),
        (lambda: told(attempt_of(1), attempt_of(2), failures=("rank 0: ValueError: a resized head",)), "failed"),
        (lambda: told(attempt_of(1), attempt_of(2, world_size=3)), "resized"),
        (lambda: told(attempt_of(1), attempt_of(2)), "restarted"),
        (lambda: told(attempt_of(1), attempt_of(2, owner="bob")), "driver lost"),
        (lambda: told(attempt_of(1), attempt_of(2), had_finished=True), "finished"),
        (lambda: told(attempt_of(1, world_size=0), attempt_of(2, owner="bob")), "by hand"),
        (lambda: "words of a later raycheck", "unknown"),
    ],
)
def test_why_an_attempt_ended_is_told_from_what_the_coordinator_writes(cause: Callable[[], str], ending: str) -> None:
    text = cause()
    assert text

    first, second = two_attempts(text)

    assert (first.ending, first.cause) == (ending, text)
    assert (second.ending, second.cause, second.ended_at) == ("live", "", None)
    assert first.ended_at == second.began_at
    assert [commit.key for commit in first.commits] == ["step-000000010-a1-s1"]
    assert [commit.is_head for commit in second.commits] == [True]


def test_what_a_restart_cost_is_told() -> None:
    store = DictStore(at=time.time())
    driver = Driver(store)
    driver.claim("g1")
    driver.save(1, 1, began_at=store.at - 100, trained_s=60.0)
    driver.claim("g2")
    resume = ResumeRecord(
        attempt=2,
        after=1,
        cause="rank 0: its process died",
        restored="step-000000010-a1-s1",
        step=10,
        world_size_before=1,
        world_size=1,
        lost_steps=4,
        lost_s=2.5,
        since_commit_s=9.0,
        restore_s=1.5,
        restore_bytes=64,
        what="everything",
    )
    assert record_resume(store, resume)

    found = read_history(store)

    second = found.attempts[-1]
    assert (second.start_step, second.restored) == (10, "step-000000010-a1-s1")
    assert (second.lost_steps, second.lost_s, second.restore_s) == (4, 2.5, 1.5)
    assert found.trained_s == 60.0
    assert found.goodput == pytest.approx(0.6, rel=0.05)


def test_a_finished_run_a_run_given_up_and_a_rewound_one() -> None:
    for state, ending in (("finished", "finished"), ("died", "gave up")):
        store = DictStore(at=time.time())
        for key, data in a_run(state=state).items():
            store.put(key, data)
        last = read_history(store).attempts[-1]
        assert last.ending == ending
        assert last.ended_at is not None
    store = DictStore(at=time.time())
    driver = Driver(store)
    driver.claim("g")
    driver.save(1, 1)
    driver.save(1, 2)
    rewind(driver.register, "step-000000010-a1-s1")

    first, by_hand = read_history(store).attempts

    assert (first.ending, by_hand.ending, by_hand.world_size) == ("by hand", "by hand", 0)
    assert [commit.step for commit in first.commits if commit.is_head] == [10]


def steps(attempt: int, first: int, last: int) -> Facts:
    series = {(attempt, "loss"): {step: 1.0 / step for step in range(first, last + 1)}}
    return Facts(rows=MetricRows(series=series))


def abandoned(history: RunHistory) -> dict[int, set[bool]]:
    """Whether rows of each attempt are abandoned."""
    found: dict[int, set[bool]] = {}
    for row in history.rows():
        found.setdefault(int(row["attempt"] or 0), set()).add(bool(row["is_abandoned"]))
    return found


def test_a_repair_of_a_lost_body_leaves_the_whole_past_in_the_history() -> None:
    store = DictStore(at=time.time())
    driver = Driver(store)
    for number, save in ((1, 1), (2, 2)):
        driver.claim(f"g{number}")
        driver.save(number, 1, step=10 * save)
        body = driver.look()
        facts = facts_of(body).joined(steps(number, 10 * save - 9, 10 * save))
        record_facts(store, facts, run_id=body.run_id, counter=body.counter)
    before = read_history(store)
    store.delete("latest")
    repair(store)

    found = read_history(store)

    assert found.problems == ()
    assert [item.number for item in found.attempts] == [1, 2, 3]
    assert [commit.key for commit in found.commits] == [commit.key for commit in before.commits]
    assert [commit.at for commit in found.commits] == [commit.at for commit in before.commits]
    assert abandoned(found) == {1: {False}, 2: {False}}
    assert [commit.is_head for commit in found.commits] == [False, True]


def test_an_attempt_whose_own_facts_were_lost_is_part_of_the_past_and_does_not_end_it() -> None:
    store = DictStore(at=time.time())
    driver = Driver(store)
    for number in (1, 2, 3):
        driver.claim(f"g{number}")
        driver.save(number, 1, step=10 * number)
        record_facts(store, steps(number, 10 * number - 9, 10 * number), run_id="run-of-a-test", counter=number)
    body = driver.look()
    store.put("latest", dump_latest(replace(body, attempts=body.attempts[2:], counter=body.counter + 1)))

    found = read_history(store)

    assert [(item.number, item.ending, item.workers) for item in found.attempts] == [
        (1, "unknown", "unknown"),
        (2, "unknown", "unknown"),
        (3, "live", "1"),
    ]
    assert found.attempts[1].restored == "step-000000010-a1-s1"
    assert [commit.is_abandoned for commit in found.commits] == [False, False, False]
    assert abandoned(found) == {1: {False}, 2: {False}, 3: {False}}


def test_an_attempt_that_had_finished_ended_then_and_not_when_the_next_one_was_claimed() -> None:
    store = DictStore(at=time.time() + 60)
    driver = Driver(store)
    first, _ = driver.claim("g1")
    driver.save(1, 1)
    finished = driver.finish("g1").finished
    assert finished is not None
    store.at += 86_400
    second, _ = Driver(store, "bob").claim("g2")
    assert second.claimed_at > finished.at + 80_000
    assert record_end(store, first, by=second, cause=HAD_FINISHED)  # as an older raycheck wrote it

    by_older, _ = read_history(store).attempts
    store.delete("attempts/000001.json")
    record_end(store, first, by=second, cause=HAD_FINISHED, finished_at=finished.at)
    rewind(driver.register, "step-000000010-a1-s1")

    assert by_older.ending == "finished"
    assert by_older.ended_at == by_older.last_seen_at
    exact = read_history(store).attempts[0]
    assert (exact.ending, exact.ended_at) == ("finished", finished.at)


def test_a_run_without_a_commit_and_a_reader_without_rights_to_the_records_have_a_history() -> None:
    store = DictStore(at=time.time())
    Driver(store).claim("g")

    class Denying(Around):
        def get(self, key: str, *bound: int) -> object:
            if key.startswith("attempts/"):
                raise DeniedError(key)
            return self.inner.get(key, *bound)

    found = read_history(Denying(store))

    assert (found.goodput, found.trained_s, found.commits) == (None, None, ())
    assert found.attempts[-1].ending == "live"


def test_a_fork_says_where_it_came_from_before_its_first_start_and_when_that_checkpoint_is_gone() -> None:
    source, store = DictStore(at=time.time()), DictStore(at=time.time())
    parent = Driver(source)
    parent.claim("g")
    parent.save(1, 1)
    fork(source, store, run_id="new", copies=True)

    (first,) = read_history(store).attempts
    driver = Driver(store)
    driver.claim("g")
    driver.save(1, 1, step=20, keep_last=1)
    later = read_history(store)

    assert (first.number, first.ending, first.workers) == (0, "by hand", "by hand")
    assert [commit.state for commit in later.commits] == ["dropped", "kept"]
    assert later.parent == source.uri
    assert later.attempts[1].ending == "live"


def test_a_metric_that_is_called_as_a_column_of_the_rows_has_a_name_of_its_own_there() -> None:
    store = DictStore(at=time.time())
    Driver(store).claim("g")
    names = ("step", "time", "attempt", "is_abandoned", "metric.step", "metric.loss")
    series: dict[tuple[int, str], dict[int, float]] = {(1, name): {7: float(at)} for at, name in enumerate(names)}
    record_facts(store, Facts(rows=MetricRows(series=series | {(1, ""): {7: 99.0}})), run_id="run-of-a-test", counter=1)

    found = read_history(store)

    assert found.rows() == [
        {"step": 7, "attempt": 1, "is_abandoned": False, "time": 99.0}
        | {"metric.step": 0.0, "metric.time": 1.0, "metric.attempt": 2.0, "metric.is_abandoned": 3.0}
        | {"metric.metric.step": 4.0, "metric.loss": 5.0}
    ]
    assert [line.values for line in found.curve("step")] == [(0.0,)]
    assert found.curve("") == ()


def test_each_line_of_a_curve_says_which_step_of_which_attempt_it_continues() -> None:
    store = DictStore(at=time.time())
    driver = Driver(store)

    def train(number: int, first: int, last: int, owner: str) -> None:
        driver = Driver(store, owner)
        driver.claim(f"g{number}")
        driver.save(number, 1, step=first + 4)
        driver.save(number, 2, step=last)
        body = driver.look()
        record_facts(store, facts_of(body).joined(steps(number, first, last)), run_id=body.run_id, counter=body.counter)

    train(1, 1, 10, "ann")
    rewind(driver.register, "step-000000005-a1-s1")
    train(3, 6, 15, "bob")
    rewind(driver.register, "step-000000010-a1-s2")
    train(5, 11, 20, "cat")
    rewind(driver.register, "step-000000010-a3-s1")
    train(7, 11, 16, "dan")

    lines = {(line.attempt, line.is_abandoned): line.continues for line in read_history(store).curve("loss")}

    assert lines == {
        (1, False): None,
        (1, True): (1, 5),
        (3, False): (1, 5),
        (3, True): (3, 10),
        (5, True): (1, 10),
        (7, False): (3, 10),
    }


class Watched(Mapping[int, float]):
    """The values of a metric, which say whether anybody has read them."""

    def __init__(self, values: dict[int, float]) -> None:
        self.values_by_step = values
        self.is_read = False

    def __getitem__(self, step: int) -> float:
        return self.values_by_step[step]

    def __iter__(self) -> Iterator[int]:
        self.is_read = True
        return iter(self.values_by_step)

    def __len__(self) -> int:
        return len(self.values_by_step)


def test_the_curve_of_a_metric_and_the_names_of_all_copy_no_other_metric() -> None:
    store = DictStore(at=time.time())
    driver = Driver(store)
    driver.claim("g1")
    driver.save(1, 1)  # its loss, at step 10, belongs to the curve too
    series = {name: Watched({1: 0.5, 2: 0.25}) for name in ("loss", "lr")}
    history = replace(read_history(store), _series={(1, name): values for name, values in series.items()})

    assert history.metrics == ("loss", "lr")
    assert [line.steps for line in history.curve("loss")] == [(1, 2, 10)]

    assert series["loss"].is_read
    assert not series["lr"].is_read
