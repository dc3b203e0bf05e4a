"""Describes a worker group as one rank sees it: who the rank is, where the run lies, how it calls the coordinator.

Under Ray Train, all of this comes from Ray; elsewhere a `Group` is made by hand.
"""

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
from raycheck.bucket.protocol.resume import Fork, Resume, parse_resume
from raycheck.bucket.store import Store, open_store
from raycheck.bucket.store.address import shown_uri
from raycheck.errors import ConfigError, FencedError, NotFoundError, RaycheckError, StoreError, SupersededError
from raycheck.group.coordinator.actor import Coordinator
from raycheck.group.coordinator.messages import Pending, RankFailure
from raycheck.on_ray.api import train_context
from raycheck.on_ray.api.calls import call, this_node
from raycheck.on_ray.api.controller_callbacks import guard_from_fit, guard_this_run
from raycheck.on_ray.api.run_location import run_uri
from raycheck.settings import Retention

RETRY_PAUSE_S = 0.5
FETCH_TIMEOUT_S = 60.0
CLAIM_TIMEOUT_S = 300.0


@dataclass(frozen=True, kw_only=True)
class Group:
    """Describes one rank's place in a worker group, and makes its calls of the coordinator.

    id: equal on all ranks, new for every start of the group. uri: the run's root. coordinator: the actor's handle.
    broadcast: returns rank 0's value on all ranks; None where there is no way to do so (then only step triggers work).
    notice: returns when the first of the group's nodes will be preempted, in unix seconds: inf when the time is not
    known, None without a notice. is_ray_train: commits are reported to Ray Train. is_first_on_node: this rank checks
    what its node may do in the bucket. retention: which checkpoints the one who started the group wants to stay; None:
    SaveSettings alone say so.
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
    retention: Retention | None = None

    @classmethod
    def of_ray_train(cls) -> "Group":
        """Returns this Ray Train worker's group. Under a plain trainer.fit(), rank 0 starts the coordinator.

        Raises ConfigError outside Ray Train, and for an unnamed run.
        """
        if not train_context.in_ray_train():
            raise ConfigError(
                "not inside a Ray Train worker (num_workers=0 has none): start it with raycheck.fit(trainer), or, "
                "under torchrun, give group=raycheck.torchrun_group(uri)"
            )
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
                started = start_coordinator(uri, owner=owner, suffix=f":{group}")
            mine = (group, started)  # to broadcast a handle takes much longer than text
        shared = train_context.broadcast(mine)
        assert shared is not None, "rank 0 has set it"
        return cls(
            id=shared[0],
            uri=uri,
            rank=rank,
            world_size=world_size,
            coordinator=coordinator or shared[1],
            broadcast=train_context.broadcast if world_size > 1 else same,
            notice=train_context.preemption_deadline,
            is_ray_train=True,
            is_first_on_node=train_context.is_first_on_node(),
            retention=train_context.retention_asked_for(),
        )

    @classmethod
    def alone(cls) -> "Group":
        """Returns this rank's place where raycheck is turned off: without a coordinator and without a run's URI."""
        rank, world_size = train_context.rank_and_world_size()
        return cls(id="", uri="", rank=rank, world_size=world_size, coordinator=None, broadcast=same)

    def check_node(self) -> None:
        """Checks, before anything depends on it, that this node may do in the bucket all that a run needs.

        Raises ConfigError that names the node, the verb and the missing permission.
        """
        probe_node(self.store, node=socket.gethostname())

    def check_shared(self) -> None:
        """Checks, after the claim, that this node sees what the coordinator wrote. Raises ConfigError.

        In a folder of its own, a node would keep its shards of each checkpoint where no other node can read them.
        """
        try:
            self.store.head(LATEST_KEY)
        except NotFoundError:
            raise ConfigError(
                f"node {socket.gethostname()}: {shown_uri(self.uri)} is another place than the driver's: the object "
                "that the driver wrote is not there. Use a bucket, or a folder that all nodes share"
            ) from None

    @property
    def node(self) -> str:
        """Returns the id of this rank's node."""
        return this_node()

    @cached_property
    def store(self) -> Store:
        """Opens this rank's own store, once: each rank holds its own connections."""
        return open_store(self.uri)

    def fetch(self, references: list[Any]) -> Any:
        """Returns what the coordinator has put into Ray's object store.

        Returns None when it put nothing there, and when the object was lost because the coordinator died.
        """
        with suppress(ray.exceptions.RayError):
            return ray.get(references[0], timeout=FETCH_TIMEOUT_S) if references else None
        return None

    def tell(self, method: str, *args: Any) -> Any:
        """Calls the coordinator without waiting. Returns what `answer` needs to look for the answer later."""
        return getattr(self.coordinator, method).remote(*args)

    def answer(self, told: Any) -> Any:
        """Returns the answer to a call by `tell`; None while there is none."""
        with suppress(ray.exceptions.RayError):
            return ray.get(told, timeout=0) if ray.wait([told], timeout=0)[0] else None
        return None

    def tell_failure(self, error: Exception, *, saves: int = 0) -> bool:
        """Tells the other ranks that this one fails with `error`, so that they need not wait for it. Never raises.

        saves: how many saves this rank has begun. Returns whether there is anything to tell: FencedError and
        SupersededError come to all ranks anyway.
        """
        if self.world_size == 1 or isinstance(error, FencedError | SupersededError):
            return False
        known = error if isinstance(error, RaycheckError) else StoreError(f"{type(error).__name__}: {error}")
        with suppress(Exception):
            self.tell("rank_failed", RankFailure(group=self.id, rank=self.rank, error=known, saves=saves))
        return True

    def ask(self, method: str, *args: Any, timeout_s: float, what: str) -> Any:
        """Calls the coordinator until it answers; it may be restarted meanwhile. Raises StoreError at the deadline.

        what: names the call in errors.
        """
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


def start_coordinator(uri: str, *, owner: str, resume: str | int | Resume = "auto", suffix: str = "") -> Any:
    """Starts the coordinator actor for the run at `uri`. Returns its handle; the actor ends with the calling process.

    It is pinned to this node, so that it is not on a preemptible node unless the driver is. owner: the id of the driver
    that owns the run. resume: see `fit`; but another run's URI is refused with a ConfigError. suffix: makes the actor's
    name differ from that of an earlier coordinator of the same owner that is just ending.
    """
    root = hashlib.blake2b(uri.encode(), digest_size=8).hexdigest()
    job = ray.get_runtime_context().get_job_id()
    wish = resume if isinstance(resume, Resume) else parse_resume(resume)
    if isinstance(wish, Fork):
        raise ConfigError(
            f"start_coordinator(resume={resume!r}): only fit and ActorCheckpointer begin from another run"
        )
    actor: Any = ray.remote(Coordinator)
    return actor.options(
        name=f"raycheck:{job}:{root}:{owner}{suffix}",
        num_cpus=0,
        max_restarts=-1,
        max_concurrency=4096,
        scheduling_strategy=NodeAffinitySchedulingStrategy(this_node(), soft=False),
    ).remote(uri, owner, wish)


def same(value: Any) -> Any:
    """Returns the value itself: the broadcast in a world of one rank."""
    return value
