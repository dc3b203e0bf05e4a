"""Tensors whose elements share memory are saved and restored, and never filled with values that do not fit together."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from raycheck.bucket.format.progress import Progress
from raycheck.bucket.store import Store
from raycheck.errors import StateMismatchError
from raycheck.state.train_state import TrainState
from tests.support.processes.save_without_ray import places, restore_state, save_state

SHAPES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "expanded rows": lambda base: base[:6].view(1, 6).expand(4, 6),
    "expanded columns": lambda base: base[:6].view(6, 1).expand(6, 4),
    "one number": lambda base: base[0].expand(3, 2),
    "one number in a row": lambda base: base[:1].expand(4),
    "expanded in the middle": lambda base: base[:6].view(2, 1, 3).expand(2, 5, 3),
    "windows": lambda base: base.unfold(0, 4, 1),
    "as_strided": lambda base: base.as_strided((3, 3), (2, 1)),
}


class Holding(nn.Module):
    def __init__(self, **buffers: torch.Tensor) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer)


def base(start: float) -> torch.Tensor:
    return torch.arange(12.0) + start


@pytest.mark.parametrize("shape", SHAPES)
def test_a_buffer_whose_elements_share_memory_comes_back(memory: Store, shape: str):
    view = SHAPES[shape]
    one, two = Holding(shared=view(base(1))), Holding(shared=view(base(50)))
    stride = two.shared.stride()

    restore_state(save_state(memory, {"model": one}), {"model": two})

    assert torch.equal(two.shared, one.shared)
    assert two.shared.stride() == stride


@pytest.mark.parametrize("requires_grad", [True, False])
@pytest.mark.parametrize("make", [lambda base: base[0].expand(1), lambda base: base.view(4, 3)[:1, 0]])
def test_a_single_element_of_any_stride_comes_back(
    memory: Store, make: Callable[[torch.Tensor], torch.Tensor], requires_grad: bool
):
    one, two = Holding(shared=make(base(1))), Holding(shared=make(base(50)))
    for module, start in ((one, 2), (two, 60)):
        module.odd = nn.Parameter(make(base(start)), requires_grad=requires_grad)
    TrainState({"model": one}, rank=0, world_size=2).replica_checksums()

    restore_state(save_state(memory, {"model": one}), {"model": two})

    assert (two.shared, two.odd) == (one.shared, one.odd)


@pytest.mark.parametrize("shape", SHAPES)
def test_values_that_do_not_fit_into_shared_memory_are_refused_by_name(memory: Store, shape: str):
    view = SHAPES[shape]
    one, two = Holding(shared=torch.randn_like(view(base(1)).contiguous())), Holding(shared=view(base(50)))

    with pytest.raises(StateMismatchError, match=r"model\.shared: elements share memory here .*clone\(\)"):
        restore_state(save_state(memory, {"model": one}), {"model": two})


def test_what_was_saved_shared_goes_into_memory_of_its_own(memory: Store):
    one, two = Holding(shared=base(1)[:3].expand(2, 3)), Holding(shared=torch.zeros(2, 3))

    restore_state(save_state(memory, {"model": one}), {"model": two})

    assert torch.equal(two.shared, one.shared)


def overlapping(values: torch.Tensor) -> Holding:
    return Holding(whole=values, part=values[2:5], turned=values.view(3, 4).t())


def test_views_of_one_memory_come_back_together(memory: Store):
    one, two = overlapping(base(1)), overlapping(base(50))

    restore_state(save_state(memory, {"model": one}), {"model": two})

    assert torch.equal(two.whole, base(1))
    assert torch.equal(two.part, base(1)[2:5])
    two.whole.zero_()
    assert two.part.tolist() == [0.0] * 3, "it is a view still"


def test_values_that_contradict_each_other_in_one_memory_are_refused_by_name(memory: Store):
    one = Holding(whole=base(1), part=base(9)[2:5].clone(), turned=base(1).view(3, 4).t().clone())
    two = overlapping(base(50))

    with pytest.raises(StateMismatchError, match=r"model\.(whole|part)"):
        restore_state(save_state(memory, {"model": one}), {"model": two})


def test_rows_that_only_interleave_are_no_contradiction(memory: Store):
    def build(values: torch.Tensor) -> Holding:
        square = values.view(3, 4)
        return Holding(left=square[:, :2], right=square[:, 2:])

    one, two = build(base(1)), build(base(50))

    restore_state(save_state(memory, {"model": one}), {"model": two})

    assert torch.equal(two.left, one.left)
    assert torch.equal(two.right, one.right)


def test_optimizer_state_whose_elements_share_memory_gets_memory_that_can_be_stepped(memory: Store):
    def build(value: float) -> dict[str, Any]:
        model = nn.Linear(3, 3)
        optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
        for parameter in model.parameters():
            optimizer.state[parameter]["momentum_buffer"] = torch.full((), value).expand_as(parameter)
        return {"model": model, "optimizer": optimizer}

    one, two = build(1.0), build(2.0)

    restore_state(save_state(memory, one), two)

    assert all(slots["momentum_buffer"].eq(1).all() for slots in two["optimizer"].state.values())


def test_a_frozen_buffer_on_a_shared_memory_is_referred_to_when_it_has_not_changed(memory: Store):
    def build(start: float) -> nn.Module:
        model = Holding()
        model.fixed = nn.Parameter(base(start)[:6].expand(4, 6), requires_grad=False)
        return model

    one, two = build(1), build(50)
    checkpoint = save_state(memory, {"model": one})
    state = TrainState({"model": two}, rank=0, world_size=1)

    state.apply(checkpoint)

    assert torch.equal(two.fixed, one.fixed)
    assert places(state.stage(Progress(step=2))) == {"model.frozen": checkpoint.entry.key}
