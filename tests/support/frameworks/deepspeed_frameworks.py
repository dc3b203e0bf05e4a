"""Trains with DeepSpeed inside Accelerate, transformers' Trainer or Lightning: `python this-file TRAINING-AS-JSON`, one
process for each rank. Rank 0 prints the losses by step, and digests of the last 32-bit weights and moments.

All three offer DeepSpeed on accelerators alone. What they then do works on CPUs, too; the few lines that let them are
marked below.
"""

import json
import os
import signal
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.support.frameworks.deepspeed_training import digests_of, launch

SAMPLES, BATCH, EPOCHS = 48, 8, 2
STEPS = SAMPLES // BATCH * EPOCHS
COMMIT_WITHIN_S = 60.0


@dataclass(frozen=True, kw_only=True)
class FrameworkTraining:
    """A training over all ranks.

    framework: one of FRAMEWORKS. stage: of ZeRO. killed_at: the step before which all ranks are killed, once the save
    of the step saved_at is committed. folder: where the framework may write.
    """

    framework: str
    uri: str
    folder: str
    world_size: int = 2
    stage: int = 2
    dtype: str = "bf16"
    killed_at: int | None = None
    saved_at: int = 3

    def run(self) -> dict[str, Any]:
        return launch(__file__, asdict(self), self.world_size)

    def be_killed(self) -> None:
        """Train until all ranks are killed."""
        with suppress(RuntimeError):
            launch(__file__, asdict(self), self.world_size)
            raise AssertionError(f"there was no step {self.killed_at}")

    def die_if_due(self, step: int) -> None:
        """Kill this process before the step `killed_at`, as a lost node would."""
        import raycheck

        if self.killed_at != step:
            return
        deadline = time.monotonic() + COMMIT_WITHIN_S
        while (head := raycheck.open_run(self.uri).head) is None or head.step < self.saved_at:
            assert time.monotonic() < deadline, f"step {self.saved_at} was not committed"
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGKILL)


def net() -> Any:
    import torch

    torch.manual_seed(7)
    return torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))


def samples() -> Any:
    import torch

    inputs = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(1))
    return torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())


def mean_over_ranks(loss: Any) -> float:
    import torch.distributed as dist

    total = loss.detach().float().clone()
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def settings_of(training: FrameworkTraining) -> dict[str, Any]:
    import raycheck

    settings = raycheck.SaveSettings(every_steps=None, at_steps=[training.saved_at])
    return {"settings": settings, "group": raycheck.torchrun_group(training.uri)}


def with_accelerate(training: FrameworkTraining) -> tuple[dict[int, float], Any]:
    import torch
    from accelerate import Accelerator, DeepSpeedPlugin, InitProcessGroupKwargs
    from accelerate.utils import DataLoaderConfiguration

    import raycheck

    accelerator = Accelerator(
        mixed_precision="bf16" if training.dtype == "bf16" else "no",
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=3),  # one order for all sizes
        deepspeed_plugin=DeepSpeedPlugin(zero_stage=training.stage, gradient_clipping=1.0),
        kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")],  # on CPUs it must be given
    )
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    loader = torch.utils.data.DataLoader(samples(), batch_size=BATCH // accelerator.num_processes, shuffle=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: 1 - step / (STEPS * accelerator.num_processes)
    )
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    attached = raycheck.accelerate.attach(accelerator, **settings_of(training))
    step = accelerator.load_state().step
    losses: dict[int, float] = {}
    for _ in attached.epochs(EPOCHS):
        for inputs, wanted in loader:
            step += 1
            training.die_if_due(step)
            loss = (model(inputs.to(model.module[0].weight.dtype)).float() - wanted).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            losses[step] = mean_over_ranks(loss)
    return losses, model


def with_transformers(training: FrameworkTraining) -> tuple[dict[int, float], Any]:
    from accelerate import PartialState
    from transformers import Trainer, TrainerCallback, training_args

    import raycheck
    from tests.support.frameworks import tiny_trainers

    training_args.is_torch_bf16_gpu_available = lambda: True  # without use_cpu, which excludes DeepSpeed
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    world_size = PartialState(backend="gloo").num_processes  # on CPUs it must be given
    args = tiny_trainers.arguments(
        training.folder,
        use_cpu=False,
        bf16=training.dtype == "bf16",
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=STEPS,
        logging_steps=1,
        save_strategy="steps",
        save_steps=training.saved_at,
        accelerator_config={"use_configured_state": True},
        deepspeed={
            "zero_optimization": {"stage": training.stage},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "bf16": {"enabled": "auto"},
            "gradient_clipping": "auto",
            "gradient_accumulation_steps": "auto",
            "train_micro_batch_size_per_gpu": "auto",
            "train_batch_size": "auto",
        },
    )
    assert args.world_size == world_size

    losses: dict[int, float] = {}

    class Watch(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            training.die_if_due(state.global_step + 1)

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            if "loss" in logs:
                losses[state.global_step] = logs["loss"]

    data = tiny_trainers.Texts(SAMPLES)
    model = tiny_trainers.tiny_llama(dropout=0.0)
    trainer = Trainer(model=model, args=args, train_dataset=data, callbacks=[Watch()])
    raycheck.transformers.prepare(trainer, group=raycheck.torchrun_group(training.uri))
    trainer.train()
    return losses, trainer.deepspeed


def with_lightning(training: FrameworkTraining) -> tuple[dict[int, float], Any]:
    import lightning.pytorch as pl
    import torch
    from lightning.pytorch.accelerators import CPUAccelerator
    from lightning.pytorch.strategies import deepspeed as of_lightning

    import raycheck

    torch.distributed.init_process_group("gloo")
    of_lightning.CUDAAccelerator = CPUAccelerator  # the strategy accepts no other
    CPUAccelerator.get_parallel_devices = staticmethod(lambda count: [torch.device("cpu", n) for n in range(count)])
    losses: dict[int, float] = {}

    class Module(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            training.die_if_due(self.global_step + 1)
            loss = (self.net(batch[0]).float() - batch[1]).square().mean()
            losses[self.global_step + 1] = mean_over_ranks(loss)
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / STEPS)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    trainer = pl.Trainer(
        max_epochs=EPOCHS,
        accelerator="cpu",
        devices=1,
        precision="bf16-mixed" if training.dtype == "bf16" else "32-true",
        strategy=raycheck.lightning.strategy("deepspeed", stage=training.stage),
        callbacks=[raycheck.lightning.Callback(**settings_of(training))],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Module()
    data = raycheck.Batches(samples(), global_batch=BATCH, seed=3)
    trainer.fit(module, data)
    return losses, trainer.strategy.model


FRAMEWORKS = {"accelerate": with_accelerate, "transformers": with_transformers, "lightning": with_lightning}


def main(training: FrameworkTraining) -> None:
    import torch.distributed as dist

    losses, engine = FRAMEWORKS[training.framework](training)
    digests = digests_of(engine, engine.module, None)
    written = sorted(path.name for path in Path(training.folder).glob("**/*"))
    if dist.get_rank() == 0:
        print(json.dumps({"losses": losses, "digests": digests, "written": written}), flush=True)


if __name__ == "__main__":
    main(FrameworkTraining(**json.loads(sys.argv[1])))
