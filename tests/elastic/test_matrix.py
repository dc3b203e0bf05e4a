"""Fails a Ray Train run in every way: checks how many steps that costs, in what order samples come, and how soon training
goes on."""

import math
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

import pytest

import raycheck
from raycheck.bucket.attempt_records import read_resumes
from raycheck.bucket.reading import read_latest
from raycheck.bucket.store import open_store
from raycheck.bucket.store.address import join_uri
from tests.support.histories.invariants import assert_invariants
from tests.support.processes.ray_cluster import ROOT, Arena, Driver, arena, wait_for
from tests.support.servers.http_fault_proxy import fault_proxy

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore")]  # Ray itself warns
EVERY = 5
BOUND_S = 120.0
"""The limit from a failure to the first new step, on two busy cores. Each row prints what it measured."""

NOTICE_S = 12
CLOCK = Path(__file__).with_name("clock")

Drive = Callable[..., Driver]
Row = Callable[..., None]


def goes_on(driver: Driver, *, since: float, what: str, row: Row, attempt: int = 2, most: int = EVERY + 3) -> None:
    """The next attempt does new steps in time, and no more were lost than one interval and what ran meanwhile."""
    driver.reaches(1, attempt=attempt, within_s=BOUND_S)
    driver.reaches(driver.story.attempts[attempt - 1].last_step + 1, attempt=attempt, within_s=BOUND_S)
    lost, seconds = driver.story.lost_steps(attempt), driver.story.first_new_step_s(attempt, since=since)
    row(what, lost_steps=lost, seconds=seconds)
    assert 0 <= lost <= most
    assert seconds < BOUND_S


def ends_well(driver: Driver, *, steps: int) -> None:
    assert driver.join(within_s=240) == 0, driver.log[-4000:]
    driver.story.assert_order(steps)


# By default on_ray/test_resume.py and the demo kill one, and the row below kills it with its node.
@pytest.mark.parametrize(
    ("kind", "cause"),
    [
        pytest.param("raise", "rank 1: ZeroDivisionError: a user's mistake", marks=pytest.mark.slow),
        pytest.param("exit", "rank 1: its process died", marks=pytest.mark.slow),
        pytest.param("kill", "rank 1: its process died", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_is_gone(nodes: Arena, drive: Drive, row: Row, kind: str, cause: str) -> None:
    nodes.add(2)
    driver = drive(workers=2, steps=40, settings={"every_steps": EVERY}, hurt=(kind, 1, 18))
    driver.reaches(17)
    since = time.monotonic()

    goes_on(driver, since=since, what=f"a rank's end: {kind}", row=row)
    ends_well(driver, steps=40)

    resume = driver.story.attempts[2].start["resume"]
    assert cause in resume["cause"]
    assert resume["lost_steps"] is not None
    assert resume["world_size_before"] == resume["world_size"] == 2


def test_a_node_gone_without_notice_leaves_a_smaller_group_and_one_with_notice_costs_at_most_what_was_trained_since(
    nodes: Arena, drive: Drive, row: Row
) -> None:
    _, second = nodes.add(2)
    driver = drive(workers=[1, 2], steps=30, settings={"every_steps": EVERY}, pause_s=0.2)
    driver.reaches(12)

    since = nodes.kill(second)
    goes_on(driver, since=since, what="a node killed without notice, 2 -> 1 ranks", row=row)
    ends_well(driver, steps=30)
    assert [told.start["world_size"] for told in driver.story.attempts.values()][:2] == [2, 1]

    nodes.add(2)
    driver = drive(name="noticed", workers=2, steps=400, settings={"every_steps": 1000})
    driver.reaches(10)
    leaving = nodes.of_rank(driver, 1)

    noticed = driver.story.attempts[1].last_step
    nodes.drain(leaving, seconds=NOTICE_S)
    time.sleep(NOTICE_S)
    since = nodes.kill(leaving)
    last = driver.story.attempts[1].last_step
    driver.reaches(last + 1, attempt=2, within_s=BOUND_S)

    at = driver.story.attempts[2].start["step"]
    row(
        f"a node drained, {NOTICE_S} s of notice",
        lost_steps=last - at,
        seconds=driver.story.first_new_step_s(2, since=since),
    )
    assert at >= noticed, "nothing that was trained before the notice was lost"
    assert last > noticed + 20, "it went on training until the node went"
    assert last - at < (last - noticed) / 2, "a second save came late"


@pytest.mark.slow
@pytest.mark.parametrize(("few", "many"), [(1, 2), (2, 4)])
def test_nodes_that_come_make_the_group_larger_and_lose_nothing(
    nodes: Arena, drive: Drive, row: Row, few: int, many: int
) -> None:
    nodes.add(few)
    driver = drive(workers=[few, many], steps=1000, settings={"every_steps": 100_000})
    driver.reaches(10)

    nodes.add(many - few)
    since = time.monotonic()
    driver.reaches(1, attempt=2, within_s=BOUND_S)
    asked = driver.story.attempts[1].last_step
    driver.reaches(asked + 1, attempt=2)

    row(
        f"nodes added, {few} -> {many} ranks",
        lost_steps=driver.story.lost_steps(2),
        seconds=driver.story.first_new_step_s(2, since=since),
    )
    start = driver.story.attempts[2].start
    assert start["world_size"] == many
    assert 0 < start["step"] <= asked
    assert driver.story.lost_steps(2) <= 20, "it was saved just before Ray replaced the group"
    assert f"from {few} to {many} ranks" in start["resume"]["cause"]


@pytest.mark.slow
def test_a_notice_that_is_too_short_keeps_the_save_under_way_and_costs_one_interval(
    nodes: Arena, drive: Drive, row: Row
) -> None:
    nodes.add(3)
    driver = drive(workers=2, steps=400, settings={"every_steps": EVERY})
    driver.reaches(12)
    leaving = nodes.of_rank(driver, 1)

    nodes.drain(leaving, seconds=0.5)
    time.sleep(0.5)
    since = nodes.kill(leaving)

    goes_on(driver, since=since, what="a node drained, 0.5 s of notice", row=row)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_three_seconds_of_notice_lose_nothing_that_another_node_has_although_a_save_takes_far_longer(
    nodes: Arena, drive: Drive, s3: str, row: Row, rank: int
) -> None:
    """The node's ranks write next to nothing, and the actor of the other node completes the save when Ray has ended the
    group."""
    with fault_proxy(s3) as proxy:
        nodes.add(2)
        settings = {"every_steps": 1000, "at_start": True, "upload_by": "node"}
        driver = drive(
            uri=join_uri(proxy.uri, uuid4().hex),
            workers=[1, 2],
            steps=400,
            settings=settings,
            replicated_width=1000,
            pause_s=0.2,
        )
        proxy.throttle(bytes_per_s=1e6)
        driver.reaches(1)
        store = open_store(driver.uri)
        wait_for(lambda: read_latest(store).live, within_s=BOUND_S, why="the save of step 0")
        driver.reaches(driver.story.attempts[1].last_step + 3)
        leaving = nodes.of_rank(driver, rank)

        noticed = driver.story.attempts[1].last_step
        nodes.drain(leaving, seconds=3)
        time.sleep(3)
        since = nodes.kill(leaving)
        last = driver.story.attempts[1].last_step
        wait_for(lambda: len(read_latest(store).live) > 1, within_s=BOUND_S, why="the save by notice")
        committed_s = time.monotonic() - since
        proxy.throttle(bytes_per_s=math.inf)
        driver.reaches(last + 1, attempt=2, within_s=BOUND_S)

        at = driver.story.attempts[2].start["step"]
        row(
            f"rank {rank} drained, 3 s of notice, committed {committed_s:.0f} s after its end",
            lost_steps=last - at,
            seconds=driver.story.first_new_step_s(2, since=since),
        )
        assert at >= noticed, "nothing that was trained before the notice was lost"
        assert committed_s > 3, "the save took longer than the node had"
        assert_invariants(store)


@pytest.mark.slow
def test_two_nodes_that_are_drained_one_after_the_other(nodes: Arena, drive: Drive, row: Row) -> None:
    nodes.add(4)
    driver = drive(workers=2, steps=2000, settings={"every_steps": 100_000})
    driver.reaches(10)
    first, second = nodes.of_rank(driver, 0), nodes.of_rank(driver, 1)

    nodes.drain(first, seconds=25)
    time.sleep(5)
    nodes.drain(second, seconds=25)
    noticed = driver.story.attempts[1].last_step
    time.sleep(20)
    nodes.kill(first)
    since = nodes.kill(second)
    last = driver.story.attempts[1].last_step
    driver.reaches(last + 1, attempt=2, within_s=BOUND_S)

    at = driver.story.attempts[2].start["step"]
    row("two nodes drained", lost_steps=last - at, seconds=driver.story.first_new_step_s(2, since=since))
    assert at >= noticed - 10


@pytest.mark.slow
def test_who_asks_for_it_is_restarted_elsewhere_before_the_node_goes(nodes: Arena, drive: Drive, row: Row) -> None:
    nodes.add(3)
    driver = drive(workers=2, steps=400, settings={"every_steps": 100_000, "on_preempt": "restart"})
    driver.reaches(10)
    leaving = nodes.of_rank(driver, 1)

    since = nodes.drain(leaving, seconds=60)
    driver.reaches(1, attempt=2, within_s=60)
    driver.reaches(driver.story.attempts[1].last_step + 1, attempt=2)

    lost, seconds = driver.story.lost_steps(2), driver.story.first_new_step_s(2, since=since)
    row('a node drained, on_preempt="restart"', lost_steps=lost, seconds=seconds)
    assert lost == 0
    assert seconds < 60
    assert leaving.node_id not in driver.story.attempts[2].nodes.values()
    assert 'on_preempt="restart"' in driver.story.attempts[2].start["resume"]["cause"]


@pytest.mark.slow
def test_four_ranks_then_three_then_two(nodes: Arena, drive: Drive, row: Row) -> None:
    nodes.add(4)
    driver = drive(workers=[1, 4], steps=150, settings={"every_steps": EVERY}, pause_s=0.2)
    driver.reaches(12)

    for attempt, what in ((2, "4 -> 3 ranks"), (3, "3 -> 2 ranks")):
        since = nodes.kill(nodes.of_rank(driver, 1, attempt=attempt - 1))
        goes_on(driver, since=since, what=f"a node killed without notice, {what}", row=row, attempt=attempt)
    ends_well(driver, steps=150)

    assert [told.start["world_size"] for told in driver.story.attempts.values()][:3] == [4, 3, 2]


@pytest.mark.slow  # on_ray/test_finish.py kills one of a Ray without a dashboard
def test_a_controller_that_is_gone_is_started_again(s3: str, tmp_path: Path, row: Row) -> None:
    with arena(include_dashboard=True) as nodes:  # Ray asks it before it gives a dead controller's nodes free
        nodes.add(2)
        driver = nodes.drive(
            tmp_path, join_uri(s3, tmp_path.name), workers=2, steps=60, settings={"every_steps": EVERY}
        )
        driver.reaches(17)

        since = time.monotonic()
        os.kill(nodes.pid_of("TrainController"), signal.SIGKILL)

        goes_on(driver, since=since, what="Ray Train's controller killed", row=row)
        ends_well(driver, steps=60)
        driver.close()


@pytest.mark.slow  # here below a second driver takes over from one that lives, which goes the same way in the bucket
def test_a_driver_that_is_gone_is_started_again_and_the_run_goes_on(nodes: Arena, drive: Drive, row: Row) -> None:
    nodes.add(2)
    first = drive(workers=2, steps=60, settings={"every_steps": EVERY})
    first.reaches(17)

    since = first.kill()
    again = drive(workers=2, steps=60, settings={"every_steps": EVERY})

    goes_on(again, since=since, what="the driver killed and started again", row=row)
    ends_well(again, steps=60)
    resume = again.story.attempts[2].start["resume"]
    assert resume["cause"] == "its driver was killed or replaced by another one"
    assert resume["lost_steps"] is None, "nobody knows, and it says so"


@pytest.mark.slow
def test_downtime_does_not_count_as_time_since_the_last_save(nodes: Arena, drive: Drive) -> None:
    nodes.add(2)
    settings = {"every_steps": None, "every_s": 8.0}
    first = drive(workers=2, steps=4000, settings=settings)
    wait_for(lambda: "committed" in first.log, within_s=90, why="a commit")
    first.kill()
    time.sleep(12)

    again = drive(workers=2, steps=4000, settings=settings)
    again.reaches(1, attempt=2)
    again.reaches(again.story.attempts[2].start["step"] + 30, attempt=2)
    told = again.story.attempts[2]
    saved = [item for item in raycheck.open_run(again.uri).checkpoints if "-a2-" in item.key]

    assert all(told.at[item.step] - told.start["at"] > 6.0 for item in saved if item.step in told.at)


@pytest.mark.slow
def test_a_head_that_is_gone_and_a_run_that_goes_on_in_another_cluster(tmp_path, s3: str, row: Row) -> None:
    uri = join_uri(s3, tmp_path.name)
    with arena() as lost:
        lost.add(2)
        first = lost.drive(tmp_path, uri, workers=2, steps=60, settings={"every_steps": EVERY})
        first.reaches(17)
        since = lost.kill_head()
        first.close()
    with arena() as new:
        new.add(2)
        again = new.drive(tmp_path, uri, workers=2, steps=60, settings={"every_steps": EVERY})
        goes_on(again, since=since, what="the head gone, and a new cluster", row=row)
        ends_well(again, steps=60)


@pytest.mark.slow
@pytest.mark.parametrize("hours", [1.0, -1.0])
def test_a_node_whose_clock_is_an_hour_off(nodes: Arena, drive: Drive, row: Row, hours: float) -> None:
    nodes.add(1)
    nodes.add(1, env_vars={"RAYCHECK_TEST_CLOCK_S": str(3600 * hours), "PYTHONPATH": f"{CLOCK}{os.pathsep}{ROOT}"})
    driver = drive(workers=2, steps=60, settings={"every_steps": EVERY, "keep_last": 2}, hurt=("kill", 1, 18))
    driver.reaches(17)
    since = time.monotonic()

    goes_on(driver, since=since, what=f"a node's clock {hours:+.0f} h off, and a rank killed", row=row)
    ends_well(driver, steps=60)

    assert_invariants(open_store(driver.uri))
    assert 0 <= read_resumes(open_store(driver.uri), [2])[2].since_commit_s < BOUND_S


@pytest.mark.slow
def test_a_rank_that_leaves_its_loop_early_is_named_by_a_deadline(nodes: Arena, drive: Drive, row: Row) -> None:
    nodes.add(2)
    settings = {"every_steps": EVERY, "save_timeout_s": 15.0}
    driver = drive(workers=2, steps=40, settings=settings, hurt=("leave", 1, 18))
    driver.reaches(17)
    since = time.monotonic()

    goes_on(driver, since=since, what="a rank left its loop early", row=row)
    ends_well(driver, steps=40)

    assert "rank 1: the last save, of step 17, was not committed" in driver.log
    assert "ranks [0] have not reported" in driver.log


@pytest.mark.slow
@pytest.mark.parametrize(
    ("when", "held"),
    [
        ("between saves", None),
        ("during the reports", ("PUT", "step-000000015-a1-s3/train/__1_0.distcp")),
        ("between manifest and latest", ("PUT", "step-000000015-a1-s3/manifest.json")),
    ],
)
def test_a_coordinator_that_is_gone_costs_no_step(
    nodes: Arena, drive: Drive, s3: str, tmp_path: Path, when: str, held: tuple[str, str] | None
) -> None:
    nodes.add(2)
    with fault_proxy(s3) as proxy:
        rule = proxy.rule("hold", *held) if held else None
        driver = drive(uri=join_uri(proxy.uri, tmp_path.name), workers=2, steps=40, settings={"every_steps": EVERY})
        if rule is not None:
            rule.wait()
        else:
            driver.reaches(12)

        os.kill(nodes.pid_of("Coordinator"), signal.SIGKILL)
        if rule is not None:
            rule.release()
        ends_well(driver, steps=40)

    assert list(driver.story.attempts) == [1], when
    saved = [item.step for item in raycheck.open_run(join_uri(join_uri(s3, tmp_path.name), "run")).checkpoints]
    assert saved == list(range(EVERY, 41, EVERY))


@pytest.mark.slow
def test_a_store_that_is_away_for_a_minute_ends_nothing(nodes: Arena, drive: Drive, s3: str, tmp_path: Path) -> None:
    nodes.add(2)
    settings = {"every_steps": EVERY, "save_timeout_s": 15.0, "max_failed_saves": 20}
    with fault_proxy(s3) as proxy:
        driver = drive(uri=join_uri(proxy.uri, tmp_path.name), workers=2, steps=900, settings=settings)
        driver.reaches(12)
        proxy.chaos(1, seed=1)
        time.sleep(60)
        proxy.chaos(0, seed=1)
        there = driver.story.attempts[1].last_step
        run = join_uri(join_uri(s3, tmp_path.name), "run")
        wait_for(lambda: raycheck.open_run(run).head.step > there, within_s=90, why="a commit after it is back")

    assert list(driver.story.attempts) == [1]
    assert_invariants(open_store(run))


@pytest.mark.slow
@pytest.mark.parametrize("is_plain", [False, True], ids=["raycheck.fit", "trainer.fit"])
def test_rays_own_record_that_cannot_be_written_ends_nothing(
    nodes: Arena, drive: Drive, s3: str, tmp_path: Path, is_plain: bool
) -> None:
    nodes.add(2)
    with fault_proxy(s3) as proxy:
        record = proxy.rule("busy", "PUT", "checkpoint_manager_snapshot.json", times=10**6)
        uri = join_uri(proxy.uri, tmp_path.name)
        driver = drive(uri=uri, workers=2, steps=40, settings={"every_steps": EVERY}, is_plain=is_plain)
        ends_well(driver, steps=40)

    assert record.seen, "Ray tried to write it"
    assert list(driver.story.attempts) == [1]
    assert "own record of checkpoints was not written" in driver.log


@pytest.mark.slow
def test_of_two_drivers_on_one_name_the_second_goes_on_and_the_first_ends(nodes: Arena, drive: Drive, row: Row) -> None:
    nodes.add(4)
    settings = {"every_steps": EVERY}
    first = drive(workers=2, steps=10_000, settings=settings)
    first.reaches(12)

    since = time.monotonic()
    second = drive(workers=2, steps=10_000, settings=settings)
    second.reaches(1, attempt=2)
    assert first.join(within_s=60) != 0
    goes_on(second, since=since, what="a second driver on the same name", row=row, most=10_000)

    assert "FencedError" in first.log
    assert second.story.attempts[2].start["resume"]["cause"] == "its driver was killed or replaced by another one"
    assert_invariants(open_store(second.uri))
