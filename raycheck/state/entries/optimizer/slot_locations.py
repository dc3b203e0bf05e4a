"""Remembers where an optimizer's slots are stored, so that the next save need not call state_dict()."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from raycheck.transfer.stage.tensor_parts import described_as

_TORCH_STATE_DICT = Optimizer.state_dict
_NO_SLOTS: Mapping[Any, Any] = {}


class SlotLocations:
    """The places of an optimizer's slots in its `state`."""

    def __init__(self, optimizer: Optimizer, slots: Mapping[str, tuple[Any, Any]], names: Iterable[str]) -> None:
        """slots: the parameter and the key of every slot, by name. names: the slots to fetch. Raises LookupError if one
        of them is not the name of a slot.
        """
        self._optimizer = optimizer
        self._places = [slots[name] for name in names]

    def fetch(self) -> list[Any]:
        """Return the slots in the order of the names. Raises LookupError if the optimizer now has other slots."""
        state = dict(self._optimizer.state)  # of an engine they are views, made each time
        is_simple = all(type(slots) is dict for slots in state.values()) and is_plain(self._optimizer)
        if not is_simple or sum(map(len, state.values())) != len(self._places):
            raise LookupError("there are other slots now")
        return [described_slot(state.get(parameter, _NO_SLOTS)[slot], parameter) for parameter, slot in self._places]


def described_slot(value: Any, parameter: Any) -> Any:
    """Return a slot, which is divided like its parameter if that describes its parts and the slot has its shape."""
    return described_as(value, parameter) if isinstance(value, torch.Tensor) else value


def is_plain(optimizer: Optimizer) -> bool:
    """Return whether the optimizer returns its state with torch's own state_dict, without hooks."""
    hooks = optimizer._optimizer_state_dict_pre_hooks, optimizer._optimizer_state_dict_post_hooks  # noqa: SLF001
    return type(optimizer).state_dict is _TORCH_STATE_DICT and "state_dict" not in vars(optimizer) and not any(hooks)
