"""Train an image classifier with PyTorch Lightning on Ray Train, as Ray's own guide for Lightning does."""

import lightning.pytorch as pl
import ray.train.lightning
import torch
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch.utils.data import DataLoader, TensorDataset

import raycheck


class ImageClassifier(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = torch.nn.Sequential(
            torch.nn.Conv2d(1, 4, 3),
            torch.nn.ReLU(),
            torch.nn.Flatten(),
            torch.nn.Dropout(0.1),
            torch.nn.Linear(144, 10),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        x, y = batch
        loss = torch.nn.functional.cross_entropy(self.forward(x), y)
        self.log("loss", loss, on_step=True, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.model.parameters(), lr=1e-3)


def images() -> TensorDataset:
    pixels = torch.randn(256, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    return TensorDataset(pixels, pixels.flatten(1)[:, :10].argmax(1))


def train_func(config: dict) -> None:
    pl.seed_everything(0)
    train_dataloader = DataLoader(images(), batch_size=8, shuffle=True)
    model = ImageClassifier()
    trainer = pl.Trainer(
        max_epochs=config["epochs"],
        devices="auto",
        accelerator="auto",
        strategy=ray.train.lightning.RayDDPStrategy(),
        plugins=[ray.train.lightning.RayLightningEnvironment()],
        callbacks=[raycheck.lightning.Callback(raycheck.SaveSettings(every_steps=4))],
        enable_checkpointing=False,
        enable_progress_bar=False,
        logger=False,
    )
    trainer = ray.train.lightning.prepare_trainer(trainer)
    trainer.fit(model, train_dataloaders=train_dataloader)


def main(storage_path: str, **config: int) -> None:
    trainer = TorchTrainer(
        train_func,
        train_loop_config={"epochs": 2, **config},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(name="images", storage_path=storage_path),
    )
    raycheck.fit(trainer)
