"""The ports of a coordinator: what it has of the system that it runs in, and uses without knowing which one it is.

The classes here are those of a coordinator without Ray; raycheck/on_ray has the others.
"""

from typing import Any

from raycheck.bucket.attempt_records import ResumeRecord
from raycheck.bucket.format.latest import Entry
from raycheck.bucket.format.manifest import Manifest
from raycheck.errors import StoreError
from raycheck.group.coordinator.export_task import Note
from raycheck.group.coordinator.messages import HeartbeatMessage
from raycheck.group.coordinator.task_run import TaskRun


class Metrics:
    """Exports the numbers of a run. This one exports nothing."""

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
    """What a coordinator has beyond its own process. This one is alone: it has neither nodes nor shared objects.

    can_share: what `share` is given can be fetched by all ranks.
    """

    can_share = False

    def metrics(self, uri: str) -> Metrics:
        """Return what exports the metrics of the run at `uri`."""
        del uri
        return Metrics()

    def run_task(self, job: TaskRun) -> list[Note]:
        """Run a task that follows a commit, and wait for it. Return what the log should say."""
        return job.run()

    def share(self, value: object) -> list[Any]:
        """Put a value where all ranks can fetch it. Return the reference in a list, and an empty list if there is none.

        Raise StoreError when it cannot be put there now.
        """
        del value
        return []

    def start_agent(self, kind: type, node: str) -> Any:
        """Start an object of this class in a process of its own on a node. Return its handle; None if it cannot be."""
        del kind, node

    def alive(self) -> dict[str, str]:
        """Return the zone of each node that is alive; "" where it is not known."""
        return {}

    def tell(self, agent: Any, method: str, *args: object) -> None:
        """Call a method of an agent without waiting for it."""
        del args
        raise _no_agents(agent, method)

    async def ask(self, agent: Any, method: str, *args: object, timeout_s: float) -> Any:
        """Call a method of an agent and return its answer. Raise StoreError when it does not answer in time."""
        del args, timeout_s
        raise _no_agents(agent, method)


def _no_agents(agent: object, method: str) -> StoreError:
    return StoreError(f"{agent!r}.{method}: this coordinator has started no agent")
