"""The ranks of the engine: processes that share the base model's weights and split each batch.

Every rank makes the same calls in the same order. Sums are computed in rank order on every rank. So all ranks stay
bitwise identical, as do two runs over the same number of ranks.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranks:
    """This process's rank and the number of ranks. With more than one there is a torch process group."""

    rank: int = 0
    size: int = 1

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in rank order, on every rank."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value)
        return found

    def from_first(self, make: Callable[[], Any]) -> Any:
        """Return on all ranks what `make` returns on the first; if it raises there, raise on all ranks."""
        if self.size == 1:
            return make()
        shared: list[Any] = [None, None]
        if self.rank == 0:
            try:
                shared[0] = make()
            except Exception as error:  # noqa: BLE001  raised below, and on the other ranks
                shared[1] = error
        dist.broadcast_object_list(shared, src=0)
        if shared[1] is not None:
            raise shared[1]
        return shared[0]

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum over all ranks."""
        if self.size == 1:
            return values
        found = [torch.empty_like(values) for _ in range(self.size)]
        dist.all_gather(found, values.contiguous())
        total = found[0]
        for other in found[1:]:
            total += other
        return total

    def is_on_all(self, condition: bool) -> bool:
        """Return whether the condition holds on every rank."""
        if self.size == 1:
            return condition
        flag = torch.tensor([int(condition)])
        dist.all_reduce(flag, dist.ReduceOp.MIN)
        return bool(flag)


ALONE = Ranks()
"""The only rank."""
