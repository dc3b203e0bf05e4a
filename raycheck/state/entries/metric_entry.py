"""Creates entries for torchmetrics' metrics: each rank's own accumulation, which their state_dict() leaves out.

Metrics are recognized by their attributes, without importing torchmetrics. A save takes a metric's states, its other
tensors, and the number of updates, by which means are weighted.

With another world size, a rank that existed before takes its own accumulation. The accumulation of ranks that no longer
exist is added to that of the remaining ranks, with the reductions that the metric defines for its states. A new rank
keeps its initial values. A restore is refused if a reduction cannot be done this way.
"""

# ruff: noqa: SLF001  torchmetrics has no public access to its states, their reductions and the number of updates

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from raycheck.errors import ConfigError
from raycheck.state.entries.per_rank_entries import PerRank, PerRankEntry
from raycheck.state.entries.saved_entry import Named, SavedEntry, empty_for


def is_metric(module: object) -> bool:
    """Return whether `module` accumulates over updates, as torchmetrics' Metric does."""
    return isinstance(module, torch.nn.Module) and all(
        hasattr(module, name) for name in ("_defaults", "_persistent", "_reductions", "_update_count", "add_state")
    )


def is_metrics(value: object) -> bool:
    """Return whether `value` is a metric, or a collection of metrics without other parameters or buffers."""
    if not isinstance(value, torch.nn.Module) or not _metrics(value):
        return False
    inside = {id(child) for metric in _metrics(value).values() for child in metric.modules()}
    rest = [module for module in value.modules() if id(module) not in inside]
    return not any(module._parameters or module._buffers for module in rest)


class MetricsEntry(PerRankEntry):
    """The entry of a metric or a collection of metrics: this rank's accumulation."""

    def __init__(self, name: str, metrics: torch.nn.Module, *, rank: int, world_size: int) -> None:
        super().__init__(name, PerRank(_Accumulated(metrics)), rank=rank)
        grown = next((module for module in metrics.modules() if hasattr(module, "increment")), None)
        if grown is not None:
            raise ConfigError(
                f"state[{name!r}] is a {type(grown).__qualname__}, which adds metrics while it is used; give the "
                "metrics themselves"
            )
        self._metrics = metrics
        self._rank = rank
        self._world_size = world_size

    @property
    def metrics(self) -> list[torch.nn.Module]:
        return list(_metrics(self._metrics).values())

    def match(self, saved: SavedEntry) -> Named:
        saved.unused.clear()  # the remaining ranks take over what the others had
        if saved.values is None:
            (saved.fresh if saved.rank_values else saved.missing).append(self._name_on_rank)
            return {}
        live, names = _Accumulated(self._metrics).state_dict(), list[str]()
        for tree in self._trees_for_this_rank(saved):
            (there,) = self.compared(saved, tree, names.append)
            if _forms(there) != _forms(live):
                saved.mismatched.append(
                    f"{self.name}: the metrics are {_described(live)} here, and {_described(there)} saved"
                )
                return {}
        if len(self._trees_for_this_rank(saved)) > 1:
            saved.mismatched += [
                f"{self.name}.{path}.{key} was accumulated by {len(saved.rank_values)} ranks, and its reduction cannot "
                f"be done for {self._world_size} ranks; restore(skip=[{self.name!r}]) resets the metric"
                for path, metric in _metrics(self._metrics).items()
                for key in live[path]["states"]
                if not _can_merge(metric, key)
            ]
        return {name: empty_for(saved.tensors[name]) for name in names}

    def load(self, saved: SavedEntry, tensors: Named) -> None:
        if saved.values is None:
            return
        (state,), *others = (self.decoded(tree, tensors.__getitem__) for tree in self._trees_for_this_rank(saved))
        for (other,) in others:
            state = {
                path: _merged(metric, state[path], other[path]) for path, metric in _metrics(self._metrics).items()
            }
        _Accumulated(self._metrics).load_state_dict(state)

    def _trees_for_this_rank(self, saved: SavedEntry) -> list[Any]:
        """Return this rank's tree, and the trees of former ranks whose accumulation this rank takes over."""
        gone = saved.rank_values[self._rank + self._world_size :: self._world_size]
        return [saved.values, *gone]


def refuse_metrics_inside(name: str, module: torch.nn.Module, given: Iterable[torch.nn.Module]) -> None:
    """Raise ConfigError that names the metrics inside a module whose accumulation nothing would save."""
    known = {id(metric) for metric in given}
    metrics: dict[str, Any] = {path: metric for path, metric in _metrics(module).items() if metric._defaults}
    lost = [path for path, metric in metrics.items() if id(metric) not in known]
    twice = [path for path, metric in metrics.items() if id(metric) in known and any(metric._persistent.values())]
    if lost:
        raise ConfigError(
            f"state[{name!r}] holds metrics ({', '.join(lost[:8])}) whose accumulation is each rank's own and not in "
            "the module's state_dict(): it would start over after a restore. Make them a separate entry: "
            f'"metrics": [m for m in {name}.modules() if isinstance(m, torchmetrics.Metric)]'
        )
    if twice:
        raise ConfigError(
            f"state[{name!r}] would save {', '.join(twice[:8])} a second time, and rank 0's for all; call "
            ".persistent(False) on the metrics that have their own entry"
        )


class _Accumulated:
    """An adapter that gives metrics a state_dict and a load_state_dict of what they have accumulated, by path."""

    def __init__(self, metrics: torch.nn.Module) -> None:
        self._module = metrics

    def state_dict(self) -> dict[str, Any]:
        module: Any
        for module in self._module.modules():
            if hasattr(module, "_compute_groups_create_state_ref"):
                module._compute_groups_create_state_ref()  # until then only the first of a compute group is up to date
        return {
            path: {"kind": type(metric).__qualname__, "updates": metric._update_count, "states": _states(metric)}
            for path, metric in _metrics(self._module).items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for path, metric in _metrics(self._module).items():
            for key, value in state[path]["states"].items():
                setattr(metric, key, _on(metric.device, value))
            metric._update_count = state[path]["updates"]
            metric._computed = None
            metric._cache, metric._is_synced = None, False


def _metrics(module: torch.nn.Module) -> dict[str, Any]:
    return {path or "itself": child for path, child in module.named_modules() if is_metric(child)}


def _states(metric: Any) -> dict[str, Any]:
    """Return the metric's states on this rank.

    While the metric is synced, these are in its cache: its attributes then contain those of all ranks together.
    """
    own = metric._cache if getattr(metric, "_is_synced", False) and metric._cache else vars(metric)
    tensors = [key for key, value in vars(metric).items() if isinstance(value, torch.Tensor) and key[0] != "_"]
    keys = dict.fromkeys([*metric._defaults, *tensors])
    return {key: _detached(own.get(key, vars(metric)[key])) for key in keys}


def _detached(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach()
    return [_detached(item) for item in value] if type(value) is list else value


def _on(device: torch.device, value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    return [_on(device, item) for item in value] if type(value) is list else value


def _forms(state: Mapping[str, Any]) -> list[Any]:
    return [(path, found["kind"], sorted(found["states"])) for path, found in sorted(state.items())]


def _described(state: Mapping[str, Any]) -> str:
    return ", ".join(f"{path} ({found['kind']}: {', '.join(found['states'])})" for path, found in state.items())


_REDUCED: dict[str, Callable[[Any, Any], Any]] = {
    "dim_zero_sum": lambda one, other: one + other,
    "dim_zero_max": torch.maximum,
    "dim_zero_min": torch.minimum,
    "dim_zero_cat": lambda one, other: [*one, *other] if isinstance(one, list) else torch.cat([one, other]),
}


def _can_merge(metric: Any, key: str) -> bool:
    reduction = metric._reductions.get(key, "not a state")
    is_list = isinstance(metric._defaults.get(key), list)
    return getattr(reduction, "__name__", "") in (*_REDUCED, "dim_zero_mean") or (reduction is None and is_list)


def _merged(metric: Any, one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Return the accumulation of two ranks, merged into one."""
    counts = one["updates"], other["updates"]
    states = {}
    for key, mine in one["states"].items():
        theirs = other["states"][key]
        kind = getattr(metric._reductions[key], "__name__", "dim_zero_cat")
        if not all(counts):
            states[key] = mine if counts[0] else theirs
        elif kind == "dim_zero_mean":
            states[key] = (mine * counts[0] + theirs * counts[1]) / sum(counts)
        else:
            states[key] = _REDUCED[kind](mine, theirs)
    return {**one, "updates": sum(counts), "states": states}
