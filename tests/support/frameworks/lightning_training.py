"""Small trainings with Lightning, which may be killed in the middle, and what they have seen and become."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

import raycheck
from tests.support.processes.coordinator_in_thread import group_of


class Killed(BaseException):
    """Ends a training where a SIGKILL would: nothing is saved any more."""


class Regression(pl.LightningModule):
    """Learns a sum, with dropout, and is killed when an optimizer step of this number would come."""

    def __init__(self, *, killed_at: int | None = None) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
        self.killed_at = killed_at
        self.seen: list[tuple[int, int, float]] = []
        self.epoch_means: list[tuple[int, float]] = []

    def loss(self, batch: Any) -> torch.Tensor:
        inputs, sums = batch
        return torch.nn.functional.mse_loss(self.net(inputs), sums)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.killed_at is not None and self.global_step >= self.killed_at:
            raise Killed
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        self.seen.append((self.global_step, batch_idx, loss.item()))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        steps = self.trainer.estimated_stepping_batches
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def samples(count: int = 40) -> TensorDataset:
    inputs = torch.randn(count, 4, generator=torch.Generator().manual_seed(1))
    return TensorDataset(inputs, inputs.sum(1, keepdim=True))


@dataclass
class Training:
    """One way to train: every run of it begins alike, and is killed or goes on where the last one was saved.

    The Trainer has these options, with callbacks that are made anew for each run.
    """

    module: Callable[..., Any] = Regression
    callbacks: Callable[[], list[Any]] = list
    options: dict[str, Any] = field(default_factory=dict)
    data: Callable[[], dict[str, Any]] = lambda: {
        "train_dataloaders": DataLoader(samples(), batch_size=4, shuffle=True),
        "val_dataloaders": DataLoader(samples(), batch_size=20),
    }
    settings: dict[str, Any] = field(default_factory=lambda: {"every_steps": 1})

    def run(self, group: Any, *, killed_at: int | None = None, **more: Any) -> tuple[Any, Any]:
        """Train in this process. Returns the module and the Trainer. Raises Killed."""
        torch.manual_seed(0)
        module = self.module(killed_at=killed_at)
        callback = raycheck.lightning.Callback(raycheck.SaveSettings(**self.settings), group=group)
        trainer = pl.Trainer(**{**QUIET, "callbacks": [*self.callbacks(), callback], **self.options, **more})
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Lightning has advice for larger trainings
            trainer.fit(module, **self.data())
        return module, trainer

    def killed_and_restarted(self, uri: str, killed_at: int) -> tuple[Any, Any, list[Any]]:
        """Returns what the restarted run came to, and all that both have seen."""
        seen: list[Any] = []
        original = self.module

        def module(**options: Any) -> Any:
            made = original(**options)
            made.seen = seen
            return made

        self.module = module
        try:
            try:
                self.run(*group_of(uri), killed_at=killed_at)
            except Killed:
                return *self.run(*group_of(uri)), seen
            raise AssertionError(f"there was no step {killed_at}")
        finally:
            self.module = original


QUIET = {
    "max_epochs": 3,
    "accelerator": "cpu",
    "devices": 1,
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
