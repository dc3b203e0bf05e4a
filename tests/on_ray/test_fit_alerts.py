"""Under Ray Train, the controller's news of a death and the driver's last words reach people, each once."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import ray.train
import ray.train.collective
import torch
from ray.train import TrainingFailedError

import raycheck
from tests.support.servers.webhook_server import webhook_server

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # Ray itself warns


def train(config: dict[str, Any]) -> None:
    """Rank 1 dies in attempt 1, and rank 0 raises in attempt 2."""
    rank = ray.train.get_context().get_world_rank()
    told = raycheck.Alerts(webhook=config["webhook"])
    torch.manual_seed(0)
    settings = raycheck.SaveSettings(every_steps=1, alerts=told)
    with raycheck.Checkpointer({"model": torch.nn.Linear(2, 2)}, settings) as ckpt:
        at = ckpt.restore()
        ckpt.end_step()
        ckpt.wait()
        ray.train.collective.barrier()
        if at.attempt == 1 and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        ray.train.collective.barrier()
        if at.attempt == 2 and not rank:
            raise RuntimeError("a device is lost")


def test_deaths_the_driver_that_gives_up_and_the_end_are_told_once_each(job, tmp_path: Path) -> None:
    storage, uri = f"file://{tmp_path}/runs", f"file://{tmp_path}/runs/run"
    with webhook_server() as hook:
        given = {"workers": 2, "train": train, "webhook": hook.url}
        with pytest.raises(TrainingFailedError):
            raycheck.fit(job(storage, "run", max_failures=1, **given))
        raycheck.fit(job(storage, "run", max_failures=1, **given))

    told = [text.removeprefix(f"raycheck: {uri}: ") for text in hook.texts]
    assert told[0].startswith("attempt 1 has died: rank 1: ")
    assert told[1].startswith("attempt 2 has died: ")
    assert "a device is lost" in told[1]
    assert told[2].startswith("the driver has given up the run in attempt 2: ")
    assert told[3].startswith("the run has finished with step-")
    assert len(told) == 4
