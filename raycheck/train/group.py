"""Who a rank is, and how it reaches the coordinator: Ray Train's own answer, or one given by hand."""

import hashlib
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from uuid import uuid4

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raycheck.bucket.format.object_keys import LATEST_KEY
from raycheck.bucket.protocol.preflight import probe_node
from raycheck.bucket.store import Store, open_store
from raycheck.errors import ConfigError, NotFoundError, RaycheckError, StoreError
from raycheck.train.coordinator.actor import Coordinator
from raycheck.train.coordinator.messages import Pending
from raycheck.train.ray_api import train_context
from raycheck.train.ray_api.calls import call, this_node
from raycheck.train.ray_api.run_location import run_uri

RETRY_PAUSE_S = 0.5
FETCH_TIMEOUT_S = 60.0
CLAIM_TIMEOUT_S = 300.0


@dataclass(frozen=True, kw_only=True)
class Group:
    """One rank's place in a worker group.

    id: equal on all ranks, new for every start of the group. uri: the run's root. coordinator: the actor's handle.
    broadcast: hands rank 0's value to all ranks, None where there is no such way (then only step triggers work).
    notice: says when the first of the group's nodes is to go: unix seconds, inf when nobody knows when, None when none
    is. is_ray_train: whether Ray Train is to be told of commits. is_first_on_node: the rank that asks what its node may
    do in the bucket.
    """

    id: str
    uri: str
    rank: int
    world_size: int
    coordinator: Any
    broadcast: Callable[[Any], Any] | None = None
    notice: Callable[[], float | None] | None = None
    is_ray_train: bool = False
    is_first_on_node: bool = True

    @classmethod
    def of_ray_train(cls) -> "Group":
        """This Ray Train worker's group. Under a plain trainer.fit() rank 0 makes the coordinator.

        Raises ConfigError outside Ray Train, and for an unnamed run.
        """
        if not train_context.in_ray_train():
            raise ConfigError(
                "not inside a Ray Train worker (num_workers=0 has none): start it with raycheck.fit(trainer), or give "
                "Checkpointer(..., group=raycheck.Group(...))"
            )
        guard = train_context.guard_from_fit()
        uri = guard.uri if guard and guard.uri else run_uri(train_context.run_config())
        rank, world_size = train_context.rank_and_world_size()
        coordinator = guard.coordinator if guard else None
        mine: tuple[str, Any] | None = None
        if rank == 0:
            group = uuid4().hex[:16]
            if coordinator is None:
                train_context.guard_this_run()
                owner = train_context.train_run_id()[:16]  # one per trainer.fit(), the same over its restarts
                coordinator = start_coordinator(uri, owner=owner, suffix=f":{group}")
            mine = (group, coordinator)
        shared = train_context.broadcast(mine)
        assert shared is not None, "rank 0 has set it"
        return cls(
            id=shared[0],
            uri=uri,
            rank=rank,
            world_size=world_size,
            coordinator=shared[1],
            broadcast=train_context.broadcast if world_size > 1 else same,
            notice=train_context.preemption_deadline,
            is_ray_train=True,
            is_first_on_node=train_context.is_first_on_node(),
        )

    @classmethod
    def alone(cls) -> "Group":
        """This rank's place where nothing is saved: no coordinator, and no place in a bucket."""
        rank, world_size = train_context.rank_and_world_size()
        return cls(id="", uri="", rank=rank, world_size=world_size, coordinator=None, broadcast=same)

    def check_node(self) -> None:
        """Find out, before anything depends on it, whether this node may do all that a run needs.

        Raises ConfigError that names node, verb and missing permission.
        """
        if self.is_first_on_node:
            probe_node(self.store, node=socket.gethostname())

    def check_shared(self) -> None:
        """After the claim: does this node see what the coordinator wrote? A folder of its own would hold a part of
        each checkpoint that nobody else can read. Raises ConfigError."""
        if not self.is_first_on_node:
            return
        try:
            self.store.head(LATEST_KEY)
        except NotFoundError:
            raise ConfigError(
                f"node {socket.gethostname()}: {self.uri} is another place than the driver's: what it wrote is not "
                "there. Use a bucket, or a folder that all nodes share"
            ) from None

    @property
    def node(self) -> str:
        """The id of this rank's node."""
        return this_node()

    @cached_property
    def store(self) -> Store:
        """One per rank: each holds its own connections."""
        return open_store(self.uri)

    def fetch(self, references: list[Any]) -> Any:
        """What the coordinator has put into Ray's object store. None when that went with it, or nothing was put."""
        with suppress(ray.exceptions.RayError):
            return ray.get(references[0], timeout=FETCH_TIMEOUT_S) if references else None
        return None

    def tell(self, method: str, *args: Any) -> Any:
        """Call the coordinator without waiting for its answer, which `answer` may look for later."""
        return getattr(self.coordinator, method).remote(*args)

    def answer(self, told: Any) -> Any:
        """The answer to what `tell` has told; None while there is none."""
        with suppress(ray.exceptions.RayError):
            return ray.get(told, timeout=0) if ray.wait([told], timeout=0)[0] else None
        return None

    def ask(self, method: str, *args: Any, timeout_s: float, what: str) -> Any:
        """Call the coordinator until it answers; it may be restarted meanwhile. Raises StoreError at the deadline."""
        deadline = time.monotonic() + timeout_s
        while True:
            left = deadline - time.monotonic()
            try:
                return call(getattr(self.coordinator, method), *args, timeout_s=max(1.0, left))
            except TimeoutError as error:
                if time.monotonic() + RETRY_PAUSE_S > deadline:
                    raise StoreError(
                        f"rank {self.rank}: {what}: the coordinator did not answer within {timeout_s:.0f} s ({error})"
                    ) from error
                time.sleep(RETRY_PAUSE_S)


def ask_until_decided(
    group: Group, method: str, *args: Any, deadline: float, what: str, late: Callable[[str], RaycheckError]
) -> Any:
    """Calls a method of the coordinator that all ranks call, until it answers with the decision for all of them.

    deadline: by time.monotonic(). what: names the call in errors. late: makes the error that is raised at the deadline,
    from the text that names the missing ranks. Raises StoreError when the coordinator does not answer at all.
    """
    while True:
        left = max(1.0, deadline - time.monotonic())
        # The coordinator waits for half of it, so that there is time left for an answer that names the missing ranks.
        answer = group.ask(method, *args, left / 2, timeout_s=left, what=what)
        if not isinstance(answer, Pending):
            return answer
        if time.monotonic() > deadline:
            raise late(answer.message)


def start_coordinator(uri: str, *, owner: str, resume: str | int = "auto", suffix: str = "") -> Any:
    """The coordinator actor of `owner` for the run at `uri`; returns its handle, which lives as long as its maker.

    Pinned to this node, so that it does not live on a preemptible one when the driver does not. suffix: told apart
    from an earlier one of the same owner that is just dying.
    """
    root = hashlib.blake2b(uri.encode(), digest_size=8).hexdigest()
    job = ray.get_runtime_context().get_job_id()
    actor: Any = ray.remote(Coordinator)
    return actor.options(
        name=f"raycheck:{job}:{root}:{owner}{suffix}",
        num_cpus=0,
        max_restarts=-1,
        max_concurrency=4096,
        scheduling_strategy=NodeAffinitySchedulingStrategy(this_node(), soft=False),
    ).remote(uri, owner, resume)


def same(value: Any) -> Any:
    """The broadcast of a world of one."""
    return value
