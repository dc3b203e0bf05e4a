"""Refuses objects of a training engine that keeps weights or optimizer state where raycheck does not look.

A save of such a module would look complete. ZeRO-3's parameters have no elements. ZeRO-1's are copies that the next
step overwrites from the engine's own fp32 weights. Megatron's are pieces that do not record their place in the whole.
Engines are recognized by their classes and by the attributes they set on parameters, without importing them.
"""

import sys
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from raycheck.errors import ConfigError
from raycheck.transfer.stage.tensor_parts import is_described

FSDP2 = "train with torch's fully_shard (FSDP2), which raycheck saves and reshards"


class TrainingEngine(NamedTuple):
    """An engine, and how it is recognized and named.

    classes: prefixes of the full names of its classes. marks: attributes that it sets on parameters. why: what a save
    would miss. cure: what works instead.
    """

    name: str
    classes: tuple[str, ...]
    marks: tuple[str, ...]
    why: str
    cure: str


DEEPSPEED = TrainingEngine(
    "DeepSpeed",
    (
        "deepspeed.runtime.engine.",
        "deepspeed.runtime.pipe.",
        "deepspeed.runtime.hybrid_engine.",
        "deepspeed.runtime.zero.",
        "deepspeed.runtime.fp16.",
        "deepspeed.runtime.bf16_optimizer.",
        "deepspeed.runtime.base_optimizer.",
        "accelerate.utils.deepspeed.",
    ),
    ("ds_id", "ds_tensor", "_hp_mapping"),
    "the engine keeps the weights that it trains, and their optimizer state, in its own buffers",
    'Make the engine itself an entry of the state, as in {"engine": engine}, or save with engine.save_checkpoint() and '
    f"load with engine.load_checkpoint(), or {FSDP2}",
)
MEGATRON = TrainingEngine(
    "Megatron",
    ("megatron.core.optimizer.", "accelerate.utils.megatron_lm."),
    (),
    "its ranks hold different parts of the model or of the optimizer under equal names",
    'Make both one entry of the state, {"engine": raycheck.adapters.megatron(model, optimizer, scheduler)}, or save '
    "with megatron.core.dist_checkpointing, or parallelize the model with torch's DTensor, which raycheck reshards",
)
OTHERS = tuple(
    TrainingEngine(
        name, classes, (), "it keeps weights or optimizer state in its own format", f"{FSDP2[0].upper()}{FSDP2[1:]}"
    )
    for name, classes in (
        ("FairScale", ("fairscale.nn.data_parallel.fully_sharded_data_parallel.", "fairscale.optim.oss.")),
        ("Colossal-AI", ("colossalai.",)),
        ("Megatron FSDP", ("megatron.core.distributed.fsdp.", "megatron_fsdp.")),
    )
)
_TENSOR_PARALLEL = "tensor_model_parallel"
"""Megatron sets it on parameters of which a tensor-parallel rank holds a part, even if there is only one such rank."""


def refuse_engine(path: str, value: object) -> None:
    """Raise ConfigError for an engine, or for an optimizer of one. path: names the value."""
    kind: Any = type(value)  # mypy does not accept a class as hashable
    engine = _engine_of(kind)
    if engine is not None:
        raise _refusal(f"{path} is a {_full_name(kind)}", engine)


def refuse_parts_of_engines(name: str, module: torch.nn.Module, parameters: Mapping[str, torch.Tensor]) -> None:
    """Raise ConfigError for a module that an engine controls, and for a parameter that is trained elsewhere.

    The module may be anywhere inside `module`. name: the entry's name. parameters: all of `module`, by path.
    """
    for path, child in module.named_modules():
        kind: Any = type(child)
        if _engine_of(kind) is not None:
            refuse_engine(".".join(filter(None, (f"state[{name!r}]", path))), child)
        if _is_model_of_megatron(kind) and _megatron_size("pipeline_model_parallel") not in (None, 1):
            raise _refusal(f"state[{name!r}] is a stage of Megatron's pipeline ({kind.__qualname__})", MEGATRON)
    for path, parameter in parameters.items():
        if any(hasattr(parameter, mark) for mark in DEEPSPEED.marks):
            raise _refusal(f"{_which(name, path)} belongs to an engine", DEEPSPEED)
        if getattr(parameter, _TENSOR_PARALLEL, False) and _megatron_size(_TENSOR_PARALLEL) != 1:
            raise _refusal(f"{_which(name, path)} is a part of a larger one", MEGATRON)
        is_part = is_described(parameter)  # a rank may have none of it
        if parameter.requires_grad and not is_part and not is_lazy(parameter) and not parameter.numel():
            raise ConfigError(
                f"{_which(name, path)} is to be trained and has no elements. If it really is empty, call "
                "requires_grad_(False) on it. If a training engine keeps its elements elsewhere, a save would miss "
                "them: save with that engine"
            )


def _which(name: str, path: str) -> str:
    return f"state[{name!r}] has the parameter {path}, which"


def is_lazy(parameter: torch.Tensor) -> bool:
    """Return whether the parameter gets its shape at the first forward."""
    return isinstance(parameter, torch.nn.parameter.UninitializedParameter)


@lru_cache(maxsize=4096)  # called for every module at every save, while training waits
def _engine_of(kind: type) -> TrainingEngine | None:
    names = [_full_name(base) for base in kind.__mro__]
    return next(
        (engine for engine in (DEEPSPEED, MEGATRON, *OTHERS) if any(name.startswith(engine.classes) for name in names)),
        None,
    )


def _full_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


@lru_cache(maxsize=4096)
def _is_model_of_megatron(kind: type) -> bool:
    return any(base.__module__.startswith("megatron.core.models.") for base in kind.__mro__)


def _megatron_size(kind: str) -> int | None:
    """Return how many ranks share the model in this way, or None if Megatron's parallel state does not report it."""
    state: Any = sys.modules.get("megatron.core.parallel_state")
    if state is None or not state.model_parallel_is_initialized():
        return None
    return int(getattr(state, f"get_{kind}_world_size")())


def _refusal(what: str, engine: TrainingEngine) -> ConfigError:
    return ConfigError(f"{what}. raycheck cannot save a training of {engine.name}: {engine.why}. {engine.cure}")
