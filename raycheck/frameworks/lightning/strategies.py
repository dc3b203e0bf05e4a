"""Lightning strategies for Ray Train's workers, which Ray has already started and connected.

Ray has such classes for DDP, FSDP1, and DeepSpeed, but not for FSDP2, and that for DeepSpeed restores before raycheck
could. Outside Ray Train, ranks come from torch.distributed.
"""

from functools import cache
from typing import Any, Literal, cast, get_args

import torch
import torch.distributed as dist

from raycheck.errors import ConfigError
from raycheck.frameworks.lightning.packages import imported_package, named

Kind = Literal["ddp", "fsdp2", "deepspeed"]


def strategy(kind: Kind, **options: Any) -> Any:
    """Return a strategy for Trainer(strategy=...) inside Ray Train. No plugins and no prepare_trainer are needed.

    kind: "ddp", "fsdp2" or "deepspeed". With "fsdp2" the module's configure_model() shards the module with torch's
    fully_shard over self.device_mesh["data_parallel"]. options: passed to Lightning's DDPStrategy,
    ModelParallelStrategy or DeepSpeedStrategy. With "fsdp2", data_parallel_size defaults to the number of workers /
    tensor_parallel_size, which defaults to 1.

    Raises ConfigError for another kind, and when Lightning is missing or too old.
    """
    if kind not in get_args(Kind):
        raise ConfigError(f'strategy({kind!r}): give "ddp", "fsdp2" or "deepspeed" (FSDP1 cannot be resharded)')
    return _class_of(kind, imported_package())(**options)


def is_sharded(candidate: object) -> bool:
    """Return whether a strategy was made by strategy("fsdp2") or strategy("deepspeed")."""
    return isinstance(candidate, Sharded)


def engine_of(trainer: Any) -> Any:
    """Return the engine of DeepSpeed that a Trainer trains, None if it trains the module itself."""
    strategy: Any = trainer.strategy
    return strategy.model if isinstance(strategy, ShardedByDeepSpeed) else None


class WorkerEnvironment:
    """This worker's rank and world size, for Lightning. Ray, or the process group's creator, started the processes."""

    creates_processes_externally = True

    def world_size(self) -> int:
        context = _ray_context()
        if context is not None:
            return int(context.get_world_size())
        return dist.get_world_size() if dist.is_initialized() else 1

    def global_rank(self) -> int:
        context = _ray_context()
        if context is not None:
            return int(context.get_world_rank())
        return dist.get_rank() if dist.is_initialized() else 0

    def local_rank(self) -> int:
        context = _ray_context()
        return int(context.get_local_rank()) if context is not None else self.global_rank()

    def node_rank(self) -> int:
        context = _ray_context()
        return int(context.get_node_rank()) if context is not None else 0

    def set_world_size(self, size: int) -> None:
        """Ignore what Lightning computes from its devices."""

    def set_global_rank(self, rank: int) -> None:
        """Ignore what Lightning computes from its devices."""

    def teardown(self) -> None:
        """Do nothing: the process group belongs to its creator."""


class OnThisWorker:
    """A mixin that fixes a strategy to this worker's device and environment, whatever the Trainer has chosen."""

    _environment: Any = None

    @property
    def cluster_environment(self) -> Any:
        return self._environment

    @cluster_environment.setter
    def cluster_environment(self, chosen: object) -> None:
        package = type(self).__module__
        self._environment = None if chosen is None else _environment_class(package)()

    @property
    def root_device(self) -> torch.device:
        if _ray_context() is not None:
            import ray.train.torch

            device: torch.device = ray.train.torch.get_device()
            return device
        devices: Any = getattr(self, "parallel_devices", None) or [torch.device("cpu")]
        return torch.device(devices[self._environment.local_rank() % len(devices)])


class ReplicatedByDdp(OnThisWorker):
    """A mixin for DDP that gives each worker its share of the data."""

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        return {"num_replicas": self._environment.world_size(), "rank": self._environment.global_rank()}


class Sharded(OnThisWorker):
    """A mixin for strategies that shard the module: checkpoint values are read before setup, tensors after it."""

    kind: Kind
    restore_checkpoint_after_setup = False

    def setup_environment(self) -> None:
        """Refuse averaged weights. Lightning calls this before any callback's setup."""
        this: Any = self
        trainer = this.lightning_module.trainer
        if trainer.state.fn == "fit":
            _refuse_averaging(trainer.callbacks, type(self).__module__, self.kind)
        cast("Any", super()).setup_environment()


class ShardedByDeepSpeed(Sharded):
    """A mixin for DeepSpeed, whose engine shards the module. model: the engine."""

    kind = "deepspeed"
    model: Any


class ShardedByModule(Sharded):
    """A mixin for FSDP2: the module shards itself over all workers."""

    kind = "fsdp2"

    def setup_environment(self) -> None:
        """Determine the mesh sizes."""
        this: Any = self
        if this._tensor_parallel_size == "auto":
            this._tensor_parallel_size = 1
        if this._data_parallel_size == "auto":
            this._data_parallel_size = self._environment.world_size() // this._tensor_parallel_size
        cast("Any", super()).setup_environment()


def _refuse_averaging(callbacks: list[Any], package: str, kind: Kind) -> None:
    """Raise ConfigError for a callback that averages weights: Lightning copies the module for it after setup."""
    for name in ("WeightAveraging", "StochasticWeightAveraging"):
        for callback in callbacks:
            if isinstance(callback, named(package, "callbacks", name)):
                raise ConfigError(
                    f'{type(callback).__qualname__} with strategy("{kind}"): Lightning copies the whole module for it, '
                    "and a sharded module cannot be copied. Remove it, or, with fsdp2, keep averages as buffers of the "
                    "module, created in configure_model() after fully_shard"
                )


@cache
def _class_of(kind: Kind, package: str) -> type:
    name, place = {
        "ddp": ("DDPStrategy", ReplicatedByDdp),
        "fsdp2": ("ModelParallelStrategy", ShardedByModule),
        "deepspeed": ("DeepSpeedStrategy", ShardedByDeepSpeed),
    }[kind]
    return type(f"Raycheck{name}", (place, named(package, "strategies", name)), {"__module__": package})


@cache
def _environment_class(package: str) -> type:
    base = named(package, "plugins.environments", "LightningEnvironment")
    return type("RaycheckEnvironment", (WorkerEnvironment, base), {"__module__": package})


def _ray_context() -> Any:
    """Return this worker's Ray Train context, or None outside Ray Train."""
    import ray.train

    try:
        context = ray.train.get_context()
        context.get_world_size()
    except (RuntimeError, AttributeError):
        return None
    return context
