"""The parts of Ray that a coordinator in a Ray actor uses: actors on the ranks' nodes, the object store, tasks,
metrics."""

import asyncio
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raycheck.errors import StoreError
from raycheck.group.coordinator.cluster import Cluster
from raycheck.group.coordinator.export_task import Note
from raycheck.group.coordinator.task_run import TaskRun
from raycheck.on_ray.ray_tasks import run_in_ray
from raycheck.on_ray.reports.ray_metrics import RayMetrics

CALLS = 64
"""How many calls of one agent may be in progress: one save of each of its ranks, and questions about them."""
ZONE = "ray.io/availability-zone"


class RayCluster(Cluster):
    """The Ray cluster in which the coordinator runs."""

    def metrics(self, uri: str) -> RayMetrics:
        return RayMetrics(uri)

    def run_task(self, job: TaskRun) -> list[Note]:
        return run_in_ray(job)

    def share(self, make: Callable[[], object]) -> list[Any]:
        value = make()
        try:
            return [ray.put(value)]
        except RayError as error:
            raise StoreError(f"Ray's object store: {type(error).__name__}: {error}") from error

    def start_agent(self, kind: type, node: str) -> Any:
        """Start an actor. Ray starts it again when it dies, as long as its node lives."""
        actor: Any = ray.remote(kind)
        return actor.options(
            num_cpus=0,
            max_restarts=-1,
            max_concurrency=CALLS,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
        ).remote()

    def alive(self) -> dict[str, str]:
        nodes: list[dict[str, Any]] = ray.nodes()
        return {node["NodeID"]: node.get("Labels", {}).get(ZONE, "") for node in nodes if node["Alive"]}

    def tell(self, agent: Any, method: str, *args: object) -> None:
        getattr(agent, method).remote(*args)

    async def ask(self, agent: Any, method: str, *args: object, timeout_s: float) -> Any:
        try:
            return await asyncio.wait_for(getattr(agent, method).remote(*args), timeout_s)
        except (TimeoutError, RayError) as error:
            raise StoreError(type(error).__name__) from error
