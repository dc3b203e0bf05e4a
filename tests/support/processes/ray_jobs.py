"""Trains a small model in Ray's worker processes, which the Ray tests kill, and writes its story into files."""

import json
import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray.train
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import raycheck
from raycheck.bucket.reading import read_latest
from raycheck.bucket.store import open_store

SAMPLES, BATCH = 96, 8


def build(mode: str) -> tuple[Any, Any, Any]:
    """Returns model, optimizer and scheduler. Under FSDP2 the first layer is frozen.

    The model has dropout, which draws random numbers, and no BatchNorm: losses must match bit by bit.
    """
    torch.manual_seed(7)
    model: Any = torch.nn.Sequential(
        torch.nn.Linear(12, 33), torch.nn.Tanh(), torch.nn.Dropout(0.2), torch.nn.Linear(33, 1)
    )
    if mode == "ddp":
        model = DistributedDataParallel(model)
    if mode == "fsdp":
        model[0].requires_grad_(False)
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, optimizer, torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=9)


def dataset() -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(SAMPLES, 12, generator=generator)
    return torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))


def train(config: dict[str, Any]) -> None:
    """Trains as `config` says.

    mode: plain, ddp or fsdp. epochs. every: steps between saves. loader_workers. folder: where the story goes.
    kill: (rank, step) at which that rank kills itself, after the step `committed` is committed, or once the nodes hold
    that of `in_memory` or a later one. wait_at: a step after which it waits for its saves. pause_s: after each
    step. until: a file; training ends when it exists. settings: further ones of SaveSettings.
    """
    torch.set_num_threads(1)
    folder = Path(config["folder"])
    rank = ray.train.get_context().get_world_rank()
    model, optimizer, scheduler = build(config["mode"])
    data = raycheck.Batches(dataset(), global_batch=BATCH, seed=5)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "data": data}
    settings = raycheck.SaveSettings(every_steps=config.get("every", 4), **config.get("settings", {}))
    with raycheck.Checkpointer(state, settings) as ckpt:
        at = ckpt.restore()
        pointer = ray.train.get_checkpoint()
        tell(folder, rank, "start", at=at.step, attempt=at.attempt, pid=os.getpid(), ray=pointer and pointer.path)
        tell(
            folder, rank, "restored", checkpoint=at.checkpoint, is_from_memory=at.is_from_memory, bytes=at.bytes_fetched
        )
        step = at.step
        for epoch in range(at.epoch, config["epochs"]):
            for inputs, targets in data.loader(epoch, num_workers=config.get("loader_workers", 0)):
                loss = torch.nn.functional.mse_loss(model(inputs), targets)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                scheduler.step()
                step += 1
                ckpt.end_step({"loss": loss})
                tell(folder, rank, "step", step=step, attempt=at.attempt, loss=loss.item())
                if config.get("wait_at") == step:
                    ckpt.wait()
                if config.get("kill") == (rank, step) and at.attempt == 1:
                    if "in_memory" in config:
                        tell(folder, rank, "held", step=wait_for_memory(ckpt, config["in_memory"]))
                    else:
                        wait_for_commit(config["uri"], config["committed"])
                    os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(config.get("pause_s", 0))
            if config.get("until") and Path(config["until"]).exists():
                break
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    if rank == 0:
        torch.save(state, folder / "weights.pt")


def wait_for_commit(uri: str, step: int) -> None:
    """Waits until a checkpoint of this step or a later one is committed.

    It uses one client: making one for each look would take a core from the training that is waited for.
    """
    store, deadline = open_store(uri), time.monotonic() + 150
    while time.monotonic() < deadline:
        with suppress(raycheck.errors.NotFoundError):
            if any(entry.step >= step for entry in read_latest(store).live):
                return
        time.sleep(0.02)
    raise TimeoutError(f"step {step} was not committed")


def wait_for_memory(ckpt: raycheck.Checkpointer, step: int) -> int:
    """Waits until there is a memory checkpoint of this step or a later one. Returns its step."""
    deadline = time.monotonic() + 60
    while ckpt.save_status.memory_step < step:
        if time.monotonic() > deadline:
            raise TimeoutError(f"no memory checkpoint of step {step}: {ckpt.save_status}")
        time.sleep(0.02)
    return ckpt.save_status.memory_step


def tell(folder: Path, rank: int, kind: str, **facts: Any) -> None:
    """Appends one line to the rank's story, in one write: it is readable even if a SIGKILL follows at once."""
    with (folder / f"story-{rank}.jsonl").open("a") as story:
        story.write(json.dumps({"kind": kind, "rank": rank, **facts}) + "\n")


def story(folder: Path, kind: str, rank: int = 0) -> list[dict[str, Any]]:
    path = folder / f"story-{rank}.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [event for event in map(json.loads, lines) if event["kind"] == kind]
