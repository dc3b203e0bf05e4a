"""From what the user put into the state to parts. Raises ConfigError, naming the entry, before any step runs."""

from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from torch.optim import Optimizer

from raycheck.bucket.format.values import encode
from raycheck.errors import ConfigError
from raycheck.shards.entries.hf_assets import FilesEntry, has_files
from raycheck.shards.entries.metric_entry import MetricsEntry, is_metrics, refuse_metrics_inside
from raycheck.shards.entries.module.module_entry import ModuleEntry
from raycheck.shards.entries.module.parameter_names import NamedParameters, ParameterNames, parameter_names
from raycheck.shards.entries.object_entry import ObjectEntry
from raycheck.shards.entries.optimizer.optimizer_entry import OptimizerEntry
from raycheck.shards.entries.per_rank_entries import (
    LoaderEntry,
    PerRank,
    PerRankEntry,
    RankZero,
    RankZeroEntry,
    is_loader,
)
from raycheck.shards.entries.plain_value_entry import HeldValue, InPlace, PlainValueEntry, is_container
from raycheck.shards.entries.random_generators import GeneratorState, is_generator
from raycheck.shards.entries.state_entry import ASSETS, OWN_ENTRIES, StateEntry
from raycheck.shards.entries.wrappers import unwrapped
from raycheck.shards.transfer.stock_torch_names import StockNames


def objects_by_name(state: Mapping[str, object]) -> dict[str, object]:
    """The state by entry; a dict or list of entries becomes entries with dotted names ("optimizer.0"). A dict of plain
    values is an entry itself; any other plain value is one where it stands. Known wrappers are taken off."""
    entries: dict[str, object] = {}
    for name, value in _entries(state):
        if name in entries:
            raise ConfigError(f"state[{name!r}]: two entries have this name")
        entries[name] = value
    return entries


class ChainedState(Mapping[str, object]):
    """The entries of a state from several mappings, each still held by the one in which the caller gave it."""

    def __init__(self, *sources: Mapping[str, object]) -> None:
        self.sources = sources

    def holder(self, name: str) -> Mapping[str, object]:
        """Raises KeyError."""
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


def make_entries(entries: Mapping[str, object], *, rank: int, world_size: int) -> list[StateEntry]:
    """One part per entry."""
    named = NamedParameters({name: value for name, value in entries.items() if isinstance(value, torch.nn.Module)})
    parts = [_part(name, value, named, rank, world_size) for name, value in entries.items()]
    metrics = [metric for part in parts if isinstance(part, MetricsEntry) for metric in part.metrics]
    for part in parts:
        if isinstance(part, ModuleEntry):
            refuse_metrics_inside(part.name, part.module, metrics)
    by_entry: dict[str, list[OptimizerEntry]] = {}
    for part in parts:
        if isinstance(part, OptimizerEntry):
            by_entry.setdefault(part.name.partition(".")[0], []).append(part)
    for entry, optimizers in by_entry.items():
        names = StockNames(entry, optimizers)
        for optimizer in optimizers:
            optimizer.stock_names = names
    return parts


class Containers:
    """The lists and dicts of entries in a state, and what they held when it was looked at first."""

    def __init__(self, state: Mapping[str, object]) -> None:
        self._held = [(*found, _identities(found[1])) for item in state.items() for found in _containers(*item)]

    def check(self) -> None:
        """Raise ConfigError when one of them holds something else now: it would be left out of every save."""
        for name, container, held in self._held:
            if _identities(container) != held:
                raise ConfigError(
                    f"state[{name!r}] holds other objects than when the state was given, and the new ones would not be "
                    "saved. Give the state once the list or dict is complete"
                )


def _containers(name: str, value: object) -> Iterator[tuple[str, Any]]:
    if type(value) in (dict, list, tuple) and _is_entry(value):
        yield name, value
        for key, item in value.items() if isinstance(value, dict) else enumerate(cast("list[object]", value)):
            yield from _containers(f"{name}.{key}", item)


def _identities(container: Any) -> list[Any]:
    """Keys of all, and which object it is for an entry; a plain value may become another one."""
    items = container.items() if isinstance(container, dict) else enumerate(container)
    return [(key, id(item)) if _is_entry(item) else key for key, item in items]


def _entries(state: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    top = parameter_names({name: value for name, value in state.items() if isinstance(value, torch.nn.Module)})
    for name, value in state.items():
        if not name.isidentifier() or name in (*OWN_ENTRIES, ASSETS):
            raise ConfigError(
                f"state[{name!r}]: use a plain name; {', '.join((*OWN_ENTRIES, ASSETS))} are raycheck's own"
            )
        yield from _nested(name, value, top, state.holder(name) if isinstance(state, ChainedState) else state, name)


def _nested(
    name: str, value: object, parameters: ParameterNames, holder: object, at: object
) -> Iterator[tuple[str, object]]:
    """holder, at: where the value stands."""
    if type(value) not in (dict, list, tuple) or not _is_entry(value):
        yield name, HeldValue(holder, at, name) if _is_plain(name, value) else unwrapped(name, value)
        return
    for key, item in value.items() if isinstance(value, dict) else enumerate(cast("list[object]", value)):
        if isinstance(key, torch.Tensor) and key in parameters:  # optimizer in backward: one for each parameter
            step = parameters[key][1]
        elif isinstance(key, str | int):
            step = str(key)
        else:
            raise ConfigError(f"state[{name!r}] has a {type(key).__qualname__} as key; use names or numbers")
        yield from _nested(f"{name}.{step.replace('.', '_')}", item, parameters, value, key)


def _is_plain(name: str, value: object) -> bool:
    """Whether it is a plain value to be held where it stands. Its own dict is held by whoever has it."""
    if type(value) is dict or _is_entry(value):
        return False
    if isinstance(value, torch.Tensor):
        return True
    try:
        encode(value, f"state[{name!r}]", lambda leaf, path: path if isinstance(leaf, torch.Tensor) else None)
    except ConfigError:
        return is_container(value)  # it says by itself what in it cannot be saved
    return True


def _part(name: str, value: Any, named: NamedParameters, rank: int, world_size: int) -> StateEntry:
    inside = value.value if isinstance(value, PerRank) else value
    if is_metrics(inside):
        return MetricsEntry(name, inside, rank=rank, world_size=world_size)
    if isinstance(value, torch.nn.Module):
        return ModuleEntry(name, value)
    if isinstance(value, HeldValue):
        return PlainValueEntry(name, value, rank=rank)
    if isinstance(value, Optimizer) and _is_in_torchs_form(value):
        return OptimizerEntry(name, value, named)
    if isinstance(value, PerRank):
        return PerRankEntry(name, value, rank=rank)
    if isinstance(value, RankZero):
        return RankZeroEntry(name, value, rank=rank)
    if is_loader(name, value):
        return LoaderEntry(name, value, rank=rank, world_size=world_size)
    if type(value) is dict:
        return ObjectEntry(name, InPlace(value))
    if has_files(value):
        return FilesEntry(name, value)
    if is_generator(value):
        return ObjectEntry(name, GeneratorState(value))
    if _is_entry(value):
        return ObjectEntry(name, value)
    raise ConfigError(
        f"state[{name!r}] is a {type(value).__qualname__} without state_dict and load_state_dict. Plain values go into "
        "a dict, which a restore fills in place"
    )


def _is_in_torchs_form(optimizer: Optimizer) -> bool:
    """Whether its state_dict() has state and groups. torchtitan's container of optimizers gives the flattened form."""
    if type(optimizer).state_dict is Optimizer.state_dict:
        return True
    return {"state", "param_groups"} <= optimizer.state_dict().keys()


def _is_entry(value: object) -> bool:
    """Whether it is an entry of its own, or holds some."""
    if type(value) in (dict, list, tuple):
        items = value.values() if isinstance(value, dict) else cast("list[object]", value)
        return any(_is_entry(item) for item in items)
    return (
        isinstance(value, PerRank | RankZero)
        or is_generator(value)
        or has_files(value)
        or (callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None)))
    )
