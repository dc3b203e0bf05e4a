"""Loads state into an optimizer so that it holds exactly what was saved, whatever load_state_dict makes of it.

Torch's load_state_dict casts tensors to the parameter's dtype, nested ones too, although a bf16 parameter may well have
fp32 state. It also rebuilds strings, deques and dicts as something else. Of a complex tensor under a real parameter the
cast keeps half, with a warning, and packed 4-bit floats it cannot cast at all.
"""

from collections.abc import Mapping
from types import NoneType
from typing import Any

import torch
from torch.optim import Optimizer

from raycheck.state.entries.optimizer.parameter_groups import ParameterGroups
from raycheck.state.entries.optimizer.slot_allocation import STEP

_FOUR_BITS = getattr(torch, "float4_e2m1fn_x2", None)  # older versions of torch have no such dtype


def load_exactly(
    optimizer: Optimizer, groups: ParameterGroups, *, other: Mapping[str, Any], state: Mapping[str, Any], own: Any
) -> None:
    """Put saved state into the optimizer by its load_state_dict, then undo what that did to the values.

    other: the keys of its state_dict() beside "state". state: slots by parameter name. own: state of the optimizer as a
    whole. A slot that only the live optimizer has stays, since the checkpoint may come from before an option was turned
    on.
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
    optimizer.load_state_dict({**other, "state": packed, "param_groups": options})
    _put_exactly(optimizer, {groups.parameters[name]: slots for name, slots in state.items()})


def loads_as_torch(optimizer: Optimizer) -> bool:
    """Returns whether the optimizer loads its state by torch's own load_state_dict."""
    return type(optimizer).load_state_dict is Optimizer.load_state_dict and "load_state_dict" not in vars(optimizer)


class _Shield:
    """Takes the place of a value that torch's load_state_dict would take apart; it passes a shield on as it is."""


def _shielded(slots: Any, dtype: torch.dtype) -> Any:
    """Returns the slots of a parameter of this dtype, with shields for what torch cannot cast to it."""

    def is_passed(value: object) -> bool:
        if isinstance(value, torch.Tensor):
            is_packed = _FOUR_BITS in (value.dtype, dtype) and value.dtype != dtype
            return torch.can_cast(value.dtype, dtype) and not is_packed
        return isinstance(value, bool | int | float | NoneType)

    return {slot: value if is_passed(value) else _Shield() for slot, value in slots.items()}


def _put_exactly(optimizer: Optimizer, exact: Mapping[torch.Tensor, Any]) -> None:
    """Replace the values that load_state_dict changed. An optimizer that keeps its state in another way than torch's
    keeps what it made of them."""
    shown_state = optimizer.state_dict()["state"]
    for number, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
        here, shown = optimizer.state.get(parameter), shown_state.get(number)
        if parameter not in exact or not isinstance(here, dict) or not isinstance(shown, dict):
            continue  # it keeps its state in another way
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
