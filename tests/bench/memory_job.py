"""The training that memory_checkpoints.py measures, and the driver that starts it: `python -m tests.bench.memory_job '{...}'`.

Each rank holds a shard of weights and of AdamW's moments that is as large as the config says. A step does next to nothing
and talks to nobody, so that what the network carries is raycheck's. Each rank tells its story in a file.
"""

import json
import logging
import os
import sys
import time
from pathlib import Path
from typing import Any

import ray
import ray.train
import ray.train.torch
import torch
from torch.distributed.fsdp import fully_shard

import raycheck

WIDTH = 2048
STEP_S = 0.05
IN_MEMORY, IN_BUCKET = 20, 200
"""Steps between memory checkpoints, and between saves to the bucket. The former are left out at the latter's steps."""


def train(config: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    context = ray.train.get_context()
    story = (Path(config["folder"]) / f"story-{context.get_world_rank()}.jsonl").open("a", buffering=1)

    def tell(kind: str, **facts: Any) -> None:
        story.write(json.dumps({"kind": kind, "at": time.time(), **facts}) + "\n")

    layer_bytes = 3 * 4 * WIDTH * WIDTH // context.get_world_size()
    layers = [torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(max(1, config["shard_bytes"] // layer_bytes))]
    model = torch.nn.Sequential(*layers)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    settings = raycheck.SaveSettings(
        every_steps=IN_BUCKET, upload_by=config["upload_by"], memory_every_steps=IN_MEMORY if config["memory"] else None
    )
    with raycheck.Checkpointer({"model": model, "optimizer": optimizer}, settings) as ckpt:
        at = ckpt.restore()
        tell("start", step=at.step, pid=os.getpid(), node=ray.get_runtime_context().get_node_id())
        if at.checkpoint is not None:
            tell("restored", step=at.step, from_memory=at.is_from_memory, seconds=at.seconds, bytes=at.bytes_fetched)
        for step in range(at.step + 1, 1_000_000):
            time.sleep(STEP_S)
            with torch.no_grad():
                next(model.parameters()).add_(1e-6)
            ended = time.monotonic()
            ckpt.end_step()
            status = ckpt.save_status
            blocked_s = time.monotonic() - ended
            tell("step", step=step, blocked_s=blocked_s, memory_step=status.memory_step, save_s=status.save_s)


def main() -> None:
    """RAY_ADDRESS says where. Ends only by an error, or when it is killed."""
    config = json.loads(sys.argv[1])
    ray.init(logging_level=logging.ERROR)
    trainer = ray.train.torch.TorchTrainer(
        train,
        train_loop_config=config,
        scaling_config=ray.train.ScalingConfig(num_workers=config["workers"]),
        run_config=ray.train.RunConfig(
            name="run", storage_path=config["uri"], failure_config=ray.train.FailureConfig(max_failures=-1)
        ),
    )
    raycheck.fit(trainer)


if __name__ == "__main__":
    main()
