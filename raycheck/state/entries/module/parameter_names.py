"""Gives tensors the names of the plain model, so that a checkpoint does not depend on how the model was wrapped.

DDP and torch.compile around the module are removed. Layers inserted by torch.compile, activation checkpointing and PEFT
are removed from the names. LoRA's own tensors keep their place next to the layer that they adapt.

Torch's wrappers are recognized by their class, since a user's own module may have a child with any name.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import cache

import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper
from torch.nn.parallel import DistributedDataParallel

from raycheck.state.entries.module.tensor_locations import is_plain as gives_torchs_state

ParameterNames = Mapping[torch.Tensor, tuple[str, str]]
"""The state entry and the plain name of each parameter."""
_CHECKPOINTED = "_checkpoint_wrapped_module"


def unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    """Return the module inside DDP and torch.compile.

    A wrapper that owns something itself is kept: a parameter, a buffer, another child or extra state registered on it.
    """
    while (inner := _wrapped_by(module)) is not None and not _owns_more(module):
        module = inner
    return module


def innermost(module: torch.nn.Module) -> torch.nn.Module:
    """Return the module inside DDP and torch.compile, whatever these wrappers own."""
    while (inner := _wrapped_by(module)) is not None:
        module = inner
    return module


def _wrapped_by(module: torch.nn.Module) -> torch.nn.Module | None:
    """Return what DDP or torch.compile wraps directly; None for any other module."""
    name = "module" if isinstance(module, DistributedDataParallel) else "_orig_mod" if is_compiled(module) else ""
    return module._modules.get(name)  # noqa: SLF001


def is_compiled(module: torch.nn.Module) -> bool:
    """Return whether torch.compile made this module. Its class is not imported: that takes a second."""
    kinds = ((kind.__module__, kind.__qualname__) for kind in type(module).__mro__)
    return ("torch._dynamo.eval_frame", "OptimizedModule") in kinds


def _owns_more(wrapper: torch.nn.Module) -> bool:
    return bool(
        wrapper._parameters or wrapper._buffers or len(wrapper._modules) > 1 or not gives_torchs_state(wrapper)  # noqa: SLF001
    )


def plain_names(module: torch.nn.Module) -> Callable[[str], str]:
    """Return a function that turns a key of this module into the plain model's name.

    It follows the modules instead of the key alone, since a user's own layer may be called model or base_layer.
    """
    around = set()  # wrappers around the whole model; DDP around a part stays in the names
    outer: torch.nn.Module | None = module
    while outer is not None:
        around.add(id(outer))
        outer = _wrapped_by(outer)

    @cache  # called for every key at every save, while training waits
    def plain(key: str) -> str:
        inner: torch.nn.Module | None = module
        kept = []
        for step in key.split("."):
            while isinstance(inner, ActivationWrapper) and step not in inner._modules:  # noqa: SLF001
                inner = inner._modules[_CHECKPOINTED]  # noqa: SLF001  its state_dict leaves this step out of the key
            is_ddp = isinstance(inner, DistributedDataParallel) and id(inner) in around
            if inner is None or not (_is_wrapper(inner, step) or (is_ddp and step == "module")):
                kept.append(step)
            inner = None if inner is None else inner._modules.get(step)  # noqa: SLF001
        return ".".join(kept)

    return plain


def parameter_names(modules: Mapping[str, torch.nn.Module]) -> ParameterNames:
    """Return the entry and the plain name of every parameter. A tied parameter has its first name."""
    named: dict[torch.Tensor, tuple[str, str]] = {}
    for entry, module in modules.items():
        inside = unwrapped(module)
        plain = plain_names(inside)
        for key, parameter in inside.named_parameters():
            named.setdefault(parameter, (entry, plain(key)))
    return named


class NamedParameters:
    """The names of all parameters in a state's modules, including parameters that were added later."""

    def __init__(self, modules: Mapping[str, torch.nn.Module]) -> None:
        self._modules = modules
        self._known = parameter_names(modules)

    def of(self, parameters: Iterable[torch.Tensor]) -> ParameterNames:
        """Return the names of these parameters, and of others.

        Parameters that belong to no module are missing from it.
        """
        if any(parameter not in self._known for parameter in parameters):
            self._known = parameter_names(self._modules)
        return self._known


def _is_wrapper(module: torch.nn.Module, name: str) -> bool:
    """Return whether `module` exists only to wrap its child `name`.

    PEFT is recognized by its attributes, without importing it.
    """
    match name:
        case "_orig_mod":
            return is_compiled(module)
        case "_checkpoint_wrapped_module":
            return isinstance(module, ActivationWrapper)
        case "base_layer":
            return hasattr(module, "adapter_layer_names")  # a LoRA layer
        case "original_module":
            return hasattr(module, "modules_to_save")
        case "base_model":
            return hasattr(module, "peft_config")  # a PeftModel
        case "model":
            return hasattr(module, "inject_adapter")  # the tuner inside it; prompt tuning has none
        case _:
            return False
