"""A Checkpointer takes care of data and random numbers in real runs: Ray Data, draws of the script, global state."""

import logging
import random
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import pytest
import ray.data
import ray.train
import torch

import raycheck
from raycheck.bucket.store.address import join_uri
from tests.support.processes.coordinator_in_thread import group_of
from tests.support.servers.http_fault_proxy import FaultProxy


def train_on_ray_data(config: dict[str, Any]) -> None:
    """Ends without a last save at `stop`; what raycheck logs goes into a file."""
    rank = ray.train.get_context().get_world_rank()
    handler = logging.FileHandler(Path(config["folder"]) / f"log-{config['life']}-{rank}")
    logging.getLogger("raycheck").addHandler(handler)
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1)
    ckpt = raycheck.Checkpointer({"model": model}, raycheck.SaveSettings(every_steps=3))
    at = ckpt.restore()
    step, shard = at.step, ray.train.get_dataset_shard("train")
    for _ in range(at.epoch, 2):
        for _ in shard.iter_torch_batches(batch_size=4):
            step += 1
            ckpt.end_step()
            if step == config["stop"]:
                ckpt.close()
                return
        ckpt.end_epoch()
    ckpt.close()


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Ray itself warns
def test_a_cut_off_epoch_of_ray_data_is_warned_of_at_first_and_when_it_happens(cluster: None, tmp_path: Path):
    def run(life: int, stop: int) -> list[str]:
        trainer = ray.train.torch.TorchTrainer(
            train_on_ray_data,
            train_loop_config={"folder": str(tmp_path), "life": life, "stop": stop},
            datasets={"train": ray.data.range(32)},
            scaling_config=ray.train.ScalingConfig(num_workers=2),
            run_config=ray.train.RunConfig(name="run", storage_path=str(tmp_path / "runs")),
        )
        raycheck.fit(trainer)
        text = "".join((tmp_path / f"log-{life}-{rank}").read_text() for rank in range(2))
        return [line for line in text.splitlines() if "Ray Data" in line]

    (first,) = run(1, stop=6)  # of 4 steps per epoch
    (cut_off,) = run(2, stop=0)
    after_an_epoch = run(3, stop=0)

    assert "datasets of Ray Data (train) cannot report their position" in first
    assert "after a restart in mid-epoch, the epoch starts over" in first
    assert "step=6 epoch=1 epoch_step=2" in cut_off
    assert "so its samples are trained on again" in cut_off
    assert after_an_epoch == []


def global_draws() -> list[float]:
    return [random.random(), float(np.random.rand()), float(torch.rand(()))]  # noqa: NPY002


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    torch.manual_seed(seed)


def train(ckpt: Any, data: raycheck.Batches, epochs: range, *, stop: int = 1000) -> list[list[float]]:
    """A draw of every kind before each epoch's loader, and one per step."""
    drawn: list[list[float]] = []
    for epoch in epochs:
        drawn.append(global_draws())
        for _ in data.loader(epoch):
            drawn.append(global_draws())
            if ckpt is None:
                data.end_step()
            else:
                ckpt.end_step({"loss": 1.0})
            if len(drawn) == stop:
                return drawn
        if ckpt is None:
            data.end_epoch()
        else:
            ckpt.end_epoch()
    return drawn


def batches() -> raycheck.Batches:
    return raycheck.Batches(range(20), global_batch=4, rank=0, world_size=1)


@pytest.mark.parametrize(("epochs", "stop"), [(1, 1000), (2, 9)], ids=["at an epoch's end", "inside an epoch"])
def test_a_run_that_saves_retries_and_restores_draws_as_one_without_raycheck(wire: FaultProxy, epochs: int, stop: int):
    """The coordinator is in this process, too, and its draws would be seen."""
    uri = join_uri(wire.uri, uuid4().hex)
    seed_all(3)
    whole = train(None, batches(), range(3))
    seed_all(3)
    rules = [wire.rule("busy", method, "checkpoints", times=2) for method in ("PUT", "GET")]

    data, settings = batches(), raycheck.SaveSettings(every_steps=2)
    with raycheck.Checkpointer(
        {"data": data, "own": {"n": 1}}, settings, group=group_of(uri, owner="first")[0]
    ) as ckpt:
        ckpt.restore()
        first = train(ckpt, data, range(epochs), stop=stop)
    seed_all(99)
    data = batches()
    with raycheck.Checkpointer(
        {"data": data, "own": {"n": 2}}, settings, group=group_of(uri, owner="second")[0]
    ) as ckpt:
        at = ckpt.restore()
        rest = train(ckpt, data, range(at.epoch, 3))

    if stop == 9:
        rest = rest[1:]  # inside an epoch the script draws once more before its loader; the steps go on as they would
    assert first + rest == whole
    assert not rules[0].times, "requests were repeated"
