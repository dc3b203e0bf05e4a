"""Measures how long a save blocks a Lightning training: `python -m tests.bench.frameworks.lightning`.

One process, a model of 100 MB with AdamW (300 MB of state), a local folder. Each way saves 4 times, and the median of
the last 3 counts. Ray's callback saves Lightning's file to a local disk and then uploads it while training waits; here
its upload is a copy of that file into another folder.
"""

import logging
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

import raycheck
from tests.support.coordinator_in_thread import group_of

WIDTH, STEPS = 2560, 4


class Wide(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(4)))
        self.waits: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


class Saving(pl.Callback):
    """Saves Lightning's own file at the end of each batch, and copies it elsewhere if that is asked for."""

    def __init__(self, folder: Path, *, uploads: bool) -> None:
        self.folder, self.uploads = folder, uploads
        self.seconds: list[float] = []

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        began = time.monotonic()
        file = self.folder / f"{trainer.global_step}.ckpt"
        trainer.save_checkpoint(file)
        if self.uploads:
            shutil.copyfile(file, f"{file}.uploaded")
        self.seconds.append(time.monotonic() - began)


def trained(callback: Any) -> None:
    options = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = pl.Trainer(max_epochs=1, accelerator="cpu", devices=1, logger=False, callbacks=[callback], **options)
    trainer.fit(Wide(), DataLoader(TensorDataset(torch.ones(STEPS, WIDTH)), batch_size=1))


def blocked_by_raycheck(folder: Path) -> list[float]:
    """Returns the seconds of each end_step that saves, with the one before committed, as in a training of long steps."""
    seconds: list[float] = []

    class Timed(raycheck.Checkpointer):
        def end_step(self, *args: Any, **options: Any) -> None:
            self.wait()
            began = time.monotonic()
            super().end_step(*args, **options)
            seconds.append(time.monotonic() - began)

    session = sys.modules["raycheck.frameworks.lightning.fit_session"]
    session.Checkpointer = Timed
    trained(raycheck.lightning.Callback(raycheck.SaveSettings(every_steps=1), group=group_of(f"file://{folder}")[0]))
    return seconds


def main() -> None:
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    _ = raycheck.lightning.Callback
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        found = {"raycheck": blocked_by_raycheck(folder / "run")}
        for way, uploads in (("Lightning's own file", False), ("the file and its upload, as Ray does", True)):
            (folder / str(uploads)).mkdir()
            callback = Saving(folder / str(uploads), uploads=uploads)
            trained(callback)
            found[way] = callback.seconds
            shutil.rmtree(folder / str(uploads))
    unit = statistics.median(found["raycheck"][1:])
    for way, seconds in found.items():
        middle = statistics.median(seconds[1:])
        print(f"{way}: {middle:.2f} s, {middle / unit:.1f} times raycheck's")


if __name__ == "__main__":
    main()
