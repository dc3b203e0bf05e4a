"""One rank's place in a group whose coordinator is a Ray actor: under Ray Train, or in a user's own actors."""

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import ray
from ray.exceptions import ActorDiedError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raycheck.bucket.protocol.resume import AUTO, Resume
from raycheck.bucket.reading import RangeReader
from raycheck.errors import StoreError
from raycheck.group.coordinator.actor import Coordinator
from raycheck.group.coordinator.messages import Holder
from raycheck.group.group import Group, same
from raycheck.group.ports import NodeSink, Reporter
from raycheck.on_ray.api import train_context
from raycheck.on_ray.api.calls import call, this_node
from raycheck.on_ray.api.controller_callbacks import guard_from_fit, guard_this_run
from raycheck.on_ray.api.preemption_notices import notice_of_ray_train
from raycheck.on_ray.api.run_location import run_uri
from raycheck.on_ray.nodes.memory_shards import MemoryReader
from raycheck.on_ray.nodes.node_uploads import NodeUploads
from raycheck.on_ray.ray_cluster import RayCluster
from raycheck.on_ray.reports.ray_reporter import RayReporter

RETRY_PAUSE_S = 0.5
FETCH_TIMEOUT_S = 60.0
MAX_CALLS = 1 << 16
"""How many calls the coordinator holds at once. A rank may wait in several: for a save, for a memory checkpoint. One
that is not let in is not counted among the ranks that have come, so it would hold up all others."""


@dataclass(frozen=True, kw_only=True)
class RayGroup(Group):
    """One rank's place in a group whose coordinator is a Ray actor.

    coordinator: the actor's handle, as `start_coordinator` returns it. is_ray_train: commits are reported to Ray Train.
    """

    is_ray_train: bool = False

    @property
    def node(self) -> str:
        return this_node()

    def fetch(self, references: list[Any]) -> Any:
        with suppress(RayError):
            return ray.get(references[0], timeout=FETCH_TIMEOUT_S) if references else None
        return None

    def tell(self, method: str, *args: Any) -> Any:
        return getattr(self.coordinator, method).remote(*args)

    def answer(self, told: Any) -> Any:
        with suppress(RayError):
            return ray.get(told, timeout=0) if ray.wait([told], timeout=0)[0] else None
        return None

    def ask(self, method: str, *args: Any, timeout_s: float, what: str) -> Any:
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
            except ActorDiedError as error:
                raise StoreError(
                    f"rank {self.rank}: {what}: the coordinator has ended, since the process that started it has ended "
                    "or has left its block; start the workers again"
                ) from error
            except RayError as error:
                raise StoreError(f"rank {self.rank}: {what}: {type(error).__name__}: {error}") from error

    def reporter(self) -> Reporter:
        return RayReporter(self) if self.is_ray_train else Reporter()

    def node_sink(self, *, timeout_s: float, given_up: Callable[[str], object]) -> NodeSink:
        return NodeUploads(self, timeout_s=timeout_s, given_up=given_up)

    def memory_reader(self, holders: Mapping[str, Sequence[Holder]]) -> RangeReader:
        return MemoryReader(self.store, holders, self.node)

    def pickled(self, name: str, function: Callable[..., Any]) -> bytes:
        """Return a function, also one of a script or a lambda, as bytes."""
        del name
        return bytes(ray.cloudpickle.dumps(function))


def group_of_ray_train() -> RayGroup:
    """Return this Ray Train worker's group. Under a plain trainer.fit(), rank 0 starts the coordinator.

    Raises ConfigError for an unnamed run.
    """
    guard = guard_from_fit()
    uri = guard.uri if guard and guard.uri else run_uri(train_context.run_config())
    rank, world_size = train_context.rank_and_world_size()
    coordinator = guard.coordinator if guard else None
    mine: tuple[str, Any] | None = None
    if rank == 0:
        group, started = uuid4().hex[:16], None
        if coordinator is None:
            guard_this_run()
            owner = train_context.train_run_id()[:16]  # one per trainer.fit(): it survives restarts of the workers
            started = start_coordinator(uri, owner=owner, suffix=f":{group}", examines=True)
        mine = (group, started)  # to broadcast a handle takes much longer than text
    shared = train_context.broadcast(mine)
    assert shared is not None, "rank 0 has set it"
    return RayGroup(
        id=shared[0],
        uri=uri,
        rank=rank,
        world_size=world_size,
        coordinator=coordinator or shared[1],
        broadcast=train_context.broadcast if world_size > 1 else same,
        notice=notice_of_ray_train,
        is_ray_train=True,
        is_first_on_node=train_context.is_first_on_node(),
        retention=train_context.retention_asked_for(),
    )


def start_coordinator(uri: str, *, owner: str, resume: Resume = AUTO, suffix: str = "", examines: bool = False) -> Any:
    """Start the coordinator actor for the run at `uri`. Return its handle; the actor ends with the calling process.

    It is pinned to this node, so that it is not on a preemptible node unless the driver is. owner: the id of the driver
    that owns the run. resume: what that driver's own `resume` argument means; by default, `Checkpointer.restore` says
    where to begin. suffix: makes the actor's name differ from that of an earlier coordinator of the same owner that is
    just ending. examines: before its first claim, refuse a place that `raycheck doctor` calls wrong.
    """
    root = hashlib.blake2b(uri.encode(), digest_size=8).hexdigest()
    job = ray.get_runtime_context().get_job_id()
    actor: Any = ray.remote(Coordinator)
    return actor.options(
        name=f"raycheck:{job}:{root}:{owner}{suffix}",
        num_cpus=0,
        max_restarts=-1,
        max_concurrency=MAX_CALLS,
        scheduling_strategy=NodeAffinitySchedulingStrategy(this_node(), soft=False),
    ).remote(uri, owner, resume, RayCluster(), examines=examines)
