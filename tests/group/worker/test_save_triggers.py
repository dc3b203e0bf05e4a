"""Tests that every rank makes the same decisions to save, whatever it knows about its last save."""

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any, Literal, get_args

import numpy as np
import pytest
import torch
from ray import cloudpickle

import raycheck
from raycheck.bucket.format.progress import Progress
from raycheck.errors import ConfigError
from raycheck.group.ports import PreemptionNotice
from raycheck.group.worker.save_triggers import SaveTriggers
from raycheck.on_ray.actors.actor_checkpointer import settings_for_actors
from raycheck.settings import AfterCommit, HFExport, Retention, SaveSettings
from tests.support.processes.background_call import InThread


class Ranks:
    """Threads that stand for ranks, with a broadcast from rank 0 that, like a collective, no rank passes alone."""

    def __init__(self, world_size: int) -> None:
        self.size = world_size
        self._all = threading.Barrier(world_size, timeout=30.0)
        self._said: queue.Queue[Any] = queue.Queue()

    def broadcast_of(self, rank: int) -> Callable[[Any], Any]:
        def broadcast(value: Any) -> Any:
            if rank == 0:
                for _ in range(self.size):
                    self._said.put(value)
            self._all.wait()
            heard = self._said.get_nowait()
            self._all.wait()
            return heard

        return broadcast

    def run(self, settings: SaveSettings, steps: int, busy: Callable[[int, int], bool]) -> list[list[int]]:
        """Return by rank the steps at which it would save. busy: whether (rank, step) is busy."""

        def one(rank: int) -> list[int]:
            triggers = SaveTriggers(settings, group(rank, self.size, self.broadcast_of(rank)))
            return [
                step
                for step in range(1, steps + 1)
                if triggers.decide_at_step(Progress(step=step), is_busy=busy(rank, step))
            ]

        threads = [InThread(lambda rank=rank: one(rank)) for rank in range(self.size)]
        return [thread.join() for thread in threads]


def group(rank: int, world_size: int, broadcast: Callable[[Any], Any] | None) -> raycheck.adapters.Group:
    return raycheck.adapters.RayGroup(
        id="g", uri="memory://r", rank=rank, world_size=world_size, coordinator=None, broadcast=broadcast
    )


def test_a_busy_rank_0_skips_the_save_of_all_ranks():
    settings = SaveSettings(every_steps=3, when_busy="skip")

    saved = Ranks(3).run(settings, 12, lambda rank, step: rank == 0 and step in (3, 9))

    assert saved == [[6, 12]] * 3


def test_another_rank_that_is_busy_does_not_decide():
    """The outcome of such a rank's save is decided, or rank 0 would be busy too. The rank only has to learn of it."""
    settings = SaveSettings(every_steps=3, when_busy="skip")

    saved = Ranks(3).run(settings, 9, lambda rank, step: rank > 0)

    assert saved == [[3, 6, 9]] * 3


def test_who_waits_skips_nothing_and_asks_nobody():
    triggers = SaveTriggers(SaveSettings(every_steps=2), group(1, 2, None))

    assert [step for step in range(1, 7) if triggers.decide_at_step(Progress(step=step), is_busy=True)] == [2, 4, 6]


def test_a_rank_alone_decides_by_itself():
    triggers = SaveTriggers(SaveSettings(every_steps=1, when_busy="skip"), group(0, 1, None))

    assert [triggers.decide_at_step(Progress(step=step), is_busy=step == 2) for step in (1, 2, 3)] == [
        "keep",
        None,
        "keep",
    ]


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_notice_too_short_for_a_save_brings_a_memory_checkpoint_as_soon_as_there_can_be_one(world_size: int):
    settings = SaveSettings(when=lambda step, metrics: False, memory_every_steps=10, upload_by="node")
    ranks = Ranks(world_size)

    def one(rank: int) -> list[tuple[int, bool, bool]]:
        """Return for each step whether it is saved to the bucket and to memory. Memory is busy up to step 5."""
        notices = [None, None, *[PreemptionNotice(at=time.time() + 3.0)] * 10]
        place = replace(group(rank, world_size, ranks.broadcast_of(rank)), notice=lambda: notices.pop(0))
        triggers = SaveTriggers(settings, place)
        triggers.committed(save_s=60.0)
        return [
            (
                step,
                bool(triggers.decide_at_step(Progress(step=step))),
                triggers.decide_on_memory(step, is_busy=step <= 5),
            )
            for step in range(1, 11)
        ]

    decided = [thread.join() for thread in [InThread(lambda rank=rank: one(rank)) for rank in range(world_size)]]

    assert all(found == decided[0] for found in decided)
    assert not any(is_saved for _, is_saved, _ in decided[0])
    assert [step for step, _, is_in_memory in decided[0] if is_in_memory] == [6, 10]


@pytest.mark.parametrize(
    ("upload_by", "leaving", "alone_bytes", "is_saved"),
    [
        ("node", {1}, 1000, True),
        ("node", {1}, 100_000_000, False),
        ("node", {1}, None, False),
        ("node", set(), 1000, False),
        ("node", {0, 1}, 1000, False),
        ("rank", {1}, 1000, False),
    ],
)
def test_a_notice_too_short_for_a_save_brings_one_that_the_others_can_complete(
    upload_by: Literal["node", "rank"], leaving: set[int], alone_bytes: int | None, is_saved: bool
) -> None:
    """Else only a save that every rank completes in time is begun. The last save is always one of these."""
    settings = SaveSettings(every_steps=1000, upload_by=upload_by)
    ranks = Ranks(2)

    def one(rank: int) -> list[tuple[str | None, frozenset[int] | None]]:
        notice = PreemptionNotice(at=time.time() + 3.0, ranks=frozenset(leaving))
        triggers = SaveTriggers(settings, replace(group(rank, 2, ranks.broadcast_of(rank)), notice=lambda: notice))
        triggers.committed(save_s=60.0)
        return [
            (triggers.decide_at_step(Progress(step=step), alone_bytes=alone_bytes), triggers.leaving)
            for step in range(1, 10)
        ]

    decided = [thread.join() for thread in [InThread(lambda rank=rank: one(rank)) for rank in range(2)]]

    first = ("keep", frozenset(leaving)) if is_saved else (None, None)
    assert decided == [[first, *[(None, None)] * 8]] * 2


def test_a_memory_checkpoint_that_has_to_wait_asks_no_more_often_than_the_ranks_hear_rank_0():
    settings = SaveSettings(every_steps=100, memory_every_steps=10, upload_by="node")
    ranks, shared = Ranks(2), []
    notice = PreemptionNotice(at=time.time() + 3600.0)

    def one(rank: int) -> list[int]:
        hear = ranks.broadcast_of(rank)
        broadcast = hear if rank else lambda value: (shared.append(value.step), hear(value))[1]
        triggers = SaveTriggers(settings, replace(group(rank, 2, broadcast), notice=lambda: notice))
        found = []
        for step in range(1, 21):
            triggers.decide_at_step(Progress(step=step))
            if triggers.decide_on_memory(step, is_busy=step < 20):
                found.append(step)
        return found

    decided = [thread.join() for thread in [InThread(lambda rank=rank: one(rank)) for rank in range(2)]]

    assert decided == [[20], [20]]
    assert shared == [1, 1, 10, 20], "the ranks hear rank 0 at step 1, and then after a thousand steps"


def test_a_save_by_time_is_begun_when_the_one_before_has_ended():
    settings = SaveSettings(every_steps=None, every_s=1e-9, when_busy="skip")

    saved = Ranks(1).run(settings, 4, lambda rank, step: step < 3)

    assert saved == [[3, 4]]


def test_skipping_needs_a_way_to_decide_alike():
    with pytest.raises(ConfigError, match=r"when_busy.*broadcast"):
        SaveTriggers(SaveSettings(when_busy="skip"), group(0, 2, None))


def test_a_policy_that_does_not_exist_is_refused():
    with pytest.raises(ConfigError, match="when_busy='queue'"):
        SaveSettings(when_busy="queue")


def steps_saved(settings: SaveSettings, *, tokens: list[int], start: int = 0) -> list[int]:
    """Return the steps at which a rank alone saves after a restore at `start` tokens. tokens: of each step."""
    triggers = SaveTriggers(settings, group(0, 1, lambda value: value))
    triggers.start_at(Progress(tokens=start), [0.0])
    saved = []
    for step in range(1, len(tokens) + 1):
        progress = Progress(step=step, tokens=start + sum(tokens[:step]))
        if triggers.decide_at_step(progress):
            saved.append(step)
            triggers.saved(0.0, progress, began=time.monotonic())
    return saved


def test_tokens_are_counted_from_the_last_save_or_restore():
    settings = SaveSettings(every_tokens=100)

    assert steps_saved(settings, tokens=[40] * 9, start=90) == [3, 6, 9]


def test_triggers_are_joined_by_or_and_a_save_for_one_counts_for_all():
    settings = SaveSettings(every_tokens=100, every_steps=4)

    assert steps_saved(settings, tokens=[30] * 12) == [4, 8, 12]
    assert steps_saved(settings, tokens=[30, 80, 10, 10, 10, 95]) == [2, 4, 6]


def test_an_epoch_that_ends_without_a_word_is_saved_after_the_first_step_of_the_next():
    triggers = SaveTriggers(SaveSettings(every_epochs=1), group(1, 2, None))
    triggers.start_at(Progress(step=3, epoch=1), [0.0])

    due = [triggers.decide_at_step(Progress(step=step, epoch=1 + step // 6)) for step in range(4, 14)]

    assert due == [None, None, "keep", None, None, None, None, None, "keep", None]


def test_tokens_that_nobody_counts_are_an_error_and_not_never():
    triggers = SaveTriggers(SaveSettings(every_tokens=5), group(0, 1, None))

    with pytest.raises(ConfigError, match=r"end_step\(tokens=...\)"):
        triggers.decide_at_step(Progress(step=1))


def test_an_epoch_ends_in_a_save_where_it_is_asked_for():
    triggers = SaveTriggers(SaveSettings(every_epochs=2), group(1, 2, None))

    assert [epoch for epoch in range(1, 7) if triggers.decide_at_epoch_end(Progress(step=10 * epoch, epoch=epoch))] == [
        2,
        4,
        6,
    ]


def test_tokens_need_a_way_to_decide_alike():
    with pytest.raises(ConfigError, match=r"every_tokens.*broadcast"):
        SaveTriggers(SaveSettings(every_tokens=5), group(0, 2, None))


@pytest.mark.parametrize("trigger", [{"every_s": 5}, {"every_tokens": 5}, {"every_epochs": 5}, {"overhead": 0.1}])
def test_the_default_interval_stands_only_where_no_trigger_is_given(trigger: dict[str, Any]):
    assert SaveSettings(**trigger).step_trigger is None
    assert SaveSettings(**trigger, every_steps=7).step_trigger == 7
    assert SaveSettings().step_trigger == 100


def test_rolling_saves_come_between_the_kept_ones_and_restart_no_count_of_theirs():
    triggers = SaveTriggers(SaveSettings(every_steps=6, rolling_every_steps=2), group(0, 1, None))

    assert [triggers.decide_at_step(Progress(step=step)) for step in range(1, 8)] == [
        None,
        "roll",
        None,
        "roll",
        None,
        "keep",
        None,
    ]


def test_a_rolling_save_does_not_put_off_a_kept_one():
    triggers = SaveTriggers(SaveSettings(every_tokens=100, rolling_every_s=1e-9), group(0, 1, lambda value: value))
    due = []
    for step in (1, 2, 3, 4):
        progress = Progress(step=step, tokens=40 * step)
        due.append(triggers.decide_at_step(progress))
        triggers.saved(0.0, progress, due[-1], began=time.monotonic())

    assert due == ["roll", "roll", "keep", "roll"]


def test_listed_steps_are_saved_and_nothing_else_is():
    triggers = SaveTriggers(SaveSettings(at_steps=[5, 2, 5]), group(1, 2, None))

    assert [step for step in range(1, 300) if triggers.decide_at_step(Progress(step=step))] == [2, 5]


def test_listed_steps_come_beside_other_triggers():
    triggers = SaveTriggers(SaveSettings(at_steps=range(5, 7), every_steps=4), group(1, 2, None))

    assert [step for step in range(1, 10) if triggers.decide_at_step(Progress(step=step))] == [4, 5, 6, 8]


@pytest.mark.parametrize("given", [[0], [1.0], [True], ["3"], "35", 7, None, {2: 3}])
def test_what_is_no_list_of_steps_is_refused(given: Any):
    with pytest.raises(ConfigError, match=r"at_steps=.*at_start=True"):
        SaveSettings(at_steps=given)


@pytest.mark.parametrize("wrong", [{"enabled": "false"}, {"at_start": 1}, {"when": "best"}])
def test_a_switch_or_a_function_that_is_none_is_refused(wrong: dict[str, Any]):
    with pytest.raises(ConfigError, match=f"{next(iter(wrong))}="):
        SaveSettings(**wrong)


@pytest.mark.parametrize("wrong", [True, False])
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        pytest.param(kind, spec.name, id=f"{kind.__name__}.{spec.name}")
        for kind in (SaveSettings, Retention, AfterCommit, HFExport)
        for spec in fields(kind)
        if {int, float} & {spec.type, *get_args(spec.type)}
    ],
)
def test_no_number_may_be_true_or_false(kind: Any, name: str, wrong: bool):
    given = {"task": print} if kind is AfterCommit else {}

    with pytest.raises(ConfigError, match=f"^{name}={wrong}: give "):
        kind(**given, **{name: wrong})


def of_all_ranks(settings: SaveSettings, losses: list[list[float]]) -> list[Any]:
    """Return by rank the steps at which it would save, or what it raised. losses: by rank and step."""
    ranks = Ranks(len(losses))

    def one(rank: int) -> Any:
        triggers = SaveTriggers(settings, group(rank, ranks.size, ranks.broadcast_of(rank)))
        triggers.start_at(Progress(), [0.0])
        try:
            return [
                step
                for step, loss in enumerate(losses[rank], 1)
                if triggers.decide_at_step(Progress(step=step), metrics={"loss": loss})
            ]
        except ConfigError as error:
            return error

    return [thread.join() for thread in [InThread(lambda rank=rank: one(rank)) for rank in range(ranks.size)]]


def test_a_function_of_the_user_decides_on_rank_0_at_each_step_for_all_ranks():
    asked = []

    def when(step: int, metrics: Any) -> bool:
        asked.append((step, metrics["loss"]))
        return metrics["loss"] < 0.5 or step == 7

    found = of_all_ranks(SaveSettings(when=when), [[0.9, 0.4, 0.6, 0.1, 0.9, 0.9, 0.9, 0.9], [0.0] * 8, [1.0] * 8])

    assert found == [[2, 4, 7]] * 3
    assert asked == list(enumerate([0.9, 0.4, 0.6, 0.1, 0.9, 0.9, 0.9, 0.9], 1)), "on rank 0 alone, and never skipped"


def test_what_a_function_of_the_user_raises_ends_the_run_on_all_ranks_by_name():
    def best_so_far(step: int, metrics: Any) -> bool:
        return metrics["los"] < 1

    found = of_all_ranks(SaveSettings(when=best_so_far), [[1.0] * 3] * 3)

    assert len(found) == 3
    for error in found:
        assert isinstance(error, ConfigError)
        assert "when=" in str(error)
        assert "best_so_far) raised at step 1: KeyError: 'los'" in str(error)


@pytest.mark.parametrize("answer", [None, 1, "yes", torch.ones(2)])
def test_an_answer_that_is_neither_yes_nor_no_ends_the_run(answer: Any):
    (error,) = of_all_ranks(SaveSettings(when=lambda step, metrics: answer), [[1.0]])

    assert isinstance(error, ConfigError)
    assert "when=" in str(error)


@pytest.mark.parametrize("answer", [np.bool_(True), torch.tensor(True), torch.tensor(2.0) > 1])
def test_yes_may_come_from_numpy_or_torch(answer: Any):
    assert of_all_ranks(SaveSettings(when=lambda step, metrics: answer), [[1.0], [1.0]]) == [[1], [1]]


def test_a_function_that_asks_while_a_save_is_under_way_is_skipped_where_that_is_wished():
    triggers = SaveTriggers(SaveSettings(when=lambda step, metrics: True, when_busy="skip"), group(0, 1, None))

    assert [triggers.decide_at_step(Progress(step=step), is_busy=step == 2) for step in (1, 2, 3)] == [
        "keep",
        None,
        "keep",
    ]
    assert triggers.skipped == 1


def test_a_function_needs_a_way_to_decide_alike():
    with pytest.raises(ConfigError, match=r"when=.*broadcast"):
        SaveTriggers(SaveSettings(when=lambda step, metrics: True), group(0, 2, None))


def test_tokens_that_nobody_counts_are_said_on_all_ranks():
    """Only rank 0 counts. The others would wait for its broadcast."""
    found = of_all_ranks(SaveSettings(every_tokens=5), [[1.0]] * 3)

    assert ["end_step(tokens=...)" in str(error) for error in found] == [True] * 3


def test_a_rank_alone_needs_no_broadcast_to_save_by_time():
    triggers = SaveTriggers(SaveSettings(every_s=1e-9), group(0, 1, None))

    assert triggers.decide_at_step(Progress(step=1)) == "keep"


def test_settings_are_told_alike_in_each_process():
    settings = SaveSettings(when=lambda step, metrics: True, at_steps=[3])

    assert settings.chosen == (
        "at_steps=(3,)",
        "when=test_settings_are_told_alike_in_each_process.<locals>.<lambda>",
    )
    assert settings.step_trigger is None
    assert SaveSettings(at_start=True).step_trigger == 100
    assert settings.without_triggers.chosen == ("every_steps=None",)


def test_no_address_is_told_with_the_settings_in_its_query():
    export = AfterCommit.export(every_steps=7, to="s3://exports/place?profile=mine")
    settings = SaveSettings(base="s3://bucket/base?profile=mine", after_commit=export)

    told = ", ".join(settings.chosen)

    assert "base='s3://bucket/base'" in told
    assert "to='s3://exports/place'" in told
    assert "mine" not in told


def test_a_drivers_function_stays_in_the_driver_and_its_name_goes_to_the_actors():
    lock = threading.Lock()
    settings = SaveSettings(when=lambda step, metrics: lock.locked(), at_steps=[3])

    told = cloudpickle.loads(cloudpickle.dumps(settings_for_actors(settings)))

    assert told.chosen == settings.chosen
    assert told.without_triggers == settings.without_triggers
