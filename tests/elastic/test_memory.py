"""Fails a run that makes memory checkpoints, and checks from where the next attempt goes on: memory or the bucket."""

import os
import random
import signal
import time
from collections.abc import Callable

import pytest

from raycheck.bucket.reading import read_latest
from raycheck.bucket.store import open_store
from tests.support.histories.invariants import assert_invariants
from tests.support.processes.node_memory import agents, shared_memory
from tests.support.processes.ray_cluster import Arena, Driver, wait_for

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore")]  # Ray itself warns
BOUND_S = 120.0
EVERY, IN_MEMORY = 60, 4
SETTINGS = {"every_steps": EVERY, "upload_by": "node", "memory_every_steps": IN_MEMORY}

Drive = Callable[..., Driver]
Row = Callable[..., None]


def goes_on(driver: Driver, row: Row, *, what: str, since: float, is_from_memory: bool, attempt: int = 2) -> None:
    """The next attempt goes on from the tier that the rule says, and the run ends with every step done in order."""
    driver.reaches(1, attempt=attempt, within_s=BOUND_S)
    driver.reaches(driver.story.attempts[attempt - 1].last_step + 1, attempt=attempt, within_s=BOUND_S)
    start = driver.story.attempts[attempt].start
    lost = driver.story.lost_steps(attempt)
    row(f"memory: {what}", lost_steps=lost, seconds=driver.story.first_new_step_s(attempt, since=since))
    assert start["resume"]["is_from_memory"] == is_from_memory, start["resume"]
    if is_from_memory:
        assert start["step"] % IN_MEMORY == 0
        assert start["step"] % EVERY
        assert 0 <= lost <= 3 * IN_MEMORY, "one interval, and what ran while it was copied"
    else:
        assert start["step"] % EVERY == 0


def holds(driver: Driver, *, more_than: int) -> None:
    """Waits until the nodes hold a memory checkpoint of a later step."""
    driver.reaches(1)

    def is_there() -> bool:
        told = driver.story.attempts[1]
        return told.memory_step > max(more_than, told.last_step - 2 * IN_MEMORY)

    wait_for(is_there, within_s=90, why=driver.log[-2000:])


def holds_again(driver: Driver, *, after: int) -> None:
    """Waits until this attempt has made a memory checkpoint of a step above `after`."""
    wait_for(lambda: driver.story.attempts[1].memory_step > after, within_s=90, why=driver.log[-2000:])


def ends_well(driver: Driver, *, steps: int) -> None:
    assert driver.join(within_s=240) == 0, driver.log[-4000:]
    driver.story.assert_order(steps)
    by_place: dict[tuple[int, int], set[float]] = {}
    for told in driver.story.attempts.values():
        for step, loss in told.losses.items():
            by_place.setdefault((step, told.start["world_size"]), set()).add(loss)
    assert all(len(losses) == 1 for losses in by_place.values()), (
        "a step done twice by equally many ranks is the same step"
    )
    body = assert_invariants(open_store(driver.uri))
    assert body is not None
    assert all(entry.step % EVERY == 0 or entry.step == steps for entry in body.live), "memory is never in latest"


def damage(pid: int) -> None:
    """Flips all bits of what a rank shares, while the rank stands still."""
    os.kill(pid, signal.SIGSTOP)
    for path in shared_memory(pid):
        with path.open("r+b", buffering=0) as memory:
            flipped = bytes(byte ^ 255 for byte in memory.read())
            memory.seek(0)
            memory.write(flipped)


# By default on_ray/nodes/test_memory_checkpoints.py kills a worker, and has one actor copy to another.
@pytest.mark.slow
def test_a_node_that_is_gone_is_restored_from_its_neighbours_memory_on_fewer_ranks(
    nodes: Arena, drive: Drive, row: Row
) -> None:
    nodes.add(2)
    driver = drive(workers=[1, 2], steps=100, settings=SETTINGS, pause_s=0.2)
    holds(driver, more_than=0)

    since = nodes.kill(nodes.of_rank(driver, 1))
    goes_on(driver, row, what="a node killed, 2 -> 1 ranks", since=since, is_from_memory=True)
    ends_well(driver, steps=100)


@pytest.mark.slow
def test_a_worker_that_is_gone_is_restored_from_memory(nodes: Arena, drive: Drive, row: Row) -> None:
    nodes.add(2)
    driver = drive(workers=2, steps=100, settings=SETTINGS, pause_s=0.2)
    holds(driver, more_than=0)

    since = time.monotonic()
    os.kill(driver.story.attempts[1].pids[1], signal.SIGKILL)
    goes_on(driver, row, what="a worker killed", since=since, is_from_memory=True)
    ends_well(driver, steps=100)


@pytest.mark.slow
def test_a_damaged_copy_is_read_from_the_neighbour(nodes: Arena, drive: Drive, row: Row) -> None:
    nodes.add(2)
    driver = drive(workers=2, steps=100, settings=SETTINGS, pause_s=0.2)
    holds(driver, more_than=0)

    pid = driver.story.attempts[1].pids[1]
    damage(pid)
    since = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    goes_on(driver, row, what="a copy damaged, its worker killed", since=since, is_from_memory=True)
    ends_well(driver, steps=100)


@pytest.mark.slow
def test_a_damaged_copy_without_another_gives_way_to_the_bucket(nodes: Arena, drive: Drive, row: Row) -> None:
    nodes.add(1)
    driver = drive(workers=1, steps=130, settings=SETTINGS, pause_s=0.2)
    holds(driver, more_than=EVERY)

    pid = driver.story.attempts[1].pids[0]
    damage(pid)
    since = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    goes_on(driver, row, what="the only copy damaged, its worker killed", since=since, is_from_memory=False)
    ends_well(driver, steps=130)


@pytest.mark.slow
def test_actors_that_die_with_the_workers_give_way_to_the_bucket(nodes: Arena, drive: Drive, row: Row) -> None:
    nodes.add(2)
    driver = drive(workers=2, steps=130, settings=SETTINGS, pause_s=0.2)
    holds(driver, more_than=EVERY)

    since = time.monotonic()
    for process in agents():
        process.kill()
    os.kill(driver.story.attempts[1].pids[1], signal.SIGKILL)
    goes_on(driver, row, what="both nodes' actors and a worker killed", since=since, is_from_memory=False)
    ends_well(driver, steps=130)


@pytest.mark.slow
def test_an_actor_killed_at_any_moment_of_a_save_costs_no_step(nodes: Arena, drive: Drive, row: Row) -> None:
    """Around saves to memory, and to the bucket at step 60. Each time memory checkpoints are made again afterwards."""
    nodes.add(2)
    driver = drive(workers=2, steps=200, settings=SETTINGS, pause_s=0.2)
    holds(driver, more_than=0)
    chance = random.Random(23)

    while (at := driver.story.attempts[1].last_step) < EVERY + 2 * IN_MEMORY:
        next_save = EVERY if EVERY - 3 * IN_MEMORY <= at < EVERY else at + IN_MEMORY - at % IN_MEMORY
        driver.reaches(next_save)
        time.sleep(chance.uniform(0.0, 0.5))
        for process in chance.sample(agents(), chance.choice([1, 2])):
            process.kill()
        holds_again(driver, after=driver.story.attempts[1].last_step)
    assert list(driver.story.attempts) == [1], "no attempt was lost"
    assert EVERY in [entry.step for entry in read_latest(open_store(driver.uri)).live]

    holds(driver, more_than=EVERY)
    since = time.monotonic()
    os.kill(driver.story.attempts[1].pids[1], signal.SIGKILL)
    goes_on(driver, row, what="nodes' actors killed again and again, then a worker", since=since, is_from_memory=True)
    ends_well(driver, steps=200)


@pytest.mark.slow
def test_two_seconds_of_notice_are_enough_for_memory(nodes: Arena, drive: Drive, row: Row) -> None:
    """The save to the bucket may be in time, too: then it is as new, and the bucket is where the next attempt begins."""
    nodes.add(2)
    driver = drive(workers=[1, 2], steps=150, settings=SETTINGS, pause_s=0.2)
    holds(driver, more_than=0)
    leaving = nodes.of_rank(driver, 1)

    noticed = driver.story.attempts[1].last_step
    nodes.drain(leaving, seconds=2)
    time.sleep(2)
    since = nodes.kill(leaving)
    driver.reaches(driver.story.attempts[1].last_step + 1, attempt=2, within_s=BOUND_S)

    start, lost = driver.story.attempts[2].start, driver.story.lost_steps(2)
    tier = "memory" if start["resume"]["is_from_memory"] else "the bucket"
    row(f"memory: 2 s of notice, from {tier}", lost_steps=lost, seconds=driver.story.first_new_step_s(2, since=since))
    assert start["step"] >= noticed, "nothing that was trained before the notice was lost"
    assert driver.join(within_s=240) == 0, driver.log[-4000:]
    driver.story.assert_order(150)


@pytest.mark.slow
def test_two_nodes_that_go_at_once_give_way_to_the_bucket(nodes: Arena, drive: Drive, row: Row) -> None:
    nodes.add(3)
    driver = drive(workers=[1, 3], steps=130, settings=SETTINGS, pause_s=0.2)
    holds(driver, more_than=EVERY)

    going = [nodes.of_rank(driver, rank) for rank in (1, 2)]
    since = min([nodes.kill(node) for node in going])
    goes_on(driver, row, what="two nodes killed, 3 -> 1 ranks", since=since, is_from_memory=False)
    ends_well(driver, steps=130)


@pytest.mark.slow
def test_a_new_driver_goes_on_from_the_bucket(nodes: Arena, drive: Drive, row: Row) -> None:
    nodes.add(2)
    driver = drive(workers=2, steps=130, settings=SETTINGS, pause_s=0.2)
    holds(driver, more_than=EVERY)

    since = driver.kill()
    driver = drive(workers=2, steps=130, settings=SETTINGS, pause_s=0.2)
    goes_on(driver, row, what="the driver killed and started again", since=since, is_from_memory=False)
    ends_well(driver, steps=130)
