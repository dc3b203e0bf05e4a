"""A preview says what a checkpoint holds before anything is restored."""

import math
from collections import Counter

import numpy as np
import pytest
import torch

from raycheck.bucket.format.progress import Progress
from raycheck.bucket.reading import Checkpoint
from raycheck.bucket.store import Store
from raycheck.errors import ConfigError, DamagedError
from raycheck.state.entries.per_rank_entries import PerRank
from raycheck.state.preview import Preview
from raycheck.state.restore_selection import EVERYTHING, Selection
from raycheck.state.train_state import TrainState
from tests.support.processes.save_without_ray import agreed, save

WHERE = Progress(step=7, epoch=2, epoch_step=1, samples=56, tokens=700, episodes=3)


def preview(checkpoint: Checkpoint, selection: Selection = EVERYTHING, *, rank: int = 0) -> Preview:
    return Preview.of(checkpoint, selection, attempt=2, rank=rank, refused=())


def saved(store: Store, state: dict[str, object]) -> Checkpoint:
    staged = TrainState(state, rank=0, world_size=1).stage(WHERE)
    return save(store, [staged], progress=WHERE, metrics={"loss": 0.5})


def trained() -> dict[str, object]:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return {"model": model, "optimizer": optimizer}


def test_a_preview_says_where_training_stands_and_what_there_is(store: Store) -> None:
    early = {"best": 0.25, "worst": math.inf, "bad": (1, 2), "seen": Counter("aab"), 3: np.arange(3)}
    state = trained()
    scheduler = torch.optim.lr_scheduler.StepLR(state["optimizer"], step_size=4)

    found = preview(saved(store, {**state, "early": early, "scheduler": scheduler}))

    assert (found.step, found.epoch, found.epoch_step, found.samples) == (7, 2, 1, 56)
    assert (found.tokens, found.episodes, found.metrics) == (700, 3, {"loss": 0.5})
    assert (found.attempt, found.saved_world_size, found.is_fresh) == (2, 1, False)
    assert found.checkpoint == "step-000000007-a1-s1"
    assert found.entries == ("early", "model", "optimizer", "scheduler")
    assert set(found.values) == {"early", "scheduler"}, "an optimizer is in a form of its own, a model holds tensors"
    assert found.values["scheduler"] == scheduler.state_dict()
    values = found.values["early"]
    assert np.array_equal(values.pop(3), early.pop(3))
    assert values == early
    assert [type(value) for value in values.values()] == [type(value) for value in early.values()]


def test_what_a_script_does_to_a_value_changes_no_other_answer(store: Store) -> None:
    found = preview(saved(store, {"model": torch.nn.Linear(1, 1), "early": {"best": [1]}}))

    found.values["early"]["best"].append(2)

    assert found.values["early"] == {"best": [1]}


def test_each_rank_sees_the_values_of_its_own_and_a_new_rank_none(store: Store) -> None:
    states = [
        {"x": torch.nn.Linear(1, 1), "mine": PerRank({"rank": rank}), "t": PerRank(torch.ones(2))} for rank in (0, 1)
    ]
    for state in states:
        torch.nn.init.zeros_(state["x"].weight)
        torch.nn.init.zeros_(state["x"].bias)
    ranks = agreed([TrainState(state, rank=rank, world_size=2) for rank, state in enumerate(states)])
    checkpoint = save(store, [rank.stage(WHERE) for rank in ranks], progress=WHERE)

    found = [preview(checkpoint, rank=rank) for rank in range(3)]

    assert [dict(item.values) for item in found] == [{"mine": {"rank": 0}}, {"mine": {"rank": 1}}, {}]
    assert {item.entries for item in found} == {("mine", "t", "x")}
    assert [item.saved_world_size for item in found] == [2, 2, 2]


def test_a_selection_without_the_step_count_begins_at_step_0_and_must_be_that_of_the_restore(store: Store) -> None:
    checkpoint = saved(store, trained())
    weights = Selection.of(["model"], ())

    whole, partial = preview(checkpoint), preview(checkpoint, weights)

    assert (partial.step, partial.epoch, partial.samples, partial.entries) == (0, 0, 0, whole.entries)
    assert partial.metrics == whole.metrics
    whole.check(EVERYTHING)
    whole.check(Selection.of(None, ["optimizer"]))
    partial.check(weights)
    for answer, selection in ((whole, weights), (partial, EVERYTHING)):
        with pytest.raises(ConfigError, match=r"peek\(\) returned step \d, .*Pass the same only and skip to both"):
            answer.check(selection)


def test_an_index_that_is_damaged_is_no_preview(store: Store) -> None:
    checkpoint = saved(store, trained())
    key = f"checkpoints/{checkpoint.entry.key}/index"
    data = bytearray(store.get(key).data)
    data[-1] ^= 1
    store.put(key, bytes(data))

    with pytest.raises(DamagedError, match="index has another checksum"):
        preview(checkpoint)
