"""Loads state into an optimizer so that it contains exactly what was saved, whatever load_state_dict does to it.

Torch's load_state_dict casts tensors, including nested ones, to the parameter's dtype, although a bf16 parameter may
well have fp32 state. It also rebuilds strings, deques and dicts as something else. It casts a complex tensor of a real
parameter to its real part, with a warning, and it cannot cast packed 4-bit floats at all.
"""

from collections.abc import Mapping, Sequence
from types import NoneType
from typing import Any

import torch
from torch.optim import Optimizer

from raycheck.state.entries.optimizer.parameter_groups import ParameterGroups
from raycheck.state.entries.optimizer.slot_allocation import STEP
from raycheck.state.entries.optimizer.slot_locations import is_plain

_FOUR_BITS = getattr(torch, "float4_e2m1fn_x2", None)
"""Older versions of torch lack this dtype."""


def load_exactly(
    optimizer: Optimizer, groups: ParameterGroups, *, other: Mapping[str, Any], state: Mapping[str, Any], own: Any
) -> None:
    """Load saved state into the optimizer with its load_state_dict, then undo what that did to the values.

    other: the keys of its state_dict() other than "state". state: slots by parameter name. own: state of the optimizer
    as a whole. A slot that only the live optimizer has is kept, since the checkpoint may be older than an option that
    was turned on.
    """
    number = {name: i for i, name in enumerate(groups.flat())}
    packed = dict(optimizer.state_dict()["state"])
    for name, slots in state.items():
        only_here = {key: value for key, value in packed.get(number[name], {}).items() if key not in slots}
        slots.update(only_here)
        packed[number[name]] = slots
    packed |= own
    if loads_as_torch(optimizer):
        packed |= {number[name]: _shielded(slots, groups.parameters[name].dtype) for name, slots in state.items()}
    options = groups.with_options_of(other["param_groups"])
    if loads_as_torch(optimizer) and not optimizer._optimizer_load_state_dict_pre_hooks:  # noqa: SLF001  they see it
        options = [{**group, "params": _searched_at_once(group["params"])} for group in options]
    optimizer.load_state_dict({**other, "state": packed, "param_groups": options})
    _put_exactly(optimizer, {groups.parameters[name]: slots for name, slots in state.items()})


def loads_as_torch(optimizer: Optimizer) -> bool:
    """Return whether the optimizer loads its state with torch's own load_state_dict."""
    return type(optimizer).load_state_dict is Optimizer.load_state_dict and "load_state_dict" not in vars(optimizer)


def is_torchs_own(optimizer: Optimizer) -> bool:
    """Return whether the optimizer is of torch.optim, with nothing added to how it loads its state or returns it."""
    if not f"{type(optimizer).__module__}.".startswith("torch.optim."):
        return False
    hooks = optimizer._optimizer_load_state_dict_pre_hooks, optimizer._optimizer_load_state_dict_post_hooks  # noqa: SLF001
    return loads_as_torch(optimizer) and is_plain(optimizer) and not any(hooks)


def _searched_at_once(numbers: list[int]) -> Sequence[int]:
    """Return the same numbers as a range, if they are one.

    Torch looks for the number of a parameter in those of its group, once for each slot: in a list, that takes longer
    the more parameters there are.
    """
    found = range(numbers[0], numbers[0] + len(numbers)) if numbers else range(0)
    return found if list(found) == numbers else numbers


class _Shield:
    """A stand-in for a value that torch's load_state_dict would take apart; torch leaves a _Shield unchanged."""


def _shielded(slots: Any, dtype: torch.dtype) -> Any:
    """Return the slots of a parameter of this dtype, with shields for values that torch cannot cast to it."""

    def is_passed(value: object) -> bool:
        if isinstance(value, torch.Tensor):
            is_packed = _FOUR_BITS in (value.dtype, dtype) and value.dtype != dtype
            return torch.can_cast(value.dtype, dtype) and not is_packed
        return isinstance(value, bool | int | float | NoneType)

    return {slot: value if is_passed(value) else _Shield() for slot, value in slots.items()}


def _put_exactly(optimizer: Optimizer, exact: Mapping[torch.Tensor, Any]) -> None:
    """Replace the values that load_state_dict changed.

    An optimizer that does not store its state as torch does keeps what it made of them.
    """
    shown_state = optimizer.state_dict()["state"]
    for number, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
        here, shown = optimizer.state.get(parameter), shown_state.get(number)
        if parameter not in exact or not isinstance(here, dict) or not isinstance(shown, dict):
            continue  # it stores its state differently
        for slot, value in exact[parameter].items():
            if slot not in here or not (isinstance(here[slot], _Shield) or shown.get(slot) is here[slot]):
                continue
            if not isinstance(value, torch.Tensor):
                here[slot] = value
            elif isinstance(here[slot], _Shield):
                here[slot] = value if slot == STEP else value.to(parameter.device)
            elif here[slot].dtype != value.dtype:
                here[slot] = value.to(here[slot].device)
        if type(exact[parameter]) is not type(here) is dict:
            optimizer.state[parameter] = type(exact[parameter])(here)
