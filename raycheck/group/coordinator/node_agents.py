"""Starts the actors that upload for the ranks of a node, and knows which saves they finish without the ranks.

What such an actor does is in on_ray/nodes/node_uploads.py. They end with the coordinator, which owns them. Without Ray
there are none.
"""

import asyncio
from collections.abc import Iterable
from typing import Any

from raycheck.bucket.assembly.save_report import Report
from raycheck.errors import StoreError
from raycheck.group.coordinator.cluster import Cluster

ANSWER_S = 10.0
Place = tuple[str, int]
"""A group, and the number of one of its saves."""


class NodeAgents:
    """One actor for each node, and what the ranks of each have handed to it."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._actors: dict[str, Any] = {}
        self._handed: dict[Place, dict[int, Report]] = {}  # by rank

    def of(self, node: str, kind: type) -> Any:
        """Return the node's actor of this class. Start it if there is none."""
        if node not in self._actors:
            self._actors[node] = self.cluster.start_agent(kind, node)
        return self._actors[node]

    def known(self, node: str) -> Any:
        """Return the actor of a node; None when none was started there."""
        return self._actors.get(node)

    def all(self) -> dict[str, Any]:
        """Return the actors by node."""
        return dict(self._actors)

    def keep(self, checkpoint: str | None, floor: tuple[int, int]) -> None:
        """Have all nodes free what they hold in memory, except this checkpoint and those above the floor.

        floor: an attempt and a step. Do not wait for the nodes.
        """
        for actor in self._actors.values():
            self.cluster.tell(actor, "keep_shards", checkpoint, floor)

    def handed_over(self, report: Report) -> None:
        """Record that the actor of its node has a rank's staged save."""
        self._handed.setdefault((report.group, report.save), {})[report.rank] = report

    def ended(self, at: Place) -> None:
        """Forget a decided save, the saves before it, and the saves of other groups."""
        group, number = at
        self._handed = {place: by for place, by in self._handed.items() if place[0] == group and place[1] > number}

    def undecided(self, group: str) -> dict[int, dict[int, Report]]:
        """Return the saves of a group that are not decided, by number: which ranks have handed in what."""
        return {save: by for (found, save), by in self._handed.items() if found == group}

    async def ask_whether_saving(self, reports: Iterable[Report]) -> bool:
        """Return whether the actors are still uploading what these ranks handed in."""
        by_node: dict[tuple[str, str, int], list[int]] = {}
        for report in reports:
            by_node.setdefault((report.node, report.group, report.save), []).append(report.rank)
        answers = [self._ask_actor(*key, ranks) for key, ranks in by_node.items()]
        return all(await asyncio.gather(*answers))

    async def _ask_actor(self, node: str, group: str, save: int, ranks: list[int]) -> bool:
        actor = self._actors.get(node)
        if actor is None:
            return False
        try:
            return bool(await self.cluster.ask(actor, "is_saving", group, save, ranks, timeout_s=ANSWER_S))
        except StoreError:
            return False
