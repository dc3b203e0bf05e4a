"""Handles tensors on torch's meta device, which have a shape and no memory: a copy into one silently does nothing.

A restore gives them memory before it reads. The tensors keep their identity, so an optimizer or an FSDP2 layer that
refers to a parameter still does afterwards. What no checkpoint can fill is named before anything changes.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from raycheck.errors import ConfigError

ADVICE = "give it memory before the optimizer and the state are made (module.to_empty(device=...)) and initialize it"


def is_on_meta(tensor: torch.Tensor) -> bool:
    """Return whether the tensor, or one of its inner tensors, has no memory."""
    return tensor.is_meta or any(map(is_on_meta, _inner(tensor).values()))


def untied_views(live: Mapping[str, torch.Tensor]) -> list[str]:
    """Return differences to report: separate tensors on meta that share memory. A restore would give each its own."""
    found, lines = dict[int, tuple[str, torch.Tensor]](), []
    for name, tensor in live.items():
        for plain in _plain(tensor) if is_on_meta(tensor) else ():
            other, known = found.setdefault(plain.untyped_storage()._cdata, (name, tensor))  # noqa: SLF001
            if known is not tensor:
                lines.append(f"{name} is on the meta device and shares its memory with {other}; {ADVICE}")
    return lines


def give_memory(tensors: Mapping[str, torch.Tensor], all_of_module: Iterable[torch.Tensor]) -> None:
    """Give these tensors uninitialized memory. They keep their identity.

    A DTensor gets memory on its mesh's device. Any other tensor gets it on the device of the module's other tensors, or
    if there are none, on torch's default device. Raises ConfigError, naming the tensor, if those other tensors are on
    several devices, and if torch does not allow it.
    """
    homes = {home for tensor in all_of_module if (home := _home(tensor)) is not None}
    done = set()
    for name, tensor in tensors.items():
        if id(tensor) in done or not is_on_meta(tensor):
            continue
        done.add(id(tensor))
        if _home(tensor) is None and len(homes) > 1:
            raise ConfigError(
                f"{name} is on the meta device, and its module is on {', '.join(sorted(map(str, homes)))}; {ADVICE}"
            )
        default = torch.get_default_device()
        device = next(iter(homes), torch.device("cpu") if default.type == "meta" else default)
        _swap(name, tensor, _with_memory(tensor, device))


def _swap(name: str, tensor: torch.Tensor, new: torch.Tensor) -> None:
    """Exchange the memory of the two tensors, and keep what the script has set on the first."""
    hooks = tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None)  # noqa: SLF001
    if hooks:  # they belong to the memory being swapped out
        raise ConfigError(f"{name} is on the meta device and has hooks, which would be lost; {ADVICE}")
    with torch.no_grad():
        tensor.grad = None
        if isinstance(tensor, torch.nn.Parameter):
            new = torch.nn.Parameter(new, requires_grad=False)
        new.requires_grad_(tensor.requires_grad)
        for key, value in vars(tensor).items():
            vars(new).setdefault(key, value)
        try:
            torch.utils.swap_tensors(tensor, new)
        except RuntimeError as error:
            raise ConfigError(
                f"{name} is on the meta device, and something keeps it there ({error}); {ADVICE}"
            ) from None


def _home(tensor: torch.Tensor) -> torch.device | None:
    """Return the device that a tensor is on or belongs to; None if it is unknown."""
    if isinstance(tensor, DTensor):
        return torch.empty(0, device=tensor.device_mesh.device_type).device
    return None if is_on_meta(tensor) else tensor.device


def _with_memory(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    device = _home(tensor) or device
    if inner := _inner(tensor):
        flattened: Any = tensor
        names, context = flattened.__tensor_flatten__()
        made = {name: getattr(tensor, name) for name in names}  # a DTensor names its mesh too
        made |= {name: _with_memory(own, device) for name, own in inner.items()}
        whole: torch.Tensor = type(flattened).__tensor_unflatten__(made, context, tensor.size(), tensor.stride())
        return whole
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)


def _inner(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the tensors that a tensor subclass consists of; a DTensor is one."""
    if type(tensor) in (torch.Tensor, torch.nn.Parameter) or not hasattr(tensor, "__tensor_flatten__"):
        return {}
    attributes = {name: getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]}
    return {name: value for name, value in attributes.items() if isinstance(value, torch.Tensor)}


def _plain(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the plain tensors that a tensor consists of, at any depth; itself if it is plain."""
    inner = _inner(tensor)
    return [plain for own in inner.values() for plain in _plain(own)] if inner else [tensor]
