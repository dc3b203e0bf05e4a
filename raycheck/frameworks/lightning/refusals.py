"""Refuses, before the first step, what could not be saved or restored completely, and says what to do instead."""

import logging
from typing import Any

from raycheck.errors import ConfigError
from raycheck.frameworks.lightning.packages import named
from raycheck.frameworks.lightning.strategies import ShardedByDeepSpeed, is_sharded

logger = logging.getLogger("raycheck")

REFUSED_CALLBACKS = {
    "OnExceptionCheckpoint": "writes its own file; raycheck resumes from its last commit",
    "ModelPruning": "changes the model's parameters in the middle of a run, so saved ones cannot be restored into it",
    "LearningRateFinder": "trains and restores on its own; find the rate in a Trainer without raycheck's Callback",
    "BatchSizeFinder": "trains and restores on its own; find the size in a Trainer without raycheck's Callback",
}


def check_trainer(trainer: Any, package: str, *, world_size: int) -> None:
    """Raise ConfigError for unsupported parts of a Trainer. Remove the ModelCheckpoint that it added by default."""
    _check_strategy(trainer, package, world_size)
    _take_out_model_checkpoint(trainer, package)
    for callback in trainer.callbacks:
        for name, why in REFUSED_CALLBACKS.items():
            if isinstance(callback, named(package, "callbacks", name)):
                raise ConfigError(f"{type(callback).__qualname__} {why}. Remove it from Trainer(callbacks=...)")
        if type(callback).__qualname__ == "RayTrainReportCallback":
            raise ConfigError(
                "RayTrainReportCallback saves the whole state a second time. Remove it: raycheck reports its commits "
                "to Ray Train"
            )
    if len([one for one in trainer.callbacks if hasattr(one, "is_raycheck")]) > 1:
        raise ConfigError("the Trainer has two of raycheck's Callbacks; give only one")


def check_data(trainer: Any) -> None:
    """Raise ConfigError for settings under which the position in the training data cannot be saved."""
    if trainer.reload_dataloaders_every_n_epochs:
        raise ConfigError(
            "Trainer(reload_dataloaders_every_n_epochs=...) creates loaders whose position is unknown. Leave it out "
            "(raycheck.Batches orders each epoch differently), or give Callback(..., data_position=False)"
        )
    fetcher = trainer.lightning_module.training_step
    names = fetcher.__code__.co_varnames[: fetcher.__code__.co_argcount] if hasattr(fetcher, "__code__") else ()
    if "dataloader_iter" in names:
        raise ConfigError(
            "training_step(dataloader_iter) fetches batches itself, so the batches trained on are unknown. Take "
            "`batch` instead, or give Callback(..., data_position=False)"
        )


def check_optimizers(trainer: Any) -> None:
    """Raise ConfigError for an optimizer that shards its state over the ranks itself and gathers it to save."""
    for optimizer in trainer.optimizers:
        if hasattr(optimizer, "consolidate_state_dict"):
            raise ConfigError(
                f"{type(optimizer).__qualname__} shards its state in a way that cannot be restored on another number "
                'of ranks. Use raycheck.lightning.strategy("fsdp2"), which shards the optimizer with the parameters'
            )


def _check_strategy(trainer: Any, package: str, world_size: int) -> None:
    strategy = trainer.strategy
    kinds = tuple(named(package, "strategies", name) for name in ("DDPStrategy", "SingleDeviceStrategy"))
    if not (isinstance(strategy, kinds) or is_sharded(strategy)):
        raise ConfigError(
            f"{type(strategy).__qualname__} is not supported. Give Trainer(strategy=raycheck.lightning.strategy(...)) "
            'with "ddp", or with "fsdp2" or "deepspeed" for a sharded model (FSDP1 cannot be resharded)'
        )
    if isinstance(strategy, ShardedByDeepSpeed) and trainer.accumulate_grad_batches != 1:
        raise ConfigError(
            f'Trainer(accumulate_grad_batches={trainer.accumulate_grad_batches}) with strategy("deepspeed"): the '
            "engine accumulates over the end of an epoch, where a save would miss these gradients. Leave it out, and "
            "give larger batches"
        )
    if trainer.world_size != world_size:
        raise ConfigError(
            f"the Trainer uses {trainer.world_size} processes, but there are {world_size} workers. Give "
            'Trainer(strategy=raycheck.lightning.strategy("ddp")), so that all workers train one model'
        )
    if getattr(strategy, "_ddp_comm_state", None) is not None:
        raise ConfigError("DDPStrategy(ddp_comm_state=...) has state that is not saved; leave it out")


def _take_out_model_checkpoint(trainer: Any, package: str) -> None:
    """Remove the ModelCheckpoint that Trainer adds by default. Raises ConfigError for one that was configured."""
    kind = named(package, "callbacks", "Checkpoint")
    default = named(package, "callbacks", "ModelCheckpoint")
    for callback in [one for one in trainer.callbacks if isinstance(one, kind)]:
        if type(callback) is default and _is_as_default(callback, default()):
            trainer.callbacks.remove(callback)
            if trainer.global_rank == 0:
                logger.info("the Trainer's default ModelCheckpoint is removed, as with enable_checkpointing=False")
            continue
        monitor, top = getattr(callback, "monitor", None), getattr(callback, "save_top_k", 1)
        best = {"metric": monitor, "mode": getattr(callback, "mode", "min"), "count": max(top, 1)}
        keep = f"keep_best={best}, " if monitor else ""
        raise ConfigError(
            f"{type(callback).__qualname__} writes its own checkpoints. Remove it, and give raycheck's Callback "
            f"SaveSettings({keep}every_epochs=1, keep_last=1) or similar; see `raycheck docs lightning`"
        )


def _is_as_default(callback: Any, default: Any) -> bool:
    names = (
        *("monitor", "dirpath", "filename", "save_last", "save_top_k", "save_weights_only"),
        *("_every_n_train_steps", "_every_n_epochs", "_train_time_interval"),
    )
    return all(getattr(callback, name) == getattr(default, name) for name in names)
