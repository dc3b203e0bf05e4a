"""A rendezvous collects a value from each rank, makes one decision, and tells it to all ranks.

There is one for the first claim, the comparison of the ranks' data, each peek or restore (how far each rank came), what
a restore defers, what a base offers and what matches it, each agreement before a save (their replica checksums), each
save and each memory checkpoint (the ranks' reports), and the end of training. Each lives in the coordinator's event
loop. A rank gets the decision or `Pending`, never just a confirmation that its call arrived; on `Pending` it asks again
(`group.ask_until_decided`).
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Generic, Literal, TypeVar

from raycheck.errors import SaveFailedError
from raycheck.group.coordinator.messages import Pending, RankFailure
from raycheck.terminal import first_few

Arrived = TypeVar("Arrived")
Decision = TypeVar("Decision")
WAIT_S = 10.0
"""How long a rank's call waits for the decision before it is answered with `Pending` and repeated."""
MAX_NAMED = 32
"""How many missing ranks a `Pending` names."""
Kind = Literal[
    "claim", "data", "peek", "restore", "deferred", "base offer", "base match", "agreement", "save", "memory", "end"
]


class Rendezvous(Generic[Arrived, Decision]):
    """A place where values from the ranks are collected until one decision is made, which each of them is told.

    arrivals: the collected values, by rank; empty again after the decision.
    """

    def __init__(self, world_size: int, *, awaited: str) -> None:
        """awaited: what a missing rank has not done yet, as in "ranks [1] have not reported"."""
        self.arrivals: dict[int, Arrived] = {}
        self._came: set[int] = set()
        self._world_size = world_size
        self._awaited = awaited
        self._missing = (-1, "")  # in words, and how many had arrived then
        self._decision: asyncio.Future[Decision] = asyncio.get_running_loop().create_future()
        self._decision.add_done_callback(lambda _: self._wake(self._waiting))
        self._waiting: set[asyncio.Future[None]] = set()
        self._deciding: asyncio.Task[None] | None = None

    @property
    def came(self) -> list[int]:
        """Return the ranks that have arrived, also after the decision."""
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
        """Return whether nothing has been decided and nobody is working on the decision."""
        return self._deciding is None and not self.is_decided

    @property
    def is_due(self) -> bool:
        """Return whether all ranks have arrived, and the decision is still to be made."""
        return self.is_open and self.is_complete

    def arrive(self, rank: int, arrival: Arrived) -> None:
        """Record a rank's value. When it asks again, it sends an equal value, which is ignored."""
        self._came.add(rank)
        if not self.is_decided:
            self.arrivals.setdefault(rank, arrival)

    def decide(self, make: Callable[[list[Arrived]], Decision]) -> None:
        """Make the decision at once from all arrivals in order of rank. An error of `make` is told to all ranks."""
        try:
            decision = make([self.arrivals[rank] for rank in sorted(self.arrivals)])
        except Exception as error:  # noqa: BLE001  every waiting rank is told, whatever it was (I9)
            self.fail(error)
        else:
            self._decide(decision)

    def decide_later(self, work: Coroutine[Any, Any, Decision]) -> None:
        """Start the work that makes the decision, as a task of the event loop. Only while `is_open`."""
        assert self.is_open, "a decision is made once"
        self._deciding = asyncio.create_task(self._decide_by(work))

    def fail(self, error: Exception) -> None:
        """Give every rank this error, unless a decision was made before."""
        if not self.is_decided:
            self._decision.set_exception(error)
            self._decision.exception()  # looked at, so that asyncio does not report it when no other rank comes
            self.arrivals = {}

    async def answer(self, up_to_s: float) -> Decision | Pending:
        """Return the decision, or raise the error, that all ranks are told; `Pending` when there is none in time."""
        if not self.is_decided:
            await self._wait(up_to_s)
        if self.is_decided:
            return self._decision.result()
        return Pending(message="the decision is under way" if self.is_complete else self._what_is_missing())

    async def _wait(self, up_to_s: float) -> None:
        """Wait until there is a decision, but not longer.

        Not by `asyncio.wait`: each call that it ends goes through all callbacks of the future, one for each rank.
        """
        loop = asyncio.get_running_loop()
        woken: asyncio.Future[None] = loop.create_future()
        self._waiting.add(woken)
        timer = loop.call_later(up_to_s, self._wake, (woken,))
        try:
            await woken
        finally:
            timer.cancel()
            self._waiting.discard(woken)

    def _wake(self, waiting: Iterable[asyncio.Future[None]]) -> None:
        for woken in waiting:
            if not woken.done():
                woken.set_result(None)

    def _what_is_missing(self) -> str:
        """Name the missing ranks. Thousands of ranks ask at one time, so this looks only after an arrival."""
        if self._missing[0] != len(self._came):
            ranks = [rank for rank in range(self._world_size) if rank not in self._came]
            self._missing = len(self._came), f"ranks [{first_few(ranks, MAX_NAMED)}] have not {self._awaited}"
        return self._missing[1]

    async def _decide_by(self, work: Coroutine[Any, Any, Decision]) -> None:
        try:
            self._decide(await work)
        except Exception as error:  # noqa: BLE001  every waiting rank is told, whatever it was (I9)
            self.fail(error)

    def _decide(self, decision: Decision) -> None:
        if not self.is_decided:
            self._decision.set_result(decision)
            self.arrivals = {}


class RendezvousTable:
    """All rendezvous of one coordinator, in one place so that none is left out when a rank fails."""

    def __init__(self) -> None:
        self._all: dict[tuple[str, Kind, Any], Rendezvous[Any, Any]] = {}
        self._failures: dict[str, RankFailure] = {}  # the first one of each group

    def meet(self, group: str, kind: Kind, key: Any = None, *, world_size: int, awaited: str) -> Rendezvous[Any, Any]:
        """Return the rendezvous, a new one at the first call. It has failed if a rank that failed will not come.

        key: distinguishes rendezvous of one kind: the number of a save in the group, the step of a memory checkpoint.
        awaited: see Rendezvous.
        """
        at = group, kind, key
        if at not in self._all:
            self._all[at] = Rendezvous(world_size, awaited=awaited)
        self._fail_if_lost(at)
        return self._all[at]

    def find(self, group: str, kind: Kind, key: Any = None) -> Rendezvous[Any, Any] | None:
        """Return the rendezvous; None while no rank has come to it."""
        return self._all.get((group, kind, key))

    def of_kind(self, kind: Kind, group: str | None = None) -> list[Rendezvous[Any, Any]]:
        """Return the rendezvous of one kind. group: None for all groups."""
        return [found for at, found in self._all.items() if at[1] == kind and group in (None, at[0])]

    def raise_if_failed(self, group: str) -> None:
        """Raise the error of the group's rank that failed first."""
        if failure := self._failures.get(group):
            raise failure.told

    def rank_failed(self, failure: RankFailure) -> None:
        """Fail every rendezvous of the group that the rank will not come to, now and later."""
        self._failures.setdefault(failure.group, failure)
        for at in self._all:
            self._fail_if_lost(at)

    def end_before(self, group: str, kind: Kind, key: int) -> None:
        """Fail the open saves of a kind before this one. Forget these, and the decided ones."""
        for at in [at for at in self._all if at[:2] == (group, kind) and at[2] < key]:
            if self._all[at].is_open:
                self._all[at].fail(SaveFailedError("a later one was begun before all ranks had reported this one"))
            if self._all[at].is_decided:
                del self._all[at]

    def claimed(self, group: str) -> None:
        """Forget the rendezvous of earlier groups, and those of this group from before its claim."""
        self._all = {at: found for at, found in self._all.items() if at[:2] == (group, "save")}
        self._failures = {lost: failure for lost, failure in self._failures.items() if lost == group}

    def _fail_if_lost(self, at: tuple[str, Kind, Any]) -> None:
        group, kind, key = at
        failure, found = self._failures.get(group), self._all[at]
        if failure is None or not found.is_open:
            return
        # What the rank had begun before it failed may still end well. Its memory checkpoints are not counted.
        if kind != "memory" and (kind != "save" or key > failure.saves):
            found.fail(failure.told)
