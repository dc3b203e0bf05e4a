"""Turns each form of an optimizer's state into the one whose parameters have names.

Torch's own has numbers; `get_optimizer_state_dict` has names; with flatten_optimizer_state_dict=True, as torchtitan
uses it, there are keys such as `state.layers.0.weight.exp_avg` and `param_groups.layers.0.weight.lr`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from raycheck.catalog.importing.parameter_order import names_by_order, shape_of_parameter, trainable
from raycheck.errors import ConfigError, CorruptError

_FLAT = ("state.", "param_groups.")


@dataclass(frozen=True, kw_only=True, slots=True)
class NamedOptimizer:
    """Holds an optimizer's state by name. names: of the parameters, by group. options: of each group. slots: by
    parameter. rest: what state_dict() has beside. is_by_order: the names follow from the order of the model."""

    names: list[list[str]]
    options: list[dict[str, Any]]
    slots: dict[str, Any]
    rest: dict[str, Any]
    is_by_order: bool


def is_optimizer(value: object) -> bool:
    """Returns whether this is the state of an optimizer, in any form."""
    if not isinstance(value, Mapping):
        return False
    if isinstance(value.get("state"), Mapping) or "state" not in value:
        groups = value.get("param_groups")
        if isinstance(groups, list) and groups and all(isinstance(g, Mapping) and "params" in g for g in groups):
            return True
    starts = {start for key in value for start in _FLAT if isinstance(key, str) and key.startswith(start)}
    return len(starts) == 2


def named_optimizer(
    name: str,
    value: Mapping[Any, Any],
    models: Mapping[str, Mapping[str, Any]],
    *,
    ordered: Mapping[str, Mapping[str, Any]],
    parameters: Sequence[Sequence[str]] | None,
    plain: Callable[[str], str],
) -> NamedOptimizer:
    """Returns the state of the optimizer `name` with names for its parameters.

    models: the state dicts of the modules, by entry. ordered: those that have the order of their model. parameters: the
    names of each group, when the caller gives them.
    plain: returns the plain model's name. Raises ConfigError when the names cannot be concluded, CorruptError for a
    state that no optimizer has.
    """
    if "param_groups" not in value:
        return _unflattened(name, value, plain)
    groups, state = list(value["param_groups"]), dict(value.get("state", {}))
    numbers = [list(group["params"]) for group in groups]
    flat = [number for group in numbers for number in group]
    if len(set(map(str, flat))) != len(flat):
        raise CorruptError(f"{name}: a parameter is in several groups")
    is_numbered = all(type(number) is int for number in flat)
    if is_numbered:  # DCP has made strings of numbers
        state = {int(key) if isinstance(key, str) and key.isdigit() else key: slots for key, slots in state.items()}
    elif not all(isinstance(number, str) for number in flat):
        raise CorruptError(f"{name}: its parameters are neither numbered nor named")
    if not set(state) <= set(flat) or not all(isinstance(slots, Mapping) for slots in state.values()):
        raise CorruptError(f"{name}: it has state for parameters that are in none of its groups")
    names, is_by_order = numbers, False
    if is_numbered:
        if parameters is not None:
            names = [list(group) for group in parameters]
            _check_names(name, names, numbers, state, models)
        else:
            names, is_by_order = _names(name, groups, numbers, state, ordered)
    named = {
        number: plain(own) for ns, os in zip(numbers, names, strict=True) for number, own in zip(ns, os, strict=True)
    }
    return NamedOptimizer(
        names=[[named[number] for number in group] for group in numbers],
        options=[{key: item for key, item in group.items() if key != "params"} for group in groups],
        slots={named[number]: dict(slots) for number, slots in state.items()},
        rest={k: v for k, v in value.items() if k not in ("state", "param_groups") and not str(k).startswith(_FLAT)},
        is_by_order=is_by_order,
    )


def _names(
    name: str,
    groups: Sequence[Mapping[str, Any]],
    numbers: list[list[int]],
    state: Mapping[Any, Mapping[Any, Any]],
    ordered: Mapping[str, Mapping[str, Any]],
) -> tuple[list[list[str]], bool]:
    """Returns the names of each group's numbered parameters, and whether only the order of the model tells them."""
    sizes = [len(group) for group in numbers]
    said = [group.get("param_names") for group in groups]
    if all(isinstance(own, list) and len(own) == size for own, size in zip(said, sizes, strict=True)):
        return [list(map(str, own)) for own in said if own is not None], False
    shapes = [[shape_of_parameter(state.get(number, {})) for number in group] for group in numbers]
    found = [names for model in ordered.values() if (names := names_by_order(trainable(model), shapes)) is not None]
    if len(found) == 1:
        return found[0], True
    raise ConfigError(
        f"{name}: its parameters have numbers only, in groups of {sizes}, and which names they are cannot be concluded "
        "from their order and shapes. Give the names of each group, in order, with parameters=, or name the other "
        "entries alone with entries="
    )


def _check_names(
    name: str,
    names: list[list[str]],
    numbers: list[list[int]],
    state: Mapping[Any, Mapping[Any, Any]],
    models: Mapping[str, Mapping[str, Any]],
) -> None:
    """Refuse names that are too few, that no model has, or whose shape is not that of the slots."""
    sizes = [len(group) for group in numbers]
    if [len(group) for group in names] != sizes:
        raise ConfigError(f"parameters=: {name} has groups of {sizes} parameters; give one list of names for each")
    for group, own in zip(names, numbers, strict=True):
        for parameter, number in zip(group, own, strict=True):
            shape = shape_of_parameter(state.get(number, {}))
            tensors = [model[parameter] for model in models.values() if parameter in model]
            if models and not tensors:
                raise ConfigError(f"parameters=: {parameter} is in no model of the source")
            if shape is not None and tensors and all(tuple(t.shape) != shape for t in tensors):
                raise ConfigError(
                    f"parameters=: {parameter} is {list(tensors[0].shape)}, its slots in {name} {list(shape)}"
                )


def _unflattened(name: str, value: Mapping[Any, Any], plain: Callable[[str], str]) -> NamedOptimizer:
    """Read the flattened form. It does not say which parameters were one group: those with equal options are."""
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
    beside = {key: item for key, item in value.items() if not str(key).startswith(_FLAT)}
    return NamedOptimizer(
        names=[names for _, names in groups.values()],
        options=[{k: v for k, v in own.items() if k != "params"} for own, _ in groups.values()],
        slots=slots,
        rest=beside,
        is_by_order=False,
    )
