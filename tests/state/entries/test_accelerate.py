"""The wrappers that Accelerate and Ray Train return are taken off, or refused by name before the first step."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DataLoaderConfiguration
from ray.train.torch import train_loop_utils
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import raycheck
from raycheck.bucket.reading import Checkpoint, read_latest
from raycheck.bucket.store import Store
from raycheck.state.train_state import TrainState
from tests.support.processes.fork_server import run_code
from tests.support.processes.save_without_ray import save_state


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Reset Accelerate, which keeps its settings in classes."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    assert not PartialState._shared_state


def prepared(seed: int, **options: Any) -> tuple[Accelerator, nn.Module, Any, Any]:
    torch.manual_seed(seed)
    accelerator = Accelerator(cpu=True, **options)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    return accelerator, *accelerator.prepare(model, optimizer, scheduler)


def newest(store: Store) -> Checkpoint:
    return Checkpoint(store, read_latest(store).live[-1])


def train(accelerator: Accelerator, model: nn.Module, optimizer: Any, scheduler: Any, *, steps: int) -> list[float]:
    losses = []
    for step in range(steps):
        inputs = torch.randn(16, 4, generator=torch.Generator().manual_seed(scheduler.scheduler.last_epoch))
        with accelerator.accumulate(model):
            loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        assert step < steps
    return losses


@pytest.mark.parametrize("options", [{}, {"mixed_precision": "bf16"}], ids=["fp32", "bf16"])
def test_a_loop_on_what_accelerate_prepared_goes_on_as_if_it_had_never_ended(memory: Store, options: Any) -> None:
    objects = prepared(0, **options)
    assert isinstance(objects[2], AcceleratedOptimizer)
    assert isinstance(objects[3], AcceleratedScheduler)
    train(*objects, steps=3)
    save_state(memory, dict(zip(("model", "optimizer", "scheduler"), objects[1:], strict=True)))
    straight = train(*objects, steps=4)

    again = prepared(1, **options)
    state = dict(zip(("model", "optimizer", "scheduler"), again[1:], strict=True))
    report = TrainState(state, rank=0, world_size=1).apply(newest(memory)).report

    assert set(report.restored) >= {"model", "optimizer", "scheduler"}
    assert train(*again, steps=4) == straight


def test_the_checkpoint_is_that_of_the_plain_objects(memory: Store) -> None:
    """A script may begin to use Accelerate between two restarts, or stop using it."""
    objects = prepared(0)
    train(*objects, steps=3)
    save_state(memory, dict(zip(("model", "optimizer", "scheduler"), objects[1:], strict=True)))
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    plain = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5),
    }

    TrainState(plain, rank=0, world_size=1).apply(newest(memory))

    assert optimizer.param_groups[0]["lr"] == objects[2].param_groups[0]["lr"] == 5e-3
    for mine, theirs in zip(optimizer.state.values(), objects[2].optimizer.state.values(), strict=True):
        assert torch.equal(mine["exp_avg"], theirs["exp_avg"])


@pytest.mark.filterwarnings("ignore:.set_vital")  # torchdata
@pytest.mark.parametrize("is_stateful", [False, True], ids=["plain", "stateful"])
@pytest.mark.parametrize("is_dispatched", [False, True], ids=["shard", "dispatcher"])
def test_loaders_of_accelerate_are_refused_by_name(is_stateful: bool, is_dispatched: bool) -> None:
    """The stateful loaders are refused too: restored in epoch 1, they would go on in the order of epoch 0."""
    config = DataLoaderConfiguration(use_stateful_dataloader=is_stateful, dispatch_batches=is_dispatched)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    loader = accelerator.prepare(DataLoader(TensorDataset(torch.arange(20)), batch_size=4, shuffle=True))
    name = "DataLoaderDispatcher" if is_dispatched else "DataLoaderShard"
    if type(loader).__name__ != name:
        pytest.skip(f"this Accelerate makes a {type(loader).__name__} of it")

    with pytest.raises(
        raycheck.errors.ConfigError, match=rf"state\['data'\] is a accelerate.data_loader.{name}.*Batches"
    ):
        TrainState({"data": loader}, rank=0, world_size=1)


def test_the_accelerator_itself_is_refused_by_name() -> None:
    with pytest.raises(raycheck.errors.ConfigError, match=r"accelerate\.accelerator\.Accelerator.*accelerator\.scaler"):
        TrainState({"all": Accelerator(cpu=True)}, rank=0, world_size=1)


def test_subclasses_that_may_have_state_of_their_own_are_not_seen_through() -> None:
    class Sharded(AcceleratedOptimizer):
        pass

    Accelerator(cpu=True)
    wrapped = Sharded(torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=1.0))

    with pytest.raises(raycheck.errors.ConfigError, match="Sharded, a wrapper that raycheck does not know"):
        TrainState({"optimizer": wrapped}, rank=0, world_size=1)


def test_an_optimizer_around_another_one_that_nobody_knows_is_refused_by_name() -> None:
    class Around(torch.optim.Optimizer):
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.optimizer = optimizer
            self.slow = [p.clone() for group in optimizer.param_groups for p in group["params"]]

        param_groups = property(lambda self: self.optimizer.param_groups)
        state = property(lambda self: self.optimizer.state)

    around = Around(torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=1.0))

    with pytest.raises(raycheck.errors.ConfigError, match="Around, which is not a torch optimizer itself"):
        TrainState({"optimizer": around}, rank=0, world_size=1)


def test_ray_trains_optimizer_is_seen_through_also_in_a_list(memory: Store) -> None:
    model = nn.Linear(2, 2)
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    wrapped = train_loop_utils._WrappedOptimizer(inner)

    state = TrainState({"model": model, "optimizers": [wrapped]}, rank=0, world_size=1)

    state.check()
    assert state.objects["optimizers.0"] is inner


def test_a_scaler_that_an_optimizer_steps_through_must_be_in_the_state() -> None:
    model = nn.Linear(2, 2)
    Accelerator(cpu=True)
    scaler = torch.amp.GradScaler("cpu")
    wrapped = AcceleratedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), scaler=scaler)

    with pytest.raises(
        raycheck.errors.ConfigError, match=r"state\['optimizer'\] steps through a GradScaler.*not in the state"
    ):
        TrainState({"model": model, "optimizer": wrapped}, rank=0, world_size=1).check()
    with pytest.raises(raycheck.errors.ConfigError, match="steps through"):
        TrainState({"model": model, "optimizer": [wrapped]}, rank=0, world_size=1).check()

    TrainState({"model": model, "optimizer": wrapped, "scaler": scaler}, rank=0, world_size=1).check()


def test_nobody_imports_accelerate_for_it() -> None:
    code = (
        "import sys, torch\n"
        "from raycheck.state.train_state import TrainState\n"
        "model = torch.nn.Linear(2, 2)\n"
        "TrainState({'model': model, 'optimizer': torch.optim.SGD(model.parameters())}, rank=0, world_size=1).check()\n"
        "assert 'accelerate' not in sys.modules\n"
    )

    done = run_code(code, timeout_s=120)

    assert done.returncode == 0, done.stderr
