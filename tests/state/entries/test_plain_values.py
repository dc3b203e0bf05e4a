"""Plain values are entries: whoever holds a container or tensor inside of them sees what a restore puts there."""

import io
import logging
from collections import Counter, OrderedDict, defaultdict, deque
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from raycheck.bucket.store import Store
from raycheck.errors import ConfigError, StateMismatchError
from raycheck.state.entries.per_rank_entries import PerRank
from raycheck.state.preview import Preview
from raycheck.state.restore_selection import EVERYTHING
from raycheck.state.train_state import TrainState
from tests.support.processes.save_without_ray import Own, save_state
from tests.support.samples.sample_values import Frozen, Options, Phase, same

State = dict[str, Any]


def filled_with(number: int) -> State:
    """Returns one of every container, at several depths."""
    return {
        "deep": {"er": {"number": number, "list": [number, {"x": [number]}]}},
        "ordered": OrderedDict([("a", [number])]),
        "counter": Counter({"a": number}),
        "default": defaultdict(list, {"a": [number]}),
        "deque": deque([[number]], maxlen=4),
        "set": {number},
        "bytes": bytearray([number]),
        "stream": io.BytesIO(bytes([number] * number)),
        "array": np.full((2, 2), number),
        "tensor": torch.full((2,), float(number)),
        "parameter": nn.Parameter(torch.full((2,), float(number))),
        "tuple": ([number], torch.tensor(number)),
        "options": Options([number], [number]),
    }


def inner_values_of(state: State) -> list[Any]:
    """Returns every container and tensor in it that a script may hold."""
    return [
        state["deep"],
        state["deep"]["er"],
        state["deep"]["er"]["list"],
        state["deep"]["er"]["list"][1]["x"],
        state["ordered"]["a"],
        state["default"]["a"],
        state["deque"][0],
        state["tuple"][0],
        state["tuple"][1],
        state["options"].rate,
        *(value for name, value in state.items() if name != "tuple"),
    ]


@pytest.mark.parametrize("place", ["entry", "per rank", "nested entry"])
def test_references_to_any_part_of_a_plain_dict_stay_good(memory: Store, place: str) -> None:
    def put(plain: State) -> State:
        if place == "nested entry":
            return {"group": {"plain": plain, "own": Own({"a": 1})}}
        return {"plain": plain if place == "entry" else PerRank(plain)}

    live = filled_with(1)
    held = inner_values_of(live)
    wanted = filled_with(7)

    TrainState(put(live), rank=0, world_size=1).apply(save_state(memory, put(filled_with(7))))

    assert same(live, wanted)
    for i, (mine, found, expected) in enumerate(zip(held, inner_values_of(live), inner_values_of(wanted), strict=True)):
        assert mine is found, i
        assert same(mine, expected), i


def test_what_grew_or_shrank_or_became_another_type_is_as_it_was_saved(memory: Store) -> None:
    live: State = {"list": [1, [2], 3], "gone": {"a": 1}, "kind": [1], "tensor": torch.ones(2), "frozen": Frozen([1])}
    saved = {"list": [[9]], "new": {"b": 2}, "kind": {"x": 1}, "tensor": torch.ones(5), "frozen": Frozen([2])}
    listed = live["list"]

    TrainState({"plain": live}, rank=0, world_size=1).apply(save_state(memory, {"plain": saved}))

    assert same(
        live, {"list": [[9]], "new": {"b": 2}, "kind": {"x": 1}, "tensor": torch.ones(5), "frozen": Frozen([2])}
    )
    assert live["list"] is listed


def test_one_object_at_two_places_never_takes_the_value_of_the_other_place(memory: Store) -> None:
    shared, tensor = [0], torch.zeros(2)
    live = {"a": shared, "b": shared, "c": tensor, "d": tensor}
    saved = {"a": [1], "b": [True], "c": torch.tensor([0.0, 1.0]), "d": torch.tensor([-0.0, 1.0])}

    TrainState({"plain": live}, rank=0, world_size=1).apply(save_state(memory, {"plain": saved}))

    assert same(live, saved)
    assert live["a"] is shared
    assert live["c"] is tensor


def test_one_object_at_two_places_stays_one_object(memory: Store) -> None:
    shared = [0]
    live = {"a": shared, "b": shared}

    TrainState({"plain": live}, rank=0, world_size=1).apply(save_state(memory, {"plain": {"a": [5], "b": [5]}}))

    assert live["a"] is live["b"] is shared
    assert shared == [5]


def test_an_expanded_tensor_and_a_read_only_array_in_a_dict_are_replaced(memory: Store) -> None:
    array = np.zeros(2)
    array.flags.writeable = False
    live = {"expanded": torch.zeros(1).expand(3), "array": array}
    saved = {"expanded": torch.tensor([1.0, 2.0, 3.0]), "array": np.ones(2)}

    TrainState({"plain": live}, rank=0, world_size=1).apply(save_state(memory, {"plain": saved}))

    assert same(live, saved)


def test_a_tensor_that_is_trained_is_never_replaced_by_another_one(memory: Store) -> None:
    checkpoint = save_state(memory, {"plain": {"scale": torch.ones(3)}})

    with pytest.raises(StateMismatchError, match=r"plain\.scale: float32\[2\] here, float32\[3\] saved"):
        TrainState({"plain": {"scale": nn.Parameter(torch.ones(2))}}, rank=0, world_size=1).apply(checkpoint)


# --- bare values ---


def bare(number: int) -> State:
    return {
        "model": nn.Linear(1, 1),
        "best": number / 3,
        "count": number,
        "none": None,
        "phase": Phase.WARMUP if number else Phase.MAIN,
        "history": [number] * number,
        "seen": {number},
        "queue": torch.full((3, 2), float(number)),
        "weight": nn.Parameter(torch.full((2,), float(number))),
        "scalar": np.float32(number),
        "group": [nn.Linear(1, 1), number, {"own": [number]}],
    }


def test_bare_tensors_and_numbers_come_back_into_the_dict_that_was_given(memory: Store) -> None:
    live, saved = bare(0), bare(5)
    held = [live[name] for name in ("history", "seen", "queue", "weight", "group")]
    inner = live["group"][2]["own"]

    done = TrainState(live, rank=0, world_size=1).apply(save_state(memory, saved))

    for name in set(live) - {"model", "group"}:
        assert same(live[name], saved[name]), name
    assert live["group"][1:] == [5, {"own": [5]}]
    assert live["group"][2]["own"] is inner
    for one, name in zip(held, ("history", "seen", "queue", "weight", "group"), strict=True):
        assert one is live[name]
    assert done.report.missing == done.report.unexpected == ()


def test_a_bare_value_is_read_anew_at_every_save(memory: Store) -> None:
    state = bare(1)
    train = TrainState(state, rank=0, world_size=1)
    train.check()
    state["best"], state["none"] = 0.25, "now"
    state["history"] = [4]

    again = bare(0)
    TrainState(again, rank=0, world_size=1).apply(save_state(memory, state))

    assert (again["best"], again["none"], again["history"]) == (0.25, "now", [4])


def test_a_peek_gives_bare_values_as_they_were_saved(memory: Store) -> None:
    state = {"best": 0.5, "none": None, "seen": [1, {2}], "phase": Phase.MAIN, "plain": {"a": 1}}
    state["empty"] = torch.optim.SGD(nn.Linear(1, 1).parameters())
    checkpoint = save_state(memory, state)

    values = Preview.of(checkpoint, EVERYTHING, attempt=1, rank=0, refused=()).values

    del state["empty"]
    assert same(dict(values), state)


@pytest.mark.parametrize(
    ("live", "saved", "message"),
    [
        ({"x": torch.ones(2)}, {"x": torch.ones(3)}, r"x: float32\[2\] here, float32\[3\] saved"),
        ({"x": torch.ones(2)}, {"x": torch.ones(2).half()}, r"x: float32\[2\] here, float16\[2\] saved"),
        ({"x": torch.ones(2, device="meta")}, {"x": torch.ones(2)}, "x is on the meta device and would stay there"),
        ({"x": torch.ones(2)}, {"x": 3}, "x: Tensor here, int saved"),
        ({"x": [1]}, {"x": {1}}, "x: list here, set saved"),
        ({"x": [1]}, {"x": {"a": 1}}, "x: a bare list here, an object or dict saved"),
        ({"x": {"a": 1}}, {"x": [1]}, "x: an object or dict here, a bare value saved"),
        ({"x": 1}, {"y": 1}, "missing in the checkpoint: x"),
    ],
)
def test_a_bare_value_of_another_kind_is_a_mismatch_and_nothing_is_changed(
    memory: Store, live: State, saved: State, message: str
) -> None:
    checkpoint = save_state(memory, {"own": Own({"n": 5}), **saved})
    own = Own({"n": 0})

    with pytest.raises(StateMismatchError, match=message):
        TrainState({"own": own, **live}, rank=0, world_size=1).apply(checkpoint)

    assert own.state == {"n": 0}


def test_a_bare_number_is_said_to_be_read_from_the_given_dict_before_the_first_step(caplog) -> None:
    state = TrainState({"best": 0.5, "history": [1]}, rank=0, world_size=1)

    with caplog.at_level(logging.WARNING, logger="raycheck"):
        state.check()
        state.check()

    (record,) = caplog.records
    assert "state['best'] is a bare float: it is read from the dict" in record.getMessage()


def test_a_bare_number_where_nothing_can_be_put_back_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"state\['best'\] is a float in a mappingproxy"):
        TrainState(MappingProxyType({"best": 0.5}), rank=0, world_size=1)


# --- objects with an empty state_dict ---


class Forgets:
    def __init__(self, **held: Any) -> None:
        self.__dict__.update(held)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        del state


class Caches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("sum", torch.zeros(1), persistent=False)


class Assigns(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = [torch.zeros(1)]


SILENT: dict[str, tuple[Any, str]] = {
    "attribute": (Forgets(shadow=torch.ones(1)), "shadow"),
    "list": (Forgets(shadow=[torch.ones(1)]), r"shadow\.0"),
    "dict": (Forgets(shadow={"a": torch.ones(1)}), r"shadow\.a"),
    "non-persistent buffer": (Caches(), "sum"),
    "attribute of a module": (Assigns(), r"parts\.0"),
    "inside a module": (nn.Sequential(nn.ReLU(), Caches()), r"1\.sum"),
    "per rank": (PerRank(Forgets(shadow=torch.ones(1))), "shadow"),
}


@pytest.mark.parametrize("kind", SILENT)
def test_an_object_that_holds_tensors_and_gives_no_state_is_refused_by_name(kind: str) -> None:
    value, place = SILENT[kind]

    with pytest.raises(ConfigError, match=rf"state\['thing'\]\.state_dict\(\) is empty.*holds a tensor \({place}\)"):
        TrainState({"thing": value}, rank=0, world_size=1).check()


@pytest.mark.parametrize(
    "value", [Forgets(), Forgets(name="x"), nn.ReLU(), torch.amp.GradScaler("cpu", enabled=False), {}], ids=str
)
def test_an_object_without_anything_to_save_is_no_error(memory: Store, value: Any) -> None:
    TrainState({"thing": value}, rank=0, world_size=1).apply(save_state(memory, {"thing": value}))
