"""Decides whether the tensors gathered for the last save are still the ones to save, without gathering them again.

Collecting and naming the state of a large model costs more than copying it. Where tensors are kept does not change from
one step to the next. So it is enough to fetch them from there, and to compare their addresses, shapes, strides and
types. Nothing here keeps a tensor alive: a model that is moved off its device between two saves must be able to free
it.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from raycheck.transfer.stage.tensor_parts import description_of

Form = tuple[int, torch.Size, tuple[int, ...], torch.dtype, tuple[Any, ...]]


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor: the tensor object itself, not a view of it."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor  # noqa: SLF001  to_local() makes a new one


def form_of(tensor: torch.Tensor) -> Form:
    """Return the properties that identify a tensor, apart from its elements.

    Tensors of equal form are the same bytes in the same memory.
    """
    local = local_of(tensor)
    return local.data_ptr(), tensor.shape, local.stride(), local.dtype, description_of(tensor)


class GatherCache:
    """A cache of named tensors.

    It stores their forms, and fetches the tensors themselves from the objects that hold them.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], fetch: Callable[[], list[Any]]) -> None:
        """fetch: returns the tensors in the order of the names. It raises LookupError if some may have been added.

        Raises LookupError if `fetch` does not return these tensors now.
        """
        self._names = list(tensors)
        self._forms = [form_of(tensor) for tensor in tensors.values()]
        self._fetch = fetch
        if self.look() is None:
            raise LookupError("`fetch` does not return all of these tensors")

    def look(self) -> dict[str, torch.Tensor] | None:
        """Return the tensors, or None when anything but their elements may have changed."""
        try:
            tensors = self._fetch()
            forms = [form_of(tensor) for tensor in tensors]
        except (LookupError, AttributeError, RuntimeError):  # the place now holds something else, or nothing
            return None
        return dict(zip(self._names, tensors, strict=True)) if forms == self._forms else None
