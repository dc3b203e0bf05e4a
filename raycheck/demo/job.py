"""Trains a byte-level Llama on Python's source files with FSDP2, in a training function as users write it."""

import os
import signal
import sysconfig
from pathlib import Path
from typing import Any

import ray
import ray.train.torch
import torch
from torch.distributed.fsdp import fully_shard
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM

import raycheck

CONTEXT_BYTES = 128
CORPUS_BYTES = 4_000_000
GLOBAL_BATCH = 24


def build_model() -> Any:
    """Make a randomly initialized Llama with about 3 M parameters, whose tokens are bytes."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=192,
            intermediate_size=576,
            num_hidden_layers=6,
            num_attention_heads=6,
            num_key_value_heads=6,
            max_position_embeddings=2 * CONTEXT_BYTES,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
        )
    )


class StandardLibrary(Dataset[torch.Tensor]):
    """The text of the Python standard library, split into contexts of 128 bytes."""

    def __init__(self) -> None:
        text = b""
        for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
            text += path.read_bytes()
            if len(text) > CORPUS_BYTES:
                break
        self._text = torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def __len__(self) -> int:
        return len(self._text) // CONTEXT_BYTES

    def __getitem__(self, index: int) -> torch.Tensor:
        return self._text[index * CONTEXT_BYTES : (index + 1) * CONTEXT_BYTES].long()


@ray.remote(num_cpus=0)
class Board:
    """An actor that collects the workers' events for the driver, and permits exactly one kill."""

    def __init__(self) -> None:
        self._events: list[dict[str, Any]] = []
        self._may_kill = True

    def pin(self, event: dict[str, Any]) -> None:
        self._events.append(event)

    def read(self, start: int) -> list[dict[str, Any]]:
        return self._events[start:]

    def ask_for_kill(self) -> bool:
        granted, self._may_kill = self._may_kill, False
        return granted


def train_fn(config: dict[str, Any]) -> None:
    """Train for config["steps"] steps, in one worker.

    The last rank kills itself once, after step config["kill_step"].
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    device = ray.train.torch.get_device()
    rank, world_size = ray.train.get_context().get_world_rank(), ray.train.get_context().get_world_size()
    model = build_model().to(device)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=10)
    data = raycheck.Batches(StandardLibrary(), global_batch=GLOBAL_BATCH, seed=0)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "data": data}
    with raycheck.Checkpointer(state, raycheck.SaveSettings(every_steps=config["save_every"])) as ckpt:
        at = ckpt.restore()
        step = at.step
        if rank == 0:
            restored = {"kind": "start", "attempt": at.attempt, "step": at.step, "ranks": world_size}
            ray.get(config["board"].pin.remote(restored))
        epoch = at.epoch
        while step < config["steps"]:
            for batch in data.loader(epoch):
                if step >= config["steps"]:
                    break
                tokens = batch.to(device)
                loss = model(input_ids=tokens, labels=tokens).loss
                loss.backward()
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                step += 1
                ckpt.end_step({"loss": loss})
                if rank == 0:
                    ray.get(config["board"].pin.remote({"kind": "step", "step": step, "loss": loss.item()}))
                if step == config["kill_step"] and rank == world_size - 1:
                    _die_once(config["board"], rank, step)
            epoch += 1


def _die_once(board: Any, rank: int, step: int) -> None:
    if ray.get(board.ask_for_kill.remote()):
        ray.get(board.pin.remote({"kind": "kill", "rank": rank, "step": step, "pid": os.getpid()}))
        os.kill(os.getpid(), signal.SIGKILL)
