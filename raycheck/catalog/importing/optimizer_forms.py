"""Reads an optimizer's state whose parameters have names in the source; torch's own form has only numbers.

`get_optimizer_state_dict` names the parameters, and so does `state_dict()` of an optimizer that was made of
`named_parameters()`. With flatten_optimizer_state_dict=True, as torchtitan uses it, there are keys such as
`state.layers.0.weight.exp_avg` and `param_groups.layers.0.weight.lr`. Nothing in a source says which parameter a
number is, so a state with numbers alone is not imported.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from raycheck.errors import CorruptError

_FLAT = ("state.", "param_groups.")


@dataclass(frozen=True, kw_only=True, slots=True)
class NamedOptimizer:
    """The state of an optimizer by parameter name.

    names: the parameters' names, by group. options: each group's options. slots: by parameter. rest: the other items of
    state_dict().
    """

    names: list[list[str]]
    options: list[dict[str, Any]]
    slots: dict[str, Any]
    rest: dict[str, Any]


def is_optimizer(value: object) -> bool:
    """Return whether this is the state of an optimizer, in any form."""
    if not isinstance(value, Mapping):
        return False
    if isinstance(value.get("state"), Mapping) or "state" not in value:
        groups = value.get("param_groups")
        if isinstance(groups, list) and groups and all(isinstance(g, Mapping) and "params" in g for g in groups):
            return True
    starts = {start for key in value for start in _FLAT if isinstance(key, str) and key.startswith(start)}
    return len(starts) == 2


def has_names(value: Mapping[Any, Any]) -> bool:
    """Return whether the state of an optimizer has names for all its parameters."""
    return all(_names(group) is not None for group in value.get("param_groups", ()))


def named_optimizer(name: str, value: Mapping[Any, Any], plain: Callable[[str], str]) -> NamedOptimizer:
    """Return the state of the optimizer `name`, which `has_names`, by parameter name.

    plain: returns the plain model's name of a parameter. Raise CorruptError for a state that no optimizer has.
    """
    if "param_groups" not in value:
        return _unflattened(name, value, plain)
    groups, state = list(value["param_groups"]), dict(value.get("state", {}))
    keys = [list(group["params"]) for group in groups]
    flat = [key for group in keys for key in group]
    if len(set(map(str, flat))) != len(flat):
        raise CorruptError(f"{name}: a parameter is in several groups")
    if all(type(key) is int for key in flat):  # DCP has made strings of numbers that are keys
        state = {int(key) if isinstance(key, str) and key.isdigit() else key: slots for key, slots in state.items()}
    elif not all(isinstance(key, str) for key in flat):
        raise CorruptError(f"{name}: its parameters are neither numbered nor named")
    if not set(state) <= set(flat) or not all(isinstance(slots, Mapping) for slots in state.values()):
        raise CorruptError(f"{name}: it has state for parameters that are in none of its groups")
    named = dict(zip(flat, (plain(own) for group in groups for own in _names(group) or []), strict=True))
    if len(set(named.values())) != len(named):
        raise CorruptError(f"{name}: two of its parameters have one name")
    return NamedOptimizer(
        names=[[named[key] for key in group] for group in keys],
        options=[{key: item for key, item in group.items() if key != "params"} for group in groups],
        slots={named[key]: dict(slots) for key, slots in state.items()},
        rest={k: v for k, v in value.items() if k not in ("state", "param_groups") and not str(k).startswith(_FLAT)},
    )


def _names(group: Mapping[str, Any]) -> list[str] | None:
    """Return the names of a group's parameters as the source has them: its keys, or a list next to them."""
    keys, said = list(group["params"]), group.get("param_names")
    if all(isinstance(key, str) for key in keys):
        return keys
    return list(map(str, said)) if isinstance(said, list) and len(said) == len(keys) else None


def _unflattened(name: str, value: Mapping[Any, Any], plain: Callable[[str], str]) -> NamedOptimizer:
    """Read the flattened form. It has the options of each parameter; those with equal options become one group."""
    slots: dict[str, dict[str, Any]] = {}
    options: dict[str, dict[str, Any]] = {}
    for key, item in value.items():
        start, _, rest = str(key).partition(".")
        parameter, _, last = rest.rpartition(".")
        if start == "state":
            slots.setdefault(plain(parameter), {})[last] = item
        elif start == "param_groups":
            options.setdefault(plain(parameter), {})[last] = item
    if not set(slots) <= set(options):
        raise CorruptError(f"{name}: it has state for parameters that have no options")
    groups: dict[str, tuple[dict[str, Any], list[str]]] = {}
    for parameter, own in options.items():
        form = repr(sorted((k, id(v) if isinstance(v, torch.Tensor) else v) for k, v in own.items()))
        groups.setdefault(form, (own, []))[1].append(parameter)
    return NamedOptimizer(
        names=[names for _, names in groups.values()],
        options=[{k: v for k, v in own.items() if k != "params"} for own, _ in groups.values()],
        slots=slots,
        rest={key: item for key, item in value.items() if not str(key).startswith(_FLAT)},
    )
