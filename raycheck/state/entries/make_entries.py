"""Creates the entries of a state from what the user put into it.

`objects_by_name` flattens the user's dicts and lists into objects with dotted names. `make_entries` then picks the kind
of entry for each object. Both raise ConfigError, naming the entry, before any step runs.
"""

from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from torch.optim import Optimizer

from raycheck.bucket.assembly.role import Role
from raycheck.bucket.format.values import encode
from raycheck.errors import ConfigError
from raycheck.state.entries.deepspeed_engine import is_engine, parts_of_engine
from raycheck.state.entries.engine_model import EngineModel, EngineOptimizer
from raycheck.state.entries.engines import refuse_engine
from raycheck.state.entries.fill_in_place import is_container
from raycheck.state.entries.hf_assets import FilesEntry, has_files
from raycheck.state.entries.metric_entry import MetricsEntry, is_metrics, refuse_metrics_inside
from raycheck.state.entries.module.module_entry import ModuleEntry
from raycheck.state.entries.module.parameter_names import NamedParameters, ParameterNames, parameter_names
from raycheck.state.entries.object_entry import ObjectEntry, has_state_dict
from raycheck.state.entries.optimizer.optimizer_entry import OptimizerEntry
from raycheck.state.entries.per_rank_entries import (
    LoaderEntry,
    MergedEntry,
    PerRank,
    PerRankEntry,
    RankZero,
    RankZeroEntry,
    inside,
    is_loader,
    is_merged,
)
from raycheck.state.entries.plain_value_entry import HeldValue, InPlace, PlainValueEntry
from raycheck.state.entries.random_generators import GeneratorState, is_generator
from raycheck.state.entries.state_entry import ASSETS, OWN_ENTRIES, StateEntry, calling
from raycheck.state.entries.wrappers import unwrapped
from raycheck.transfer.stage.stock_torch_names import StockNames


def objects_by_name(state: Mapping[str, object]) -> dict[str, object]:
    """Return the user's objects by name.

    A dict or list of objects becomes objects with dotted names ("optimizer.0"). A dict of plain values is one object.
    Any other plain value is a reference to the dict or list that contains it. Known wrappers are removed.
    """
    objects: dict[str, object] = {}
    for name, value in _top_level(state):
        if name in objects:
            raise ConfigError(f"state[{name!r}]: two entries have this name")
        objects[name] = value
    return objects


class ChainedState(Mapping[str, object]):
    """Several states joined into one, in which every value still belongs to the caller's own mapping."""

    def __init__(self, *sources: Mapping[str, object]) -> None:
        self.sources = sources

    def holder(self, name: str) -> Mapping[str, object]:
        """Return the caller's mapping that contains this name. Raises KeyError."""
        for source in self.sources:
            if name in source:
                return source
        raise KeyError(name)

    def __getitem__(self, name: str) -> object:
        return self.holder(name)[name]

    def __iter__(self) -> Iterator[str]:
        return (name for source in self.sources for name in source)

    def __len__(self) -> int:
        return sum(map(len, self.sources))


def make_entries(objects: Mapping[str, object], role: Role) -> list[StateEntry]:
    """Create one entry for each object."""
    named = NamedParameters({name: value for name, value in objects.items() if isinstance(value, torch.nn.Module)})
    entries = [_make_entry(name, value, named, *role.place_for(name)) for name, value in objects.items()]
    metrics = [metric for entry in entries if isinstance(entry, MetricsEntry) for metric in entry.metrics]
    for entry in entries:
        if isinstance(entry, ModuleEntry):
            refuse_metrics_inside(entry.name, entry.module, metrics)
    by_first_name: dict[str, list[OptimizerEntry]] = {}
    for entry in entries:
        if isinstance(entry, OptimizerEntry):
            by_first_name.setdefault(entry.name.partition(".")[0], []).append(entry)
    for first_name, optimizers in by_first_name.items():
        names = StockNames(first_name, optimizers)
        for optimizer in optimizers:
            optimizer.stock_names = names
    return entries


class Containers:
    """The contents of a state's lists and dicts of objects when the state was given."""

    def __init__(self, state: Mapping[str, object]) -> None:
        self._held = [(*found, _identities(found[1])) for item in state.items() for found in _containers(*item)]

    def check(self) -> None:
        """Raise ConfigError when one of them now contains other objects: these would be left out of every save."""
        for name, container, held in self._held:
            if _identities(container) != held:
                raise ConfigError(
                    f"state[{name!r}] holds other objects than when the state was given, and the new ones would not be "
                    "saved. Give the state once the list or dict is complete"
                )


def _containers(name: str, value: object) -> Iterator[tuple[str, Any]]:
    if type(value) in (dict, list, tuple) and _has_objects(value):
        yield name, value
        for key, item in value.items() if isinstance(value, dict) else enumerate(cast("list[object]", value)):
            yield from _containers(f"{name}.{key}", item)


def _identities(container: Any) -> list[Any]:
    """Return all keys, and the identity of each object. A plain value has none, since it may be replaced."""
    items = container.items() if isinstance(container, dict) else enumerate(container)
    return [(key, id(item)) if _has_objects(item) else key for key, item in items]


def _top_level(state: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    parameters = parameter_names({name: value for name, value in state.items() if isinstance(value, torch.nn.Module)})
    for name, value in state.items():
        if not name.isidentifier() or name in (*OWN_ENTRIES, ASSETS):
            raise ConfigError(
                f"state[{name!r}]: use a plain name; {', '.join((*OWN_ENTRIES, ASSETS))} are raycheck's own"
            )
        holder = state.holder(name) if isinstance(state, ChainedState) else state
        yield from _nested(name, value, parameters, holder, name)


def _nested(
    name: str, value: object, parameters: ParameterNames, holder: object, key: object
) -> Iterator[tuple[str, object]]:
    """Return the objects in `value`, with their names. holder, key: the container of `value`, and its key there."""
    if is_engine(value):
        for part, item in parts_of_engine(name, value).items():
            yield f"{name}.{part}", item
        return
    if type(value) not in (dict, list, tuple) or not _has_objects(value):
        yield name, HeldValue(holder, key, name) if _is_plain(name, value) else unwrapped(name, value)
        return
    for inner, item in value.items() if isinstance(value, dict) else enumerate(cast("list[object]", value)):
        if isinstance(inner, torch.Tensor) and inner in parameters:  # optimizer in backward: one per parameter
            step = parameters[inner][1]
        elif isinstance(inner, str | int):
            step = str(inner)
        else:
            raise ConfigError(f"state[{name!r}] has a {type(inner).__qualname__} as key; use names or numbers")
        yield from _nested(f"{name}.{step.replace('.', '_')}", item, parameters, value, inner)


def _is_plain(name: str, value: object) -> bool:
    """Return whether `value` is a plain value to be read from its container. A dict is filled in place instead."""
    if type(value) is dict or _has_objects(value):
        return False
    if isinstance(value, torch.Tensor):
        return True
    try:
        encode(value, f"state[{name!r}]", lambda leaf, path: path if isinstance(leaf, torch.Tensor) else None)
    except ConfigError:
        return is_container(value)  # its entry reports which parts cannot be saved
    return True


def _make_entry(name: str, value: Any, named: NamedParameters, rank: int, world_size: int) -> StateEntry:
    """Pick the kind of entry. The order matters: a metric is a module, and several kinds have a state_dict."""
    refuse_engine(f"state[{name!r}]", inside(value))
    own = value.value if isinstance(value, PerRank) else value
    if is_metrics(own):
        return MetricsEntry(name, own, rank=rank, world_size=world_size)
    if isinstance(value, EngineModel):
        return value.entry(name, value)
    if isinstance(value, torch.nn.Module):
        return ModuleEntry(name, value)
    if isinstance(value, HeldValue):
        return PlainValueEntry(name, value, rank=rank)
    if isinstance(value, EngineOptimizer):
        return value.entry(name, value, named)
    if isinstance(value, Optimizer) and _has_torchs_form(name, value):
        return OptimizerEntry(name, value, named)
    if isinstance(value, PerRank | RankZero) and is_loader(name, inside(value)):
        raise ConfigError(
            f"state[{name!r}] is {type(value).__name__} of a loader, whose position means other samples at another "
            "world size. Use the loader itself: each rank's position is saved, and another number of ranks is refused"
        )
    if isinstance(value, PerRank):
        return PerRankEntry(name, value, rank=rank)
    if isinstance(value, RankZero):
        return RankZeroEntry(name, value, rank=rank)
    if is_merged(value):
        return MergedEntry(name, value, rank=rank)
    if is_loader(name, value):
        return LoaderEntry(name, value, rank=rank, world_size=world_size)
    if type(value) is dict:
        return ObjectEntry(name, InPlace(value))
    if has_files(value):
        return FilesEntry(name, value)
    if is_generator(value):
        return ObjectEntry(name, GeneratorState(value))
    if _has_objects(value):
        return ObjectEntry(name, value)
    raise ConfigError(
        f"state[{name!r}] is a {type(value).__qualname__} without state_dict and load_state_dict. Plain values go into "
        "a dict, which a restore fills in place"
    )


def _has_torchs_form(name: str, optimizer: Optimizer) -> bool:
    """Return whether the optimizer's state_dict() has state and groups.

    torchtitan's container of optimizers returns the flattened form.
    """
    if type(optimizer).state_dict is Optimizer.state_dict:
        return True
    if any(base.__name__ == "ZeroRedundancyOptimizer" for base in type(optimizer).__mro__):  # importing it is slow
        raise ConfigError(
            f"state[{name!r}] is a ZeroRedundancyOptimizer, which gives the state of all ranks to one of them only. "
            "Use torch.distributed.fsdp.fully_shard with a plain optimizer, which shards the optimizer's state too, or "
            "the plain optimizer itself"
        )
    with calling(name, "state_dict"):
        return {"state", "param_groups"} <= optimizer.state_dict().keys()


def _has_objects(value: object) -> bool:
    """Return whether `value` is an object that needs its own entry, or a container with such objects in it."""
    if type(value) in (dict, list, tuple):
        items = value.values() if isinstance(value, dict) else cast("list[object]", value)
        return any(_has_objects(item) for item in items)
    return isinstance(value, PerRank | RankZero) or is_generator(value) or has_files(value) or has_state_dict(value)
