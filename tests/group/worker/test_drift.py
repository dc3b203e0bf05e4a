"""Tests that what several ranks hold is compared at every save: no checkpoint mixes ranks that have drifted apart.

The ranks are threads of this process, and the coordinator is another thread.
"""

import re
from collections.abc import Callable, Iterator
from typing import Any
from uuid import uuid4

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import raycheck
from raycheck.bucket.store import open_store
from tests.support.histories.invariants import assert_invariants
from tests.support.processes.background_call import InThread
from tests.support.processes.coordinator_in_thread import group_of
from tests.support.processes.save_without_ray import Own

WIDE = 600  # a float32 matrix of this width is large enough to be spread over the ranks
State = dict[str, Any]
_begun: list["Run"] = []


@pytest.fixture
def uri() -> str:
    return f"memory://{uuid4().hex}"


@pytest.fixture(autouse=True)
def all_runs_end() -> Iterator[None]:
    """Stop what still runs of each start, as the end of a process does."""
    yield
    while _begun:
        _begun.pop().fail()


def model_of() -> nn.Module:
    """Has two matrices, which two different ranks write, one small tensor, and buffers."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE), nn.BatchNorm1d(WIDE))


def replica() -> State:
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return {"model": model, "optimizer": optimizer}


def step(state: State, gradient: float = 1.0) -> None:
    for parameter in state["model"].parameters():
        parameter.grad = torch.full_like(parameter, gradient)
    state["optimizer"].step()


class Run:
    """A group of replicas in training, like one start of the workers."""

    def __init__(self, uri: str, states: list[State], **settings: Any) -> None:
        self.states = states
        chosen = raycheck.SaveSettings(**{"every_steps": None, "max_failed_saves": 2, **settings})
        places = group_of(uri, world_size=len(states), owner=uuid4().hex)
        self.ranks = [
            raycheck.Checkpointer(own, chosen, group=place) for own, place in zip(states, places, strict=True)
        ]
        _begun.append(self)

    def on_all(self, method: str) -> list[Any]:
        return [told.join() for told in [InThread(getattr(rank, method)) for rank in self.ranks]]

    def step(self) -> None:
        for state in self.states:
            step(state)
        self.on_all("end_step")

    def save(self) -> None:
        self.on_all("save")
        self.on_all("wait")

    def fail(self) -> None:
        """End this start of the workers, as an error in the training does."""
        for rank in self.ranks:
            rank.__exit__(RuntimeError, RuntimeError(), None)

    def refusal(self) -> str:
        """Return why a save is refused, as every rank is told."""
        self.on_all("save")
        said = set()
        for told in [InThread(rank.wait) for rank in self.ranks]:
            with pytest.raises(raycheck.errors.SaveFailedError) as error:
                told.join()
            said.add(re.sub(r"^rank \d+: ", "", str(error.value)))
        (text,) = said
        return text


def steps_of(uri: str) -> list[int]:
    return [entry.step for entry in assert_invariants(open_store(uri)).live]


def test_a_missed_all_reduce_is_refused_by_name_and_the_next_start_has_the_good_one(uri: str) -> None:
    run = Run(uri, [replica(), replica()])
    run.on_all("restore")
    run.step()
    run.save()
    good = {name: value.clone() for name, value in run.states[0]["model"].state_dict().items()}

    step(run.states[1], gradient=5.0)
    run.step()
    said = run.refusal()
    run.step()
    last = run.refusal()

    assert "tensor model.0.weight is not the same on ranks 0 and 1" in said
    assert "all-reduce" in said
    assert "2 failed save(s) in a row" in last
    assert steps_of(uri) == [1]
    run.fail()
    again = Run(uri, [replica(), replica()])
    assert [at.step for at in again.on_all("restore")] == [1, 1]
    for state in again.states:
        assert all(torch.equal(value, good[name]) for name, value in state["model"].state_dict().items())


def one_element(weight: torch.Tensor) -> None:
    weight[7, 11] += 1e-6


def exchange(weight: torch.Tensor) -> None:
    weight[3, 1], weight[5, 2] = weight[5, 2].clone(), weight[3, 1].clone()


def a_sign(weight: torch.Tensor) -> None:
    weight[0, 0].neg_()


@pytest.mark.parametrize("place", ["model.0.weight", "model.1.weight", "model.1.bias", "slot"])
@pytest.mark.parametrize("change", [one_element, exchange, a_sign])
def test_the_smallest_change_on_one_rank_is_found_whoever_writes_it(
    uri: str, change: Callable[[torch.Tensor], None], place: str
) -> None:
    run = Run(uri, [replica(), replica(), replica()])
    run.on_all("restore")
    run.step()
    run.save()
    model, optimizer = run.states[2]["model"], run.states[2]["optimizer"]
    tensor = optimizer.state[model[0].weight]["momentum_buffer"] if place == "slot" else model.get_parameter(place[6:])

    with torch.no_grad():
        optimizer.state[model[0].weight]["momentum_buffer"].copy_(torch.randn(WIDE, WIDE))
        for state in run.states[:2]:
            state["optimizer"].state[state["model"][0].weight]["momentum_buffer"].copy_(
                optimizer.state[model[0].weight]["momentum_buffer"]
            )
        change(tensor.view(-1, 20))
    run.on_all("end_step")
    said = run.refusal()

    name = "optimizer.state.0.weight.momentum_buffer" if place == "slot" else place
    assert f"tensor {name} is not the same on ranks 0 and 2" in said
    assert steps_of(uri) == [1]


class Average:
    """A moving average of a model, as many scripts implement it."""

    def __init__(self, model: nn.Module) -> None:
        self.average = {name: value.clone() for name, value in model.state_dict().items()}

    def state_dict(self) -> State:
        return self.average

    def load_state_dict(self, state: State) -> None:
        self.average = dict(state)


def average_of(kind: str, state: State) -> Any:
    return AveragedModel(state["model"]) if kind == "module" else Average(state["model"])


def update(average: Any, state: State) -> None:
    """Update the average. The author of such a class advises doing this on rank 0 alone."""
    if isinstance(average, AveragedModel):
        average.update_parameters(state["model"])
        return
    for name, value in state["model"].state_dict().items():
        average.average[name] = value.clone()


@pytest.mark.parametrize("kind", ["module", "object"])
def test_an_average_that_only_rank_0_updates_is_refused_and_rank_zero_cures_it(uri: str, kind: str) -> None:
    states = [replica(), replica()]
    averages = [average_of(kind, state) for state in states]
    run = Run(uri, [state | {"ema": average} for state, average in zip(states, averages, strict=True)], at_start=True)
    run.on_all("restore")
    run.on_all("wait")
    run.step()
    update(averages[0], states[0])

    said = run.refusal()

    assert re.search(r"(tensor ema\.\S+|state\['ema'\]) is not the same on ranks 0 and 1", said)
    assert "raycheck.RankZero(entry)" in said
    assert steps_of(uri) == [0]
    run.fail()

    states = [replica(), replica()]  # the cure, from the checkpoint in which all ranks had the average
    averages = [average_of(kind, state) for state in states]
    wrapped = [state | {"ema": raycheck.RankZero(own)} for state, own in zip(states, averages, strict=True)]
    run = Run(uri, wrapped, at_start=True)
    assert [at.step for at in run.on_all("restore")] == [0, 0]
    run.step()
    update(averages[0], states[0])
    run.save()
    kept = {name: value.clone() for name, value in averages[0].state_dict().items()}
    run.fail()

    states = [replica(), replica()]
    averages = [average_of(kind, state) for state in states]
    wrapped = [state | {"ema": raycheck.RankZero(own)} for state, own in zip(states, averages, strict=True)]
    assert [at.step for at in Run(uri, wrapped).on_all("restore")] == [1, 1]
    assert all(torch.equal(value, kept[name]) for name, value in averages[0].state_dict().items())


def test_each_rank_s_own_value_is_refused_and_per_rank_cures_it(uri: str) -> None:
    states = [replica() | {"counts": Own({"seen": torch.zeros(3)})} for _ in range(2)]
    run = Run(uri, states, at_start=True)
    run.on_all("restore")
    run.on_all("wait")
    states[1]["counts"].state["seen"] += 1
    run.step()

    said = run.refusal()

    assert "tensor counts.seen is not the same on ranks 0 and 1" in said
    assert "raycheck.PerRank(entry)" in said
    run.fail()
    states = [replica() | {"counts": raycheck.PerRank(Own({"seen": torch.full((3,), float(i))}))} for i in range(2)]
    run = Run(f"{uri}-new", states)
    run.on_all("restore")
    run.step()
    run.save()
    assert steps_of(f"{uri}-new") == [1]


def test_a_value_that_differs_later_is_refused_by_its_entry(uri: str) -> None:
    run = Run(uri, [replica(), replica(), replica()])
    run.on_all("restore")
    run.step()
    run.save()
    run.states[1]["optimizer"].param_groups[0]["lr"] = 0.5
    run.on_all("end_step")

    said = run.refusal()

    assert "state['optimizer'] is not the same on ranks 0 and 1" in said
    assert steps_of(uri) == [1]


def test_buffers_may_differ_at_every_save(uri: str) -> None:
    run = Run(uri, [replica(), replica()])
    run.on_all("restore")
    run.step()
    run.save()
    run.states[1]["model"][2].running_mean.fill_(7)
    run.step()

    run.save()

    assert steps_of(uri) == [1, 2]


def with_frozen_base() -> State:
    model = model_of()
    model[0].requires_grad_(False)
    model[1].weight.requires_grad_(False)
    return {"model": model}


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_frozen_component_that_differs_is_refused_though_nobody_uploads_it_again(
    uri: str, layer: int, rank: int
) -> None:
    run = Run(uri, [with_frozen_base(), with_frozen_base()])
    run.on_all("restore")
    run.on_all("end_step")
    run.save()
    run.on_all("end_step")
    run.save()
    run.states[rank]["model"][layer].weight.data[5, 5] += 1
    run.on_all("end_step")

    said = run.refusal()

    assert f"tensor model.{layer}.weight is not the same on ranks 0 and 1" in said
    assert steps_of(uri) == [1, 2]


def test_what_differs_at_the_first_save_is_a_mistake_of_the_program(uri: str) -> None:
    states = [replica(), replica()]
    states[1]["model"][0].weight.data[0, 0] += 1
    run = Run(uri, states)
    run.on_all("restore")
    run.on_all("end_step")

    for told in [InThread(rank.save) for rank in run.ranks]:
        with pytest.raises(
            raycheck.errors.ConfigError, match=r"tensor model\.0\.weight is not the same on ranks 0 and 1"
        ):
            told.join()

    assert not open_store(uri).list_names("checkpoints/")


def test_i11_one_rank_s_whole_state_is_kept_where_the_user_chose_so_and_marked(uri: str, caplog: Any) -> None:
    run = Run(uri, [replica(), replica(), replica()], on_drift="keep_first")
    run.states[2]["model"][1].weight.data[0, 0] += 1  # also at the first save
    run.on_all("restore")
    run.step()
    run.save()
    step(run.states[1], gradient=5.0)
    run.states[1]["optimizer"].param_groups[0]["lr"] = 0.5
    run.step()
    run.save()
    first = {name: value.clone() for name, value in run.states[0]["model"].state_dict().items()}
    slots = [slot["momentum_buffer"].clone() for slot in run.states[0]["optimizer"].state.values()]
    run.fail()

    assert steps_of(uri) == [1, 2]
    newest = raycheck.open_run(uri).head
    assert newest is not None
    assert newest.is_drifted
    assert {"tensor model.0.weight", "state['optimizer']"} <= set(newest.details().drifted)
    (said,) = [record.message for record in caplog.records if "drifted apart" in record.message]
    assert "tensor model.1.weight is not the same on ranks 0 and 2" in said
    again = Run(uri, [replica(), replica(), replica()])
    restored = again.on_all("restore")
    assert all("tensor model.0.weight" in at.report.drifted for at in restored)
    for state in again.states:
        assert all(torch.equal(value, first[name]) for name, value in state["model"].state_dict().items())
        found = [slot["momentum_buffer"] for slot in state["optimizer"].state.values()]
        assert all(torch.equal(*pair) for pair in zip(found, slots, strict=True))
        assert state["optimizer"].param_groups[0]["lr"] == 0.1
    again.step()
    again.save()  # equal again, after the restart
    newest = raycheck.open_run(uri).head
    assert newest is not None
    assert (newest.step, newest.is_drifted) == (3, False)
