"""Tells whether the tensors gathered for the last save are still the ones to save, without gathering them again.

Collecting and naming the state of a large model costs more than copying it. Where tensors live does not change from one
step to the next. So it is enough to fetch them from there, and to compare their addresses, shapes, strides and types.
Nothing here keeps a tensor alive: a model that is moved off its device between two saves must be able to free it.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

Form = tuple[int, torch.Size, tuple[int, ...], torch.dtype]


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns this rank's part of a tensor: the very tensor object, not a view of it."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor  # noqa: SLF001  to_local() makes a new one


def form_of(tensor: torch.Tensor) -> Form:
    """Returns what identifies a tensor apart from its elements.

    Tensors of equal form are equal bytes of the same memory.
    """
    local = local_of(tensor)
    return local.data_ptr(), tensor.shape, local.stride(), local.dtype


class GatherCache:
    """Remembers named tensors by their form, and fetches them again from where they live."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], fetch: Callable[[], list[Any]]) -> None:
        """fetch: returns the tensors in the order of the names, or raises LookupError when some may have come or gone.

        Raises LookupError when `fetch` does not return these tensors now.
        """
        self._names = list(tensors)
        self._forms = [form_of(tensor) for tensor in tensors.values()]
        self._fetch = fetch
        if self.look() is None:
            raise LookupError("not all of these tensors live there")

    def look(self) -> dict[str, torch.Tensor] | None:
        """Returns the tensors, or None when anything but their elements may have changed."""
        try:
            tensors = self._fetch()
            forms = [form_of(tensor) for tensor in tensors]
        except (LookupError, AttributeError, RuntimeError):  # something else is there now, or nothing
            return None
        return dict(zip(self._names, tensors, strict=True)) if forms == self._forms else None
