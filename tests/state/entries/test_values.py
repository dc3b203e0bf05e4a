"""A tree of values, wherever it is in the state, comes back with the same types and bits, or its path is refused."""

import copy
import datetime as dt
import io
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.checkpoint import FileSystemReader

from raycheck.bucket.format.object_keys import component_prefix
from raycheck.bucket.format.progress import Progress
from raycheck.bucket.reading import Checkpoint
from raycheck.bucket.store import Store, open_store
from raycheck.errors import ConfigError, StateMismatchError
from raycheck.state.entries.per_rank_entries import PerRank
from raycheck.state.train_state import TrainState
from raycheck.transfer.stage.local_box import TRAIN
from tests.support.processes.save_without_ray import Own, save, save_state
from tests.support.samples.sample_values import (
    Flags,
    Frozen,
    Level,
    Mark,
    Options,
    Pair,
    Phase,
    Point,
    containers,
    leaves,
    same,
)

State = dict[str, Any]
thorough = settings(
    max_examples=min(60, settings().max_examples),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64]
tensors = st.tuples(
    st.sampled_from(DTYPES), st.lists(st.integers(0, 3), max_size=3), st.integers(0, 255), st.booleans()
).map(lambda given: tensor_of(*given))
trees = st.recursive(st.one_of(leaves, tensors, tensors), containers, max_leaves=10)


def tensor_of(dtype: torch.dtype, shape: list[int], seed: int, is_turned: bool) -> torch.Tensor:
    """Returns a tensor with odd bits for its dtype, such as the payloads of nan."""
    count = torch.Size(shape).numel() * dtype.itemsize
    octets = (torch.arange(count, dtype=torch.int64) * 37 + seed * 131) % 251
    octets = octets % 2 if dtype == torch.bool else octets
    tensor = octets.to(torch.uint8).view(dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)
    return tensor.T if is_turned and tensor.dim() == 2 else tensor


class Simple(torch.optim.Optimizer):
    """Is an optimizer whose state is whatever a test puts there."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:
        raise NotImplementedError


class WithExtra(nn.Module):
    def __init__(self, extra: Any) -> None:
        super().__init__()
        self.extra = extra
        self.weight = nn.Parameter(torch.ones(2))

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, extra: Any) -> None:
        self.extra = extra


# --- the places of a value: how it is put there, and how it is found again ---


def optimizer_with(dtype: torch.dtype = torch.bfloat16) -> State:
    model = nn.Linear(3, 2, bias=False, dtype=dtype)
    return {"model": model, "optimizer": Simple(model.parameters())}


def in_slot(value: Any) -> State:
    state = optimizer_with()
    state["optimizer"].state[state["model"].weight] = {"exp_avg": torch.ones(2, 3), "odd": value}
    return state


def in_group(value: Any) -> State:
    state = optimizer_with()
    state["optimizer"].param_groups[0]["odd"] = value
    return state


def in_own(value: Any) -> State:
    state = optimizer_with()
    state["optimizer"].state["odd"] = value
    return state


PLACES: dict[str, tuple[Callable[[Any], State], Callable[[State], Any]]] = {
    "dict": (lambda value: {"plain": {"value": value}}, lambda state: state["plain"]["value"]),
    "bare": (lambda value: {"bare": [value]}, lambda state: state["bare"][0]),
    "object": (lambda value: {"own": Own({"value": value})}, lambda state: state["own"].state["value"]),
    "per rank": (lambda value: {"own": PerRank(value)}, lambda state: state["own"].value),
    "extra state": (lambda value: {"model": WithExtra({"value": value})}, lambda state: state["model"].extra["value"]),
    "slot": (in_slot, lambda state: state["optimizer"].state[state["model"].weight]["odd"]),
    "group": (in_group, lambda state: state["optimizer"].param_groups[0]["odd"]),
    "whole optimizer": (in_own, lambda state: state["optimizer"].state["odd"]),
}


@pytest.mark.parametrize("place", PLACES)
@thorough
@example(tree={frozenset(): torch.tensor([], dtype=torch.float64)})
@given(tree=trees)
def test_every_tree_of_values_comes_back_in_type_and_bits_or_is_refused_by_its_path(place: str, tree: Any) -> None:
    put, find = PLACES[place]
    before = copy.deepcopy(tree)
    saved, fresh = put(tree), put(None)
    checkpoint = saved_or_refused(saved)
    if checkpoint is None:
        return

    TrainState(fresh, rank=0, world_size=1).apply(checkpoint)

    assert same(find(saved), before), "a save changes nothing"
    assert same(find(fresh), before)


def saved_or_refused(state: State) -> Checkpoint | None:
    """Saves the tree. Returns None if it is refused for keys with one name in the checkpoint (1 and "1"): nothing else in
    these trees may be refused."""
    try:
        return save_state(open_store(f"memory://{uuid4().hex}"), state)
    except ConfigError as error:
        if "have one name in the checkpoint" in str(error) or "two tensors have this name" in str(error):
            return None
        raise


@thorough
@given(tree=trees)
def test_a_restore_into_the_very_objects_that_were_saved_changes_nothing(tree: Any) -> None:
    state = {"plain": {"value": tree}, "bare": [tree], "own": PerRank([tree])}
    before = copy.deepcopy(tree)
    checkpoint = saved_or_refused(state)
    if checkpoint is None:
        return

    TrainState(state, rank=0, world_size=1).apply(checkpoint)

    assert same(state["plain"]["value"], before)
    assert same(state["bare"][0], before)
    assert same(state["own"].value[0], before)


KEPT: dict[str, Any] = {
    "string": "momentum",
    "deque": deque([torch.tensor([1.1]), 2], maxlen=3),
    "counter": Counter("hello"),
    "ordered": OrderedDict([("b", torch.tensor([1, 2], dtype=torch.uint8)), ("a", 1)]),
    "array": np.arange(3, dtype=np.int16),
    "named tuple": Point(torch.tensor([1.000001]), "x"),
    "enum": Phase.MAIN,
    "string enum": Mark.B,
    "number enum": Level.HIGH,
    "flags": Flags.FAST | Flags.RARE,
    "dataclass": Options(torch.tensor(1e-9, dtype=torch.float64), ["a"]),
    "frozen dataclass": Frozen(("x", 2)),
    "nested fp32": {"left": [torch.tensor([1.000001])], "ints": torch.tensor([2**40])},
    "defaultdict": defaultdict(list, {1: [torch.tensor(3)]}),
    "dtype": torch.float8_e4m3fn,
    "size": torch.Size([2, 3]),
    "device": torch.device("cuda:1"),
    "moment": dt.datetime(2026, 1, 1, tzinfo=dt.UTC),
    "path": Path("a/b"),
    "stream": io.BytesIO(b"abc"),
    "bool": True,
    "set": {1, "a"},
    "frozenset as a key": {frozenset({1}): torch.ones(1)},  # stock torch has another name for it than the checkpoint
}


@pytest.mark.parametrize("kind", KEPT)
@pytest.mark.parametrize("place", PLACES)
def test_a_value_that_torch_or_json_would_change_comes_back_as_it_was(memory: Store, place: str, kind: str) -> None:
    put, find = PLACES[place]
    saved, fresh = put(copy.deepcopy(KEPT[kind])), put(None)

    TrainState(fresh, rank=0, world_size=1).apply(save_state(memory, saved))

    assert same(find(fresh), KEPT[kind])


class Handle:
    """Cannot be held in JSON."""


REFUSED: dict[str, Callable[[], Any]] = {
    "object": Handle,
    "str subclass": lambda: type("Mine", (str,), {})("text"),
    "dict subclass": type("Mine", (dict,), {}),
    "float subclass": lambda: type("Mine", (np.float64,), {})(1.0),
    "lambda": lambda: lambda: 1,
    "factory": lambda: defaultdict(lambda: 0),
    "object array": lambda: np.array([Handle()]),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "meta": lambda: torch.empty(3, device="meta"),
}


@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.parametrize("place", PLACES)
def test_what_cannot_be_kept_is_refused_by_its_path_before_anything_is_saved(place: str, kind: str) -> None:
    put, _ = PLACES[place]
    state = TrainState(put({"deep": [REFUSED[kind]()]}), rank=0, world_size=1)

    with pytest.raises(ConfigError, match=r"state at [\w.]*deep\.0\b"):
        state.check()
    with pytest.raises(ConfigError, match=r"state at [\w.]*deep\.0\b"):
        state.stage(Progress())


# --- optimizers ---


def test_an_optimizers_slots_keep_their_order_and_kind_of_dict(memory: Store) -> None:
    one, two = optimizer_with(), optimizer_with()
    slots = OrderedDict(
        [("b", "x"), ("exp_avg", torch.ones(2, 3)), ("a", torch.tensor(3, dtype=torch.int64)), (7, [1])]
    )
    one["optimizer"].state[one["model"].weight] = slots

    TrainState(two, rank=0, world_size=1).apply(save_state(memory, one))

    assert same(two["optimizer"].state[two["model"].weight], slots)


@pytest.mark.parametrize("slots", [Counter("a"), torch.ones(2), [1]], ids=lambda slots: type(slots).__name__)
def test_slots_that_are_no_dict_are_refused_by_name(slots: Any) -> None:
    state = optimizer_with()
    state["optimizer"].state[state["model"].weight] = slots

    with pytest.raises(ConfigError, match=rf"state at optimizer\.state\.weight is a {type(slots).__name__}"):
        TrainState(state, rank=0, world_size=1).check()


def test_hooks_around_an_optimizers_state_do_not_change_what_is_restored(memory: Store) -> None:
    one, two = in_slot({"name": "x", "array": np.ones(2)}), in_slot(None)
    for state in (one, two):
        state["optimizer"].register_load_state_dict_pre_hook(lambda _optimizer, given: given)
        state["optimizer"].register_load_state_dict_post_hook(lambda _optimizer: None)

    TrainState(two, rank=0, world_size=1).apply(save_state(memory, one))

    assert same(PLACES["slot"][1](two), {"name": "x", "array": np.ones(2)})


class Packs(Simple):
    """Returns its state in a form of its own, and loads it from that."""

    def state_dict(self) -> Any:
        said = super().state_dict()
        said["state"] = {key: {**slots, "odd": sorted(slots["odd"])} for key, slots in said["state"].items()}
        return said

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        for slots in self.state.values():
            slots["odd"] = set(slots["odd"])


def test_an_optimizer_that_packs_its_state_unpacks_it_itself(memory: Store) -> None:
    one, two = packing({1, 2}), packing(set())

    TrainState(two, rank=0, world_size=1).apply(save_state(memory, one))

    assert two["optimizer"].state[two["model"].weight] == {"odd": {1, 2}, "name": "x"}


def test_an_optimizer_whose_own_load_changes_a_value_is_named(memory: Store) -> None:
    checkpoint = save_state(memory, packing({"a"}))

    with pytest.raises(
        ConfigError, match=r"optimizer\.state\.weight\.odd is not what was saved: Packs\.load_state_dict"
    ):
        TrainState(packing(set()), rank=0, world_size=1).apply(checkpoint)


def packing(odd: set[Any]) -> State:
    model = nn.Linear(3, 2, bias=False)
    optimizer = Packs(model.parameters())
    optimizer.state[model.weight] = {"odd": odd, "name": "x"}
    return {"model": model, "optimizer": optimizer}


def test_saves_notice_slots_that_come_and_change_between_them(memory: Store) -> None:
    state = optimizer_with()
    optimizer, weight = state["optimizer"], state["model"].weight
    optimizer.state[weight] = {"exp_avg": torch.ones(2, 3)}
    train = TrainState(state, rank=0, world_size=1)
    save(memory, [train.stage(Progress(step=1))], save=1)
    optimizer.state["steps"] = 5
    optimizer.state[weight]["name"] = "x"

    checkpoint = save(memory, [train.stage(Progress(step=2))], save=2)

    again = optimizer_with()
    TrainState(again, rank=0, world_size=1).apply(checkpoint)
    assert again["optimizer"].state["steps"] == 5
    assert again["optimizer"].state[again["model"].weight]["name"] == "x"


# --- classes ---


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized:UserWarning")
def test_stock_torch_reads_values_of_classes_as_plain_ones(tmp_path: Path) -> None:
    checkpoint = save_state(
        open_store(f"file://{tmp_path}/run"),
        {
            "own": Own(
                {"options": Options(0.5), "phase": Level.HIGH, "pair": Pair(1, torch.ones(2)), "when": dt.date.min}
            )
        },
    )
    found: State = {"own": {"options": None, "phase": 0, "pair": (), "when": None}}
    place = tmp_path / "run" / component_prefix(checkpoint.entry.key, TRAIN)

    dcp.load(found, storage_reader=FileSystemReader(place), no_dist=True)

    assert same(found["own"]["options"], {"rate": 0.5, "tags": [], "derived": "<class 'float'>"})
    assert same(found["own"]["pair"], (1, torch.ones(2)))
    assert found["own"]["phase"] == 2
    assert found["own"]["when"] == dt.date.min


def local_classes() -> tuple[Any, Any]:
    """Returns classes that no import finds, like those in a script's main function."""

    @dataclass
    class Best:
        step: int

    class Stage(Enum):
        ONE = 1

    return Best, Stage


def test_a_class_of_the_scripts_own_is_taken_from_the_live_state(memory: Store) -> None:
    best, stage = local_classes()
    early = {"best": best(1), "stage": stage.ONE}
    live = early["best"]

    checkpoint = save_state(memory, {"early": {"best": best(7), "stage": stage.ONE, "more": [best(8)]}})
    TrainState({"early": early}, rank=0, world_size=1).apply(checkpoint)

    assert (live.step, early["best"], early["stage"]) == (7, live, stage.ONE)
    assert early["more"] == [best(8)]


def test_a_class_that_is_not_here_is_a_mismatch_and_nothing_is_changed(memory: Store) -> None:
    best, _ = local_classes()
    checkpoint = save_state(memory, {"early": {"best": best(7)}, "other": {"a": 1}})
    early, other = {"best": None}, {"a": 0}

    with pytest.raises(
        StateMismatchError, match=r"early holds a tests\.state\.entries\.test_values:local_classes.*Best"
    ):
        TrainState({"early": early, "other": other}, rank=0, world_size=1).apply(checkpoint)

    assert (early, other) == ({"best": None}, {"a": 0})


def test_a_class_that_a_restart_would_not_find_is_refused_by_the_first_save_that_meets_it() -> None:
    best, _ = local_classes()
    early: State = {"best": None, "importable": None}
    state = TrainState({"early": early}, rank=0, world_size=1)
    state.check()
    early["importable"] = Options(1)
    state.check()
    early["best"] = best(1)

    with pytest.raises(ConfigError, match=r"state at early\.best is a .*Best, which a restart would not find"):
        state.check()


def test_two_classes_of_one_name_are_refused() -> None:
    one, two = local_classes()[0], local_classes()[0]

    with pytest.raises(ConfigError, match=r"state at own\.b is a .*there is another class of this name"):
        TrainState({"own": Own({"a": one(1), "b": two(2)})}, rank=0, world_size=1).check()


def test_a_class_whose_fields_have_changed_is_a_mismatch(memory: Store) -> None:
    def options(names: list[str]) -> Any:
        return dataclass(type("Named", (), {"__annotations__": dict.fromkeys(names, int)}))(*range(len(names)))

    checkpoint = save_state(memory, {"own": Own({"options": options(["a", "b"])})})

    with pytest.raises(StateMismatchError, match=r"has the fields a, c here, and a, b when saved"):
        TrainState({"own": Own({"options": options(["a", "c"])})}, rank=0, world_size=1).apply(checkpoint)
