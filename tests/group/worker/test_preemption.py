"""Tests when rank 0 saves after a notice that a node will be taken away."""

import math
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import raycheck
from raycheck.group.ports import PreemptionNotice
from raycheck.group.worker.preemption import Preemption
from tests.support.processes.background_call import InThread
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
        if preemption.take_notice(PreemptionNotice(at=1000.0 + notice_s)):
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


def test_a_late_save_that_took_much_less_than_the_first_one_is_followed_by_a_later_one() -> None:
    clock = Clock(0.0)
    preemption = Preemption(clock)
    preemption.take_notice(PreemptionNotice(at=30.0))
    save_s, begun = 10.0, []
    while clock.now < 30.0:
        if preemption.take_last_chance(save_s=save_s, busy_s=0.0, again_s=0.5):
            begun.append(clock.now)
            save_s = 1.0
        clock.now += 0.5

    early, late = begun
    assert 12.0 < early < 15.0
    assert 26.0 < late < 28.5


def test_a_save_that_cannot_end_in_time_is_not_begun() -> None:
    assert saves(notice_s=10.0, save_s=8.0) == []


def test_what_the_saves_under_way_still_need_is_counted() -> None:
    assert saves(notice_s=20.0, save_s=6.0, busy_s=2.0)[0] == 0.0
    assert saves(notice_s=10.0, save_s=6.0, busy_s=4.0) == [], "they end, and another one would not"


def test_a_notice_without_a_time_has_the_two_minutes_that_ray_waits() -> None:
    clock = Clock(1000.0)
    preemption = Preemption(clock)

    assert preemption.take_notice(PreemptionNotice(at=math.inf))
    assert preemption.can_save_in_time(save_s=60.0, busy_s=0.0)
    assert not preemption.take_last_chance(save_s=4.0, busy_s=0.0, again_s=1.0)
    clock.now += 102.0
    assert preemption.take_last_chance(save_s=4.0, busy_s=0.0, again_s=1.0)


def test_a_time_from_a_clock_an_hour_off_still_brings_a_save() -> None:
    behind, ahead = Preemption(Clock(1000.0 + 3600.0)), Preemption(Clock(1000.0 - 3600.0))

    for preemption in (behind, ahead):
        assert preemption.take_notice(PreemptionNotice(at=1030.0))
        assert preemption.can_save_in_time(save_s=10.0, busy_s=0.0)
        assert not preemption.take_last_chance(save_s=10.0, busy_s=0.0, again_s=1.0)


def test_each_new_time_is_news_and_brings_its_own_saves() -> None:
    clock = Clock(0.0)
    preemption = Preemption(clock)

    notices = [None, *(PreemptionNotice(at=at) for at in (100.0, 100.0, 60.0))]
    is_new = [preemption.take_notice(notice) for notice in notices]

    assert is_new == [False, True, False, True]
    clock.now = 55.0
    assert preemption.take_last_chance(save_s=2.0, busy_s=0.0, again_s=1.0)
    assert not preemption.take_last_chance(save_s=2.0, busy_s=0.0, again_s=1.0), "once"


def test_a_save_by_notice_is_marked_in_its_manifest_and_in_latest(tmp_path: Path) -> None:
    """No save before or after it is marked."""
    notices: list[PreemptionNotice] = []
    uri = f"file://{tmp_path}/run"
    (place,) = group_of(uri)
    group = replace(place, notice=lambda: notices[-1] if notices else None)
    model = torch.nn.Linear(2, 1)

    with raycheck.Checkpointer({"model": model}, raycheck.SaveSettings(every_steps=2), group=group) as ckpt:
        ckpt.restore()
        for step in range(1, 6):
            if step == 3:
                notices.append(PreemptionNotice(at=time.time() + 3600.0))
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


def replica() -> dict[str, Any]:
    """A frozen matrix, a trained one, and buffers, all large enough to be spread over the ranks."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(600, 600), nn.Linear(600, 600), nn.BatchNorm1d(300_000))
    model[0].requires_grad_(False)
    return {"model": model, "optimizer": torch.optim.SGD(model[1:2].parameters(), lr=0.1, momentum=0.9)}


def step(state: dict[str, Any]) -> None:
    for parameter in state["model"][1].parameters():
        parameter.grad = torch.ones_like(parameter)
    state["optimizer"].step()


@pytest.mark.parametrize("leaving", [0, 1])
def test_from_the_save_by_notice_on_a_rank_that_leaves_uploads_nothing_that_another_may_write(
    tmp_path: Path, leaving: int
) -> None:
    """Nobody uploads the frozen matrix again. The first rank's buffers count, so they are not another rank's to write.

    The second save after the notice has no agreement of its own.
    """
    uri = f"file://{tmp_path}/run"
    states = [replica() for _ in range(2)]
    places = group_of(uri, world_size=2)
    settings = raycheck.SaveSettings(every_steps=None)
    ranks = [raycheck.Checkpointer(state, settings, group=place) for state, place in zip(states, places, strict=True)]

    def on_all(call: Callable[[raycheck.Checkpointer], Any]) -> None:
        for thread in [InThread(lambda rank=rank: call(rank)) for rank in ranks]:
            thread.join()

    def save(*, by_notice: bool) -> None:
        for state in states:
            step(state)
        on_all(lambda rank: rank.end_step())
        on_all(lambda rank: rank.save_as("keep", None, leaving={leaving} if by_notice else None))
        on_all(lambda rank: rank.wait())

    on_all(lambda rank: rank.restore())
    save(by_notice=False)
    save(by_notice=True)
    save(by_notice=False)

    run = raycheck.open_run(uri)
    manifests = [item._stored.read_manifest() for item in run.checkpoints]
    sizes = [
        {shard.rank: shard.size_bytes for part in manifest.components if part.name == "train" for shard in part.shards}
        for manifest in manifests
    ]
    trained, buffers = 600 * 601 * 4, 4 * 300_000 * 4
    assert sizes[0][1] > 0.4 * trained, "at first, each rank writes a part"
    for size in sizes[1:]:
        assert size[leaving] < (buffers if leaving == 0 else 0) + 20_000
        assert size[1 - leaving] > 2 * trained
    frozen = [[part.checkpoint for part in manifest.components if part.name != "train"] for manifest in manifests]
    assert frozen == [[manifests[0].key]] * 3
    on_all(lambda rank: rank.close())

    (again,) = group_of(uri, owner="again")
    fresh = replica()
    with torch.no_grad():
        for tensor in fresh["model"].state_dict().values():
            tensor.zero_()
    with raycheck.Checkpointer(fresh, settings, group=again) as ckpt:
        assert ckpt.restore().step == 3
        for name, tensor in states[0]["model"].state_dict().items():
            assert torch.equal(fresh["model"].state_dict()[name], tensor), name
        for mine, saved in zip(fresh["optimizer"].state.values(), states[0]["optimizer"].state.values(), strict=True):
            assert torch.equal(mine["momentum_buffer"], saved["momentum_buffer"])
