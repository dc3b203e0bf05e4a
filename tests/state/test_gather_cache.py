"""A state is collected once; a later save only checks that every tensor is still where it was. Whatever changes in
between must be noticed: a save of a used TrainState equals that of one just built from the same objects."""

import gc
import io
import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from raycheck.bucket.format.index import Index
from raycheck.bucket.store import open_store
from raycheck.errors import ConfigError
from raycheck.state.entries.deepspeed_engine import ParameterRange
from raycheck.state.entries.engine_model import EngineModel, EngineModelEntry, EngineOptimizer
from raycheck.state.train_state import Progress, TrainState
from tests.support.processes.save_without_ray import save_state, shard_bytes


@dataclass
class Live:
    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler

    def state(self, *names: str) -> TrainState:
        return TrainState({name: vars(self)[name] for name in names or vars(self)}, rank=0, world_size=1)

    def step(self) -> None:
        self.model(torch.ones(3, 4)).pow(2).sum().backward()
        self.optimizer.step()
        self.scheduler.step()


@pytest.fixture
def live() -> Live:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Sequential(nn.Linear(4, 2)))
    model.register_buffer("scale", None)
    model.register_parameter("shift", None)
    model.register_buffer("unsaved", torch.ones(2), persistent=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    live = Live(model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2))
    live.step()
    return live


class FlatModel(EngineModel):
    """Parameters that share one flat memory, as an engine's do."""

    entry = EngineModelEntry
    cure = "put it back"

    def __init__(self, memory: nn.Parameter) -> None:
        super().__init__("the engine")
        for name, shape, at in (("weight", (4, 3), 0), ("bias", (4,), 12), ("empty", (0,), 16)):
            size = math.prod(shape)
            item = ParameterRange(torch.empty(shape), memory, at, size, 0)
            self.add_parameter(name, self.view(memory, item, item.of))

    def refresh(self) -> None: ...


class Engine:
    """The flat memory of an engine, and the optimizer that trains it."""

    def __init__(self) -> None:
        self.memory = nn.Parameter(torch.arange(18.0))
        self.base = torch.optim.AdamW([self.memory], lr=0.1)
        self.model = FlatModel(self.memory)
        self.optimizer = EngineOptimizer([self.base], self.model, [list(self.model.of)])

    @property
    def slots(self) -> dict[str, Any]:
        return self.base.state[self.memory]

    def state(self) -> TrainState:
        return TrainState({"model": self.model, "optimizer": self.optimizer}, rank=0, world_size=1)

    def step(self) -> None:
        self.memory.grad = torch.ones(18)
        self.base.step()


def saved_by(state: TrainState) -> tuple[bytes, Index, list[Any]]:
    """Returns what was saved: the tensors' records, their index with all values, and what stock tools see of the rest."""
    torch.manual_seed(0)
    staged = state.stage(Progress(step=1))
    data, section = shard_bytes(staged), staged.section()
    plan = replace(section.plan, leaves=())
    ends = [chunk.record_offset + chunk.record_size for chunk in section.chunks]
    records = [data[leaf.record_offset :][: leaf.record_size] for leaf in section.leaves]
    leaves = [
        (leaf.name, leaf.path, torch.load(io.BytesIO(record)))
        for leaf, record in zip(section.leaves, records, strict=True)
    ]
    return data[: max(ends)], replace(section, plan=plan), leaves


CHANGES: dict[str, Callable[[Live], Any]] = {}


def change(function: Callable[[Live], Any]) -> Callable[[Live], Any]:
    CHANGES[function.__name__.replace("_", " ")] = function
    return function


@change
def nothing(live: Live) -> None: ...


@change
def a_step(live: Live) -> None:
    live.step()


@change
def two_steps(live: Live) -> None:
    live.step()
    live.step()


@change
def data_is_swapped(live: Live) -> None:
    live.model[0].weight.data = torch.full((4, 4), 2.0)


@change
def data_is_transposed_in_place(live: Live) -> None:
    live.model[0].weight.data = live.model[0].weight.data.t()


@change
def a_parameter_is_another_one(live: Live) -> None:
    live.model[0].weight = nn.Parameter(torch.full((4, 4), 3.0))


@change
def a_child_is_another_one(live: Live) -> None:
    live.model[2] = nn.Sequential(nn.Linear(4, 2))


@change
def a_grandchild_is_another_one(live: Live) -> None:
    live.model[2][0] = nn.Linear(4, 2)


@change
def a_child_comes(live: Live) -> None:
    live.model[2].append(nn.Linear(2, 2))


@change
def a_buffer_is_another_one(live: Live) -> None:
    live.model[1].running_mean = torch.full((4,), 5.0)


@change
def a_buffer_comes(live: Live) -> None:
    live.model[0].register_buffer("seen", torch.ones(3))


@change
def a_buffer_is_no_longer_kept(live: Live) -> None:
    live.model[1]._non_persistent_buffers_set.add("running_var")


@change
def a_buffer_that_was_none_is_a_tensor(live: Live) -> None:
    live.model.scale = torch.full((2,), 3.0)


@change
def a_parameter_that_was_none_is_a_tensor(live: Live) -> None:
    live.model.shift = nn.Parameter(torch.full((2,), 4.0))


@change
def two_buffers_swap_their_persistence(live: Live) -> None:
    live.model[1]._non_persistent_buffers_set.add("running_mean")
    live.model._non_persistent_buffers_set.clear()


@change
def the_module_has_a_state_dict_of_its_own(live: Live) -> None:
    own = live.model.state_dict
    live.model.state_dict = lambda *args, **options: {k: 2 * v for k, v in own(*args, **options).items()}


@change
def a_buffer_goes(live: Live) -> None:
    del live.model[1].running_var


@change
def the_module_is_of_another_dtype(live: Live) -> None:
    live.model.double()


@change
def a_hook_changes_what_is_saved(live: Live) -> None:
    def double(module: nn.Module, state: dict[str, Any], prefix: str, metadata: object) -> None:
        state[f"{prefix}weight"] = state[f"{prefix}weight"] * 2

    live.model[0]._register_state_dict_hook(double)


@change
def a_slot_is_another_tensor(live: Live) -> None:
    live.optimizer.state[live.model[0].weight]["exp_avg"] = torch.full((4, 4), 7.0)


@change
def a_slot_comes(live: Live) -> None:
    live.optimizer.state[live.model[0].weight]["more"] = torch.ones(2)


@change
def a_slot_is_a_number(live: Live) -> None:
    live.optimizer.state[live.model[0].weight]["step"] = 7


@change
def a_parameter_has_no_slots(live: Live) -> None:
    del live.optimizer.state[live.model[0].weight]


@change
def the_optimizer_is_loaded(live: Live) -> None:
    live.optimizer.load_state_dict(torch.optim.AdamW(live.model.parameters()).state_dict())


@change
def the_optimizer_is_loaded_with_state(live: Live) -> None:
    state = live.optimizer.state_dict()
    state["state"] = {i: {k: v + 1 for k, v in slots.items()} for i, slots in state["state"].items()}
    live.optimizer.load_state_dict(state)


@change
def an_optimizer_hook_changes_what_is_saved(live: Live) -> None:
    live.optimizer.register_state_dict_post_hook(lambda _, state: {**state, "note": "changed"})


@change
def a_learning_rate_changes(live: Live) -> None:
    live.optimizer.param_groups[0]["lr"] = 0.5


@change
def a_learning_rate_is_a_tensor(live: Live) -> None:
    live.optimizer.param_groups[0]["lr"] = torch.tensor(0.25)


@pytest.mark.parametrize("name", CHANGES)
def test_a_save_after_a_change_equals_that_of_a_state_just_built(live: Live, name: str) -> None:
    names = ["model"] if "another one" in name else []  # an optimizer knows its parameters by the names they began with
    used = live.state(*names)
    for _ in range(2):
        saved_by(used)

    CHANGES[name](live)

    for _ in range(2):
        assert saved_by(used) == saved_by(live.state(*names))


def test_a_change_back_is_noticed_too(live: Live) -> None:
    used, weight = live.state("model"), live.model[0].weight
    saved_by(used)
    live.model[0].weight = nn.Parameter(torch.full((4, 4), 3.0))
    saved_by(used)

    live.model[0].weight = weight

    assert saved_by(used) == saved_by(live.state("model"))


def test_a_state_that_was_looked_at_in_between_is_planned_anew(live: Live) -> None:
    """The agreement gathers too, so the stage that follows it finds nothing changed and must not use an old plan."""
    used = live.state("model")
    saved_by(used)
    live.model[0].weight = nn.Parameter(torch.full((4, 4), 3.0))

    used.replica_checksums()

    assert saved_by(used) == saved_by(live.state("model"))


def test_an_entry_that_raises_leaves_no_plan_behind(live: Live) -> None:
    used = live.state()
    saved_by(used)
    live.model[0].bias.data = torch.full((4,), 6.0)
    live.optimizer.param_groups[0]["odd"] = object()
    with pytest.raises(ConfigError, match="odd"):
        saved_by(used)

    del live.optimizer.param_groups[0]["odd"]

    assert saved_by(used) == saved_by(live.state())


@pytest.mark.parametrize("move", ["parameter", "slot", "all slots"])
def test_memory_that_is_let_go_between_saves_is_free(live: Live, move: str) -> None:
    """A model and its optimizer may leave their device between two saves, to make room for another model."""
    used = live.state()
    for _ in range(2):
        saved_by(used)
    weight, slots = live.model[0].weight, live.optimizer.state[live.model[0].weight]
    gone = weakref.ref((weight.data if move == "parameter" else slots["exp_avg"]).untyped_storage())

    if move == "parameter":
        weight.data = weight.data.clone()
    elif move == "slot":
        slots["exp_avg"] = slots["exp_avg"].clone()
    else:
        live.optimizer.state = {p: {k: v.clone() for k, v in held.items()} for p, held in live.optimizer.state.items()}
        del slots
    gc.collect()

    assert gone() is None
    assert saved_by(used) == saved_by(live.state())


ENGINE_CHANGES: dict[str, Callable[[Engine], Any]] = {
    "nothing": lambda _: None,
    "a step": Engine.step,
    "a slot is another tensor": lambda engine: engine.slots.update(exp_avg=torch.full((18,), 7.0)),
    "a slot is moved": lambda engine: setattr(engine.slots["exp_avg"], "data", torch.full((18,), 8.0)),
    "all memory is moved": lambda engine: [
        setattr(tensor, "data", tensor.data + 1) for tensor in (engine.memory, *engine.slots.values())
    ],
    "a slot comes": lambda engine: engine.slots.update(more=torch.ones(18)),
    "a slot is a number": lambda engine: engine.slots.update(step=7),
    "a slot is of another dtype": lambda engine: engine.slots.update(exp_avg=torch.ones(18).double()),
    "a slot is not laid out like the memory": lambda engine: engine.slots.update(exp_avg=torch.ones(2)),
    "the memory has no slots": lambda engine: engine.base.state.clear(),
    "a learning rate changes": lambda engine: engine.base.param_groups[0].update(lr=0.5),
    "a learning rate is a tensor": lambda engine: engine.base.param_groups[0].update(lr=torch.tensor(0.25)),
}


@pytest.mark.parametrize("name", ENGINE_CHANGES)
@pytest.mark.parametrize("is_trained", [True, False], ids=["trained", "fresh"])
def test_a_save_of_an_engine_after_a_change_equals_that_of_a_state_just_built(name: str, is_trained: bool) -> None:
    engine = Engine()
    if is_trained:
        engine.step()
    used = engine.state()
    for _ in range(2):
        saved_by(used)
    assert (used._entries[1]._gather_by_cache() is not None) == is_trained

    if is_trained or "slot" not in name:
        ENGINE_CHANGES[name](engine)

    for _ in range(2):
        assert saved_by(used) == saved_by(engine.state())


def test_an_engine_s_slots_that_are_let_go_between_saves_are_free() -> None:
    engine = Engine()
    engine.step()
    used = engine.state()
    for _ in range(2):
        saved_by(used)
    gone = weakref.ref(engine.slots["exp_avg"].untyped_storage())

    engine.slots["exp_avg"].data = engine.slots["exp_avg"].data.clone()
    gc.collect()

    assert gone() is None
    assert saved_by(used) == saved_by(engine.state())


def test_an_engine_is_restored_at_once_also_where_optimizers_are_deferred(tmp_path: Path) -> None:
    engine, store = Engine(), open_store(f"file://{tmp_path}/run")
    engine.step()
    expected = [engine.memory.detach().clone(), *(engine.slots[name].clone() for name in ("exp_avg", "exp_avg_sq"))]
    checkpoint = save_state(store, {"model": engine.model, "optimizer": engine.optimizer})
    engine.step()

    state = engine.state()
    state.apply(checkpoint, defer_optimizer=True)

    assert state.deferred is not None
    assert state.deferred.boxes == []
    found = [engine.memory.detach(), engine.slots["exp_avg"], engine.slots["exp_avg_sq"]]
    assert all(torch.equal(one[:16], other[:16]) for one, other in zip(found, expected, strict=True))
