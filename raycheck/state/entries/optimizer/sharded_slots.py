"""Saves the slots of a sharded parameter that are not sharded like it.

A slot that is a DTensor records where its parts are. It is saved whole. If its shape differs from the parameter's, as
for statistics of rows, its placements are saved too, and a restore recreates it from these. A plain tensor that was
created from the rank's own part of the parameter records nothing. Each part is saved under its own name, and can be
restored only where the parameter is cut in the same way.
"""

from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch.distributed.tensor as sharded
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from raycheck.bucket.format.index import Tensor as SavedTensor
from raycheck.transfer.stage.local_box import boxes_of

MAX_SHOWN = 3
"""How many parts an error lists."""
Placements = list[str]
"""A DTensor's placements in the saved values of an optimizer: "R", or "S" and the dimension."""


def cut_of(parameter: torch.Tensor) -> str:
    """Return the suffix of a slot's name for the part of a parameter that this rank has; "" when it has all of it."""
    if not isinstance(parameter, DTensor):
        return ""
    boxes = boxes_of("a parameter", (), parameter, may_spread=False)
    if all(box.sizes == box.shape for box in boxes):
        return ""
    return "@" + "&".join(f"{_text(box.offsets)}+{_text(box.sizes)}" for box in boxes)


def is_of_cut(value: object, parameter: torch.Tensor) -> bool:
    """Return whether a slot was created from this rank's own part of the parameter, judged by its shape."""
    if not isinstance(value, torch.Tensor) or isinstance(value, DTensor) or not isinstance(parameter, DTensor):
        return False
    here, whole = parameter.to_local().shape, parameter.shape
    cut = {own for own, all_of_it in zip(here, whole, strict=True) if own != all_of_it}
    return bool(cut) and value.dim() > 0 and (not value.numel() or not cut.isdisjoint(value.shape))


def cuts_in(names: Collection[str], name: str) -> list[str]:
    """Return the parts for which a slot was saved, found in all saved names."""
    return sorted(found.removeprefix(name) for found in names if found.startswith(f"{name}@"))


def placements_of(value: object, parameter: torch.Tensor) -> Placements | None:
    """Return the placements of a slot if a restore could not derive them, otherwise None."""
    if not isinstance(value, DTensor) or value.shape == parameter.shape:
        return None
    return [f"S{placement.dim}" if isinstance(placement, Shard) else "R" for placement in value.placements]


def other_cut(cuts: Sequence[str], parameter: torch.Tensor) -> str:
    """Return why a slot that was saved for these parts cannot be restored here."""
    more = ", ..." if len(cuts) > MAX_SHOWN else ""
    return (
        f"each rank saved its own part of it ({', '.join(cuts[:MAX_SHOWN])}{more}), and this rank holds "
        f"{cut_of(parameter) or 'all'} of the parameter. It can be restored only on the same mesh; an optimizer that "
        "keeps it as a DTensor resumes at any world size"
    )


def new_slot(
    tensor: SavedTensor, placements: Placements | None, parameter: torch.Tensor, *, path: str
) -> torch.Tensor | None:
    """Return a tensor to read into, for a slot that does not exist yet and is not laid out like its parameter.

    None for any other slot. placements: the saved ones, or None. path: the full name of the slot. Raises ValueError
    with the reason if the mesh has another number of dimensions than when it was saved.
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
        raise ValueError(f"saved over a mesh of {len(placements)} dimensions, but the mesh here has {mesh.ndim}")
    return sharded.empty(tensor.shape, dtype=dtype, device_mesh=mesh, placements=[_parsed(text) for text in placements])


def _parsed(text: str) -> Placement:
    return Shard(int(text[1:])) if text.startswith("S") else Replicate()


def _text(numbers: Collection[int]) -> str:
    return ",".join(map(str, numbers))


def with_placed(values: Any, state: Any, parameters: dict[str, torch.Tensor]) -> Any:
    """Add the placements of DTensor slots whose shape is not their parameter's to an optimizer's values.

    They are by parameter and slot. state: the live slots.
    """
    placed = {
        name: found
        for name, slots in state.items()
        if (found := {slot: own for slot, value in slots.items() if (own := placements_of(value, parameters[name]))})
    }
    return {**values, "placed": placed} if placed else values
