"""Tests when rank 0 saves after a notice that a node will be taken away."""

import math
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import raycheck
from raycheck.group.worker.preemption import Preemption
from tests.support.processes.coordinator_in_thread import group_of


class Clock:
    def __init__(self, now: float) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def saves(*, notice_s: float, save_s: float, busy_s: float = 0.0, again_s: float = 0.5) -> list[float]:
    """Return at which seconds after a notice of `notice_s` saves begin. It asks every again_s until the node goes."""
    clock = Clock(1000.0)
    preemption = Preemption(clock)
    begun = []
    while clock.now < 1000.0 + notice_s:
        left_s = max(0.0, busy_s - (clock.now - 1000.0))
        if preemption.take_notice(1000.0 + notice_s):
            is_due = preemption.can_save_in_time(save_s=save_s, busy_s=left_s)
        else:
            is_due = preemption.take_last_chance(save_s=save_s, busy_s=left_s, again_s=again_s)
        if is_due:
            begun.append(clock.now - 1000.0)
        clock.now += again_s
    return begun


@pytest.mark.parametrize("again_s", [0.1, 0.5, 3.0, 10.0])
def test_a_save_at_once_and_one_as_late_as_it_surely_fits(again_s: float) -> None:
    at_once, late = saves(notice_s=60.0, save_s=4.0, again_s=again_s)

    assert at_once == 0.0
    assert 60.0 - late > 1.5 * 4.0, "it may take half as long again as the last one"
    assert 60.0 - late <= 1.5 * 4.0 + 1.0 + 2.5 * again_s, "and not much earlier"


def test_long_steps_have_their_save_too() -> None:
    assert saves(notice_s=30.0, save_s=4.0, again_s=20.0)[0] == 0.0


def test_a_save_that_cannot_end_in_time_is_not_begun() -> None:
    assert saves(notice_s=10.0, save_s=8.0) == []


def test_what_the_saves_under_way_still_need_is_counted() -> None:
    assert saves(notice_s=20.0, save_s=6.0, busy_s=2.0)[0] == 0.0
    assert saves(notice_s=10.0, save_s=6.0, busy_s=4.0) == [], "they end, and another one would not"


def test_a_notice_without_a_time_has_the_two_minutes_that_ray_waits() -> None:
    clock = Clock(1000.0)
    preemption = Preemption(clock)

    assert preemption.take_notice(math.inf)
    assert preemption.can_save_in_time(save_s=60.0, busy_s=0.0)
    assert not preemption.take_last_chance(save_s=4.0, busy_s=0.0, again_s=1.0)
    clock.now += 102.0
    assert preemption.take_last_chance(save_s=4.0, busy_s=0.0, again_s=1.0)


def test_a_time_from_a_clock_an_hour_off_still_brings_a_save() -> None:
    behind, ahead = Preemption(Clock(1000.0 + 3600.0)), Preemption(Clock(1000.0 - 3600.0))

    for preemption in (behind, ahead):
        assert preemption.take_notice(1030.0)
        assert preemption.can_save_in_time(save_s=10.0, busy_s=0.0)
        assert not preemption.take_last_chance(save_s=10.0, busy_s=0.0, again_s=1.0)


def test_each_new_time_is_news_and_brings_its_own_saves() -> None:
    clock = Clock(0.0)
    preemption = Preemption(clock)

    is_new = [preemption.take_notice(notice) for notice in (None, 100.0, 100.0, 60.0)]

    assert is_new == [False, True, False, True]
    clock.now = 55.0
    assert preemption.take_last_chance(save_s=2.0, busy_s=0.0, again_s=1.0)
    assert not preemption.take_last_chance(save_s=2.0, busy_s=0.0, again_s=1.0), "once"


def test_a_save_by_notice_is_marked_in_its_manifest_and_in_latest(tmp_path: Path) -> None:
    """No save before or after it is marked."""
    notices: list[float] = []
    uri = f"file://{tmp_path}/run"
    (place,) = group_of(uri)
    group = replace(place, notice=lambda: notices[-1] if notices else None)
    model = torch.nn.Linear(2, 1)

    with raycheck.Checkpointer({"model": model}, raycheck.SaveSettings(every_steps=2), group=group) as ckpt:
        ckpt.restore()
        for step in range(1, 6):
            if step == 3:
                notices.append(time.time() + 3600.0)
            ckpt.end_step()
            ckpt.wait()

    run = raycheck.open_run(uri)
    assert {item.step: item.is_by_notice for item in run.checkpoints} == {2: False, 3: True, 4: False, 5: False}
    assert {item.step: item._stored.read_manifest().by_notice for item in run.checkpoints} == {
        2: False,
        3: True,
        4: False,
        5: False,
    }
    assert {item.step: item.is_by_notice for item in run.history().commits} == {2: False, 3: True, 4: False, 5: False}
    forked = raycheck.catalog.fork_run(uri, f"file://{tmp_path}/fork", at=3)
    assert not raycheck.open_run(f"file://{tmp_path}/fork").at(forked.key).is_by_notice
