"""A rendezvous takes something from each rank, has one decision made, and tells all ranks this decision.

There is one for each save (the ranks' reports), each agreement before a save (their replica checksums), each peek or
restore (how far each rank came), and the end of training. Each lives in the coordinator's event loop. A rank is told
the decision or `Pending`, never just that its call arrived; upon `Pending` it asks again (`group.ask_until_decided`).
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

from raycheck.train.coordinator.messages import Pending

Arrived = TypeVar("Arrived")
Decision = TypeVar("Decision")


class Rendezvous(Generic[Arrived, Decision]):
    """Gathers what the ranks hand in until a decision is made, once, and hands out this decision.

    arrivals: what has been handed in, by rank; empty again after the decision.
    """

    def __init__(self, world_size: int, *, awaited: str) -> None:
        """awaited: what a missing rank has not done yet, as in "ranks [1] have not reported"."""
        self.arrivals: dict[int, Arrived] = {}
        self._came: set[int] = set()
        self._world_size = world_size
        self._awaited = awaited
        self._decision: asyncio.Future[Decision] = asyncio.get_running_loop().create_future()
        self._deciding: asyncio.Task[None] | None = None

    @property
    def came(self) -> list[int]:
        """Returns the ranks that have arrived, also after the decision."""
        return sorted(self._came)

    @property
    def is_complete(self) -> bool:
        return len(self._came) == self._world_size

    @property
    def is_decided(self) -> bool:
        return self._decision.done()

    @property
    def is_deciding(self) -> bool:
        return self._deciding is not None and not self.is_decided

    @property
    def is_open(self) -> bool:
        """Returns whether nothing has been decided and nobody is working on the decision."""
        return self._deciding is None and not self.is_decided

    def arrive(self, rank: int, arrival: Arrived) -> None:
        """Takes what a rank hands in. What it hands in again, when it asks again, is equal and ignored."""
        self._came.add(rank)
        if not self.is_decided:
            self.arrivals.setdefault(rank, arrival)

    def decide(self, make: Callable[[list[Arrived]], Decision]) -> None:
        """Makes the decision at once from all arrivals in order of rank. An error of `make` is told to all ranks."""
        try:
            decision = make([self.arrivals[rank] for rank in sorted(self.arrivals)])
        except Exception as error:  # noqa: BLE001  every waiting rank is told, whatever it was (I9)
            self.fail(error)
        else:
            self._decide(decision)

    def decide_later(self, work: Coroutine[Any, Any, Decision]) -> None:
        """Starts the work that makes the decision, beside the event loop's other tasks. Only while `is_open`."""
        assert self.is_open, "a decision is made once"
        self._deciding = asyncio.create_task(self._decide_by(work))

    def fail(self, error: Exception) -> None:
        """Tells every rank this error, unless a decision was made before."""
        if not self.is_decided:
            self._decision.set_exception(error)
            self._decision.exception()  # looked at, so that asyncio does not report it when no other rank comes
            self.arrivals = {}

    async def answer(self, up_to_s: float) -> Decision | Pending:
        """Returns the decision, or raises the error, that all ranks are told; `Pending` when there is none in time."""
        await asyncio.wait([self._decision], timeout=up_to_s)
        if self.is_decided:
            return self._decision.result()
        missing = sorted(set(range(self._world_size)) - self._came)
        return Pending(message=f"ranks {missing} have not {self._awaited}" if missing else "the decision is under way")

    async def _decide_by(self, work: Coroutine[Any, Any, Decision]) -> None:
        try:
            self._decide(await work)
        except Exception as error:  # noqa: BLE001  every waiting rank is told, whatever it was (I9)
            self.fail(error)

    def _decide(self, decision: Decision) -> None:
        if not self.is_decided:
            self._decision.set_result(decision)
            self.arrivals = {}
