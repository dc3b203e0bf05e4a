"""The training that goodput.py hurts, and the driver that starts it: `python -m tests.bench.goodput_job '{"way": ...}'`.

One FSDP2 training, four ways to checkpoint it, and none. The two peers are written as their documentation has it; both
resume as a careful user would. torchft saves nothing: each rank holds the model whole, the other goes on when one is killed,
and the new one gets its state. Each rank tells its story in a file of its own, one line per event.
"""

import json
import logging
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import fsspec
import psutil
import ray
import ray.train
import ray.train.torch
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import fully_shard

import raycheck
from raycheck.bucket.store.address import join_uri
from tests.bench.place import plain_uri, pyarrow_files, s3fs_options

WORKERS = 2
RUN = "run"
ROOM = "room"
"""A resource of the nodes for ranks. The head has none, but a CPU, without which Ray starts no lighthouse of torchft there."""
GLOO_TIMEOUT = timedelta(seconds=30)
LIGHTHOUSE = {"min_replicas": 1, "heartbeat_timeout_ms": 1000}
"""By default a replica counts as alive for 5 s after its last heartbeat, and the other one waits as long."""


class Training:
    """One rank of it. config: folder (of the stories), every (steps between saves; for raycheck with memory, between
    memory checkpoints, and bucket_every between saves to the bucket), when_busy (see SaveSettings), step_s, width,
    layers."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._step_s, self._every = config["step_s"], config["every"]
        self._story = Path(config["folder"]) / f"story-{ray.train.get_context().get_world_rank()}.jsonl"
        self._tell("called", began=psutil.Process().create_time())
        torch.set_num_threads(1)
        torch.manual_seed(0)
        layers = [torch.nn.Linear(config["width"], config["width"]) for _ in range(config["layers"])]
        self.model: Any = torch.nn.Sequential(*layers)
        if config["way"] != TORCHFT:
            fully_shard(self.model)
        self.optimizer: Any = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self._inputs = torch.randn(4, config["width"])
        self._tell("built")

    def steps(self, done: int) -> Iterator[int]:
        """Train for ever. Yields the number of each step once it is done."""
        self._tell("start", step=done, pid=os.getpid())
        while True:
            began = time.monotonic()
            self.model(self._inputs).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            time.sleep(max(0.0, began + self._step_s - time.monotonic()))
            done += 1
            self._tell("step", step=done, seconds=time.monotonic() - began)
            yield done

    def replicated_steps(self, manager: Any) -> None:
        """Train for ever on model and optimizer of torchft. A step that the manager does not commit is told as dropped.

        The pause comes before the gradients are reduced, so that a kill hits a step which is not done, as it does above.
        It is shorter by what reducing takes at best, or else this way's steps were longer than the others'.
        """
        self._tell("start", step=manager.current_step(), pid=os.getpid())
        reduced_s = self._step_s
        while True:
            began, before = time.monotonic(), manager.current_step()
            self.optimizer.zero_grad()  # asks who takes part, too
            loss = self.model(self._inputs).square().mean()
            time.sleep(max(0.0, began + self._step_s - reduced_s - time.monotonic()))
            computed = time.monotonic()
            loss.backward()
            self.optimizer.step()
            ended = time.monotonic()
            reduced_s = min(reduced_s, ended - computed)
            facts = {"step": manager.current_step(), "batches": manager.batches_committed(), "seconds": ended - began}
            self._tell("step" if facts["step"] > before else "dropped", **facts)

    def is_due(self, step: int) -> bool:
        return step % self._every == 0

    @contextmanager
    def saving(self) -> Iterator[None]:
        """What the training waits for."""
        began = time.monotonic()
        yield
        self._tell("save", seconds=time.monotonic() - began)

    def listed(self, step: int) -> None:
        """A memory checkpoint can be restored from now on."""
        self._tell("listed", memory_step=step)

    def _tell(self, kind: str, **facts: Any) -> None:
        """One line, written whole: a SIGKILL right after leaves it readable."""
        with self._story.open("a") as story:
            story.write(json.dumps({"kind": kind, "at": time.time(), **facts}) + "\n")


class App(Stateful):
    """All that DCP is to save, as torch's own tutorial has it."""

    def __init__(self, training: Training) -> None:
        self._parts = training.model, training.optimizer
        self.step = 0

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(*self._parts)
        return {"model": model, "optimizer": optimizer, "step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(*self._parts, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        self.step = state["step"]


def by_raycheck(training: Training, config: dict[str, Any]) -> None:
    _by_raycheck(training, raycheck.SaveSettings(every_steps=config["every"], when_busy=config["when_busy"]))


def by_memory(training: Training, config: dict[str, Any]) -> None:
    settings = raycheck.SaveSettings(
        every_steps=config["bucket_every"],
        memory_every_steps=config["every"],
        upload_by="node",
        when_busy=config["when_busy"],
    )
    _by_raycheck(training, settings)


def _by_raycheck(training: Training, settings: raycheck.SaveSettings) -> None:
    state = {"model": training.model, "optimizer": training.optimizer}
    with raycheck.Checkpointer(state, settings) as ckpt:
        listed = -1
        for step in training.steps(ckpt.restore().step):
            if ckpt.save_status.memory_step > listed:
                listed = ckpt.save_status.memory_step
                training.listed(listed)
            if training.is_due(step):
                with training.saving():
                    ckpt.end_step()
            else:
                ckpt.end_step()


def by_report(training: Training, config: dict[str, Any]) -> None:
    """Ray Train's own way: each rank saves into a folder, and `report` uploads all of them into one."""
    app = App(training)
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            dcp.load({"app": app}, storage_reader=dcp.FileSystemReader(folder))
    for step in training.steps(app.step):
        if training.is_due(step):
            app.step = step
            with training.saving(), tempfile.TemporaryDirectory(prefix="bench-") as folder:
                dcp.save({"app": app}, storage_writer=dcp.FileSystemWriter(folder, sync_files=False))
                ray.train.report({"step": step}, checkpoint=ray.train.Checkpoint.from_directory(folder))


def by_dcp(training: Training, config: dict[str, Any]) -> None:
    """Straight to the bucket; a restart takes the newest directory that has its metadata, which DCP writes last."""
    app = App(training)
    options, root = s3fs_options(config["uri"]), plain_uri(join_uri(config["uri"], RUN))
    files, path = fsspec.url_to_fs(root, **options)
    whole = [int(name.split("/")[-2].removeprefix("step-")) for name in files.glob(f"{path}/step-*/.metadata")]
    if whole:
        dcp.load({"app": app}, storage_reader=FsspecReader(f"{root}/step-{max(whole):09d}", **options))
    for step in training.steps(app.step):
        if training.is_due(step):
            app.step = step
            with training.saving():
                writer = FsspecWriter(f"{root}/step-{step:09d}", sync_files=False, **options)
                dcp.save({"app": app}, storage_writer=writer)


def by_nothing(training: Training, config: dict[str, Any]) -> None:
    """What a restart takes when there is nothing to restore."""
    del config
    for _ in training.steps(0):
        pass


def by_torchft(training: Training, config: dict[str, Any]) -> None:
    """As in Ray's example of it, with every rank a replica group of its own."""
    del config
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo
    from torchft.checkpointing.pg_transport import PGTransport

    model, optimizer = training.model, training.optimizer

    def state_dict() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    def load_state_dict(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    group = ProcessGroupGloo(timeout=GLOO_TIMEOUT)
    manager = Manager(
        pg=group,
        min_replica_size=1,
        load_state_dict=load_state_dict,
        state_dict=state_dict,
        world_size=1,
        rank=0,
        replica_id=f"replica_{ray.train.get_context().get_world_rank()}",
        timeout=2 * GLOO_TIMEOUT,
        checkpoint_transport=PGTransport(group, timeout=GLOO_TIMEOUT, device=torch.device("cpu")),
    )
    training.model = DistributedDataParallel(manager, model)
    training.optimizer = Optimizer(manager, optimizer)
    training.replicated_steps(manager)


OURS = "raycheck"
MEMORY = "raycheck, memory checkpoints"
TORCHFT = "torchft"
BARE = "no checkpoints"
WAYS: dict[str, Callable[[Training, dict[str, Any]], None]] = {
    OURS: by_raycheck,
    MEMORY: by_memory,
    "Ray Train's report": by_report,
    "DCP on s3fs, newest directory": by_dcp,
    TORCHFT: by_torchft,
    BARE: by_nothing,
}


def train(config: dict[str, Any]) -> None:
    WAYS[config["way"]](Training(config), config)


def main() -> None:
    """RAY_ADDRESS says where. Ends only by an error, or when it is killed."""
    config = json.loads(sys.argv[1])
    ray.init(logging_level=logging.ERROR)
    trainer = ray.train.torch.TorchTrainer(
        train,
        train_loop_config=config,
        torch_config=_torch_config(config),
        scaling_config=ray.train.ScalingConfig(num_workers=WORKERS, resources_per_worker={"CPU": 1, ROOM: 1}),
        run_config=ray.train.RunConfig(
            name=RUN, failure_config=ray.train.FailureConfig(max_failures=-1), **_storage(config)
        ),
    )
    if config["way"] in (OURS, MEMORY):
        raycheck.fit(trainer)
    else:
        trainer.fit()


def _torch_config(config: dict[str, Any]) -> ray.train.torch.TorchConfig:
    if config["way"] != TORCHFT:
        return ray.train.torch.TorchConfig()
    from ray.train.v2.torch.torchft_config import TorchftConfig

    return TorchftConfig(lighthouse_kwargs=LIGHTHOUSE, backend="gloo")


def _storage(config: dict[str, Any]) -> dict[str, Any]:
    if config["way"] in (OURS, MEMORY):
        return {"storage_path": config["uri"]}
    files, path = pyarrow_files(config["uri"])
    return {"storage_path": path, "storage_filesystem": files}


if __name__ == "__main__":
    main()
