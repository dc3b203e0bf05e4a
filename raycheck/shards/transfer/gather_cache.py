"""Whether the tensors that were gathered last are still the ones to save, without gathering them again.

Collecting and naming the state of a large model costs more than copying it. Where tensors live does not change from one
step to the next, so it is enough to fetch them from there and to compare what they are. Nothing here keeps a tensor
alive: a model that is moved off its device between two saves must be able to leave.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

Form = tuple[int, torch.Size, tuple[int, ...], torch.dtype]


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor, itself and not a view of it."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor  # noqa: SLF001  to_local() makes a new one


def form_of(tensor: torch.Tensor) -> Form:
    """What a tensor is, but for its elements: equal forms are the same bytes of the same memory."""
    local = local_of(tensor)
    return local.data_ptr(), tensor.shape, local.stride(), local.dtype


class GatherCache:
    """Tensors by name, fetched again from where they live. fetch: gives them in the order of the names; raises
    LookupError when others may have come or gone."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], fetch: Callable[[], list[Any]]) -> None:
        """Raises LookupError when `fetch` does not give these tensors."""
        self._names = list(tensors)
        self._forms = [form_of(tensor) for tensor in tensors.values()]
        self._fetch = fetch
        if self.look() is None:
            raise LookupError("not all of these tensors live there")

    def look(self) -> dict[str, torch.Tensor] | None:
        """The tensors; None when anything but their elements may have changed."""
        try:
            tensors = self._fetch()
            forms = [form_of(tensor) for tensor in tensors]
        except (LookupError, AttributeError, RuntimeError):  # none stands there now, or one of another kind
            return None
        return dict(zip(self._names, tensors, strict=True)) if forms == self._forms else None
