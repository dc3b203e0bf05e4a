"""A worker group as one rank sees it: its rank, the location of the run, and its calls to the coordinator.

The host decides how the calls are sent: see RayGroup (on_ray/ray_group.py) and ServedGroup (served_group.py).
"""

import pickle
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from raycheck.bucket.assembly.role import Role
from raycheck.bucket.format.object_keys import LATEST_KEY
from raycheck.bucket.protocol.preflight import check_same_place, probe_node
from raycheck.bucket.reading import RangeReader
from raycheck.bucket.store import Store, open_store
from raycheck.errors import ConfigError, FencedError, RaycheckError, StoreError, SupersededError
from raycheck.group.coordinator.messages import Holder, Pending, RankFailure
from raycheck.group.coordinator.rendezvous import WAIT_S
from raycheck.group.ports import NodeSink, NoNodeSink, PreemptionNotice, Reporter
from raycheck.host import host
from raycheck.settings import Retention

CLAIM_TIMEOUT_S = 300.0


@dataclass(frozen=True, kw_only=True)
class Group(ABC):
    """One rank's place in a worker group. It also makes the rank's calls to the coordinator.

    id: equal on all ranks, new for every start of the group. uri: the run's root. coordinator: the means to call it.
    broadcast: returns rank 0's value on all ranks; None if that is not possible (then only step triggers work). notice:
    returns the newest notice that nodes of the group will be preempted, None without one. is_first_on_node: this rank
    checks what its node may do in the bucket. retention: the retention requested by the system that started the group;
    None: only SaveSettings decide. role: see Role; None if all ranks have the same entries.
    """

    id: str
    uri: str
    rank: int
    world_size: int
    coordinator: Any
    broadcast: Callable[[Any], Any] | None = None
    notice: Callable[[], PreemptionNotice | None] | None = None
    is_first_on_node: bool = True
    retention: Retention | None = None
    role: Role | None = None

    def check_node(self) -> None:
        """Check, before anything depends on it, that this node may do everything in the bucket that a run needs.

        Raises ConfigError that names the node, the verb and the missing permission.
        """
        probe_node(self.store, node=socket.gethostname())

    def check_shared(self) -> None:
        """Check, after the claim, that this node sees what the coordinator wrote. Raises ConfigError."""
        check_same_place(self.store, LATEST_KEY, node=socket.gethostname())

    @property
    @abstractmethod
    def node(self) -> str:
        """Return the id of this rank's node."""

    @cached_property
    def store(self) -> Store:
        """Open this rank's own store, once: each rank has its own connections."""
        return open_store(self.uri)

    @abstractmethod
    def fetch(self, references: list[Any]) -> Any:
        """Return the value that the coordinator has shared (Cluster.share); None if there is none, or if it was
        lost."""

    @abstractmethod
    def tell(self, method: str, *args: Any) -> Any:
        """Call the coordinator without waiting. Return what `answer` needs to look for the answer later."""

    @abstractmethod
    def answer(self, told: Any) -> Any:
        """Return the answer to a call by `tell`; None while there is none."""

    def tell_failure(self, error: Exception, *, saves: int = 0) -> bool:
        """Tell the other ranks that this one fails with `error`, so that they need not wait for it. Never raises.

        saves: how many saves this rank has begun. Returns whether there is anything to tell: FencedError and
        SupersededError reach all ranks anyway.
        """
        if self.world_size == 1 or isinstance(error, FencedError | SupersededError):
            return False
        known = error if isinstance(error, RaycheckError) else StoreError(f"{type(error).__name__}: {error}")
        with suppress(Exception):
            self.tell("rank_failed", RankFailure(group=self.id, rank=self.rank, error=known, saves=saves))
        return True

    def tell_end(self, error: Exception) -> None:
        """Have it recorded that `error` ends this rank's training, where no driver does that. Never raises."""
        del error

    @abstractmethod
    def ask(self, method: str, *args: Any, timeout_s: float, what: str) -> Any:
        """Call the coordinator until it answers; it may be restarted meanwhile. Raises StoreError at the deadline.

        what: names the call in errors.
        """

    def reporter(self) -> Reporter:
        """Return the reporter of commits to this rank's host."""
        return Reporter()

    def node_sink(self, *, timeout_s: float, given_up: Callable[[str], object]) -> NodeSink:
        """Return the sink that keeps this rank's saves in another process of its node.

        timeout_s: how long a save may take; errors name it. given_up: called with the reason when that process takes no
        more saves.
        """
        del timeout_s
        return NoNodeSink(given_up)

    def memory_reader(self, holders: Mapping[str, Sequence[Holder]]) -> RangeReader:
        """Return the reader of a memory checkpoint's shards. holders: the nodes that hold each shard, by key."""
        raise ConfigError(f"rank {self.rank}: this group cannot read what nodes hold in memory: {sorted(holders)[:3]}")

    def pickled(self, name: str, function: Callable[..., Any]) -> bytes:
        """Return a function as bytes, from which a task after a commit restores it. Raises what pickle raises.

        name: the task's name, which is unique in the run.
        """
        del name
        return pickle.dumps(function)


@dataclass(frozen=True, kw_only=True)
class Alone(Group):
    """The place of a rank where raycheck is turned off: without a coordinator and without a run."""

    @property
    def node(self) -> str:
        return socket.gethostname()

    def fetch(self, references: list[Any]) -> Any:
        del references

    def tell(self, method: str, *args: Any) -> Any:
        del args
        raise ConfigError(f"raycheck is turned off: there is no coordinator to call {method} of")

    def answer(self, told: Any) -> Any:
        del told

    def ask(self, method: str, *args: Any, timeout_s: float, what: str) -> Any:
        del timeout_s, what
        return self.tell(method, *args)


def alone() -> Alone:
    """Return this rank's place where raycheck is turned off."""
    rank, world_size = host().rank_and_world_size()
    return Alone(id="", uri="", rank=rank, world_size=world_size, coordinator=None, broadcast=same)


def ask_until_decided(
    group: Group,
    method: str,
    *args: Any,
    deadline: float,
    what: str,
    late: Callable[[str], RaycheckError] | None = None,
) -> Any:
    """Call a coordinator method that all ranks call, until it answers with the decision for all of them.

    No rank waits past the deadline, and the error names the missing ranks (I9). deadline: by time.monotonic(). what:
    names the call in errors. late: makes the error that is raised at the deadline, from the text that names the missing
    ranks; by default a StoreError. Raises StoreError when the coordinator does not answer at all.
    """
    within_s = deadline - time.monotonic()
    while True:
        left = max(1.0, deadline - time.monotonic())
        # The coordinator waits for half of it, so that there is time left for an answer that names the missing ranks.
        answer = group.ask(method, *args, min(WAIT_S, left / 2), timeout_s=left, what=what)
        if not isinstance(answer, Pending):
            return answer
        if time.monotonic() > deadline:
            if late is not None:
                raise late(answer.message)
            raise StoreError(f"rank {group.rank}: {what}: {answer.message} within {within_s:.0f} s")


def same(value: Any) -> Any:
    """Return the value itself: the broadcast in a world of one rank."""
    return value
