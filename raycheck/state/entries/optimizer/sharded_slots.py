"""Saves the slots of a sharded parameter that are not sharded as it is.

A slot that is a DTensor says where its parts lie. It is saved whole. If it has another shape than the parameter, such
as the statistics of rows, its placements are saved too: from these a restore makes it again. A plain tensor that was
made of the rank's own part of the parameter says nothing. It is saved under a name of its own for each part, and comes
back where the parameter is cut in the same way.
"""

from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch.distributed.tensor as sharded
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from raycheck.bucket.format.index import Tensor as SavedTensor
from raycheck.transfer.stage.local_box import box_of

MAX_SHOWN = 3
"""How many parts a refusal shows."""
Placements = list[str]
"""A DTensor's placements as the values of an optimizer have them: "R", or "S" and the dimension."""


def cut_of(parameter: torch.Tensor) -> str:
    """Returns the part of a parameter that this rank holds, to follow a slot's name; "" when it holds all of it."""
    if not isinstance(parameter, DTensor):
        return ""
    box = box_of("a parameter", (), parameter, may_spread=False)
    return "" if box.sizes == box.shape else f"@{_text(box.offsets)}+{_text(box.sizes)}"


def is_of_cut(value: object, parameter: torch.Tensor) -> bool:
    """Returns whether a slot was made of this rank's own part of the parameter, as far as its shape tells."""
    if not isinstance(value, torch.Tensor) or isinstance(value, DTensor) or not isinstance(parameter, DTensor):
        return False
    here, whole = parameter.to_local().shape, parameter.shape
    cut = {own for own, all_of_it in zip(here, whole, strict=True) if own != all_of_it}
    return bool(cut) and value.dim() > 0 and (not value.numel() or not cut.isdisjoint(value.shape))


def cuts_in(names: Collection[str], name: str) -> list[str]:
    """Returns the parts for which a slot was saved, of all saved names."""
    return sorted(found.removeprefix(name) for found in names if found.startswith(f"{name}@"))


def placements_of(value: object, parameter: torch.Tensor) -> Placements | None:
    """Returns the placements of a slot that a restore could not find out; None when it can."""
    if not isinstance(value, DTensor) or value.shape == parameter.shape:
        return None
    return [f"S{placement.dim}" if isinstance(placement, Shard) else "R" for placement in value.placements]


def other_cut(cuts: Sequence[str], parameter: torch.Tensor) -> str:
    """Says why a slot that was saved for these parts cannot be restored here."""
    more = ", ..." if len(cuts) > MAX_SHOWN else ""
    return (
        f"each rank saved its own part of it ({', '.join(cuts[:MAX_SHOWN])}{more}), and this rank holds "
        f"{cut_of(parameter) or 'all'} of the parameter. It can be restored only on the same mesh; an optimizer that "
        "keeps it as a DTensor goes on at any world size"
    )


def new_slot(
    tensor: SavedTensor, placements: Placements | None, parameter: torch.Tensor, *, path: str
) -> torch.Tensor | None:
    """Returns a tensor to read into, for a slot that is not there yet and is not laid out as its parameter is.

    None for any other slot. placements: as saved, None for none. path: the slot's name as a whole. Raises ValueError,
    which says why, when the mesh has another number of dimensions than it had.
    """
    if not isinstance(parameter, DTensor):
        return None
    dtype: torch.dtype = getattr(torch, tensor.dtype)
    if tensor.name != path:
        return torch.empty(tensor.shape, dtype=dtype, device=parameter.to_local().device)
    if placements is None:
        return None
    mesh = parameter.device_mesh
    if mesh.ndim != len(placements):
        raise ValueError(f"saved over a mesh of {len(placements)} dimensions, and there are {mesh.ndim} here")
    return sharded.empty(tensor.shape, dtype=dtype, device_mesh=mesh, placements=[_parsed(text) for text in placements])


def _parsed(text: str) -> Placement:
    return Shard(int(text[1:])) if text.startswith("S") else Replicate()


def _text(numbers: Collection[int]) -> str:
    return ",".join(map(str, numbers))


def with_placed(values: Any, state: Any, parameters: dict[str, torch.Tensor]) -> Any:
    """Add to an optimizer's values the placements of such slots, by parameter and slot. state: the live slots."""
    placed = {
        name: found
        for name, slots in state.items()
        if (found := {slot: own for slot, value in slots.items() if (own := placements_of(value, parameters[name]))})
    }
    return {**values, "placed": placed} if placed else values
