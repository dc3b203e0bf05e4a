"""Names the parts of an Accelerator that are saved, and refuses by name what cannot be saved completely."""

from typing import Any

from accelerate import Accelerator
from accelerate.utils import DistributedType
from accelerate.utils.deepspeed import DeepSpeedSchedulerWrapper

from raycheck.adapters import DataStream
from raycheck.errors import ConfigError

REFUSED = {
    DistributedType.MEGATRON_LM: "Megatron-LM keeps state in its own form, which raycheck cannot read; "
    "use FSDP2, FullyShardedDataParallelPlugin(fsdp_version=2)",
    DistributedType.XLA: "raycheck cannot read XLA tensors; train on GPUs or CPUs",
}


def check_supported(accelerator: Accelerator) -> None:
    """Raise ConfigError, with a remedy, for a kind of training or a setting that cannot be saved completely."""
    kind = accelerator.distributed_type
    if kind in REFUSED:
        raise ConfigError(f"raycheck.accelerate: {REFUSED[kind]}")
    if kind == DistributedType.FSDP and not accelerator.is_fsdp2:
        raise ConfigError(
            "raycheck.accelerate: FSDP1 flattens parameters, which cannot be resharded; set "
            "FullyShardedDataParallelPlugin(fsdp_version=2), or fsdp_version: 2 in Accelerate's configuration"
        )
    limit = accelerator.project_configuration.total_limit
    if limit is not None:
        raise ConfigError(
            f"raycheck.accelerate: ProjectConfiguration(total_limit={limit}) counts folders, and raycheck writes none; "
            f"leave it out and give raycheck.SaveSettings(keep_last={limit})"
        )
    hooks = accelerator._save_model_state_pre_hook or accelerator._load_model_state_pre_hook
    if hooks:
        raise ConfigError(
            "raycheck.accelerate: a hook of register_save_state_pre_hook or register_load_state_pre_hook expects a "
            "folder, and raycheck uses none; remove it. Models are saved completely; export_hf writes one into a "
            "folder"
        )


def state_of(accelerator: Accelerator) -> dict[str, object]:
    """Return the objects given to `prepare` and `register_for_checkpointing`, by entry name."""
    state: dict[str, object] = {}
    for name, values in _entries(accelerator).items():
        if values:
            state[name] = values[0] if len(values) == 1 else list(values)
    if accelerator.scaler is not None:
        state["scaler"] = accelerator.scaler
    prepared = (*accelerator._models, *accelerator._optimizers, *accelerator._schedulers)
    known = [inner for own in prepared for inner in _with_inner(own)]
    registered = [own for own in accelerator._custom_objects if not any(own is other for other in known)]
    if registered:
        state["registered"] = registered
    if not accelerator._models:
        raise ConfigError("raycheck.accelerate: no model was prepared; call accelerator.prepare before load_state")
    return state


def _entries(accelerator: Accelerator) -> dict[str, list[object]]:
    """Return what was prepared, by entry name. An engine of DeepSpeed includes its optimizer, and often a scheduler."""
    models, optimizers, schedulers = accelerator._models, accelerator._optimizers, accelerator._schedulers
    if accelerator.distributed_type != DistributedType.DEEPSPEED:
        return {"model": models, "optimizer": optimizers, "scheduler": schedulers}
    return {"engine": models, "scheduler": [own for own in schedulers if not is_stepped_by_engine(own)]}


def is_stepped_by_engine(scheduler: object) -> bool:
    """Return whether an engine of DeepSpeed steps this scheduler itself, and contains its state."""
    return isinstance(scheduler, DeepSpeedSchedulerWrapper)


def streams_in(state: dict[str, object]) -> list[DataStream]:
    """Return the data streams that the user registered."""
    registered: Any = state.get("registered", [])
    return [own for own in registered if isinstance(own, DataStream)]


def _with_inner(value: Any) -> list[object]:
    found = [value, getattr(value, "optimizer", None), getattr(value, "scheduler", None)]
    return [item for item in found if item is not None]
