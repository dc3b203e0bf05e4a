"""Several optimizers of one model are saved by name, by number or by parameter, and also those inside backward."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from raycheck.bucket.format.progress import Progress
from raycheck.bucket.store import Store
from raycheck.errors import ConfigError, StateMismatchError
from raycheck.state.train_state import TrainState
from tests.support.processes.save_without_ray import agreed, restore_state, save, save_state

State = dict[str, Any]


def layers(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 4))


def backward(model: nn.Module, steps: int, *, start: int = 0, after: Callable[[], None] = lambda: None) -> None:
    for step in range(start, start + steps):
        batch = torch.randn(3, 4, generator=torch.Generator().manual_seed(step))
        (model(batch) - 1).pow(2).mean().backward()
        after()


def by_name(model: nn.Sequential) -> Any:
    return {
        "first": torch.optim.AdamW(model[0].parameters(), lr=0.01),
        "last.layer": {"weights": torch.optim.SGD([model[2].weight], lr=0.1, momentum=0.9)},
        "biases": torch.optim.RMSprop([model[2].bias], lr=0.01),
    }


def by_number(model: nn.Sequential) -> Any:
    return [torch.optim.AdamW(model[0].parameters()), torch.optim.SGD(model[2].parameters(), lr=0.1, momentum=0.9)]


def by_parameter(model: nn.Sequential) -> Any:
    return {parameter: torch.optim.AdamW([parameter], lr=0.01) for parameter in model.parameters()}


def each(optimizers: Any) -> list[torch.optim.Optimizer]:
    if isinstance(optimizers, torch.optim.Optimizer):
        return [optimizers]
    items = optimizers.values() if isinstance(optimizers, dict) else optimizers
    return [optimizer for item in items for optimizer in each(item)]


def step_all(optimizers: Any) -> Callable[[], None]:
    def step() -> None:
        for optimizer in each(optimizers):
            optimizer.step()
            optimizer.zero_grad()

    return step


NAMES = {
    by_name: ["optimizer.first", "optimizer.last_layer.weights", "optimizer.biases"],
    by_number: ["optimizer.0", "optimizer.1"],
    by_parameter: ["optimizer.0_weight", "optimizer.0_bias", "optimizer.2_weight", "optimizer.2_bias"],
}


@pytest.mark.parametrize("make", NAMES, ids=lambda make: make.__name__)
def test_several_optimizers_resume_to_the_last_bit(memory: Store, make: Callable[[nn.Sequential], Any]):
    one, two = layers(1), layers(2)
    ours, theirs = make(one), make(two)
    backward(one, 3, after=step_all(ours))

    checkpoint = save_state(memory, {"model": one, "optimizer": ours})
    report = TrainState({"model": two, "optimizer": theirs}, rank=0, world_size=1).apply(checkpoint).report

    assert report.restored == ("model", *NAMES[make], "progress", "rng")
    backward(one, 3, start=3, after=step_all(ours))
    backward(two, 3, start=3, after=step_all(theirs))
    assert_same(two, theirs, one, ours)


def fused(model: nn.Sequential) -> Any:
    """Applies torch's own way: the optimizer of a parameter steps as soon as its gradient is there, and frees it."""
    from torch.distributed.optim import _apply_optimizer_in_backward, _get_in_backward_optimizers

    _apply_optimizer_in_backward(torch.optim.AdamW, model.parameters(), {"lr": 0.01})
    return _get_in_backward_optimizers(model)


def hooked(model: nn.Sequential) -> Any:
    """Follows torch's tutorial "How to save memory by fusing the optimizer step into the backward pass"."""
    optimizers = {parameter: torch.optim.AdamW([parameter], lr=0.01) for parameter in model.parameters()}

    def step(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    return optimizers


@pytest.mark.filterwarnings("ignore:.torch.jit.:DeprecationWarning")  # torch warns on import of its own module
@pytest.mark.parametrize("make", [fused, hooked], ids=lambda make: make.__name__)
def test_an_optimizer_in_backward_resumes_to_the_last_bit(memory: Store, make: Callable[[nn.Sequential], Any]):
    one, two = layers(1), layers(2)
    ours, theirs = make(one), make(two)
    backward(one, 3)
    before = copy.deepcopy(one.state_dict())

    restore_state(save_state(memory, {"model": one, "optimizer": ours}), {"model": two, "optimizer": theirs})

    assert all(torch.equal(two.state_dict()[name], tensor) for name, tensor in before.items())
    backward(one, 3, start=3)
    backward(two, 3, start=3)
    assert not torch.equal(one[0].weight, before["0.weight"])
    assert_same(two, theirs, one, ours)


def test_an_added_optimizer_starts_fresh_beside_the_others(memory: Store):
    one, two = layers(1), layers(2)
    ours = {"first": torch.optim.AdamW(one[0].parameters())}
    theirs = {"first": torch.optim.AdamW(two[0].parameters()), "last": torch.optim.AdamW(two[2].parameters())}
    backward(one, 2, after=step_all(ours))

    checkpoint = save_state(memory, {"model": one, "optimizer": ours})
    done = TrainState({"model": two, "optimizer": theirs}, rank=0, world_size=1).apply(checkpoint, strict=False)

    assert done.report.restored == ("model", "optimizer.first", "progress", "rng")
    assert done.report.missing == ("optimizer.last (the whole optimizer)",)
    assert theirs["first"].state[two[0].weight]["step"] == 2
    assert not theirs["last"].state


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({nn.Parameter(torch.ones(1)): nn.Linear(1, 1)}, r"state\['parts'\] has a Parameter as key"),
        ({(1, 2): nn.Linear(1, 1)}, r"state\['parts'\] has a tuple as key"),
        ({1: nn.Linear(1, 1), "1": nn.Linear(1, 1)}, r"state\['parts\.1'\]: two entries have this name"),
        ({"a.b": nn.Linear(1, 1), "a_b": nn.Linear(1, 1)}, r"state\['parts\.a_b'\]: two entries have this name"),
        ({"a": [nn.Linear(1, 1), len]}, r"state\['parts\.a\.1'\] is a builtin_function_or_method without state_dict"),
        ({"a": (nn.Linear(1, 1), 3)}, r"state\['parts\.a\.1'\] is a int in a tuple"),
    ],
)
def test_nested_entries_have_names_that_stay_the_same(entries: Any, message: str):
    with pytest.raises(ConfigError, match=message):
        TrainState({"parts": entries}, rank=0, world_size=1)


def assert_same(model: nn.Module, optimizers: Any, wanted_model: nn.Module, wanted_optimizers: Any) -> None:
    for found, expected in zip(model.parameters(), wanted_model.parameters(), strict=True):
        assert torch.equal(found, expected)
    for found, expected in zip(each(optimizers), each(wanted_optimizers), strict=True):
        assert found.state_dict()["param_groups"] == expected.state_dict()["param_groups"]
        one, other = found.state_dict()["state"], expected.state_dict()["state"]
        assert one.keys() == other.keys()
        for number, slots in other.items():
            assert slots.keys() == one[number].keys()
            assert all(torch.equal(one[number][slot], value) for slot, value in slots.items())


@pytest.mark.parametrize("is_new_layer", [False, True], ids=["unfrozen layer", "layer added to the model"])
def test_a_parameter_group_may_be_added_later(memory: Store, is_new_layer: bool):
    def build(seed: int) -> tuple[nn.Sequential, torch.optim.Optimizer]:
        model = layers(seed)
        return model, torch.optim.AdamW(model[0].parameters(), lr=0.01)

    def add_group(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
        if is_new_layer:
            model.append(nn.Linear(4, 4))
        optimizer.add_param_group({"params": model[-1].parameters(), "lr": 0.5})

    one, ours = build(1)
    saver = TrainState({"model": one, "optimizer": ours}, rank=0, world_size=1)
    backward(one, 2, after=step_all(ours))
    saver.stage(Progress(step=2))  # from now on its gather cache is filled
    add_group(one, ours)
    backward(one, 2, start=2, after=step_all(ours))

    checkpoint = save(memory, [saver.stage(Progress(step=4))], progress=Progress(step=4))
    two, theirs = build(2)
    restorer = TrainState({"model": two, "optimizer": theirs}, rank=0, world_size=1)
    add_group(two, theirs)
    restorer.apply(checkpoint)

    backward(one, 2, start=4, after=step_all(ours))
    backward(two, 2, start=4, after=step_all(theirs))
    assert_same(two, theirs, one, ours)
    assert f"optimizer.state.{len(one) - 1}.weight.exp_avg" in {
        t.name for t in checkpoint.read_index(checkpoint.read_manifest()).tensors
    }


def test_a_group_that_is_not_there_yet_is_missed_by_name(memory: Store):
    one, two = layers(1), layers(2)
    ours, theirs = torch.optim.AdamW(one.parameters()), torch.optim.AdamW(two[0].parameters())
    backward(one, 2, after=step_all(ours))
    checkpoint = save_state(memory, {"model": one, "optimizer": ours})

    with pytest.raises(StateMismatchError, match=r"only in the checkpoint: optimizer\.state\.2\.weight"):
        restore_state(checkpoint, {"model": two, "optimizer": theirs})


def test_a_parameter_that_came_later_is_compared_between_ranks_like_the_others(memory: Store):
    models = [layers(1), layers(1)]
    ranks = [TrainState({"model": model}, rank=rank, world_size=2) for rank, model in enumerate(models)]
    for number, model in enumerate(models):
        model.append(nn.Linear(4, 4, bias=False))
        nn.init.constant_(model[-1].weight, number)

    with pytest.raises(ConfigError, match=r"model\.3\.weight is not the same on ranks 0 and 1"):
        agreed(ranks)


def test_an_optimizer_that_joins_a_list_later_is_not_left_out_silently(memory: Store):
    model = layers(1)
    optimizers = [torch.optim.AdamW(model[0].parameters())]
    saver = TrainState({"model": model, "optimizer": optimizers}, rank=0, world_size=1)
    saver.stage(Progress(step=1))

    optimizers.append(torch.optim.AdamW(model[2].parameters()))

    with pytest.raises(ConfigError, match=r"state\['optimizer'\] holds other objects"):
        saver.stage(Progress(step=2))
