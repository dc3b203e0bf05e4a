"""Tests the interval between saves that follows from the cost of a save and the rate of failures."""

import random

import pytest

import raycheck
from raycheck.group.worker.young_daly import Interval, daly_interval_s, mtbf_s


def lost_share(interval_s: float, *, cost_s: float, mtbf: float, seed: int = 1) -> float:
    """Return the share of a long simulated run, with exponential failures, that did not become lasting training."""
    dice = random.Random(seed)
    wall, stands = 0.0, 0.0
    while wall < 4000 * mtbf:
        failure = dice.expovariate(1 / mtbf)
        whole, rest = divmod(failure, interval_s + cost_s)
        wall += failure
        stands += whole * interval_s
        del rest
    return 1 - stands / wall


@pytest.mark.parametrize(("cost_s", "mtbf"), [(1.0, 600.0), (10.0, 3600.0), (60.0, 1800.0)])
def test_no_other_interval_loses_noticeably_less(cost_s: float, mtbf: float) -> None:
    best = daly_interval_s(cost_s, mtbf)

    loss = lost_share(best, cost_s=cost_s, mtbf=mtbf)

    others = [lost_share(best * factor, cost_s=cost_s, mtbf=mtbf) for factor in (0.25, 0.5, 0.8, 1.25, 2.0, 4.0)]
    assert loss <= min(others) * 1.02
    assert loss < 0.7 * max(others)


def test_a_save_dearer_than_the_time_between_failures_is_made_that_often() -> None:
    assert daly_interval_s(300.0, 100.0) == 100.0


def test_failures_are_counted_and_a_run_that_never_failed_is_trusted_more_with_time() -> None:
    assert mtbf_s([0.0], 0.0) == 3600.0
    assert mtbf_s([0.0], 9 * 3600.0) == 10 * 3600.0
    assert mtbf_s([0.0, 1000.0, 2000.0, 3000.0], 5400.0) == 2250.0


def settled(interval: Interval, *, step_s: float, slow_step_s: float, blocked_s: float, saves: int = 6) -> float:
    for _ in range(saves):
        for _ in range(20):
            interval.step(step_s, is_saving=False)
        interval.saved(blocked_s)
        for _ in range(5):
            interval.step(slow_step_s, is_saving=True)
    return interval.seconds


def test_a_save_costs_what_it_blocks_and_what_it_slows() -> None:
    plain, slowing = Interval(0.5, at_most_s=None), Interval(0.5, at_most_s=None)

    fast = settled(plain, step_s=0.1, slow_step_s=0.1, blocked_s=0.2)
    slow = settled(slowing, step_s=0.1, slow_step_s=0.3, blocked_s=0.2)

    assert fast == pytest.approx(daly_interval_s(0.2, 3612.5), rel=0.01)
    assert slow == pytest.approx(daly_interval_s(1.2, 3621.0), rel=0.1)


def test_the_users_bounds_hold() -> None:
    dear = Interval(0.01, at_most_s=None)
    bounded = Interval(0.01, at_most_s=30.0)

    assert settled(dear, step_s=0.1, slow_step_s=0.1, blocked_s=100.0) >= 100.0 / 0.01
    assert settled(bounded, step_s=0.1, slow_step_s=0.1, blocked_s=100.0) == 30.0


def test_the_first_save_comes_at_once_to_be_measured() -> None:
    assert Interval(0.02, at_most_s=None).seconds == 0.0


def test_an_overhead_takes_the_place_of_the_default_steps() -> None:
    assert raycheck.SaveSettings().step_trigger == 100
    assert raycheck.SaveSettings(overhead=0.02).step_trigger is None
    assert raycheck.SaveSettings(overhead=0.02, every_steps=7).step_trigger == 7
    for wrong in (0, 1, 1.5, -0.1, "2%"):
        with pytest.raises(raycheck.errors.ConfigError, match="overhead="):
            raycheck.SaveSettings(overhead=wrong)
