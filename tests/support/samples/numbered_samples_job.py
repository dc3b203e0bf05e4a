"""The training function of the matrix: FSDP2 or DDP on numbered samples. Each rank writes, step by step, which samples it was given."""

import json
import os
import signal
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch
from torch.distributed.fsdp import fully_shard
from torch.utils.data import Dataset

import raycheck

SAMPLES, BATCH, SEED = 120, 12, 3


class Numbered(Dataset[tuple[torch.Tensor, int]]):
    """A dataset in which each sample holds its own number."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((4,), index / SAMPLES), index


def train(config: dict[str, Any]) -> None:
    """Options: folder, steps, pause_s, settings; hurt=(kind, rank, step): how a rank fails in the first attempt;
    replicated_width: DDP, with a layer of that width."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    context = ray.train.get_context()
    rank, world_size = context.get_world_rank(), context.get_world_size()
    width = config.get("replicated_width")
    wide = [torch.nn.Linear(width, width)] if width else []
    model: Any = torch.nn.Sequential(
        torch.nn.Linear(4, width or 64), *wide, torch.nn.Tanh(), torch.nn.Linear(width or 64, 1)
    )
    model = ray.train.torch.prepare_model(model) if width else fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = raycheck.Batches(Numbered(), global_batch=BATCH, seed=SEED)
    state = {"model": model, "optimizer": optimizer, "data": data}
    with raycheck.Checkpointer(state, raycheck.SaveSettings(**config["settings"])) as ckpt:
        at = ckpt.restore()
        tell = Teller(Path(config["folder"]), rank, at.attempt)
        resume = asdict(at.resume) if at.resume else None
        node = ray.get_runtime_context().get_node_id()
        tell("start", step=at.step, world_size=world_size, node=node, pid=os.getpid(), resume=resume)
        step, epoch = at.step, at.epoch
        while step < config["steps"]:
            for inputs, indices in data.loader(epoch):
                loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                step += 1
                tell(
                    "step",
                    step=step,
                    indices=indices.tolist(),
                    loss=loss.item(),
                    memory_step=ckpt.save_status.memory_step,
                )
                if at.attempt == 1 and config.get("hurt") and tuple(config["hurt"][1:]) == (rank, step):
                    if config["hurt"][0] == "leave":
                        return
                    hurt(config["hurt"][0])
                ckpt.end_step({"loss": loss})
                time.sleep(config["pause_s"])
                if step == config["steps"]:
                    break
            epoch += 1


def hurt(kind: str) -> None:
    if kind == "raise":
        raise ZeroDivisionError("a user's mistake")
    if kind == "exit":
        os._exit(1)
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError(kind)


class Teller:
    """Writes one line per event, each in one piece: a SIGKILL right after leaves it readable."""

    def __init__(self, folder: Path, rank: int, attempt: int) -> None:
        self._path = folder / f"story-{attempt:03d}-{rank}.jsonl"

    def __call__(self, kind: str, **facts: Any) -> None:
        with self._path.open("a") as story:
            story.write(json.dumps({"kind": kind, "at": time.monotonic(), **facts}) + "\n")
