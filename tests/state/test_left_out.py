"""Every tensor that an object trains is in the checkpoint, or is refused or named."""

from typing import Any
from uuid import uuid4

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from raycheck.bucket.format.progress import Progress
from raycheck.bucket.store import Store, open_store
from raycheck.errors import ConfigError
from raycheck.state.train_state import TrainState
from tests.support.processes.save_without_ray import restore_state, save_state

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.:DeprecationWarning")


def warnings_of(state: dict[str, Any], caplog: pytest.LogCaptureFixture) -> list[str]:
    caplog.set_level("WARNING", "raycheck")
    caplog.clear()
    TrainState(state, rank=0, world_size=1).check()
    return [record.getMessage() for record in caplog.records]


class LeavesOut(nn.Module):
    """Drops the tensors whose names begin so from its state_dict()."""

    def __init__(self, start: str, *, makes_anew: bool = False) -> None:
        super().__init__()
        self.kept, self.lost = nn.Linear(2, 2), nn.Linear(2, 2)
        self.lost.register_buffer("count", torch.zeros(1))

        def drop(module: nn.Module, state: Any, prefix: str, _metadata: Any) -> None:
            for key in [key for key in state if key.startswith(prefix + start)]:
                tensor = state.pop(key)
                if makes_anew:
                    state[key.replace("lost", "other")] = tensor.clone()

        self._register_state_dict_hook(drop)


def test_a_trained_parameter_that_state_dict_leaves_out_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model\.lost\.weight: to be trained, but left out"):
        TrainState({"model": LeavesOut("lost.weight")}, rank=0, world_size=1).check()


def test_frozen_parameters_and_buffers_that_state_dict_leaves_out_are_named_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = LeavesOut("lost")
    model.lost.requires_grad_(False)
    caplog.set_level("WARNING", "raycheck")
    state = TrainState({"model": model}, rank=0, world_size=1)

    state.check()
    state.check()
    state.stage(Progress(step=1))

    (record,) = caplog.records
    assert record.getMessage().startswith("model.lost.weight, model.lost.bias, model.lost.count: left out")


def test_where_state_dict_makes_other_tensors_what_is_missing_is_named(caplog: pytest.LogCaptureFixture) -> None:
    (text,) = warnings_of({"model": LeavesOut("lost", makes_anew=True)}, caplog)

    assert text.startswith("model.lost.weight, model.lost.bias, model.lost.count: left out")


def test_an_optimizers_parameters_of_no_module_are_named(caplog: pytest.LogCaptureFixture) -> None:
    model, strange = nn.Linear(2, 2), nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([{"params": list(model.parameters())}, {"params": [strange]}], lr=0.1)

    (text,) = warnings_of({"model": model, "optimizer": optimizer}, caplog)

    assert "state['optimizer'] trains parameters that are in no entry of the state" in text
    assert "parameter 0 of group 1 ([3])" in text
    assert "group 0" not in text


def test_parameters_in_a_list_are_saved_and_restored(memory: Store, caplog: pytest.LogCaptureFixture) -> None:
    def build(value: float) -> dict[str, Any]:
        weights = [nn.Parameter(torch.full((3,), value)), nn.Parameter(torch.full((2,), value))]
        return {"weights": weights, "optimizer": torch.optim.SGD(weights, lr=0.1)}

    one, two = build(1.0), build(2.0)
    held = list(two["weights"])
    assert warnings_of(one, caplog) == []
    restore_state(save_state(memory, one), two)

    assert [weight.tolist() for weight in held] == [[1.0] * 3, [1.0] * 2]
    assert two["optimizer"].param_groups[0]["params"][0] is held[0]


def test_a_parameter_group_added_later_is_named_at_the_first_save(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    caplog.set_level("WARNING", "raycheck")
    state = TrainState({"model": model, "optimizer": optimizer}, rank=0, world_size=1)
    state.check()
    assert caplog.records == []

    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(5))]})
    state.stage(Progress(step=1))

    (record,) = caplog.records
    assert "parameter 0 of group 1 ([5])" in record.getMessage()


# --- property: whatever the tree of modules is ---

KINDS = ("linear", "buffers", "compiled", "checkpointed", "orig_mod", "module", "frozen", "tied", "sequence")


Recipe = tuple[str, list[Any]]


def build(recipe: Recipe) -> nn.Module:
    kind, children = recipe
    inner = nn.Sequential(nn.Linear(2, 2), *map(build, children))
    if kind == "compiled":
        inner = torch.compile(inner)
        inner.register_parameter("gate", nn.Parameter(torch.zeros(1)))
    elif kind == "checkpointed":
        inner = checkpoint_wrapper(inner)
        inner.register_buffer("scale", torch.zeros(1))
    elif kind == "frozen":
        inner.requires_grad_(False)
    elif kind == "tied":
        inner.tied = inner[0].weight
    elif kind == "buffers":
        inner.register_buffer("kept", torch.zeros(2))
        inner.register_buffer("cache", torch.zeros(2), persistent=False)
    elif kind in ("orig_mod", "module"):
        outer = nn.Module()
        outer.add_module("_orig_mod" if kind == "orig_mod" else "module", inner)
        outer.head = nn.Linear(2, 1)
        inner = outer
    return inner


TREES = st.recursive(
    st.tuples(st.sampled_from(KINDS), st.just([])),
    lambda trees: st.tuples(st.sampled_from(KINDS), st.lists(trees, max_size=2)),
    max_leaves=4,
)


def filled_with(model: nn.Module, value: float, groups: int) -> dict[str, Any]:
    """Give all persistent tensors a value, and the optimizer a slot for each trained parameter, in several groups."""
    with torch.no_grad():
        for number, tensor in enumerate(model.state_dict().values()):
            tensor.fill_(value + number)
    parameters = [p for p in model.parameters() if p.requires_grad]
    split = [parameters[i::groups] for i in range(groups) if parameters[i::groups]]
    if not split:
        return {"model": model}
    optimizer = torch.optim.SGD([{"params": own} for own in split], lr=0.1, momentum=0.9)
    for number, parameter in enumerate(parameters):
        optimizer.state[parameter]["momentum_buffer"] = torch.full_like(parameter, value + 100 + number)
    return {"model": model, "optimizer": optimizer}


@settings(max_examples=30)
@given(recipe=TREES, groups=st.integers(1, 3))
def test_every_tensor_of_any_tree_comes_back(recipe: Recipe, groups: int) -> None:
    one, two = filled_with(build(recipe), 1.0, groups), filled_with(build(recipe), 1000.0, groups)
    wanted = {key: value.clone() for key, value in one["model"].state_dict().items()}

    checkpoint = save_state(open_store(f"memory://{uuid4().hex}"), one)
    restore_state(checkpoint, two)

    found = two["model"].state_dict()
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[key], value) for key, value in wanted.items())
    if "optimizer" in one:
        slots = [one["optimizer"].state_dict()["state"], two["optimizer"].state_dict()["state"]]
        assert slots[0].keys() == slots[1].keys()
        assert all(torch.equal(slots[0][n]["momentum_buffer"], slots[1][n]["momentum_buffer"]) for n in slots[0])
    index = checkpoint.read_index(checkpoint.read_manifest())
    assert not [tensor.name for tensor in index.tensors if "unnamed" in tensor.name or 0 in tensor.shape]
