"""Train a small classifier with DDP on Ray Train, epoch by epoch."""

import ray.train.torch
import torch
from ray.train import RunConfig, ScalingConfig
from torch.utils.data import Dataset, TensorDataset

import raycheck


def train_fn(config: dict) -> None:
    torch.manual_seed(0)
    device = ray.train.torch.get_device()
    layers = [torch.nn.Linear(20, 64), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(64, 2)]
    model = ray.train.torch.prepare_model(torch.nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2)
    data = raycheck.Batches(dataset(), global_batch=32)
    with raycheck.Checkpointer({"model": model, "optimizer": optimizer, "scheduler": scheduler, "data": data}) as ckpt:
        at = ckpt.restore()
        for epoch in range(at.epoch, config["epochs"]):
            for inputs, labels in data.loader(epoch):
                loss = torch.nn.functional.cross_entropy(model(inputs.to(device)), labels.to(device))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                ckpt.end_step({"loss": loss})
            scheduler.step()
            ckpt.end_epoch()


def dataset() -> Dataset:
    inputs = torch.randn(512, 20, generator=torch.Generator().manual_seed(1))
    return TensorDataset(inputs, (inputs.sum(1) > 0).long())


def main(storage_path: str, **config: int) -> None:
    trainer = ray.train.torch.TorchTrainer(
        train_fn,
        train_loop_config={"epochs": 4, **config},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(name="classifier", storage_path=storage_path),
    )
    raycheck.fit(trainer)
