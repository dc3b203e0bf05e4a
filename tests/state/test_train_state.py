"""A train state goes into a checkpoint and comes back bit for bit, or is refused before anything changed."""

import copy
import math
import random
import warnings
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.optim import lr_scheduler as schedulers
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader

from raycheck.bucket.format.progress import Progress
from raycheck.bucket.reading import Checkpoint
from raycheck.bucket.store import Store
from raycheck.data.batches import Batches
from raycheck.errors import ConfigError, StateMismatchError
from raycheck.state.random_state import apply_rng, rng_values
from raycheck.state.restore_selection import Selection
from raycheck.state.train_state import TrainState
from tests.support.processes.save_without_ray import Own, restore_state, save, save_state

State = dict[str, Any]


# --- modules ---


class Rich(nn.Module):
    """Has buffers of all kinds, tied weights, BatchNorm, and extra state with tensors in it."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(11, 6)
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mask", torch.rand(4) > 0.5)
        self.register_buffer("scratch", torch.rand(3), persistent=False)
        self.register_buffer("absent", None)
        self.extra: Any = {"seed": seed, "tensor": torch.rand(2), "nested": [torch.rand(1), (torch.rand(3), "x")]}

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.embed(tokens)))

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


def test_a_plain_module_comes_back_with_buffers_tied_weights_and_extra_state(store: Store):
    one, two = Rich(1), Rich(2)
    one(torch.arange(8))
    scratch = two.scratch.clone()

    restore_state(save_state(store, {"model": one}), {"model": two})

    assert_same(two.state_dict(), one.state_dict())
    assert two.head.weight is two.embed.weight
    assert two.norm.num_batches_tracked == 1
    assert two.extra["seed"] == 1
    assert torch.equal(two.scratch, scratch)


class CountsInATensor(nn.Module):
    """Has extra state that is a tensor made anew at each call, as Transformer Engine's FP8 modules do."""

    def __init__(self, count: int, *, size: int) -> None:
        super().__init__()
        self.count = count
        self.size = size
        self.inner = nn.Linear(2, 2)

    def get_extra_state(self) -> torch.Tensor:
        return torch.tensor([self.count] * self.size)

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.count, self.size = int(state[0]), len(state)


@pytest.mark.parametrize("size", [4, 5], ids=["same size", "another size"])
def test_extra_state_that_is_a_tensor_comes_back(memory: Store, size: int):
    one, two = CountsInATensor(7, size=4), CountsInATensor(3, size=size)

    restore_state(save_state(memory, {"model": one}), {"model": two})

    assert (two.count, two.size) == (7, 4)


# importing inductor uses torch's own deprecated names
compiling = pytest.mark.filterwarnings("ignore:.torch.jit.:DeprecationWarning")


@compiling
@pytest.mark.parametrize("wrap", [DistributedDataParallel, torch.compile], ids=["ddp", "compile"])
def test_a_wrapped_module_is_saved_and_restored_under_the_plain_names(
    memory: Store, group_of_one: None, wrap: Callable[[nn.Module], nn.Module]
):
    plain, wrapped = layers(1), wrap(layers(2))
    adam = torch.optim.Adam(plain.parameters())
    train(plain, adam)
    wrapped_adam = torch.optim.Adam(wrapped.parameters())

    from_plain = save_state(memory, {"model": plain, "optimizer": adam}, step=1)
    restore_state(from_plain, {"model": wrapped, "optimizer": wrapped_adam})
    from_wrapped = save_state(memory, {"model": wrapped, "optimizer": wrapped_adam}, step=2, save_number=2)
    again = layers(3)
    again_adam = torch.optim.Adam(again.parameters())
    restore_state(from_wrapped, {"model": again, "optimizer": again_adam})

    assert names_of(from_wrapped) == names_of(from_plain)
    assert_same(again.state_dict(), plain.state_dict())
    assert_same(again_adam.state_dict(), adam.state_dict())


@compiling
def test_a_compiled_layer_inside_a_module_keeps_its_plain_names(memory: Store):
    inner, plain = layers(1), layers(2)
    inner[0] = torch.compile(inner[0])

    checkpoint = save_state(memory, {"model": inner})
    restore_state(checkpoint, {"model": plain})

    assert "model.0.weight" in names_of(checkpoint)
    assert torch.equal(plain[0].weight, inner[0].weight)


def test_an_averaged_model_is_restored_beside_its_model(store: Store):
    def with_average(seed: int) -> State:
        model = layers(seed)
        return {"model": model, "ema": AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)}

    one, two = with_average(1), with_average(2)
    for _ in range(3):
        train(one["model"], torch.optim.SGD(one["model"].parameters(), lr=0.1))
        one["ema"].update_parameters(one["model"])

    restore_state(save_state(store, one), two)

    assert two["ema"].n_averaged == 3
    assert_same(two["ema"].state_dict(), one["ema"].state_dict())
    one["ema"].update_parameters(one["model"])
    two["ema"].update_parameters(two["model"])
    assert_same(two["ema"].state_dict(), one["ema"].state_dict())


# --- optimizers ---

# "capturable" is not tried: torch refuses it for parameters on the CPU
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd-momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adam-fused": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "adam-foreach": lambda p: torch.optim.Adam(p, lr=0.01, foreach=True),
    "adam-tensor-lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01)),
    "adamw-amsgrad": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "sgd-fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "adamw-maximize": lambda p: torch.optim.AdamW(p, lr=0.01, maximize=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "adagrad-fused": lambda p: torch.optim.Adagrad(p, lr=0.01, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=0.5),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.01),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3, history_size=4),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_the_next_step_is_bit_identical_after_a_restore_into_a_fresh_optimizer(memory: Store, kind: str):
    one, two = layers(1), layers(2)
    before, fresh = OPTIMIZERS[kind](one.parameters()), OPTIMIZERS[kind](two.parameters())
    train(one, before, steps=3)

    restore_state(save_state(memory, {"model": one, "optimizer": before}), {"model": two, "optimizer": fresh})

    assert_same(fresh.state_dict(), before.state_dict())
    train(one, before, steps=2, start=3)
    train(two, fresh, steps=2, start=3)
    assert_same(two.state_dict(), one.state_dict())
    assert_same(fresh.state_dict(), before.state_dict())


def test_optimizer_state_is_restored_from_every_store(store: Store):
    one, two = layers(1), layers(2)
    before, fresh = torch.optim.AdamW(one.parameters()), torch.optim.AdamW(two.parameters())
    train(one, before, steps=3)

    restore_state(save_state(store, {"model": one, "optimizer": before}), {"model": two, "optimizer": fresh})

    assert_same(two.state_dict(), one.state_dict())
    assert_same(fresh.state_dict(), before.state_dict())


def test_a_restore_makes_no_dummy_step_and_calls_no_hook(memory: Store):
    one, two = layers(1), layers(2)
    before, fresh = torch.optim.Adam(one.parameters()), torch.optim.Adam(two.parameters())
    train(one, before)
    weights = copy.deepcopy(two.state_dict())
    called: list[str] = []
    fresh.register_step_pre_hook(lambda *_: called.append("before a step"))
    fresh.register_step_post_hook(lambda *_: called.append("after a step"))
    two.register_forward_hook(lambda *_: called.append("forward"))
    for parameter in two.parameters():
        parameter.register_hook(lambda _: called.append("backward"))

    # The model is not in the state: its parameters stay as they are, whatever the optimizer does.
    restore_state(save_state(memory, {"optimizer": before}), {"optimizer": fresh})

    assert called == []
    assert_same(two.state_dict(), weights)
    assert all(parameter.grad is None for parameter in two.parameters())
    assert_same(fresh.state_dict(), before.state_dict())


def test_bfloat16_parameters_keep_their_float32_optimizer_state(memory: Store):
    def mixed(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = layers(seed).to(torch.bfloat16)
        return model, torch.optim.AdamW(model.parameters())

    (one, before), (two, fresh), (three, used) = mixed(1), mixed(2), mixed(3)
    for model, optimizer in ((one, before), (three, used)):
        for parameter in model.parameters():
            optimizer.state[parameter] = {
                "step": torch.tensor(5.0),
                "exp_avg": torch.randn(parameter.shape),
                "exp_avg_sq": torch.rand(parameter.shape, dtype=torch.float64),
            }

    checkpoint = save_state(memory, {"model": one, "optimizer": before})
    restore_state(checkpoint, {"model": two, "optimizer": fresh})
    restore_state(checkpoint, {"model": three, "optimizer": used})

    for optimizer, model in ((fresh, two), (used, three)):
        assert_same(model.state_dict(), one.state_dict())
        assert_same(optimizer.state_dict(), before.state_dict())
        slots = optimizer.state[model[0].weight]
        assert (slots["exp_avg"].dtype, slots["exp_avg_sq"].dtype) == (torch.float32, torch.float64)


def test_frozen_and_unused_parameters_have_no_state_before_or_after(memory: Store):
    def build(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = layers(seed)
        model.register_parameter("unused", nn.Parameter(torch.randn(3)))
        model[0].weight.requires_grad_(False)
        return model, torch.optim.Adam(model.parameters())

    (one, before), (two, fresh) = build(1), build(2)
    train(one, before)

    restore_state(save_state(memory, {"model": one, "optimizer": before}), {"model": two, "optimizer": fresh})

    assert set(fresh.state) == {two[0].bias, two[2].weight, two[2].bias}
    assert_same(two.state_dict(), one.state_dict())
    train(one, before, start=1)
    train(two, fresh, start=1)
    assert_same(two.state_dict(), one.state_dict())


def test_optimizer_state_follows_names_and_not_the_order_of_parameters(memory: Store):
    one, two = layers(1), layers(2)
    before = torch.optim.AdamW([{"params": one[0].parameters(), "lr": 0.1}, {"params": one[2].parameters(), "lr": 0.2}])
    fresh = torch.optim.AdamW([{"params": list(two[2].parameters())[::-1]}, {"params": two[0].parameters()}])
    train(one, before)

    restore_state(save_state(memory, {"optimizer": before, "model": one}), {"model": two, "optimizer": fresh})

    assert [group["lr"] for group in fresh.param_groups] == [0.2, 0.1]
    for mine, theirs in zip(one.parameters(), two.parameters(), strict=True):
        assert_same(fresh.state[theirs], before.state[mine])


def test_two_modules_under_one_optimizer_and_two_optimizers_over_one_module(memory: Store):
    def build(seed: int) -> State:
        body, head = layers(seed), layers(seed + 100)
        return {
            "body": body,
            "head": head,
            "both": torch.optim.Adam([*body.parameters(), *head.parameters()]),
            "first": torch.optim.SGD(body[0].parameters(), lr=0.1, momentum=0.9),
            "second": torch.optim.RMSprop(body[2].parameters(), lr=0.1),
        }

    one, two = build(1), build(2)
    for name in ("both", "first", "second"):
        train(nn.Sequential(one["body"], one["head"]), one[name])

    restore_state(save_state(memory, one), two)

    for name, entry in one.items():
        assert_same(two[name].state_dict(), entry.state_dict(), name)


def test_a_slot_that_holds_none_comes_back_as_none(memory: Store):
    one, two = layers(1), layers(2)
    before = torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9)
    fresh = torch.optim.SGD(two.parameters(), lr=0.1, momentum=0.9)
    for parameter in one.parameters():
        before.state[parameter]["momentum_buffer"] = None

    restore_state(save_state(memory, {"model": one, "optimizer": before}), {"model": two, "optimizer": fresh})

    assert_same(fresh.state_dict(), before.state_dict())
    train(one, before, steps=2)
    train(two, fresh, steps=2)
    assert_same(two.state_dict(), one.state_dict())


def test_nested_tensors_in_an_optimizers_slots_come_back(memory: Store):
    def build(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = layers(seed)
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    (one, before), (two, fresh) = build(1), build(2)
    before.state[one[0].weight] = {"factors": {"left": torch.rand(3), "right": [torch.rand(2), 7]}, "count": 3}

    restore_state(save_state(memory, {"model": one, "optimizer": before}), {"model": two, "optimizer": fresh})

    assert_same(fresh.state_dict(), before.state_dict())


# --- schedulers, scalers ---


class Halving:
    """Is a callable object with state of its own: LambdaLR saves its __dict__."""

    def __init__(self, every: int) -> None:
        self.every = every
        self.calls = 0

    def __call__(self, step: int) -> float:
        self.calls += 1
        return 0.5 ** (self.calls // self.every)


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "LambdaLR": lambda o: schedulers.LambdaLR(o, [lambda s: 0.9**s, lambda s: 1 / (s + 1)]),
    "LambdaLR-objects": lambda o: schedulers.LambdaLR(o, [Halving(3), Halving(5)]),
    "MultiplicativeLR": lambda o: schedulers.MultiplicativeLR(o, lambda s: 0.9 + 0.01 * (s % 3)),
    "MultiplicativeLR-objects": lambda o: schedulers.MultiplicativeLR(o, [Halving(3), Halving(5)]),
    "StepLR": lambda o: schedulers.StepLR(o, step_size=3, gamma=0.5),
    "MultiStepLR": lambda o: schedulers.MultiStepLR(o, milestones=[2, 5, 5, 9, 13], gamma=0.5),
    "ConstantLR": lambda o: schedulers.ConstantLR(o, factor=0.3, total_iters=9),
    "LinearLR": lambda o: schedulers.LinearLR(o, start_factor=0.1, total_iters=12),
    "ExponentialLR": lambda o: schedulers.ExponentialLR(o, gamma=0.9),
    "CosineAnnealingLR": lambda o: schedulers.CosineAnnealingLR(o, T_max=10, eta_min=0.001),
    "CosineAnnealingWarmRestarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, T_0=4, T_mult=2),
    "PolynomialLR": lambda o: schedulers.PolynomialLR(o, total_iters=15, power=2.0),
    "CyclicLR": lambda o: schedulers.CyclicLR(o, base_lr=0.01, max_lr=0.1, step_size_up=3, step_size_down=5),
    "CyclicLR-exponential": lambda o: schedulers.CyclicLR(o, 0.01, 0.1, step_size_up=3, mode="exp_range", gamma=0.9),
    "CyclicLR-function": lambda o: schedulers.CyclicLR(o, 0.01, 0.1, step_size_up=3, scale_fn=lambda x: 1 / (1 + x)),
    "OneCycleLR": lambda o: schedulers.OneCycleLR(o, max_lr=[0.1, 0.2], total_steps=40),
    "OneCycleLR-linear": lambda o: schedulers.OneCycleLR(
        o, max_lr=0.1, total_steps=40, anneal_strategy="linear", three_phase=True
    ),
    "ReduceLROnPlateau": lambda o: schedulers.ReduceLROnPlateau(o, factor=0.5, patience=2, cooldown=1),
    "ReduceLROnPlateau-max": lambda o: schedulers.ReduceLROnPlateau(o, mode="max", patience=1, threshold_mode="abs"),
    "SequentialLR": lambda o: schedulers.SequentialLR(
        o,
        [schedulers.LinearLR(o, 0.1, total_iters=4), schedulers.ExponentialLR(o, 0.9), schedulers.ConstantLR(o, 0.2)],
        milestones=[4, 11],
    ),
    "ChainedScheduler": lambda o: schedulers.ChainedScheduler(
        [schedulers.MultiStepLR(o, [3, 8]), schedulers.ExponentialLR(o, 0.95)], optimizer=o
    ),
    "SWALR": lambda o: SWALR(o, swa_lr=0.02, anneal_epochs=9),
    "SWALR-linear": lambda o: SWALR(o, swa_lr=[0.02, 0.03], anneal_epochs=9, anneal_strategy="linear"),
}


def test_every_scheduler_of_the_installed_torch_is_tried_below():
    classes = {
        name
        for module in (schedulers, torch.optim.swa_utils)
        for name, kind in vars(module).items()
        if isinstance(kind, type) and issubclass(kind, schedulers.LRScheduler)
    }

    assert classes - {"LRScheduler", "_LRScheduler"} == {name.partition("-")[0] for name in SCHEDULERS}


@pytest.mark.parametrize("steps", [0, 1, 6])
@pytest.mark.parametrize("kind", SCHEDULERS)
def test_the_next_twenty_learning_rates_are_the_same_after_a_restore(memory: Store, kind: str, steps: int):
    def build() -> State:
        model = layers(1)
        groups = [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[2].parameters(), "lr": 0.05}]
        optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
        return {"model": model, "optimizer": optimizer, "scheduler": SCHEDULERS[kind](optimizer)}

    one, two = build(), build()
    rates(one, 0, steps)

    restore_state(save_state(memory, one), two)

    assert rates(two, steps, 20) == rates(one, steps, 20)
    assert_same(two["scheduler"].state_dict(), one["scheduler"].state_dict())


def test_a_scheduler_over_tensor_learning_rates_survives(memory: Store):
    def build() -> State:
        model = layers(1)
        optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.1))
        return {"model": model, "optimizer": optimizer, "scheduler": schedulers.ExponentialLR(optimizer, 0.9)}

    one, two = build(), build()
    rates(one, 0, 3)

    restore_state(save_state(memory, one), two)

    assert_same(rates(two, 3, 20), rates(one, 3, 20))


def test_a_scheduler_survives_on_every_store(store: Store):
    def build() -> State:
        model = layers(1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        return {"model": model, "optimizer": optimizer, "scheduler": SCHEDULERS["SequentialLR"](optimizer)}

    one, two = build(), build()
    rates(one, 0, 5)

    restore_state(save_state(store, one), two)

    assert rates(two, 5, 20) == rates(one, 5, 20)


@pytest.mark.parametrize("enabled", [True, False])
def test_a_grad_scaler_survives(memory: Store, enabled: bool):
    def build(seed: int) -> State:
        model = layers(seed)
        scaler = torch.amp.GradScaler("cpu", enabled=enabled, init_scale=1024.0, growth_interval=2)
        return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "scaler": scaler}

    def step(state: State) -> None:
        state["optimizer"].zero_grad()
        state["scaler"].scale(state["model"](torch.ones(2, 4)).mean()).backward()
        state["scaler"].step(state["optimizer"])
        state["scaler"].update()

    one, two = build(1), build(2)
    for _ in range(3):
        step(one)

    restore_state(save_state(memory, one), two)
    for _ in range(3):
        step(one)
        step(two)

    assert two["scaler"].get_scale() == one["scaler"].get_scale()
    assert_same(two["scaler"].state_dict(), one["scaler"].state_dict())
    assert_same(two["model"].state_dict(), one["model"].state_dict())


# --- random state ---


def draws() -> tuple[Any, ...]:
    """Draws from every generator, including the cached second normal of python and numpy."""
    return (
        *(random.gauss(0, 1) for _ in range(3)),
        random.random(),
        *np.random.standard_normal(3).tolist(),  # noqa: NPY002  the global generator is what user code draws from
        int(np.random.randint(1 << 30)),  # noqa: NPY002
        *torch.randn(3).tolist(),
        torch.randperm(20).tolist(),
    )


def save_two_ranks(store: Store) -> tuple[Checkpoint, list[tuple[Any, ...]]]:
    """Saves two ranks with random state of their own. Returns the checkpoint, and what each rank would draw next."""
    staged, expected = [], []
    model = nn.Linear(1, 1)
    for rank in range(2):
        random.seed(rank)
        np.random.seed(rank)  # noqa: NPY002
        torch.manual_seed(rank)
        draws()
        staged.append(TrainState({"model": model}, rank=rank, world_size=2).stage(Progress(step=1)))
        expected.append(draws())
    return save(store, staged), expected


def test_each_rank_gets_its_own_random_state_back_exactly(store: Store):
    checkpoint, expected = save_two_ranks(store)

    found = []
    for rank in range(2):
        restored = TrainState({"model": nn.Linear(1, 1)}, rank=rank, world_size=2).apply(checkpoint)
        said = restored.apply_rng()
        found.append((said, draws()))

    assert found == [("restored", drawn) for drawn in expected]


def test_a_new_rank_derives_its_random_state_from_the_checkpoint_and_its_number(memory: Store):
    checkpoint, expected = save_two_ranks(memory)

    def drawn(rank: int) -> tuple[Any, ...]:
        restored = TrainState({"model": nn.Linear(1, 1)}, rank=rank, world_size=4).apply(checkpoint)
        assert "derived" in restored.apply_rng()
        return draws()

    first = [drawn(2), drawn(3)]
    draws()
    second = [drawn(2), drawn(3)]

    assert first == second
    everything = [*expected, *first]
    for i, one in enumerate(everything):
        for other in everything[i + 1 :]:
            assert all(a != b for a, b in zip(one, other, strict=True))


def test_random_state_that_a_checkpoint_does_not_have_is_left_and_named():
    random.seed(1)
    saved = rng_values()
    drawn = draws()[0]
    np.random.seed(5)  # noqa: NPY002
    expected = np.random.get_state()[1].tolist()  # noqa: NPY002

    said = apply_rng([{name: state for name, state in saved.items() if name not in ("numpy", "accelerator")}], 0)

    assert said == "restored; not in the checkpoint and left as it is: numpy, accelerator"
    assert np.random.get_state()[1].tolist() == expected  # noqa: NPY002
    assert draws()[0] == drawn


def test_staging_and_restoring_leave_the_random_state_alone(memory: Store):
    state = {"model": layers(1)}
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)  # noqa: NPY002
    expected = draws()
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)  # noqa: NPY002

    restore_state(save_state(memory, state), state)

    assert draws() == expected


# --- the user's own objects ---


def test_an_object_of_the_users_own_comes_back_with_types_and_tensors(store: Store):
    state = {
        "tensors": (torch.rand(3), [torch.arange(4), {7: torch.tensor(True), (1, "x"): torch.rand(2, 2).half()}]),
        5: torch.rand(2, dtype=torch.float64),
        "5 or not": {True: 1, None: 2, 2.5: 3},
        "empty": [(), [], {}, set(), torch.empty(0, 2), b"", ""],
        "sets": ({1, 2}, frozenset({"a"})),
        "counted": Counter("hello"),
        "ordered": OrderedDict([("b", 1), ("a", (2,))]),
        "window": deque([1.5, math.inf], maxlen=3),
        "numbers": [math.inf, -math.inf, math.nan, 1e-320, 0.1, 2**70, -0.0, complex(1, -2), True, None],
        "bytes": (b"\x00\xff", bytearray(b"ab")),
        "arrays": [np.arange(6, dtype=np.int16).reshape(2, 3), np.float32(0.1), np.array(3.5), np.array([True])],
        "$tensor": "not a tag",
        "text": "\u2603 \U0001f600 \x00 \udc80",
    }
    own = Own({})

    restore_state(save_state(store, {"own": Own(state)}), {"own": own})

    assert_same(own.state, state)


def test_tensors_under_names_that_look_alike_are_not_mixed_up(memory: Store):
    state = {"pair": ({1: torch.zeros(2), "1": torch.ones(2)}, {"a.b": torch.zeros(1), "a": {"b": torch.ones(1)}})}
    own = Own({})

    # Keeping both or refusing is right; one value for both is not.
    try:
        checkpoint = save_state(memory, {"own": Own(state)})
    except ConfigError:
        return
    restore_state(checkpoint, {"own": own})

    assert_same(own.state, state)


# --- what cannot be saved ---


class Handle:
    """Cannot be held in JSON."""


REFUSED: dict[str, tuple[Callable[[], State], str]] = {
    "object": (lambda: {"own": Own({"a": [1, {"b": Handle()}]})}, r"own\.a\.1\.b is a .*Handle"),
    "lambda in a group": (
        lambda: {"optimizer": torch.optim.SGD([{"params": layers(1).parameters(), "call": lambda: 1}], lr=0.1)},
        r"optimizer\.param_groups\.0\.call is a .*function",
    ),
    "generator": (lambda: {"own": Own({"g": torch.Generator()})}, r"own\.g is a .*Generator"),
    "dict subclass": (lambda: {"own": Own({"d": type("D", (dict,), {})()})}, r"own\.d is a .*D"),
    "object array": (lambda: {"own": Own({"o": np.array([Handle()])})}, r"own\.o is a numpy\.ndarray"),
    "too deep": (lambda: {"own": Own(nested(200))}, r"own\..*nested deeper than 100"),
    "sparse tensor": (lambda: {"own": Own({"s": torch.eye(3).to_sparse()})}, r"own\.s\b"),
    "meta tensor": (lambda: {"own": Own({"m": torch.empty(3, device="meta")})}, r"own\.m\b"),
    "same name twice": (lambda: {"own": Own({1: torch.zeros(1), "1": torch.ones(1)})}, r"own\.1\b"),
    "not a dict": (lambda: {"own": Own([1, 2])}, r"state\['own'\].*list, not a dict"),
    "no state_dict": (lambda: {"thing": Handle()}, r"state\['thing'\] is a Handle without state_dict"),
    "DataLoader": (lambda: {"data": DataLoader([1, 2])}, r"state\['data'\].*raycheck\.Batches"),
    "nothing": (dict, r"the state is empty"),
    "rng": (lambda: {"rng": Own({})}, r"state\['rng'\].*raycheck's own"),
    "progress": (lambda: {"progress": Own({})}, r"state\['progress'\].*raycheck's own"),
    "dotted name": (lambda: {"a.b": Own({})}, r"state\['a\.b'\]: use a plain name"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_saved_is_refused_by_its_path(case: str):
    make, message = REFUSED[case]
    state = make()

    with pytest.raises(ConfigError, match=message):
        TrainState(state, rank=0, world_size=1).stage(Progress())


def nested(depth: int) -> State:
    return {"n": nested(depth - 1)} if depth else {}


def test_fsdp1_is_refused_with_advice(group_of_one: None):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch advises against FSDP1 too
        model = nn.Sequential(FullyShardedDataParallel(nn.Linear(2, 2), device_id=torch.device("cpu")))

    with pytest.raises(ConfigError, match=r"state\['model'\].*fully_shard"):
        TrainState({"model": model}, rank=0, world_size=1)


# --- checkpoints of something else ---


def stepped(model: nn.Module, **options: Any) -> State:
    """Returns the model and an AdamW with state for every parameter."""
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


def bag(**tensors: torch.Tensor) -> nn.Module:
    module = nn.Module()
    for name, tensor in tensors.items():
        module.register_parameter(name, nn.Parameter(tensor))
    return module


def test_all_differences_are_listed_at_once_and_nothing_is_changed(store: Store):
    saved = stepped(bag(same=torch.rand(2), shape=torch.rand(3, 4), dtype=torch.rand(5), gone=torch.rand(6)))
    saved |= {"ema": bag(weight=torch.rand(2)), "counter": Own({"n": 1})}
    live = stepped(
        bag(same=torch.rand(2), shape=torch.rand(3, 5), dtype=torch.rand(5).double(), new=torch.rand(7)), amsgrad=True
    )
    live |= {"scaler": Own({"scale": 2.0}), "head": bag(weight=torch.rand(2))}
    checkpoint = save_state(store, saved)
    before = snapshot(live)

    with pytest.raises(StateMismatchError) as raised:
        restore_state(checkpoint, live)

    text = str(raised.value)
    missing = [line.partition("missing in the checkpoint: ")[2] for line in text.splitlines()]
    unexpected = [line.partition("only in the checkpoint: ")[2] for line in text.splitlines()]
    assert "nothing was changed" in text
    unlike = [line.partition("not alike: ")[2] for line in text.splitlines()]
    assert "model.shape: float32[3, 5] here, float32[3, 4] saved" in unlike
    assert "model.dtype: float64[5] here, float32[5] saved" in unlike
    for line in (
        "model.new",
        "optimizer.state.new",
        "optimizer.state.same.max_exp_avg_sq",
        "optimizer.state.shape.max_exp_avg_sq",
        "optimizer.state.dtype.max_exp_avg_sq",
        "scaler",
        "head.weight",
    ):
        assert line in missing
    for line in ("model.gone", "optimizer.state.gone", "ema", "counter"):
        assert line in unexpected
    assert not any(line.startswith("model.same") for line in (*missing, *unexpected))
    assert_same(snapshot(live), before)


DIFFERENT: dict[str, tuple[Callable[[], State], Callable[[], State], str]] = {
    "missing parameter": (
        lambda: {"model": bag(a=torch.ones(1))},
        lambda: {"model": bag(a=torch.ones(1), b=torch.ones(2))},
        r"missing in the checkpoint: model\.b",
    ),
    "extra parameter": (
        lambda: {"model": bag(a=torch.ones(1), b=torch.ones(2))},
        lambda: {"model": bag(a=torch.ones(1))},
        r"only in the checkpoint: model\.b",
    ),
    "shape": (
        lambda: {"model": bag(a=torch.ones(2))},
        lambda: {"model": bag(a=torch.ones(2, 1))},
        r"not alike: model\.a: float32\[2, 1\] here, float32\[2\] saved",
    ),
    "dtype": (
        lambda: {"model": bag(a=torch.ones(2))},
        lambda: {"model": bag(a=torch.ones(2).bfloat16())},
        r"not alike: model\.a: bfloat16\[2\] here, float32\[2\] saved",
    ),
    "missing slot": (
        lambda: stepped(bag(a=torch.ones(2))),
        lambda: stepped(bag(a=torch.ones(2)), amsgrad=True),
        r"missing in the checkpoint: optimizer\.state\.a\.max_exp_avg_sq",
    ),
    "shape of a slot": (
        lambda: {"optimizer": stepped(bag(a=torch.ones(2)))["optimizer"]},
        lambda: {"optimizer": stepped(bag(a=torch.ones(3)))["optimizer"]},
        r"optimizer\.state\.unnamed\.0\.0\.exp_avg",
    ),
    "parameter that the optimizer does not know": (
        lambda: {"optimizer": torch.optim.SGD([torch.ones(1), torch.ones(2)])},
        lambda: {"optimizer": torch.optim.SGD([torch.ones(1)])},
        r"only in the checkpoint: optimizer\.state\.unnamed\.0\.1",
    ),
    "missing entry": (
        lambda: {"model": layers(1)},
        lambda: {"model": layers(1), "own": Own({"n": 1})},
        r"missing in the checkpoint: own",
    ),
    "missing optimizer": (
        lambda: {"model": layers(1)},
        lambda: stepped(layers(1)),
        r"missing in the checkpoint: optimizer",
    ),
    "extra entry": (
        lambda: {"model": layers(1), "own": Own({"n": 1})},
        lambda: {"model": layers(1)},
        r"only in the checkpoint: own",
    ),
    "extra state that only the checkpoint has": (
        lambda: {"model": Rich(1)},
        lambda: {"model": without_extra_state(Rich(2))},
        r"only in the checkpoint: model\._extra_state",
    ),
    "extra state that only the module has": (
        lambda: {"model": without_extra_state(Rich(1))},
        lambda: {"model": Rich(2)},
        r"missing in the checkpoint: model\._extra_state",
    ),
    "a parameter below a key at which a hook puts a value": (
        lambda: {"model": with_value_at("fc", nn.ModuleDict({"fc": bag(a=torch.ones(1), b=torch.ones(2))}))},
        lambda: {"model": with_value_at("fc", nn.ModuleDict({"fc": bag(a=torch.ones(1))}))},
        r"only in the checkpoint: model\.fc\.b",
    ),
    "another stream of batches": (
        lambda: {"model": layers(1), "data": Batches(range(10), global_batch=2, seed=1, rank=0, world_size=1)},
        lambda: {"model": layers(2), "data": Batches(range(10), global_batch=2, seed=2, rank=0, world_size=1)},
        r"not alike: data: .*seed: saved 1, here 2",
    ),
    "a module where an object is": (
        lambda: {"own": layers(1)},
        lambda: {"own": Own({"number": 1})},
        r"not alike: own: an object or dict here, a module or an optimizer saved",
    ),
    "an optimizer where an object is": (
        lambda: {"own": stepped(bag(a=torch.ones(2)))["optimizer"]},
        lambda: {"own": Own({"number": 1})},
        r"not alike: own: an object or dict here, a module or an optimizer saved",
    ),
    "a dict where an optimizer is": (
        lambda: {"own": {"number": 1}},
        lambda: {"own": stepped(bag(a=torch.ones(2)))["optimizer"]},
        r"not alike: own: an optimizer here, something else saved",
    ),
    "a bare value where an optimizer is": (
        lambda: {"own": [1]},
        lambda: {"own": stepped(bag(a=torch.ones(2)))["optimizer"]},
        r"not alike: own: an optimizer here, something else saved",
    ),
}


@pytest.mark.parametrize("case", DIFFERENT)
def test_a_difference_is_refused_and_changes_nothing(memory: Store, case: str):
    make_saved, make_live, message = DIFFERENT[case]
    checkpoint = save_state(memory, make_saved())
    live = make_live()
    before = snapshot(live)

    with pytest.raises(StateMismatchError, match=message):
        restore_state(checkpoint, live)

    assert_same(snapshot(live), before)


def with_value_at(key: str, module: nn.Module) -> nn.Module:
    """Has the module's state_dict hold a value, which is no tensor, under this key."""
    module.register_state_dict_post_hook(lambda _, state, prefix, __: state.update({prefix + key: 7}))
    return module


def without_extra_state(module: Rich) -> nn.Module:
    """Returns a module with these tensors and no extra state."""
    plain = nn.Module()
    for name, child in module.named_children():
        plain.add_module(name, child)
    plain.register_buffer("mask", module.mask)
    return plain


def test_only_the_asked_entries_are_restored_when_told_so(memory: Store):
    saved = stepped(layers(1)) | {"own": Own({"n": 1})}
    model = layers(2)

    checkpoint = save_state(memory, saved, step=9)
    done = TrainState({"model": model}, rank=0, world_size=1).apply(checkpoint, Selection.of(["model"], ()))

    assert_same(model.state_dict(), saved["model"].state_dict())
    assert done.progress == Progress()
    assert done.report.restored == ("model",)
    assert done.random_source is None


# --- helpers ---


def layers(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 4))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, *, steps: int = 1, start: int = 0) -> None:
    for step in range(start, start + steps):
        batch = torch.randn(3, 4, generator=torch.Generator().manual_seed(step))

        def closure(batch: torch.Tensor = batch) -> torch.Tensor:
            optimizer.zero_grad()
            loss = (model(batch) - 1).pow(2).mean()
            loss.backward()
            return loss

        optimizer.step(closure)


def rates(state: State, start: int, count: int) -> list[list[Any]]:
    """Returns the learning rates (and momenta) of the next steps."""
    found = []
    optimizer, scheduler = state["optimizer"], state["scheduler"]
    for step in range(start, start + count):
        optimizer.step()
        if isinstance(scheduler, schedulers.ReduceLROnPlateau):
            scheduler.step(1.0 / (1 + step // 4))
        else:
            scheduler.step()
        found.append(
            [copy.copy(group[key]) for group in optimizer.param_groups for key in ("lr", "momentum") if key in group]
        )
    return found


def names_of(checkpoint: Checkpoint) -> set[str]:
    return {tensor.name for tensor in checkpoint.read_index(checkpoint.read_manifest()).tensors}


def snapshot(state: State) -> Any:
    return {name: copy.deepcopy(entry.state_dict()) for name, entry in state.items()}


def assert_same(found: Any, expected: Any, at: str = "it") -> None:
    """Compares to the last bit and type; NaN equals NaN."""
    assert type(found) is type(expected), at
    if isinstance(expected, torch.Tensor):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape), at
        assert torch.equal(found, expected), at
    elif isinstance(expected, np.ndarray):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape), at
        assert found.tobytes() == expected.tobytes(), at
    elif isinstance(expected, dict):
        assert list(found) == list(expected), at
        for key, value in expected.items():
            assert_same(found[key], value, f"{at}[{key!r}]")
    elif isinstance(expected, list | tuple | deque):
        assert len(found) == len(expected), at
        for i, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_same(one, other, f"{at}[{i}]")
        assert getattr(found, "maxlen", None) == getattr(expected, "maxlen", None), at
    elif isinstance(expected, float):
        assert repr(found) == repr(expected), at
    else:
        assert found == expected, at
