"""Makes a worker group whose coordinator runs in a thread of this process, to test without Ray what the two exchange."""

import asyncio
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from uuid import uuid4

import raycheck
from raycheck.group.coordinator.actor import Coordinator
from raycheck.group.coordinator.cluster import Cluster


class OneProcess(Cluster):
    """Shares values with ranks in the same process: as they are."""

    def share(self, make: Callable[[], object]) -> list[Any]:
        return [make()]


def run_until_stopped(loop: asyncio.AbstractEventLoop) -> None:
    loop.run_forever()
    for task in asyncio.all_tasks(loop):
        task.cancel()
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()


class CoordinatorThread:
    """Runs a coordinator in an event loop of its own thread, which ends once nobody holds this object.

    Else a process would have hundreds of loops by its last test, and together they take all of its time.
    """

    def __init__(self, uri: str, owner: str, cluster: Cluster | None = None) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=run_until_stopped, args=(self._loop,), daemon=True).start()
        weakref.finalize(self, self._loop.call_soon_threadsafe, self._loop.stop).atexit = False
        self._coordinator = Coordinator(uri, owner, cluster=cluster or OneProcess())

    def call(self, method: str, *args: Any) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(getattr(self._coordinator, method)(*args), self._loop)


@dataclass(frozen=True, kw_only=True)
class InProcess(raycheck.adapters.Group):
    """Describes one rank's place in a group whose coordinator is a CoordinatorThread."""

    @property
    def node(self) -> str:
        return "here"

    def fetch(self, references: list[Any]) -> Any:
        return references[0] if references else None

    def tell(self, method: str, *args: Any) -> Any:
        return self.coordinator.call(method, *args)

    def answer(self, told: Any) -> Any:
        return told.result() if told.done() else None

    def ask(self, method: str, *args: Any, timeout_s: float, what: str) -> Any:
        return self.tell(method, *args).result(timeout_s)


def group_of(uri: str, *, world_size: int = 1, owner: str = "me") -> list[InProcess]:
    """Returns the places of all ranks of a new group."""
    place = partial(
        InProcess, id=uuid4().hex, uri=uri, world_size=world_size, coordinator=CoordinatorThread(uri, owner)
    )
    return [place(rank=rank, is_first_on_node=not rank) for rank in range(world_size)]


def again(places: Sequence[InProcess], *, world_size: int | None = None) -> list[InProcess]:
    """Return the places of the next group of the same driver. world_size: as that of the group before by default."""
    place = partial(replace, places[0], id=uuid4().hex, world_size=world_size or len(places))
    return [place(rank=rank, is_first_on_node=not rank) for rank in range(world_size or len(places))]
