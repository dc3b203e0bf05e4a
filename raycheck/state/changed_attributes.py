"""Names attributes that training changes and that no checkpoint contains: counts, flags, and non-persistent buffers.

A module's attribute that is neither a parameter nor a buffer is not in its state_dict(). After a restart it has the
value from the constructor again. Numbers, strings, tensors and small containers are compared once, between the first
two saves after a step. Internal attributes of torch's own classes are ignored, and so is what autograd computed.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from raycheck.state.entries.metric_entry import is_metric, is_metrics
from raycheck.state.entries.module.parameter_names import is_compiled
from raycheck.terminal import first_few
from raycheck.transfer.stage.gather_cache import local_of

_MAX_VALUES = 100_000
_MAX_ITEMS = 256
_MAX_ELEMENTS = 4096
_DEPTH = 3
Form = tuple[Any, ...]
_OTHER: Form = ("other",)
"""The form of an object that is not compared."""
_ABSENT: Form = ("absent",)
_OF_MODULES = frozenset(vars(torch.nn.Module()))
_WITH_PRIVATE_STATE = ("lightning.", "pytorch_lightning.")
"""Frameworks whose module class keeps attributes about the running training, all with a leading underscore."""
_COMPUTED_FROM = ("_orig", "_g", "_v")
"""Endings of the parameters from which torch's pruning and older norms compute an attribute at each forward."""


class ChangedAttributes:
    """A comparison of the attributes of a state's objects between two saves, done once."""

    def __init__(self, objects: Mapping[str, object]) -> None:
        self._objects = objects
        self._before: tuple[int, dict[str, Form]] | None = None
        self._is_done = False

    def look(self, step: int) -> str | None:
        """Compare with the previous save. At the second save, return a warning if attributes have changed.

        step: the save's step; before the first step many attributes are not set yet.
        """
        if self._is_done or step < 1 or (self._before is not None and self._before[0] == step):
            return None
        now = dict(_forms(self._objects))
        if self._before is None:
            self._before = step, now
            return None
        (before_step, before), self._before, self._is_done = self._before, None, True
        names = [name for name in {**before, **now} if _differ(before.get(name, _ABSENT), now.get(name, _ABSENT))]
        if not names:
            return None
        shown = ((name, *(_text(forms.get(name, _ABSENT)) for forms in (before, now))) for name in names)
        changes = [f"{name} ({old} -> {new})" for name, old, new in shown]
        return (
            f"These attributes changed between steps {before_step} and {step} and are not saved: {first_few(changes)}. "
            "After a restart they have their initial values again. If the training depends on one, make it a "
            "persistent buffer (register_buffer) or extra state (get_extra_state and set_extra_state) of its module, "
            "or keep it in an entry of the state with state_dict and load_state_dict"
        )


def _forms(objects: Mapping[str, object]) -> Iterator[tuple[str, Form]]:
    for number, (path, value, known) in enumerate(_values(objects)):
        if number >= _MAX_VALUES:
            return
        yield path, _form(value, known, _DEPTH)


def _values(objects: Mapping[str, object]) -> Iterator[tuple[str, object, set[int]]]:
    """Yield the path and the value of each attribute, and the addresses of the tensors that are saved anyway."""
    for name, value in objects.items():
        if isinstance(value, torch.nn.Module) and not is_metrics(value):
            known = {_address(tensor) for tensor in (*value.parameters(), *value.buffers())}
            for path, module in value.named_modules():
                start = f"{name}.{path}." if path else f"{name}."
                for key in sorted(module._non_persistent_buffers_set):  # noqa: SLF001
                    yield start + key, module._buffers.get(key), set()  # noqa: SLF001
                yield from ((start + key, item, known) for key, item in _of_module(module))
        elif isinstance(value, Optimizer):
            known = {_address(p) for group in value.param_groups for p in group["params"]}
            has_own = type(value).state_dict is not Optimizer.state_dict
            covered = _of_optimizers() | (_saved(value) if has_own else frozenset())
            yield from ((f"{name}.{key}", item, known) for key, item in vars(value).items() if key not in covered)
        elif isinstance(value, LRScheduler):
            covered = _saved(value)
            yield from ((f"{name}.{key}", item, set()) for key, item in vars(value).items() if key not in covered)


@cache
def _of_optimizers() -> frozenset[str]:
    """Return the attributes that every optimizer has. This creates an optimizer, which loads torch's compiler and takes
    a second. Call it only when the state has an optimizer, since then that is already loaded."""
    return frozenset(
        {*vars(torch.optim.SGD([torch.zeros(1)], lr=0.1)), "_opt_called", "_step_count", "_zero_grad_profile_name"}
    )


def _saved(value: Any) -> frozenset[str]:
    return frozenset(value.state_dict())


def _of_module(module: torch.nn.Module) -> Iterator[tuple[str, object]]:
    kinds = type(module).__mro__
    is_wrapper = isinstance(module, DistributedDataParallel | ActivationWrapper) or is_compiled(module)
    has_extra_state = type(module).get_extra_state is not torch.nn.Module.get_extra_state
    if is_wrapper or has_extra_state or is_metric(module):
        return
    hides_private = any(kind.__module__.startswith(_WITH_PRIVATE_STATE) for kind in kinds)
    held = {**module._parameters, **module._buffers}  # noqa: SLF001
    for key in [key for key in vars(module) if key not in _OF_MODULES]:
        is_computed = bool(held) and any(key + ending in held for ending in _COMPUTED_FROM)
        if not is_computed and not (hides_private and key.startswith("_")):
            yield key, vars(module)[key]


def _form(value: Any, known: set[int], depth: int) -> Form:
    """Return a key that is equal for equal values. It keeps no reference to the value."""
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        return ("value", type(value).__name__, repr(value)[:_MAX_ELEMENTS])
    if isinstance(value, torch.Tensor):
        return _form_of_tensor(value, known)
    if type(value).__module__ == "numpy" and hasattr(value, "tobytes"):
        return ("array", str(value.dtype), value.shape, value.ravel()[:_MAX_ELEMENTS].tobytes())
    if not depth or not isinstance(value, dict | list | tuple | set | frozenset | deque):
        return _OTHER
    try:
        items = list(value.items() if isinstance(value, dict) else value)
    except RuntimeError:  # another thread is changing it
        return _OTHER
    if isinstance(value, set | frozenset):
        items.sort(key=repr)
    forms = (_form(item, known, depth - 1 if not isinstance(value, dict) else depth) for item in items[:_MAX_ITEMS])
    return ("items", type(value).__name__, len(items), tuple(forms))


def _form_of_tensor(tensor: torch.Tensor, known: set[int]) -> Form:
    local = local_of(tensor)
    is_plain = type(local) in (torch.Tensor, torch.nn.Parameter) and local.layout == torch.strided
    if not is_plain or local.is_meta or local.grad_fn is not None or _address(local) in known:
        return _OTHER
    flat = local.detach().reshape(-1) if local.numel() <= _MAX_ELEMENTS else _sample(local.detach())
    return ("tensor", str(local.dtype), tuple(local.shape), str(flat.cpu().tolist()))


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """Return evenly spaced elements. If the tensor is contiguous, the others are not copied."""
    return tensor.reshape(-1)[:: tensor.numel() // _MAX_ELEMENTS]


def _address(tensor: torch.Tensor) -> int:
    local = local_of(tensor)
    return local.data_ptr() if type(local) in (torch.Tensor, torch.nn.Parameter) and local.numel() else 0


def _differ(before: Form, now: Form) -> bool:
    return before != now and _OTHER not in (before, now)


def _text(form: Form) -> str:
    match form:
        case ("value", _, text):
            return text if len(text) <= 40 else f"{text[:40]}..."
        case ("tensor" | "array", dtype, shape, *_):
            return f"{dtype.removeprefix('torch.')}{list(shape)}"
        case ("items", kind, count, _):
            return f"{kind} of {count}"
        case _:
            return str(form[0])
