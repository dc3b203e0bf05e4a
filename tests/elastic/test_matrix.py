"""Every way a Ray Train run can be hurt: how many steps it costs, in what order samples come, how soon it goes on."""

import time
from collections.abc import Callable

import pytest

from tests.elastic.arena import Arena, Driver

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore")]  # Ray itself warns
EVERY = 5
BOUND_S = 120.0
"""From a hurt to the first new step, on two busy cores; each row prints what it was."""

NOTICE_S = 20

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


@pytest.mark.parametrize(
    ("kind", "cause"),
    [
        pytest.param("raise", "rank 1: ZeroDivisionError: a user's mistake", marks=pytest.mark.slow),
        pytest.param("exit", "rank 1: its process died", marks=pytest.mark.slow),
        ("kill", "rank 1: its process died"),
    ],
)
def test_a_rank_that_is_gone(nodes: Arena, drive: Drive, row: Row, kind: str, cause: str) -> None:
    nodes.add(2)
    driver = drive(workers=2, steps=40, settings={"every_steps": EVERY}, hurt=(kind, 1, 18))
    driver.reaches(17)
    since = time.time()

    goes_on(driver, since=since, what=f"a rank's end: {kind}", row=row)
    ends_well(driver, steps=40)

    resume = driver.story.attempts[2].start["resume"]
    assert cause in resume["cause"]
    assert resume["lost_steps"] is not None
    assert resume["world_size_before"] == resume["world_size"] == 2


def test_a_node_that_is_gone_without_notice_leaves_a_smaller_group(nodes: Arena, drive: Drive, row: Row) -> None:
    _, second = nodes.add(2)
    driver = drive(workers=[1, 2], steps=60, settings={"every_steps": EVERY}, pause_s=0.2)
    driver.reaches(12)

    since = nodes.kill(second)
    goes_on(driver, since=since, what="a node killed without notice, 2 -> 1 ranks", row=row)
    ends_well(driver, steps=60)

    assert [told.start["world_size"] for told in driver.story.attempts.values()][:2] == [2, 1]


def test_a_node_with_notice_loses_at_most_what_was_trained_since(nodes: Arena, drive: Drive, row: Row) -> None:
    nodes.add(3)
    driver = drive(workers=2, steps=400, settings={"every_steps": 1000})
    driver.reaches(10)
    leaving = next(node for node in nodes.workers if node.node_id == driver.story.attempts[1].nodes[1])

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
    assert last > noticed + 50, "it went on training until the node went"
    assert last - at < (last - noticed) / 2, "a second save came late"
