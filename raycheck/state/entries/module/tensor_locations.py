"""Remembers where a module's parameters and buffers are stored, so that the next save need not call state_dict().

Collecting and naming the tensors of a large model costs more than copying them. This module reads torch's own
dictionaries instead, and checks each time that nothing was added, removed or replaced there.
"""

from collections.abc import Callable, Iterable, Sized
from functools import partial
from typing import Any

import torch

_TORCH_METHODS = (torch.nn.Module.state_dict, torch.nn.Module._save_to_state_dict, torch.nn.Module.get_extra_state)  # noqa: SLF001


class TensorLocations:
    """The locations of a module's tensors: the dictionaries, in it and its children, that store them."""

    def __init__(self, root: torch.nn.Module, plain: Callable[[str], str], prefix: str, names: Iterable[str]) -> None:
        """Find where the tensors `names` are stored.

        Raises LookupError if one is not found, and for a module whose state_dict() returns more than parameters and
        buffers. plain: returns the plain model's name for a key of the module. prefix: precedes it in `names`.
        """
        places: dict[str, tuple[dict[str, Any], str]] = {}
        self._sizes: list[tuple[Sized, int]] = []
        self._attributes: list[dict[str, Any]] = []
        self._empty: list[tuple[dict[str, Any], str]] = []  # registered, but still None
        self._not_persistent: list[tuple[set[str], frozenset[str]]] = []
        self._children: list[tuple[dict[str, Any], str, object]] = []
        self._pre_hooks: list[Callable[[], object]] = []
        for path, module in root.named_modules(remove_duplicate=False):
            if not is_plain(module):
                raise LookupError(f"{path} has its own state_dict")
            start = f"{path}." if path else ""
            parameters, buffers, children = module._parameters, module._buffers, module._modules  # noqa: SLF001
            for held in (parameters, buffers):
                places.update({f"{prefix}.{plain(start + key)}": (held, key) for key in held})
            hooks = module._state_dict_pre_hooks, module._state_dict_hooks  # noqa: SLF001
            left_out = module._non_persistent_buffers_set  # noqa: SLF001
            self._attributes.append(vars(module))
            self._sizes += [(held, len(held)) for held in (parameters, buffers, children, *hooks)]
            self._empty += [(held, key) for held in (parameters, buffers) for key in held if held[key] is None]
            self._not_persistent.append((left_out, frozenset(left_out)))
            self._children += [(children, key, child) for key, child in children.items()]
            self._pre_hooks += [partial(hook, module, start, False) for hook in hooks[0].values()]
        self._places = [places[name] for name in names]

    def fetch(self) -> list[Any]:
        """Return the tensors in the order of the names.

        Raises LookupError if the module was rebuilt in the meantime.
        """
        for hook in self._pre_hooks:
            hook()
        is_as_before = (
            all(len(held) == size for held, size in self._sizes)
            and all(held[key] is None for held, key in self._empty)
            and all(held == names for held, names in self._not_persistent)
            and all(held.get(key) is child for held, key, child in self._children)
            and not any("state_dict" in attributes for attributes in self._attributes)
        )
        if not is_as_before:
            raise LookupError("the module was rebuilt since the last save")
        return [held[key] for held, key in self._places]


def is_plain(module: torch.nn.Module) -> bool:
    """Return whether the module returns its state by torch's own methods.

    FSDP2's modules do: their hook only reshards the parameters first.
    """
    kind = type(module)
    methods = (kind.state_dict, kind._save_to_state_dict, kind.get_extra_state)  # noqa: SLF001
    has_own = {"state_dict", "_save_to_state_dict", "get_extra_state"} & vars(module).keys()
    return methods == _TORCH_METHODS and not has_own and not module._state_dict_hooks  # noqa: SLF001
