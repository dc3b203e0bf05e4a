"""Torch casts an optimizer's slots to their parameter's dtype as it loads them. A restore ends with what was saved,
whatever the two dtypes are."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from raycheck.bucket.store import Store
from raycheck.errors import ConfigError
from raycheck.state.train_state import TrainState
from tests.support.processes.save_without_ray import restore_state, save_state
from tests.support.samples.sample_values import same

PARAMETERS = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.complex64]
SLOTS = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.complex64,
    torch.complex128,
    torch.int64,
    torch.uint64,
    torch.int8,
    torch.bool,
]
OPTIONS: list[dict[str, bool]] = [{}, {"capturable": True}, {"fused": True}, {"foreign": True, "differentiable": True}]


CASTS = pytest.mark.filterwarnings("ignore:Casting complex values to real:UserWarning")


@pytest.fixture(autouse=True)
def warned_each_time() -> Iterator[None]:
    """Torch gives most warnings once per process, so that only the first test to cast a complex tensor would fail."""
    torch.set_warn_always(True)
    yield
    torch.set_warn_always(False)


class Simple(torch.optim.Optimizer):
    """Is an optimizer whose state is whatever a test puts there."""

    def __init__(self, parameters: Any, **options: bool) -> None:
        super().__init__(parameters, {"lr": 0.1, **options})

    def step(self, closure: Any = None) -> None:
        raise NotImplementedError


class Wraps(Simple):
    """Has a load_state_dict of its own, which calls torch's. Raycheck then leaves torch's cast as it is, with its
    warning, and puts the values back afterwards."""

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)


def slot_of(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Returns values that few other dtypes have."""
    generator = torch.Generator().manual_seed(0)
    count = torch.Size(shape).numel() * dtype.itemsize
    octets = torch.randint(0, 2 if dtype == torch.bool else 120, (count,), dtype=torch.uint8, generator=generator)
    return octets.view(dtype).reshape(shape)


def state_with(kind: type[Simple], parameter: torch.dtype, options: dict[str, bool], slots: Any) -> dict[str, Any]:
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(2, 3, dtype=parameter))
    optimizer = kind(model.parameters(), **options)
    if slots:
        optimizer.state[model.weight] = slots
    return {"model": model, "optimizer": optimizer}


@pytest.mark.parametrize("kind", [Simple, pytest.param(Wraps, marks=CASTS)])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("parameter", PARAMETERS, ids=str)
def test_a_slot_of_any_dtype_comes_back_exactly_under_a_parameter_of_any(
    memory: Store, kind: type[Simple], options: dict[str, bool], parameter: torch.dtype
) -> None:
    slots: dict[str, Any] = {f"like {dtype}": slot_of(dtype, (2, 3)) for dtype in SLOTS}
    slots |= {f"other {dtype}": slot_of(dtype, (5,)) for dtype in SLOTS}
    slots |= {f"inside {dtype}": [{"deep": (slot_of(dtype, (2, 3)), slot_of(dtype, ()))}] for dtype in SLOTS}
    two = state_with(kind, parameter, options, None)

    restore_state(save_state(memory, state_with(kind, parameter, options, dict(slots))), two)

    assert same(two["optimizer"].state[two["model"].weight], slots)


@pytest.mark.parametrize("kind", [Simple, pytest.param(Wraps, marks=CASTS)])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("step", SLOTS, ids=str)
def test_a_count_of_steps_of_any_dtype_comes_back_exactly(
    memory: Store, kind: type[Simple], options: dict[str, bool], step: torch.dtype
) -> None:
    count = slot_of(step, ())
    two = state_with(kind, torch.bfloat16, options, None)

    restore_state(save_state(memory, state_with(kind, torch.bfloat16, options, {"step": count})), two)

    assert same(two["optimizer"].state[two["model"].weight], {"step": count})


def test_a_slot_of_packed_4_bit_floats_comes_back_although_torch_cannot_cast_it(memory: Store) -> None:
    packed = torch.arange(6, dtype=torch.uint8).reshape(2, 3)
    slots = {"odd": packed.view(torch.float4_e2m1fn_x2)}
    two = state_with(Simple, torch.bfloat16, {}, None)

    restore_state(save_state(memory, state_with(Simple, torch.bfloat16, {}, dict(slots))), two)

    (found,) = two["optimizer"].state[two["model"].weight].values()
    assert found.dtype == torch.float4_e2m1fn_x2
    assert torch.equal(found.view(torch.uint8), packed)


@pytest.mark.parametrize("dtype", [torch.uint4, torch.int1], ids=str)
def test_a_dtype_that_torch_cannot_write_is_refused_by_its_path_before_anything_is_saved(dtype: torch.dtype) -> None:
    slot = torch.zeros(2, 3, dtype=torch.uint8).view(dtype)
    state = TrainState(state_with(Simple, torch.bfloat16, {}, {"odd": slot}), rank=0, world_size=1)

    with pytest.raises(ConfigError, match=rf"state at optimizer\.state\.weight\.odd is of {dtype}, which torch\.save"):
        state.check()

    assert slot.view(torch.uint8).dtype == torch.uint8, "the advice works"
