"""Names everything that is trained but would be in no checkpoint, before the first step and again at the first save.

A module may leave tensors out of its own state_dict(), and an optimizer may train parameters that are in no entry of
the state. A tensor counts as saved if an entry saves its name or its memory.
"""

from collections.abc import Mapping, Sequence

import torch
from torch.optim import Optimizer

from raycheck.errors import ConfigError
from raycheck.state.entries.module.module_entry import ModuleEntry
from raycheck.state.entries.state_entry import GatheredEntry, StateEntry
from raycheck.terminal import first_few
from raycheck.transfer.stage.gather_cache import local_of


def left_out(
    objects: Mapping[str, object], entries: Sequence[StateEntry], gathered: Sequence[GatheredEntry]
) -> list[str]:
    """Return a warning for each entry of which a save leaves tensors out.

    Raises ConfigError for a trained parameter that its module's state_dict() leaves out, unless state_dict() returns
    other tensors, which may have been derived from it.
    """
    saved = {memory for found in gathered for tensor in found.tensors.values() if (memory := _memory(tensor))}
    warnings = []
    for entry, found in zip(entries, gathered, strict=True):
        if isinstance(entry, ModuleEntry):
            warnings += _left_out_of_module(entry, found, saved)
    known = {id(p) for value in objects.values() if isinstance(value, torch.nn.Module) for p in value.parameters()}
    for name, value in objects.items():
        if isinstance(value, Optimizer):
            warnings += _unknown_to_modules(name, value, known, saved)
    return warnings


def _left_out_of_module(entry: ModuleEntry, found: GatheredEntry, saved: set[object]) -> list[str]:
    live = entry.persistent_tensors()
    names = {*found.tensors, *(name.rpartition(".")[0] for name in found.tensors)}  # includes tensor subclasses
    lost = {
        name: tensor
        for name, tensor in live.items()
        if tensor.numel() and name not in names and _memory(tensor) not in saved
    }
    if not lost:
        return []
    own = {_memory(tensor) for tensor in live.values()}
    is_made_anew = any(_memory(tensor) not in own for tensor in found.tensors.values())
    trained = [name for name, tensor in lost.items() if tensor.requires_grad]
    if trained and not is_made_anew:
        raise ConfigError(
            f"{first_few(trained)}: to be trained, but left out of the module's own state_dict(), so no checkpoint "
            "would have it. Return it from state_dict(), or call requires_grad_(False) on it if the script recreates "
            "it at every start"
        )
    text = "left out of the module's own state_dict(), so not saved: the script has to recreate it at every start"
    return [f"{first_few(list(lost))}: {text}"]


def _unknown_to_modules(name: str, optimizer: Optimizer, known: set[int], saved: set[object]) -> list[str]:
    unknown = [
        f"parameter {number} of group {group_number} ({list(parameter.shape)})"
        for group_number, group in enumerate(optimizer.param_groups)
        for number, parameter in enumerate(group["params"])
        if id(parameter) not in known and parameter.numel() and _memory(parameter) not in saved
    ]
    if not unknown:
        return []
    advice = 'Add the module that holds them, or a list of the tensors, as in {"weights": [weight, bias]}'
    text = "trains parameters that are in no entry of the state, so their values are not saved"
    return [f"state[{name!r}] {text}: {first_few(unknown)}. {advice}"]


def _memory(tensor: torch.Tensor) -> object:
    """Return a key that is equal for all tensors in one memory; None if there is no memory, or it cannot be seen."""
    local = local_of(tensor)
    if local.is_meta or type(local) not in (torch.Tensor, torch.nn.Parameter) or local.layout != torch.strided:
        return None
    address = local.untyped_storage().data_ptr()
    return (address, local.device) if address else None
