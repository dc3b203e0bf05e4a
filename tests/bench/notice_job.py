"""The training of notice.py, and the driver that starts it: `python -m tests.bench.notice_job '{"way": ...}'`.

A replicated training (DDP), as the benchmark of Ray's own repository has it: a save every so many steps, and in all ways
but the first another one when a node is about to be taken away.
"""

import json
import logging
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray
import ray.train
import ray.train.torch
import torch

import raycheck
from tests.bench.place import pyarrow_files

WORKERS = 2
OURS = "raycheck"
PERIODIC, AT_NOTICE, RELAXED = "Ray, periodic", "Ray, at the notice", "Ray, at the notice, relaxed"
WAYS = (OURS, PERIODIC, AT_NOTICE, RELAXED)
GRACE_S = 60.0


class Training:
    """One rank of it. config: folder (of the stories), every (steps between saves), step_s, width."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._step_s, self.every = config["step_s"], config["every"]
        self.rank = ray.train.get_context().get_world_rank()
        self._story = Path(config["folder"]) / f"story-{self.rank}.jsonl"
        torch.set_num_threads(1)
        torch.manual_seed(0)
        width = config["width"]
        model = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.Tanh(), torch.nn.Linear(width, 1))
        self.model = ray.train.torch.prepare_model(model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self._inputs = torch.randn(4, width)

    def steps(self, done: int) -> Iterator[int]:
        """Train for ever. Yield the number of each step once it is done."""
        self._tell("start", step=done, node=ray.get_runtime_context().get_node_id())
        while True:
            began = time.monotonic()
            self.optimizer.zero_grad()
            self.model(self._inputs).square().mean().backward()
            self.optimizer.step()
            time.sleep(max(0.0, began + self._step_s - time.monotonic()))
            done += 1
            self._tell("step", step=done)
            yield done

    def _tell(self, kind: str, **facts: Any) -> None:
        with self._story.open("a") as story:
            story.write(json.dumps({"kind": kind, "at": time.time(), **facts}) + "\n")


def by_raycheck(training: Training) -> None:
    state = {"model": training.model, "optimizer": training.optimizer}
    settings = raycheck.SaveSettings(every_steps=training.every, upload_by="node")
    with raycheck.Checkpointer(state, settings) as ckpt:
        for _ in training.steps(ckpt.restore().step):
            ckpt.end_step()


def by_report(training: Training, *, looks: bool) -> None:
    """As Ray's own benchmark does it: rank 0 saves all, and the first notice causes one more save."""
    done = 0
    if checkpoint := ray.train.get_checkpoint():
        with checkpoint.as_directory() as folder:
            state = torch.load(Path(folder) / "state.pt")
        training.model.load_state_dict(state["model"])
        training.optimizer.load_state_dict(state["optimizer"])
        done = state["step"]
    has_saved = False
    for step in training.steps(done):
        is_noticed = looks and not has_saved and ray.train.get_preemption_info() is not None
        if not is_noticed and step % training.every:
            continue
        has_saved |= is_noticed
        if training.rank:
            ray.train.report({"step": step})
            continue
        with tempfile.TemporaryDirectory(prefix="bench-") as folder:
            state = {"model": training.model.state_dict(), "optimizer": training.optimizer.state_dict(), "step": step}
            torch.save(state, Path(folder) / "state.pt")
            ray.train.report({"step": step}, checkpoint=ray.train.Checkpoint.from_directory(folder))


def train(config: dict[str, Any]) -> None:
    training = Training(config)
    if config["way"] == OURS:
        by_raycheck(training)
    else:
        by_report(training, looks=config["way"] != PERIODIC)


def main() -> None:
    """RAY_ADDRESS says where. It ends only by an error, or when it is killed."""
    config = json.loads(sys.argv[1])
    os.environ["RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S"] = "1"  # as raycheck.fit has it, for all
    ray.init(logging_level=logging.ERROR)
    relaxed = {"relax_collectives_on_preemption": True, "preemption_grace_s": GRACE_S}
    failures = ray.train.FailureConfig(max_failures=-1, **(relaxed if config["way"] == RELAXED else {}))
    if config["way"] == OURS:
        storage = {"storage_path": config["uri"]}
    else:
        files, path = pyarrow_files(config["uri"])
        storage = {"storage_path": path, "storage_filesystem": files}
    trainer = ray.train.torch.TorchTrainer(
        train,
        train_loop_config=config,
        scaling_config=ray.train.ScalingConfig(num_workers=WORKERS, resources_per_worker={"CPU": 1, "room": 1}),
        run_config=ray.train.RunConfig(name="run", failure_config=failures, **storage),
    )
    if config["way"] == OURS:
        raycheck.fit(trainer)
    else:
        trainer.fit()


if __name__ == "__main__":
    main()
