"""Signals to a driver: one asks for a save, the other ends it after a save."""

import os
import signal
from collections.abc import Callable

import pytest

import raycheck
from tests.support.processes.ray_cluster import Arena, Driver, wait_for

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # Ray itself warns


def head_of(driver: Driver) -> int:
    head = raycheck.open_run(driver.uri).head
    return head.step if head else 0


def test_a_signal_saves_and_the_one_that_stops_a_job_ends_it_after_a_save(
    nodes: Arena, drive: Callable[..., Driver]
) -> None:
    nodes.add(2)
    driver = drive(workers=2, steps=100_000, settings={"every_steps": 100_000})
    driver.reaches(10)

    os.kill(driver.process.pid, signal.SIGUSR1)
    wait_for(lambda: head_of(driver) >= 10, within_s=30, why="a save by SIGUSR1")
    there = head_of(driver)
    driver.reaches(there + 20)
    assert head_of(driver) == there, "nothing else makes it save"

    last = driver.story.attempts[1].last_step
    os.kill(driver.process.pid, signal.SIGTERM)

    assert driver.join(within_s=60) not in (0, -signal.SIGKILL)
    assert head_of(driver) >= last
    assert "SIGTERM: a save is committed" in driver.log
