"""Presents a training of Megatron-core as a module, an optimizer and what belongs to them.

The module has a parameter for each tensor of the whole model of which this rank has elements, under the name that
Megatron's own checkpoints use (megatron_parts.py). It shares the memory that the optimizer trains: a 32-bit copy of the
rank's parameter, or a flat range of that copy under DistributedOptimizer. So every rank saves and reads what it trains,
and nothing is gathered.

Megatron's private names differ between versions, so only versions that were tried are accepted. The same holds for
what its configurations turn on.
"""

import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from raycheck.errors import ConfigError
from raycheck.state.entries.engine_model import EngineModel, EngineModelEntry, EngineOptimizer
from raycheck.state.entries.megatron_parts import ParameterPiece, pieces_of, ranges_of, without_rows
from raycheck.state.entries.optimizer.optimizer_entry import OptimizerEntry
from raycheck.state.entries.saved_entry import Named, SavedEntry

logger = logging.getLogger("raycheck")

VERSIONS = ("0.16.",)
"""The beginnings of the versions of Megatron-core that were tried."""
_DISTRIBUTED = "DistributedOptimizer"
_OPTIMIZERS = (_DISTRIBUTED, "Float16OptimizerWithFloat16Params", "FP32Optimizer")
_WRAPPERS = ("DistributedDataParallel", "Float16Module")


def megatron(
    model: Any, optimizer: Any = None, scheduler: Any = None, *, has_random_states: bool = True
) -> dict[str, object]:
    """Return what a checkpoint contains of a training with Megatron-core, as an entry of a state.

    Use it as `{"engine": raycheck.adapters.megatron(model, optimizer, scheduler)}`. All ranks must call this, after
    the optimizer was created. A restore may have other degrees of tensor, pipeline, expert and data parallelism.

    model: the model, or the list of its chunks, with or without Megatron's wrappers. optimizer: of
    get_megatron_optimizer; None to keep weights alone. scheduler: an OptimizerParamScheduler. has_random_states: keep
    the states of Megatron's random number tracker too.

    Raises ConfigError, naming it, for anything that was not tried.
    """
    chunks = [_unwrapped(chunk) for chunk in (model if isinstance(model, list | tuple) else [model])]
    optimizers = _flat(optimizer)
    _refuse_untried(chunks, optimizers)
    own = MegatronModel(chunks, model, optimizers)
    state: dict[str, object] = {"model": own}
    if optimizers:
        state["optimizer"] = MegatronOptimizer(own, optimizers)
        scalers = [item.grad_scaler for item in optimizers if getattr(item, "grad_scaler", None) is not None]
        if any(scaler.state_dict() for scaler in scalers):
            state["scaler"] = _Scalers(scalers)
    if scheduler is not None:
        state["scheduler"] = _Scheduler(scheduler)
    if has_random_states:
        state["random"] = RandomStates()
    return state


def _unwrapped(chunk: Any) -> Any:
    while any(base.__name__ in _WRAPPERS and _is_megatrons(base) for base in type(chunk).__mro__):
        chunk = chunk.module
    return chunk


def _is_megatrons(kind: type) -> bool:
    return kind.__module__.startswith("megatron.core.")


def _flat(optimizer: Any) -> list[Any]:
    """Return the optimizers that a ChainedOptimizer contains, or the only one."""
    if optimizer is None:
        return []
    return list(optimizer.chained_optimizers) if type(optimizer).__name__ == "ChainedOptimizer" else [optimizer]


def _refuse_untried(chunks: Sequence[Any], optimizers: Sequence[Any]) -> None:
    """Raise ConfigError for a version or a feature of Megatron-core that was not tried."""
    version = str(getattr(sys.modules.get("megatron.core"), "__version__", "unknown"))
    odd = [] if version.startswith(VERSIONS) else [f"version {version}"]
    odd += [what for chunk in chunks for what in _odd_in_model(chunk)]
    odd += [what for item in optimizers for what in _odd_in_optimizer(item)]
    if odd:
        raise ConfigError(
            f"this is a training of Megatron-core with {odd[0]}, which raycheck cannot save. Versions "
            f"{', '.join(f'{tried}x' for tried in VERSIONS)} were tried with GPTModel, tensor, pipeline, expert and "
            "data parallelism, and get_megatron_optimizer without Transformer Engine and Apex. Save it with "
            "megatron.core.dist_checkpointing"
        )


def _odd_in_model(chunk: Any) -> Iterator[str]:
    """Yield the features of a model that were not tried."""
    if not any(base.__name__ == "GPTModel" and _is_megatrons(base) for base in type(chunk).__mro__):
        yield f"a {type(chunk).__qualname__} instead of a GPTModel"
        return
    config = chunk.config
    found = {
        "fp8": config.fp8,
        "fp4": config.fp4,
        "context_parallel_size": config.context_parallel_size > 1,
        "mtp_num_layers": config.mtp_num_layers,
        "multi_latent_attention": config.multi_latent_attention,
        "use_kitchen": config.use_kitchen,
        "num_query_groups below the degree of tensor parallelism": (config.num_query_groups or 1 << 30)
        < config.tensor_model_parallel_size,
    }
    yield from (name for name, is_on in found.items() if is_on)


def _odd_in_optimizer(optimizer: Any) -> Iterator[str]:
    """Yield the features of one optimizer that were not tried."""
    kind = type(optimizer)
    if kind.__name__ not in _OPTIMIZERS or not _is_megatrons(kind):
        yield f"the optimizer {kind.__qualname__}"
        return
    settings = optimizer.config
    data_parallel = getattr(optimizer, "ddp_config", None)
    base = type(optimizer.optimizer)
    found = {
        "use_precision_aware_optimizer": settings.use_precision_aware_optimizer,
        "optimizer_cpu_offload": settings.optimizer_cpu_offload,
        "overlap_param_gather_with_optimizer_step": settings.overlap_param_gather_with_optimizer_step,
        "Megatron FSDP": data_parallel is not None and data_parallel.use_megatron_fsdp,
        "num_distributed_optimizer_instances": data_parallel is not None
        and data_parallel.num_distributed_optimizer_instances > 1,
        f"the base optimizer {base.__module__}.{base.__qualname__}": optimizer.optimizer is not None
        and base not in (torch.optim.Adam, torch.optim.AdamW),
    }
    yield from (name for name, is_on in found.items() if is_on)


class _Trained(NamedTuple):
    """The memory that an optimizer trains for a parameter, and the number of its first element there."""

    memory: torch.Tensor
    start: int


def _trained(optimizers: Sequence[Any]) -> dict[int, _Trained | None]:
    """Return what each optimizer trains, by the id of the model's parameter. None: other ranks train all of it."""
    found: dict[int, _Trained | None] = {}
    for optimizer in optimizers:
        if optimizer.is_stub_optimizer:
            continue
        kind = type(optimizer).__name__
        if kind == "FP32Optimizer":
            found |= {id(p): _Trained(p, 0) for group in optimizer.optimizer.param_groups for p in group["params"]}
            continue
        if kind == _DISTRIBUTED:
            found |= {id(parameter): None for buffer in optimizer.buffers for parameter in buffer.params}
            pairs = (
                (optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups),
                (optimizer.model_fp32_groups, optimizer.shard_fp32_groups),
            )
        else:
            pairs = (
                (optimizer.float16_groups, optimizer.fp32_from_float16_groups),
                (optimizer.fp32_from_fp32_groups, optimizer.fp32_from_fp32_groups),
            )
        for groups, memories in pairs:
            for group, own in zip(groups, memories, strict=True):
                for parameter, memory in zip(group, own, strict=True):
                    start = (
                        optimizer._get_model_param_range_map(parameter)["param"].start  # noqa: SLF001
                        if kind == _DISTRIBUTED
                        else 0
                    )
                    found[id(parameter)] = _Trained(memory, start)
    return found


class MegatronModel(EngineModel):
    """A module whose parameters are this rank's parts of the tensors of the whole model.

    everywhere: the names that any rank has. padded: the whole shapes of tensors that may have other numbers of rows.
    """

    cure = "as optimizer.offload_to_cpu() may do; call optimizer.restore_from_cpu()"

    def __init__(self, chunks: Sequence[Any], wrapped: Any, optimizers: Sequence[Any]) -> None:
        super().__init__("this training of Megatron-core")
        self._optimizers = optimizers
        given = list(wrapped) if isinstance(wrapped, list | tuple) else [wrapped]
        self._given: Callable[[], list[Any]] = lambda: given  # torch would register modules as children
        self.padded: dict[str, tuple[int, ...]] = {}
        self.everywhere: set[str] = set()
        trained = _trained(optimizers)
        for chunk in chunks:
            self._add_chunk(chunk, trained)
        self._add_names_of_other_ranks()
        self.check()

    def check(self) -> None:
        weights = [weight for chunk in self._given() for weight in chunk.parameters()]
        if any(weight.numel() and not weight.untyped_storage().nbytes() for weight in weights):
            raise ConfigError(
                f"{self.path} has model weights whose memory was freed, as verl's param_offload does between steps. "
                "Load them onto the device before a save or a restore; in verl, set param_offload to False"
            )

    def _add_names_of_other_ranks(self) -> None:
        names: list[list[str]] = [[] for _ in range(torch.distributed.get_world_size())]
        torch.distributed.all_gather_object(names, [*self.everywhere, *(name for name, _ in self.named_buffers())])
        self.everywhere.update(*names)

    def _add_chunk(self, chunk: Any, trained: Mapping[int, _Trained | None]) -> None:
        modules, seen = dict(chunk.named_modules()), {}
        metadata = {"singleton_local_shards": True}  # each layer and each expert under its own name
        for key, sharded in chunk.sharded_state_dict(metadata=metadata).items():
            place, _, leaf = key.rpartition(".")
            own = sharded.data
            if not isinstance(own, torch.Tensor):
                _refuse_extra_state(key, own)
            elif isinstance(own, torch.nn.Parameter):
                seen[id(own)] = key
                self._add(key, own, trained.get(id(own), _Trained(own, 0)), pieces_of(key, sharded))
            elif modules.get(place) is not None and modules[place]._buffers.get(leaf) is own:  # noqa: SLF001
                if tuple(sharded.global_shape) != tuple(own.shape):
                    raise ConfigError(f"the buffer {key} is a part of a larger one, which raycheck cannot save")
                self.add_buffer(sharded.key, modules[place], leaf)
            else:
                _refuse_extra_state(key, own)
        for key, parameter in chunk.named_parameters():
            if id(parameter) not in seen:
                raise ConfigError(
                    f"the parameter {key} is not in the model's sharded_state_dict(), so that its place in the whole "
                    "model is unknown. Let the module that has it return it there"
                )

    def _add(
        self, key: str, own: torch.nn.Parameter, trained: _Trained | None, pieces: Sequence[ParameterPiece]
    ) -> None:
        if trained is None:
            return
        if not trained.memory.is_contiguous():
            raise ConfigError(f"the parameter {key} is not contiguous in memory, which raycheck cannot save")
        for item in ranges_of(pieces, trained.memory, trained.start):
            if item.name in self.everywhere:
                raise ConfigError(
                    f"this rank has {item.name} twice, in memory of its own each time ({key} is one of them), which "
                    "raycheck cannot save"
                )
            self.everywhere.add(item.name)
            self.add_parameter(item.name, self.view(item.memory, item if own.requires_grad else None, item.of))
            if item.is_padded:
                self.padded[item.name] = item.shape

    def refresh(self) -> None:
        """Make the low-precision weights from the 32-bit ones. A collective of the data-parallel ranks."""
        for optimizer in self._optimizers:
            if type(optimizer).__name__ != "FP32Optimizer" and not optimizer.is_stub_optimizer:
                optimizer._copy_main_params_to_model_params()  # noqa: SLF001
        if any(type(optimizer).__name__ == _DISTRIBUTED for optimizer in self._optimizers):
            for chunk in self._given():
                for _ in range(2 if chunk.ddp_config.overlap_param_gather else 1):  # it may first end an earlier one
                    chunk.start_param_sync(force_sync=True)


def _refuse_extra_state(key: str, value: Any) -> None:
    """Raise ConfigError for extra state of a module, which Megatron keeps as opaque bytes, unless it is empty."""
    is_empty = value is None or (isinstance(value, torch.Tensor) and not value.numel())
    if not is_empty:
        raise ConfigError(
            f"{key} is extra state of a module ({type(value).__qualname__}), as Transformer Engine has for FP8, which "
            "raycheck cannot save. Make that state a separate entry, or save with megatron.core.dist_checkpointing"
        )


class MegatronModelEntry(EngineModelEntry):
    """The entry of a MegatronModel."""

    module: MegatronModel

    def match(self, saved: SavedEntry) -> Named:
        shapes = {f"{self.name}.{name}": shape for name, shape in self.module.padded.items()}
        real = _as_padded_here(saved, shapes)
        wanted = _without_padding(saved, real, super().match(saved))
        _sort_unexpected(saved, {f"{self.name}.{name}" for name in self.module.everywhere})
        return wanted


class MegatronOptimizer(EngineOptimizer):
    """Megatron's base optimizers, with their state by parameter of a MegatronModel.

    Experts are in groups of their own only if there are several expert-parallel ranks. Here they never are.
    """

    placing = frozenset({"is_expert_parallel"})

    def __init__(self, model: MegatronModel, optimizers: Sequence[Any]) -> None:
        self.everywhere, self.padded = model.everywhere, model.padded
        bases = [item.optimizer for item in optimizers if not item.is_stub_optimizer]
        views: dict[int, list[torch.Tensor]] = {}
        for parameter, item in model.of.items():
            views.setdefault(id(item.memory), []).append(parameter)
        groups = [group for base in bases for group in base.param_groups]
        own = [[view for memory in group["params"] for view in views.get(id(memory), ())] for group in groups]
        alike: dict[str, list[int]] = {}
        for number, group in enumerate(groups):
            options = {key: value for key, value in group.items() if key not in ("params", *self.placing)}
            alike.setdefault(repr(sorted(options.items())), []).append(number)
        super().__init__(bases, model, own, list(alike.values()))


class MegatronOptimizerEntry(OptimizerEntry):
    """The entry of a MegatronOptimizer."""

    optimizer: MegatronOptimizer

    def match(self, saved: SavedEntry) -> Named:
        shapes = {
            name: shape
            for parameter, shape in self.optimizer.padded.items()
            for name in saved.tensors
            if name.startswith(f"{self.name}.state.{parameter}.")
        }
        real = _as_padded_here(saved, shapes)
        wanted = super().match(saved)
        for name in real.keys() & wanted.keys() - self._live_slots().keys():
            wanted[name].zero_()  # padding has no state yet
        _sort_unexpected(saved, {f"{self.name}.state.{name}" for name in self.optimizer.everywhere})
        return _without_padding(saved, real, wanted)


MegatronModel.entry = MegatronModelEntry
MegatronOptimizer.entry = MegatronOptimizerEntry


def _as_padded_here(saved: SavedEntry, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """Let saved tensors have as many rows as here, and return those of which that is not true."""
    real = {}
    for name, shape in shapes.items():
        there = saved.tensors.get(name)
        if there is not None and there.shape != shape and there.shape[1:] == shape[1:] and len(there.shape):
            real[name] = there
            saved.tensors[name] = replace(there, shape=shape)
    return real


def _without_padding(saved: SavedEntry, real: Mapping[str, Any], wanted: Named) -> Named:
    """Return the tensors to read into, with no more rows than were saved."""
    for name, there in real.items():
        rows = saved.tensors[name].shape[0]
        saved.tensors[name] = there
        if name in wanted:
            wanted[name] = without_rows(wanted[name], there.shape[0])
            saved.fresh.append(
                f"{name}: {rows} rows here, {there.shape[0]} saved; the first {min(rows, there.shape[0])} are restored"
            )
    return wanted


def _sort_unexpected(saved: SavedEntry, everywhere: set[str]) -> None:
    """Record as unexpected what no rank has, and as unused what other ranks have."""
    only_there = [*saved.unexpected, *saved.unused]
    saved.unexpected[:] = [name for name in only_there if name not in everywhere]
    saved.unused[:] = [name for name in only_there if name in everywhere]


@dataclass
class _Scheduler:
    """An OptimizerParamScheduler, whose own load_state_dict adds the saved steps to those it has already taken."""

    scheduler: Any

    def state_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = self.scheduler.state_dict()
        return found

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.scheduler.num_steps = 0
        self.scheduler.load_state_dict(dict(state))


@dataclass
class _Scalers:
    """The gradient scalers of the optimizers, in order."""

    scalers: Sequence[Any]

    def state_dict(self) -> dict[str, Any]:
        states = [{**scaler.state_dict(), "scale": float(scaler.scale)} for scaler in self.scalers]
        return {"scalers": states}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for scaler, saved in zip(self.scalers, state["scalers"], strict=True):
            scale = torch.full_like(scaler.scale, saved["scale"])
            scaler.load_state_dict({**saved, "scale": scale})


class RandomStates:
    """The states of Megatron's random number tracker, which the ranks of a model have in common or not by their place.

    A restore gives a rank the states of the rank that had its place in the tensor, pipeline and expert parallel groups.
    If one of these groups had another size, no saved state means the same numbers: the ranks keep the states that they
    were seeded with, and a warning says so.

    They also say whose states of Python's, NumPy's and torch's generators a rank takes. Dropout outside of
    tensor-parallel regions draws from torch's, which must be equal in a tensor-parallel group.
    """

    merges_ranks = True

    _SIZES = ("tensor_model_parallel", "pipeline_model_parallel", "expert_model_parallel")

    def state_dict(self) -> dict[str, Any]:
        states = _tracker().get_states()
        for name, value in states.items():
            if not isinstance(value, torch.Tensor):
                raise ConfigError(f"the random state {name} of Megatron is a {type(value).__qualname__}, not a tensor")
        return {**self._place(), "states": states}

    def _place(self) -> dict[str, Any]:
        """Return this rank's place in the groups, and their sizes."""
        groups = sys.modules["megatron.core.parallel_state"]
        return {
            "sizes": {kind: getattr(groups, f"get_{kind}_world_size")() for kind in self._SIZES},
            "place": {kind: getattr(groups, f"get_{kind}_rank")() for kind in self._SIZES},
            "data_rank": groups.get_data_parallel_rank(),
        }

    def random_rank(self, states: Sequence[Mapping[str, Any]]) -> int:
        """Return the number of the rank whose generators' states this rank takes.

        It is a rank of the tensor-parallel group that had this group's place: the one with this rank's place in the
        group, or the first one for all if the group had another size. A group that did not exist gets one new state.
        """
        here = self._place()
        tensor, pipeline = (int(here["place"][kind]) for kind in self._SIZES[:2])
        data_rank = int(here["data_rank"])
        group: dict[int, int] = {
            found["place"][self._SIZES[0]]: number
            for number, found in enumerate(states)
            if (found["place"][self._SIZES[1]], found["data_rank"]) == (pipeline, data_rank)
        }
        if not group:
            groups = sys.modules["megatron.core.parallel_state"]
            return len(states) + pipeline * int(groups.get_data_parallel_world_size()) + data_rank
        return group[tensor if states[0]["sizes"][self._SIZES[0]] == here["sizes"][self._SIZES[0]] else 0]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take one rank's states."""
        self.load_rank_states([state])

    def check_rank_states(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Accept every state: see load_rank_states."""

    def load_rank_states(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Take the states of the rank that had this rank's place."""
        here = self._place()
        mates = [found for found in states if (found["sizes"], found["place"]) == (here["sizes"], here["place"])]
        if not mates:
            if torch.distributed.get_rank() == 0:
                logger.warning(
                    "the random states of Megatron were saved with %s, and this training has %s: they keep their fresh "
                    "seeds, so that dropout draws other numbers than an undisturbed training would",
                    states[0]["sizes"],
                    here["sizes"],
                )
            return
        own = next((found for found in mates if found["data_rank"] == here["data_rank"]), mates[0])
        if own["states"]:
            _tracker().set_states(own["states"])


def _tracker() -> Any:
    tracker = sys.modules["megatron.core.tensor_parallel.random"].get_cuda_rng_tracker()
    if type(tracker).__name__ != "CudaRNGStatesTracker":
        raise ConfigError(
            f"the random number tracker of Megatron is a {type(tracker).__qualname__}, which was not tried; "
            "megatron(..., has_random_states=False) leaves it out"
        )
    return tracker
