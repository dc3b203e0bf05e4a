"""Describes the saved side of one entry at a restore: its content in the checkpoint, and the differences found."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from raycheck.bucket.format.index import Tensor as SavedTensor
from raycheck.state.entries.meta_tensors import is_on_meta
from raycheck.transfer.stage.tensor_parts import described_as, whole_shape

Named = dict[str, torch.Tensor]


HELD = "$held"
"""A bare value, which may be None or a list, is saved in a dict under this key. No dict of plain values contains it."""


class SavedEntry:
    """One entry in a checkpoint, and how it differs from the live one.

    tensors: the entry's tensors that are to be restored. values: the tree that all ranks share; None if the checkpoint
    has no such entry. rank_values: the trees of the ranks that saved their own values, because they had other names.
    place: returns where a tensor's bytes are; equal for names that were saved tied. takes: returns whether the tensor
    of a name is to be restored. dtypes: the dtypes of all saved tensors, if floating-point ones may be cast to the live
    dtype. strict: whether to refuse what only one side has.

    missing: names here that are not in the checkpoint. unexpected: names in the checkpoint that are not here.
    mismatched: differences between what both sides have. fresh: names left unchanged by a stated rule. unused: names in
    the checkpoint that, by a stated rule, are not for this rank. cast: tensors read into another dtype. registered:
    buffers that the live module gets from the checkpoint. advice: what to do about the differences, each once.
    reshaped: tensors of another shape. castable: whether a cast would resolve one of `mismatched`.
    """

    def __init__(
        self,
        tensors: Mapping[str, SavedTensor],
        values: Any,
        *,
        rank_values: tuple[Any, ...] = (),
        place: Callable[[str], object],
        takes: Callable[[str], bool],
        dtypes: Mapping[str, str] | None = None,
        strict: bool = True,
    ) -> None:
        self.tensors = {name: tensor for name, tensor in tensors.items() if takes(name)}
        self.values = values
        self.rank_values = rank_values
        self.place = place
        self.takes = takes
        self.dtypes = dtypes
        self.strict = strict
        self.cast: list[str] = []
        self.missing: list[str] = []
        self.unexpected: list[str] = []
        self.mismatched: list[str] = []
        self.fresh: list[str] = []
        self.unused: list[str] = []
        self.registered: list[str] = []
        self.advice: list[str] = []
        self.reshaped: list[str] = []
        self.castable = False

    def record_only_saved(self, names: Iterable[str]) -> None:
        """Record names that only the checkpoint has.

        Each rank of a pipeline has a share of the entry, so no single rank can tell whether what other ranks wrote is
        unexpected.
        """
        (self.unused if self.rank_values else self.unexpected).extend(names)

    def compare(self, name: str, tensor: torch.Tensor) -> bool:
        """Compare the saved tensor with the live one that it goes into.

        Return False, and record the difference, if it does not fit.
        """
        saved = self.tensors[name]
        here = (str(tensor.dtype).removeprefix("torch."), whole_shape(tensor))
        if here == (saved.dtype, saved.shape):
            return True
        if here[1] == saved.shape and self.may_cast(saved.dtype, tensor.dtype):
            self.cast.append(f"{name}: {saved.dtype} saved, {here[0]} here")
            return True
        self.mismatched.append(f"{name}: {here[0]}{list(here[1])} here, {saved.dtype}{list(saved.shape)} saved")
        if here[1] != saved.shape:
            self.reshaped.append(name)
        elif tensor.dtype.is_floating_point and getattr(torch, saved.dtype).is_floating_point:
            self.castable = True
        return False

    def was_none(self, name: str) -> bool:
        """Return whether the entry was None when it was saved.

        If so, add advice on how to start with the object here.
        """
        if not (isinstance(self.values, dict) and self.values.get(HELD, self) is None):
            return False
        self.values = None
        self.advice.append(
            f"{name} was None when it was saved: restore(skip=[{name!r}]) starts with the object here. Checkpoints "
            "saved after that are restored whole by the same call"
        )
        return True

    def may_cast(self, saved: str, here: torch.dtype) -> bool:
        """Return whether the caller allows reading the saved dtype into the live one.

        Only floats are ever cast: an integer that does not fit would become another number.
        """
        return self.dtypes is not None and here.is_floating_point and getattr(torch, saved).is_floating_point


def empty_like(live: torch.Tensor | None, saved: SavedTensor) -> torch.Tensor:
    """Return a tensor to read a saved one into: laid out like the live one if that has the same shape and dtype."""
    form = saved.shape, f"torch.{saved.dtype}"
    if live is None or is_on_meta(live) or (whole_shape(live), str(live.dtype)) != form:
        return empty_for(saved)
    return described_as(torch.empty_like(live, requires_grad=False), live)


def empty_for(saved: SavedTensor) -> torch.Tensor:
    """Return a plain CPU tensor to read a saved one into."""
    return torch.empty(saved.shape, dtype=getattr(torch, saved.dtype))
