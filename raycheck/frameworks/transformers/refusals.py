"""Refuses, before the first step and by the setting's name, what cannot be saved or restored faithfully."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from raycheck.errors import ConfigError

TRL_TRAINERS = ("SFTTrainer", "DPOTrainer", "GRPOTrainer")
"""The TRL trainers that were tested. Others may keep state that has not been examined."""
_REPLACED = (
    "get_train_dataloader",
    "_get_train_sampler",
    "_save_checkpoint",
    "_save_optimizer_and_scheduler",
    "_save_scaler",
    "_save_rng_state",
    "_load_from_checkpoint",
    "_load_optimizer_and_scheduler",
    "_load_scaler",
    "_load_rng_state",
    "_load_best_model",
    "_load_callback_state",
    "_inner_training_loop",
    "_init_training_state",
    "_run_epoch",
)
"""Methods of Trainer that raycheck replaces, or whose exact behavior it relies on."""
_KNOWN = ("transformers.", "trl.trainer.", "ray.train.")


def refuse_trainer(trainer: Any) -> None:
    """Raise ConfigError, naming the first setting or method of this trainer that cannot be supported."""
    for problem in (*_class_problems(type(trainer)), *_parallelism(trainer), *_arguments(trainer.args)):
        raise ConfigError(problem)


def _class_problems(cls: type) -> Iterator[str]:
    from transformers import Trainer

    if not issubclass(cls, Trainer):
        yield f"prepare({cls.__qualname__}): give a transformers.Trainer or a TRL trainer"
        return
    for name in _REPLACED:
        if not callable(getattr(Trainer, name, None)):
            yield f"this transformers has no Trainer.{name}: raycheck was tested with 5.23; install that"
    if any(base.__name__ == "ResumableTrainer" for base in cls.__mro__):
        yield "prepare() was called with this trainer before; call it only once"
    for base in cls.__mro__:
        if base.__module__.startswith(_KNOWN):
            continue
        if base.__module__.startswith("trl."):
            yield f"{base.__qualname__} of {base.__module__}: raycheck supports TRL's {', '.join(TRL_TRAINERS)}"
        for name in sorted({*_REPLACED} & {*vars(base)}):
            yield (
                f"{base.__qualname__}.{name} would not be called: raycheck replaces it. Pass what it saves to "
                "prepare(extra=...), and set the data's order with train_sampling_strategy"
            )
    own = next((base.__name__ for base in cls.__mro__ if base.__module__.startswith("trl.trainer.")), None)
    if own is not None and own not in TRL_TRAINERS:
        yield f"{own} of TRL may keep state that raycheck does not save; it supports {', '.join(TRL_TRAINERS)}"


def _parallelism(trainer: Any) -> Iterator[str]:
    if trainer.is_fsdp_enabled and trainer.accelerator.state.fsdp_plugin.fsdp_version != 2:
        yield 'fsdp_config["version"]=1: FSDP1 cannot be saved faithfully; set version 2'
    if trainer.is_fsdp_xla_enabled:
        yield 'fsdp_config["xla"]: XLA is not supported'
    if trainer.args.n_gpu > 1:
        yield (
            f"nn.DataParallel on {trainer.args.n_gpu} GPUs: give each worker one GPU (ScalingConfig(use_gpu=True)), "
            "which makes it DDP"
        )
    for kind in ("tp", "cp", "sp"):
        size = getattr(trainer, f"get_{kind}_size")()
        if size != 1:
            yield f"{kind}_size={size}: ranks that share a batch are not supported; use DDP or FSDP2 alone"


def _arguments(args: Any) -> Iterator[str]:
    if args.auto_find_batch_size:
        yield "auto_find_batch_size=True: a changing batch size makes the data position mean different samples"
    if args.save_only_model:
        yield (
            "save_only_model=True: a restart would continue with a new optimizer. Leave it out; "
            "SaveSettings(after_commit=raycheck.AfterCommit.export(...)) writes the model alone, as a Hugging Face "
            "directory"
        )
    if args.push_to_hub and str(getattr(args.hub_strategy, "value", args.hub_strategy)) != "end":
        yield (
            f"push_to_hub=True with hub_strategy={args.hub_strategy!s}: nothing is pushed while training runs. Give "
            'hub_strategy="end", and SaveSettings(after_commit=raycheck.AfterCommit.export(...)) for what to push'
        )
    if args.enable_jit_checkpoint:
        yield "enable_jit_checkpoint=True: raycheck saves automatically before a node is preempted; leave it out"
    strategy = str(getattr(args.train_sampling_strategy, "value", args.train_sampling_strategy))
    if strategy not in ("random", "sequential", "group_by_length"):
        yield f"train_sampling_strategy={strategy!r}: its batches depend on the number of ranks"
    config = args.accelerator_config
    if config.split_batches:
        yield "accelerator_config.split_batches=True: give the batch size per device instead"
    if config.dispatch_batches:
        yield "accelerator_config.dispatch_batches=True: with raycheck every rank reads its own samples; leave it out"


def refuse_dataset(dataset: Any) -> None:
    """Raise ConfigError for training data without indexed samples."""
    name = f"train_dataset is a {type(dataset).__module__}.{type(dataset).__qualname__}"
    advice = (
        "it cannot resume at a given sample, since the Trainer reads everything before it. Give a map-style dataset; "
        "with the datasets library, load it without streaming=True. raycheck.Batches and raycheck.RayData resume in "
        "streams, in a training loop of your own"
    )
    is_ray = any(base.__module__.startswith("ray.data.") for base in type(dataset).__mro__)
    if is_ray:
        raise ConfigError(f"{name}: {advice}")
    if isinstance(dataset, torch.utils.data.IterableDataset) or not hasattr(dataset, "__getitem__"):
        raise ConfigError(f"{name}: {advice}")


def refuse_callbacks(callbacks: list[Any], saved: Mapping[str, object]) -> None:
    """Raise ConfigError for a callback with a module or tensor that no entry of the state contains.

    saved: the entries of the state.
    """
    known = {id(tensor) for value in saved.values() for tensor in _tensors(value)}
    for callback in callbacks:
        if callable(getattr(callback, "state_dict", None)) and callable(getattr(callback, "load_state_dict", None)):
            continue
        for name, value in getattr(callback, "__dict__", {}).items():
            if any(id(tensor) not in known for tensor in _tensors(value)):
                raise ConfigError(
                    f"the callback {type(callback).__qualname__} holds weights or tensors in its attribute {name!r} "
                    "that no save would contain. Pass them to prepare(extra={...}), or give the callback "
                    "state_dict() and load_state_dict()"
                )


def _tensors(value: object, depth: int = 3) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, torch.nn.Module):
        yield from (*value.parameters(), *value.buffers())
    elif depth and isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item, depth - 1)
    elif depth and isinstance(value, list | tuple | set):
        for item in value:
            yield from _tensors(item, depth - 1)
