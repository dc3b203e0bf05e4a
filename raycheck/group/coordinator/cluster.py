"""The ports of a coordinator: what it has of the system that it runs in, and uses without knowing which one it is.

The classes here are those of a coordinator without Ray; raycheck/on_ray has the others.
"""

from collections.abc import Callable
from typing import Any

from raycheck.bucket.attempt_records import ResumeRecord
from raycheck.bucket.format.latest import Entry
from raycheck.bucket.format.manifest import Manifest
from raycheck.errors import StoreError
from raycheck.group.coordinator.export_task import Note
from raycheck.group.coordinator.messages import HeartbeatMessage
from raycheck.group.coordinator.task_run import TaskRun


class Metrics:
    """The exporter of a run's metrics. This one exports nothing."""

    def begin(self, attempt: int, entry: Entry | None, *, now: float, is_adopted: bool = False) -> None:
        """Begin an attempt.

        entry: the newest commit. now: the store's time in unix seconds. is_adopted: an earlier start of the coordinator
        has counted this attempt's saves so far.
        """

    def restored(self, resume: ResumeRecord) -> None:
        """Count a restore, and the steps that the end of the attempt before it cost."""

    def committed(self, manifest: Manifest, *, seconds: float) -> None:
        """Count a commit. seconds: from the last rank's report to the commit."""

    def in_memory(self, step: int, size_bytes: int) -> None:
        """Count a memory checkpoint."""

    def tick(self, heartbeat: HeartbeatMessage | None, *, now: float) -> None:
        """Update what changes with time. now: the store's time in unix seconds."""


class Cluster:
    """The cluster beyond a coordinator's own process. This one is alone: it has neither nodes nor shared objects."""

    def metrics(self, uri: str) -> Metrics:
        """Return the exporter of the metrics of the run at `uri`."""
        del uri
        return Metrics()

    def run_task(self, job: TaskRun) -> list[Note]:
        """Run a task that follows a commit, and wait for it. Return what the log should say."""
        return job.run()

    def share(self, make: Callable[[], object]) -> list[Any]:
        """Make a value and put it where all ranks can fetch it. Return the reference in a list.

        Return an empty list, and make nothing, where there is no such place. Raise what `make` raises, and StoreError
        when the value cannot be put there now.
        """
        del make
        return []

    def start_agent(self, kind: type, node: str) -> Any:
        """Start an object of this class in a separate process on a node. Return its handle."""
        raise _no_agents(kind.__name__, node)

    def alive(self) -> dict[str, str]:
        """Return the zone of each node that is alive; "" where it is not known."""
        return {}

    def tell(self, agent: Any, method: str, *args: object) -> None:
        """Call a method of an agent without waiting for it."""
        del args
        raise _no_agents(method, agent)

    async def ask(self, agent: Any, method: str, *args: object, timeout_s: float) -> Any:
        """Call a method of an agent and return its answer. Raise StoreError when it does not answer in time."""
        del args, timeout_s
        raise _no_agents(method, agent)


def _no_agents(what: str, where: object) -> StoreError:
    return StoreError(f"{what} at {where}: this coordinator cannot start agents on nodes")
