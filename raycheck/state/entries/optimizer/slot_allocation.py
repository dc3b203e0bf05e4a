"""Allocates the tensors that an optimizer's saved state is read into: the live slots, or new ones laid out like them.

State that does not exist yet is allocated from the checkpoint. Torch's own way is a dummy step, which changes
parameters and calls hooks.
"""

from typing import Any, cast

import torch

from raycheck.bucket.format.index import Tensor as SavedTensor
from raycheck.state.entries.meta_tensors import is_on_meta
from raycheck.state.entries.module.parameter_names import ParameterNames
from raycheck.state.entries.saved_entry import SavedEntry, empty_like
from raycheck.transfer.read.aliased_tensors import overlaps_itself
from raycheck.transfer.stage.gather_cache import local_of
from raycheck.transfer.stage.tensor_parts import described_as, whole_shape

STEP = "step"
"""The slot that counts a parameter's steps. It stays on the CPU and keeps its own dtype, as in torch."""


def slot_tensor(
    saved: SavedEntry, tensor: SavedTensor, slot: str, *, live: Any, parameter: torch.Tensor, named: ParameterNames
) -> torch.Tensor:
    """Return the tensor to read a slot into: the live one, or a new one laid out like the parameter.

    live: the slot's value here, None if there is none yet. named: the names of the modules' parameters.
    """
    dtype = _slot_dtype(saved, tensor, slot, live=live, parameter=parameter, named=named)
    is_there = isinstance(live, torch.Tensor) and not is_on_meta(live) and not overlaps_itself(local_of(live))
    if is_there and (whole_shape(live), live.dtype) == (tensor.shape, dtype):
        return cast("torch.Tensor", live)
    if whole_shape(parameter) == tensor.shape and slot != STEP:
        return described_as(torch.empty_like(parameter, dtype=dtype, requires_grad=False), parameter)
    return torch.empty(tensor.shape, dtype=dtype)


def _slot_dtype(
    saved: SavedEntry, tensor: SavedTensor, slot: str, *, live: Any, parameter: torch.Tensor, named: ParameterNames
) -> torch.dtype:
    """Return the saved dtype, or with a cast the live slot's.

    If there is no live slot yet, a cast uses the parameter's dtype if the saved slot had the dtype of its saved
    parameter, since torch's own optimizers create their slots so.
    """
    dtype: torch.dtype = getattr(torch, tensor.dtype)
    if saved.dtypes is None or slot == STEP:
        return dtype
    wanted = dtype
    if isinstance(live, torch.Tensor):
        wanted = live.dtype
    elif saved.dtypes.get(".".join(named.get(parameter, ()))) == tensor.dtype:
        wanted = parameter.dtype
    if wanted == dtype or not saved.may_cast(tensor.dtype, wanted):
        return dtype
    saved.cast.append(f"{tensor.name}: {tensor.dtype} saved, {str(wanted).removeprefix('torch.')} here")
    return wanted


def inner_tensor(tensor: SavedTensor, *, live: torch.Tensor | None, parameter: torch.Tensor) -> torch.Tensor:
    """Return a new tensor for one that was saved inside a slot's value.

    It is laid out like the live one if there is one, otherwise like the parameter if the shapes are equal, otherwise as
    a plain tensor on the parameter's device.
    """
    if live is not None or tensor.name.rpartition(".")[2] == STEP:
        return empty_like(live, tensor)
    dtype = getattr(torch, tensor.dtype)
    if whole_shape(parameter) == tensor.shape:
        return described_as(torch.empty_like(parameter, dtype=dtype, requires_grad=False), parameter)
    return torch.empty(tensor.shape, dtype=dtype, device=parameter.device)
