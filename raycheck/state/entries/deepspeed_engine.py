"""Presents an engine of DeepSpeed as a module and an optimizer whose tensors are the engine's own flat memory.

ZeRO cuts the weights that are trained, and the optimizer's state, into flat ranges, one for each rank. Any other
engine, stage, world size or plain model can read the checkpoint (engine_model.py).

Engines are recognized by their class, without importing DeepSpeed. Its private names differ between versions, so only
versions that were tried are accepted.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch.optim import Optimizer

from raycheck.errors import ConfigError
from raycheck.state.entries.engine_model import (
    EngineModel,
    EngineModelEntry,
    EngineOptimizer,
    MemoryRange,
    elements_of,
)
from raycheck.state.entries.engines import FSDP2
from raycheck.state.entries.module.merged_adapters import adapted_layers
from raycheck.state.entries.module.parameter_names import plain_names
from raycheck.state.entries.module.tensor_locations import is_plain
from raycheck.transfer.stage.tensor_parts import flat_part

VERSIONS = ("0.19.",)
"""The beginnings of the versions of DeepSpeed that were tried."""
_ENGINE = "deepspeed.runtime.engine.DeepSpeedEngine"
_LINKED = "_hp_mapping"
"""ZeRO 1 and 2 set it on a parameter: where this rank's range of it is, or None."""
_OFFLOAD_BUFFER = "_offload_buffer"
"""The end of the names under which ZeRO 3 keeps, beside the optimizer's state, the memory into which it offloads it."""


@dataclass(frozen=True, slots=True)
class ParameterRange:
    """This rank's range of a parameter.

    parameter: the engine's own. memory: the flat memory that the base optimizer trains. at, size: where the
    range is in it, in elements. start: the number of its first element in the parameter.
    """

    parameter: Any
    memory: torch.Tensor
    at: int
    size: int
    start: int

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the range's part of the memory, or of optimizer state that is laid out like it."""
        return flat_part(elements_of(self, flat), shape_of(self.parameter), self.start)


def shape_of(parameter: Any) -> tuple[int, ...]:
    """Return the shape of a whole parameter, which ZeRO-3 keeps apart."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def is_engine(value: object) -> bool:
    """Return whether `value` is an engine of DeepSpeed."""
    return any(f"{base.__module__}.{base.__qualname__}" == _ENGINE for base in type(value).__mro__)


def parts_of_engine(name: str, engine: Any) -> dict[str, object]:
    """Return what is saved of an engine, by name: its model, optimizer, learning rate schedule and counters.

    Raises ConfigError, naming the entry, for an engine that cannot be saved.
    """
    path = f"state[{name!r}]"
    refuse_untried(path, engine)
    parts: dict[str, object]
    if isinstance(engine.optimizer, Optimizer):  # ZeRO 0 in 32 bits trains the model itself
        parts = {"model": engine.module, "optimizer": engine.optimizer}
    else:
        model = ZeroModel(path, engine, list(ranges_of(path, engine)))
        parts = {"model": model, "optimizer": ZeroOptimizer(engine, model)}
    if callable(getattr(engine.lr_scheduler, "state_dict", None)):
        parts["scheduler"] = engine.lr_scheduler
    return {**parts, "counters": EngineCounters(engine)}


def refuse_untried(path: str, engine: Any) -> None:
    """Raise ConfigError for a version or a feature of DeepSpeed that was not tried."""
    version = str(getattr(sys.modules.get("deepspeed"), "__version__", "unknown"))
    odd = f"version {version}" if not version.startswith(VERSIONS) else _odd_feature(engine)
    if odd is not None:
        raise ConfigError(
            f"{path} is an engine of DeepSpeed with {odd}, which raycheck cannot save. Versions "
            f"{', '.join(f'{tried}x' for tried in VERSIONS)} were tried with ZeRO 0 to 3, bf16, fp16 and offload to "
            f"the CPU. Save it with engine.save_checkpoint() and load it with engine.load_checkpoint(), or {FSDP2}"
        )


def _odd_feature(engine: Any) -> str | None:
    """Return the first feature of an engine that was not tried."""
    optimizer = engine.optimizer
    base = type(getattr(optimizer, "optimizer", optimizer))
    offloads = (engine.zero_offload_optimizer(), engine.zero_offload_param())
    found = {
        "offload to NVMe": any(str(getattr(offload, "device", "")).endswith("nvme") for offload in offloads),
        "experts (MoE)": engine.has_moe_layers,
        "the pipeline engine": type(engine).__module__.startswith("deepspeed.runtime.pipe"),
        "zero_hpz_partition_size": engine.zero_hpz_partition_size() > 1,
        "round_robin_gradients": engine.zero_round_robin_gradients(),
        "zenflow": bool(getattr(engine, "zenflow", False)),
        "super_offload": bool(engine.super_offload()),
        "autotp": engine.autotp_size() > 1,
        "quantized weights": engine.zero_quantized_weights(),
        f"the optimizer {base.__qualname__}": ".onebit." in f"{base.__module__}.",
        "training without an optimizer": optimizer is None or base.__name__ in ("DummyOptim", "DeepSpeedZeRoOffload"),
    }
    return next((what for what, is_there in found.items() if is_there), None)


def ranges_of(path: str, engine: Any) -> Iterator[ParameterRange]:
    """Yield this rank's range of each parameter that is trained, an empty one of those that other ranks have."""
    own = engine.optimizer
    if hasattr(own, "fp32_partitioned_groups_flat"):  # ZeRO 3
        yield from _ranges_of_stage_3(own)
    elif hasattr(own, "fp32_groups_flat_partition"):
        yield from _linked_ranges(own.bf16_groups, own.fp32_groups_flat_partition)
    elif hasattr(own, "single_partition_of_fp32_groups"):
        yield from _linked_ranges(own.bit16_groups, own.single_partition_of_fp32_groups)
    elif hasattr(own, "fp32_groups_flat"):
        for group, memory in zip(own.fp16_groups, own.fp32_groups_flat, strict=True):
            at = 0
            for parameter in group:
                yield ParameterRange(parameter, memory, at, parameter.numel(), 0)
                at += parameter.numel()
    elif hasattr(own, "fp32_groups"):
        for group, masters in zip(own.fp16_groups, own.fp32_groups, strict=True):
            yield from (ParameterRange(p, master, 0, p.numel(), 0) for p, master in zip(group, masters, strict=True))
    else:
        raise ConfigError(f"{path} is an engine of DeepSpeed with the unknown optimizer {type(own).__qualname__}")


def _ranges_of_stage_3(own: Any) -> Iterator[ParameterRange]:
    for group, memory in zip(own.fp16_groups, own.fp32_partitioned_groups_flat, strict=True):
        for parameter in group:
            _, at, size = own.grad_position[own.get_param_id(parameter)]
            start = _start_of(parameter, size)
            count = min(size, parameter.ds_numel - start)  # the last partition is padded
            yield ParameterRange(parameter, memory, at, count, start)


def _start_of(parameter: Any, size: int) -> int:
    """Return the number of the first element that ZeRO 3 gives this rank, in partitions of this size."""
    return min(size * int(torch.distributed.get_rank(parameter.ds_process_group)), int(parameter.ds_numel))


def _linked_ranges(groups: Any, memories: Any) -> Iterator[ParameterRange]:
    for group, memory in zip(groups, memories, strict=True):
        for parameter in group:
            linked = getattr(parameter, _LINKED)
            if linked is None:
                yield ParameterRange(parameter, memory, 0, 0, 0)
            else:
                low, high = linked.lp_fragment_address, linked.hp_fragment_address
                yield ParameterRange(parameter, memory, high.start, high.numel, low.start)


def _frozen_part(parameter: Any, partition: torch.Tensor) -> torch.Tensor:
    """Return this rank's range of a frozen parameter under ZeRO 3. partition: it, perhaps padded."""
    start = _start_of(parameter, partition.numel())
    return flat_part(partition.data[: parameter.ds_numel - start], shape_of(parameter), start)


class ZeroModel(EngineModel):
    """A module with the names of the engine's model, whose trained parameters are ranges of the 32-bit weights.

    Buffers and frozen parameters are the model's own. Of a frozen parameter, ZeRO 3 has this rank's range.
    """

    cure = "which raycheck does not follow; put them back"

    def __init__(self, path: str, engine: Any, ranges: list[ParameterRange]) -> None:
        super().__init__(path)
        self.engine: Callable[[], Any] = lambda: engine  # torch would register the engine itself as a child
        plain = plain_names(engine.module)
        made: dict[int, torch.nn.Parameter] = {}
        trained = {id(item.parameter): item for item in ranges}
        for key, parameter in engine.module.named_parameters(remove_duplicate=False):
            if id(parameter) not in made:
                made[id(parameter)] = self._own(parameter, trained.get(id(parameter)))
            self.add_parameter(plain(key), made[id(parameter)])
        for module_path, module in engine.module.named_modules():
            if not is_plain(module):
                raise ConfigError(
                    f"{path}: {module_path or 'the model'} is a {type(module).__qualname__} with its own state_dict or "
                    "extra state, which raycheck cannot save inside an engine of DeepSpeed. Make that state a separate "
                    "entry, or save with engine.save_checkpoint()"
                )
            for key in module._buffers:  # noqa: SLF001
                self.add_buffer(plain(f"{module_path}.{key}" if module_path else key), module, key)

    def _own(self, parameter: Any, trained: ParameterRange | None) -> torch.nn.Parameter:
        if trained is not None:
            return self.view(trained.memory, trained, trained.of)
        if hasattr(parameter, "ds_tensor"):
            return self.view(parameter.ds_tensor, None, partial(_frozen_part, parameter))
        return self.view(parameter, None, torch.Tensor.detach)

    def check(self) -> None:
        offloaded = sorted(str(state.value) for state in getattr(self.engine().optimizer, "offloaded_states", ()))
        if offloaded:
            raise ConfigError(
                f"{self.path}: the engine has offloaded its states ({', '.join(offloaded)}); call "
                "engine.reload_states() before the save or the restore"
            )

    def refresh(self) -> None:
        """Make the low-precision weights from the 32-bit ones. A collective of ZeRO's ranks."""
        own: Any = self.engine().optimizer
        if hasattr(own, "update_lp_params"):
            own.update_lp_params()
        elif hasattr(own, "fp32_partitioned_groups_flat"):
            own.parameter_offload.partition_all_parameters()  # what was gathered holds the weights from before
            for number, memory in enumerate(own.fp32_partitioned_groups_flat):
                low = own.fp16_partitioned_groups_flat[number]
                low.data.copy_(memory.data)
                partitions = own.fp16_partitioned_groups[number]
                for partition, new in zip(partitions, own.unflatten(low, partitions), strict=True):
                    partition.data = new.data
        else:
            for item in cast("Iterator[ParameterRange]", iter(self.of.values())):
                item.parameter.data.copy_(elements_of(item, item.memory).view_as(item.parameter))


class ZeroModelEntry(EngineModelEntry):
    """The entry of a ZeroModel."""

    module: ZeroModel

    def _adapted_layers(self) -> dict[str, torch.nn.Module]:
        module = self.module.engine().module
        return adapted_layers(module, plain_names(module))


ZeroModel.entry = ZeroModelEntry


class ZeroOptimizer(EngineOptimizer):
    """The engine's base optimizer, with its state by parameter of a ZeroModel instead of by flat memory."""

    def __init__(self, engine: Any, model: ZeroModel) -> None:
        self._own = engine.optimizer
        group_of: dict[int, int] = {}
        for number, group in enumerate(_groups_of(self._own)):
            group_of |= {id(parameter): number for parameter in group}
        parameters: list[list[torch.Tensor]] = [[] for _ in self._own.optimizer.param_groups]
        for parameter, item in model.of.items():
            parameters[group_of[id(cast("ParameterRange", item).parameter)]].append(parameter)
        super().__init__([self._own.optimizer], model, parameters)

    def _slots(self, item: MemoryRange) -> dict[str, Any] | None:
        slots = super()._slots(item)
        return slots and {slot: value for slot, value in slots.items() if not slot.endswith(_OFFLOAD_BUFFER)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        super().load_state_dict(state_dict)
        link = getattr(self._own, "_lazy_init_hp_params_optimizer_state", None)
        if link is not None:
            link()


def _groups_of(own: Any) -> list[list[Any]]:
    """Return the engine's parameters by group of the base optimizer."""
    if hasattr(own, "sub_group_to_group_id"):
        groups: list[list[Any]] = [[] for _ in own.optimizer.param_groups]
        for number, group in enumerate(own.fp16_groups):
            groups[own.sub_group_to_group_id[number]] += group
        return groups
    return list(getattr(own, "bit16_groups", None) or getattr(own, "bf16_groups", None) or own.fp16_groups)


@dataclass
class EngineCounters:
    """The counts of an engine, and the state of its loss scaler."""

    engine: Any

    _COUNTERS = ("global_steps", "global_samples", "skipped_steps")

    def _scaler(self) -> Any:
        own = self.engine.optimizer
        return getattr(own, "loss_scaler", None) or getattr(own, "loss_scale_config", None)

    def state_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = {name: getattr(self.engine, name) for name in self._COUNTERS}
        if self._scaler() is not None:
            plain = (bool, int, float)
            found["loss_scaler"] = {key: value for key, value in vars(self._scaler()).items() if type(value) in plain}
        return found

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name in self._COUNTERS:
            setattr(self.engine, name, state[name])
        for name, value in state.get("loss_scaler", {}).items():
            if self._scaler() is not None and hasattr(self._scaler(), name):
                setattr(self._scaler(), name, value)
