"""What the ranks run: a small training loop as Accelerate's own examples have it, inside a raycheck run or without."""

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DataLoaderConfiguration, DistributedType, FullyShardedDataParallelPlugin, set_seed
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, Dataset

import raycheck

LENGTH = 88


class Noisy(Dataset[Any]):
    """Draws from the global generators for each sample, as an augmentation does."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, number: int) -> Any:
        inputs = torch.randn(6, generator=torch.Generator().manual_seed(number)) + 0.1 * torch.randn(6)
        return number, inputs, inputs.sum().sin() + 0.01 * random.random()


@dataclass(frozen=True, kw_only=True)
class Job:
    """Says how to train. stop: end abruptly, as if killed, at the end of this optimizer step. batch: per process."""

    batch: int = 4
    accumulate: int = 1
    epochs: int = 3
    stop: int = -1
    every_steps: int = 3
    seedable: bool = False
    split: bool = False
    fsdp: bool = False
    workers: int = 0
    options: dict[str, Any] = field(default_factory=dict)


class StoppedError(Exception):
    """The process was killed, so far as raycheck knows."""


def whole(weight: torch.Tensor) -> torch.Tensor:
    weight = weight.detach()
    return weight.full_tensor() if isinstance(weight, DTensor) else weight


@contextmanager
def accelerator_of(rank: int, world_size: int, job: Job) -> Iterator[Accelerator]:
    """A new Accelerator in a process that may have had one before."""
    before = dict(os.environ)
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT="1"
    )
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=job.accumulate,
        dataloader_config=DataLoaderConfiguration(split_batches=job.split, use_seedable_sampler=job.seedable),
    )
    assert accelerator.num_processes == world_size
    if job.fsdp:  # Accelerate offers FSDP on accelerators only; what it then does works on CPUs too
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="no_wrap")
        AcceleratorState._shared_state.update(distributed_type=DistributedType.FSDP, fsdp_plugin=plugin)
        assert accelerator.is_fsdp2
    try:
        yield accelerator
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        os.environ.clear()
        os.environ.update(before)


def prepared(accelerator: Accelerator, job: Job) -> tuple[Any, Any, Any, Any]:
    set_seed(7)
    model = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.2), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    dataset = Noisy()
    loader = DataLoader(dataset, batch_size=job.batch, shuffle=True, num_workers=job.workers)
    each = 1 if job.split else accelerator.num_processes  # how often Accelerate steps the scheduler at one step
    total = LENGTH // (job.batch * job.accumulate * each) * job.epochs * each
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / total))
    return accelerator.prepare(model, optimizer, loader, scheduler)


def train(rank: int, world_size: int, job: Job, uri: str | None) -> dict[str, Any]:
    """Returns losses, learning rates and sample numbers by step, and the last weights."""
    with accelerator_of(rank, world_size, job) as accelerator:
        seen: dict[str, Any] = {"losses": [], "samples": [], "rates": [], "epochs": []}
        epochs: Any = range(job.epochs)
        early = job.accumulate > 1
        ckpt = None

        def attach() -> Any:
            settings = raycheck.SaveSettings(every_steps=job.every_steps, **job.options)
            assert uri is not None
            return raycheck.accelerate.attach(accelerator, settings, group=raycheck.torchrun_group(uri))

        if uri and early:
            ckpt = attach()
        model, optimizer, loader, scheduler = prepared(accelerator, job)
        if uri and not early:
            ckpt = attach()
        if ckpt:
            epochs = ckpt.epochs(job.epochs)
        step = 0
        try:
            for epoch in epochs:
                seen["epochs"].append(epoch)
                for numbers, inputs, wanted in loader:
                    with accelerator.accumulate(model):
                        loss = (model(inputs).squeeze(1) - wanted).square().mean()
                        accelerator.backward(loss)
                        optimizer.step()
                        scheduler.step()
                        optimizer.zero_grad()
                    seen["losses"].append(loss.item())
                    seen["samples"].append(numbers.tolist())
                    seen["rates"].append(scheduler.get_last_lr()[0])
                    step += accelerator.sync_gradients
                    if step == job.stop:
                        raise StoppedError  # noqa: TRY301
        except StoppedError as error:
            assert ckpt is not None
            ckpt.checkpointer.wait()
            ckpt.__exit__(StoppedError, error, None)
        seen["weights"] = [whole(weight).tolist() for weight in model.parameters()]
        return seen
