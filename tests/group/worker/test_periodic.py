"""Tests a script's own periodic work: due on all ranks together, once in each span, and again if its step was lost."""

import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import raycheck
from raycheck.bucket.format.progress import Progress
from raycheck.bucket.store import open_store
from raycheck.errors import ConfigError
from raycheck.group.worker.periodic import Periodic, periodics_of
from raycheck.group.worker.save_triggers import SaveTriggers
from raycheck.settings import SaveSettings
from tests.group.worker.test_save_triggers import Ranks, group
from tests.support.histories.invariants import assert_invariants
from tests.support.processes.background_call import InThread, start_on_all
from tests.support.processes.coordinator_in_thread import again, group_of


class Now:
    """The position of a training, and its clock, which begins at 0 in each attempt."""

    def __init__(self, step: int = 0, *, epoch: int = 0, clock_s: float = 0.0) -> None:
        self.step, self.epoch, self.clock_s = step, epoch, clock_s

    def __call__(self) -> tuple[Progress, float]:
        return Progress(step=self.step, epoch=self.epoch), self.clock_s


def started(periodic: Periodic, now: Callable[[], tuple[Progress, float]], state: dict | None = None) -> Periodic:
    if state is not None:
        periodic.load_state_dict(json.loads(json.dumps(state)))
    periodic.start(now)
    return periodic


def turns(periodic: Periodic, now: Now, steps: int) -> list[int]:
    found = []
    for _ in range(steps):
        now.step += 1
        if periodic.take_turn():
            found.append(now.step)
    return found


def test_it_is_due_once_at_each_multiple():
    now = Now()
    evaluate = started(Periodic(every_steps=4), now)

    assert turns(evaluate, now, 13) == [4, 8, 12]
    now.step = 16
    assert [evaluate.take_turn(), evaluate.take_turn()] == [True, False]


def test_a_turn_that_the_checkpoint_has_is_not_taken_again_and_one_that_it_has_not_comes_at_once():
    now = Now()
    evaluate = started(Periodic(every_steps=4), now)
    turns(evaluate, now, 3)
    now.step = 4
    before = evaluate.state_dict()
    assert evaluate.take_turn()
    after = evaluate.state_dict()

    again, done = Now(4), Now(4)

    assert turns(started(Periodic(every_steps=4), again, before), again, 5) == [5, 8]
    assert turns(started(Periodic(every_steps=4), done, after), done, 5) == [8]
    assert not started(Periodic(every_steps=4), Now(4), after).take_turn(), "nor at the very step of the restore"


def test_time_of_training_counts_over_restarts_and_downtime_does_not():
    now = Now(clock_s=100.0)
    log = started(Periodic(every_s=60.0), now)
    now.clock_s = 145.0
    assert not log.take_turn()

    later = Now(7)
    log = started(Periodic(every_s=60.0), later, log.state_dict())
    due = []
    for later.clock_s in (14.0, 15.0, 30.0, 74.0, 75.0):
        due.append(log.take_turn())

    assert due == [False, True, False, False, True]


def test_an_epoch_that_ended_is_a_turn():
    now = Now(epoch=3)
    sample = started(Periodic(every_epochs=2), now)

    found = []
    for now.epoch in (3, 4, 5, 7, 8):
        found.append(sample.take_turn())

    assert found == [False, True, False, True, True]


def test_what_was_not_restored_begins_where_training_is():
    now = Now(730)
    added = started(Periodic(every_steps=100), now)
    anew = Now(0)
    from_weights = started(Periodic(every_steps=100), anew, {"step": 700, "epoch": 9, "seconds": 0.0})

    assert turns(added, now, 100) == [800]
    assert turns(from_weights, anew, 100) == [100]


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 7), st.lists(st.tuples(st.integers(1, 12), st.integers(0, 12), st.booleans()), max_size=8))
def test_however_often_a_run_failed_no_turn_that_stands_is_taken_twice_and_none_is_left_out(every, lives):
    """lives: steps until the crash, the last of them that is saved, and whether it is saved before its turn is taken."""
    saved: tuple[int, dict | None, list[int]] = (0, None, [])
    starts = set()
    for length, save_at, is_before in [*lives, (12, 12, False)]:
        now, history = Now(saved[0]), list(saved[2])
        starts.add(saved[0])
        work = started(Periodic(every_steps=every), now, saved[1])
        for number in range(1, length + 1):
            now.step += 1
            before = (now.step, work.state_dict(), list(history))
            if work.take_turn():
                history.append(now.step)
            if number == save_at:
                saved = before if is_before else (now.step, work.state_dict(), list(history))

    step, _, history = saved
    spans = [at // every for at in history]
    assert spans == sorted(set(spans))
    assert spans[-1] == step // every
    pending = {start // every for start in starts}  # a turn that a restart found due may come with the next one
    assert set(range(1, step // every + 1)) - set(spans) <= pending


def test_every_rank_hears_rank_0_of_time():
    ranks = Ranks(3)

    def one(rank: int) -> list[int]:
        mine = group(rank, 3, ranks.broadcast_of(rank))
        triggers, work = SaveTriggers(SaveSettings(), mine), Periodic(every_s=1e-9)
        at = Now()
        work.start(lambda: (at()[0], triggers.clock_s))
        found = []
        for at.step in range(1, 6000):  # rank 0 speaks at each 1000th at least
            triggers.decide_at_step(Progress(step=at.step))
            if work.take_turn():
                found.append(at.step)
        return [*found, work.state_dict()["seconds"]]

    threads = [InThread(lambda rank=rank: one(rank)) for rank in range(3)]
    found = [thread.join() for thread in threads]

    assert found[0] == found[1] == found[2]
    assert len(found[0]) > 2


@pytest.mark.parametrize(
    "wrong",
    [{}, {"every_steps": 0}, {"every_steps": "default"}, {"every_s": float("nan")}, {"every_epochs": True}],
)
def test_what_cannot_work_is_refused_by_name(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong), "every_steps")):
        Periodic(**wrong)


def test_it_needs_a_checkpointer_and_time_needs_a_way_to_decide_alike():
    with pytest.raises(ConfigError, match="state"):
        Periodic(every_steps=3).take_turn()
    with pytest.raises(ConfigError, match=r"state\['log'\].*broadcast"):
        periodics_of({"log": Periodic(every_s=3)}, group(0, 2, None), is_led=False)
    with pytest.raises(ConfigError, match=r"state\['log'\].*driver"):
        periodics_of({"log": Periodic(every_s=3)}, group(0, 1, None), is_led=True)
    assert len(periodics_of({"log": Periodic(every_steps=3)}, group(0, 2, None), is_led=False)) == 1


def test_where_raycheck_is_turned_off_it_is_due_as_ever():
    evaluate, log = Periodic(every_steps=2), Periodic(every_s=1e-9)
    with raycheck.Checkpointer(
        {"model": torch.nn.Linear(2, 1), "own": {"evaluate": evaluate, "log": log}}, SaveSettings(enabled=False)
    ) as ckpt:
        ckpt.restore()
        due = []
        for _ in range(4):
            ckpt.end_step()
            due.append((evaluate.take_turn(), log.take_turn(), ckpt.is_repeating))

    assert due == [(False, True, False), (True, True, False)] * 2


def test_a_logger_hears_of_no_step_twice_and_evaluation_is_done_again_only_where_it_was_lost(uri: str) -> None:
    told: dict[int, list[str]] = {0: [], 1: []}

    class Rank:
        def __init__(self, place: raycheck.adapters.Group) -> None:
            self.told = told[place.rank]
            self.evaluate = raycheck.adapters.Periodic(every_steps=3, every_s=3600)
            torch.manual_seed(0)
            state = {"model": torch.nn.Linear(2, 1), "own": {"evaluate": self.evaluate}}
            self.ckpt = raycheck.Checkpointer(state, raycheck.SaveSettings(every_steps=5), group=place)

        def train(self) -> None:
            with self.ckpt as ckpt:
                at = ckpt.restore()
                for step in range(at.step + 1, 13):
                    ckpt.end_step()
                    if self.evaluate.take_turn():
                        self.told.append(f"evaluate {step} {at.attempt}")
                    if not ckpt.is_repeating:
                        self.told.append(f"log {step}")
                    if at.attempt == 1 and step == 8:
                        ckpt.wait()
                        raise RuntimeError("failed")

    places = group_of(uri, world_size=2)
    for attempt in (1, 2):
        ranks = Ranks(2)
        next_places = [replace(place, broadcast=ranks.broadcast_of(place.rank)) for place in again(places)]
        for training in start_on_all([Rank(place) for place in next_places], "train"):
            with pytest.raises(RuntimeError, match="failed") if attempt == 1 else nullcontext():
                training.join()

    for rank in (0, 1):
        lines = [line.split() for line in told[rank]]
        assert [int(step) for what, step, *_ in lines if what == "log"] == list(range(1, 13))
        evaluated = [(int(step), int(attempt)) for what, step, *more in lines if what == "evaluate" for attempt in more]
        assert evaluated == [(3, 1), (6, 1), (6, 2), (9, 2), (12, 2)]
    assert [entry.step for entry in assert_invariants(open_store(uri)).live] == [5, 10, 12]
