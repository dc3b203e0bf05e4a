"""Measures how long a save blocks a Lightning training: `python -m tests.bench.frameworks.lightning`.

One worker of Ray Train, a model of 100 MB with AdamW (300 MB of state), a local folder as storage. Measured are the
saving of Lightning's own file, Ray's RayTrainReportCallback, which saves that file and uploads it while training waits,
and raycheck. Each way saves 4 times, at the end of an epoch of one batch, and the median of the last 3 counts.
"""

import logging
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import ray.train.lightning
import torch
from torch.utils.data import DataLoader, TensorDataset

import raycheck
from tests.bench.frameworks.transformers import timed
from tests.bench.frameworks.worker import seconds_in_worker

WIDTH, SAVES = 2560, 4


class Wide(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(4)))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


class Saving(pl.Callback):
    """Saves Lightning's own file at the end of each epoch."""

    def __init__(self, folder: str) -> None:
        self.file = f"{folder}/own.ckpt"
        self.seconds: list[float] = []

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        began = time.monotonic()
        trainer.save_checkpoint(self.file)
        self.seconds.append(time.monotonic() - began)


def train(*callbacks: Any) -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    options = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = pl.Trainer(
        max_epochs=SAVES, accelerator="cpu", devices=1, logger=False, callbacks=[*callbacks], **options
    )
    trainer.fit(Wide(), DataLoader(TensorDataset(torch.ones(1, WIDTH)), batch_size=1))


def into_a_file() -> list[float]:
    with tempfile.TemporaryDirectory() as folder:
        callback = Saving(folder)
        train(callback)
    return callback.seconds


def through_ray() -> list[float]:
    with timed(ray.train.lightning.RayTrainReportCallback, "on_train_epoch_end") as seconds:
        train(ray.train.lightning.RayTrainReportCallback())
    return seconds


def through_raycheck() -> list[float]:
    with timed(raycheck.Checkpointer, "end_step", wait=True) as seconds:
        train(raycheck.lightning.Callback(raycheck.SaveSettings(every_steps=1)))
    return seconds


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        storage = Path(name)
        found = {
            "raycheck": seconds_in_worker(through_raycheck, storage, "ours", raycheck.fit),
            "Lightning's own file": seconds_in_worker(into_a_file, storage, "own", lambda trainer: trainer.fit()),
            "Ray's callback": seconds_in_worker(through_ray, storage, "ray", lambda trainer: trainer.fit()),
        }
    unit = statistics.median(found["raycheck"][1:])
    for way, seconds in found.items():
        middle = statistics.median(seconds[1:])
        print(f"{way}: {middle:.3f} s, {middle / unit:.1f} times raycheck's")


if __name__ == "__main__":
    main()
