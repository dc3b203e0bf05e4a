"""What belongs to a wrapper itself is saved and restored with the model, and no user's module is taken for a wrapper."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from raycheck.bucket.format.progress import Progress
from raycheck.bucket.store import Store
from raycheck.errors import ConfigError
from raycheck.state.train_state import TrainState
from tests.support.processes.save_without_ray import restore_state, save, save_state

# importing inductor uses torch's own deprecated names
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.:DeprecationWarning")
Build = Callable[[], nn.Module]


def ddp_with_head() -> nn.Module:
    model = DistributedDataParallel(nn.Linear(2, 2))
    model.head = nn.Linear(2, 3)
    return model


def ddp_with_buffer() -> nn.Module:
    model = DistributedDataParallel(nn.Linear(2, 2))
    model.register_buffer("count", torch.zeros(()))
    return model


def compiled_with_gate() -> nn.Module:
    model = torch.compile(nn.Linear(2, 2))
    model.register_parameter("gate", nn.Parameter(torch.zeros(2)))
    return model


def both_wrappers_own_something() -> nn.Module:
    model = torch.compile(ddp_with_head())
    model.register_buffer("scale", torch.zeros(3))
    return model


class OwnDDP(DistributedDataParallel):
    """A user's subclass with a parameter."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(2, 2))
        self.register_parameter("temperature", nn.Parameter(torch.zeros(())))


class ExtraDDP(DistributedDataParallel):
    """A user's subclass with extra state."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(2, 2))
        self.seen = torch.zeros(2)

    def get_extra_state(self) -> Any:
        return {"seen": self.seen}

    def set_extra_state(self, state: Any) -> None:
        self.seen = state["seen"]


class Named(nn.Module):
    """A user's module with children named as torch's wrappers name theirs."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.add_module(name, nn.Linear(2, 2))
        self.head = nn.Linear(2, 3)


BUILDS: dict[str, Build] = {
    "head on DDP": ddp_with_head,
    "buffer on DDP": ddp_with_buffer,
    "parameter on torch.compile": compiled_with_gate,
    "both wrappers": both_wrappers_own_something,
    "subclass of DDP": OwnDDP,
    "extra state of a subclass": ExtraDDP,
    "child _orig_mod": lambda: Named("_orig_mod"),
    "child module": lambda: Named("module"),
    "child _checkpoint_wrapped_module": lambda: Named("_checkpoint_wrapped_module"),
    "DDP around child module": lambda: DistributedDataParallel(Named("module")),
    "compile around child _orig_mod": lambda: torch.compile(Named("_orig_mod")),
    "child _orig_mod with a child module": lambda: nn.Sequential(Named("_orig_mod"), Named("module")),
}


def fill(model: nn.Module, seed: int) -> dict[str, Any]:
    """Give every tensor of state_dict() values, and the optimizer's slots, too."""
    torch.manual_seed(seed)
    for value in tensors_of(model).values():
        value.copy_(torch.randn_like(value))
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    for parameter in parameters:
        optimizer.state[parameter]["momentum_buffer"] = torch.randn_like(parameter)
    return {"model": model, "optimizer": optimizer}


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for key, value in model.state_dict().items():
        found |= {key: value} if isinstance(value, torch.Tensor) else {f"{key}.{k}": v for k, v in value.items()}
    return found


@pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS)
def test_whatever_state_dict_gives_comes_back(memory: Store, group_of_one: None, build: Build) -> None:
    one, two = fill(build(), seed=1), fill(build(), seed=2)
    wanted = {key: value.clone() for key, value in tensors_of(one["model"]).items()}

    checkpoint = save_state(memory, one)
    restore_state(checkpoint, two)

    found = tensors_of(two["model"])
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)
    index = checkpoint.read_index(checkpoint.read_manifest())
    assert not [tensor.name for tensor in index.tensors if "unnamed" in tensor.name]


def test_what_is_registered_on_a_wrapper_after_a_save_is_in_the_next_one(memory: Store, group_of_one: None) -> None:
    model = DistributedDataParallel(nn.Linear(2, 2))
    state = TrainState({"model": model}, rank=0, world_size=1)
    save(memory, [state.stage(Progress(step=1))], save=1)
    model.register_buffer("late", torch.full((3,), 7.0))

    checkpoint = save(memory, [state.stage(Progress(step=2))], save=2)

    again = DistributedDataParallel(nn.Linear(2, 2))
    again.register_buffer("late", torch.zeros(3))
    restore_state(checkpoint, {"model": again})
    assert torch.equal(again.late, torch.full((3,), 7.0))


def test_the_names_are_those_without_wrappers(memory: Store, group_of_one: None) -> None:
    checkpoint = save_state(memory, {"model": both_wrappers_own_something()})

    names = {tensor.name for tensor in checkpoint.read_index(checkpoint.read_manifest()).tensors}
    assert names == {"model.weight", "model.bias", "model.head.weight", "model.head.bias", "model.scale"}


def test_a_wrapper_and_its_model_must_not_share_a_name(group_of_one: None) -> None:
    inside = nn.Linear(2, 2)
    inside.register_buffer("scale", torch.zeros(1))
    model = DistributedDataParallel(inside)
    model.register_buffer("scale", torch.ones(1))

    with pytest.raises(ConfigError, match=r"model\.scale: two parts of the module have this name; rename one"):
        TrainState({"model": model}, rank=0, world_size=1).check()
