"""A claim waits for what the nodes still upload, and for nothing else. The coordinator is in this process."""

import asyncio
import time
from collections.abc import Iterable
from typing import Any
from uuid import uuid4

import pytest

from raycheck.bucket.assembly.save_report import Report
from raycheck.bucket.format.progress import Progress
from raycheck.group.coordinator import actor
from raycheck.group.coordinator.actor import Coordinator
from raycheck.group.coordinator.cluster import Cluster
from raycheck.on_ray.nodes.node_uploads import NodeAgent

WAITS_S = 0.4


class Here(Cluster):
    """Calls agents that are objects of this process."""

    async def ask(self, agent: Any, method: str, *args: object, timeout_s: float) -> Any:
        del timeout_s
        return await getattr(agent, method)(*args)


class Node:
    """Is the agent of a node that has these saves under way."""

    def __init__(self, saves: Iterable[int], *, group: str = "before") -> None:
        self.asked = 0
        self._agent = NodeAgent()
        self._agent._under_way = {(group, rank, save) for rank in (0, 1) for save in saves}

    async def is_saving(self, group: str, save: int, ranks: list[int]) -> bool:
        self.asked += 1
        return self._agent.is_saving(group, save, ranks)


def report(save: int, rank: int, failure: str = "") -> Report:
    progress = Progress(step=save)
    return Report(
        group="before", rank=rank, world_size=2, attempt=1, save=save, progress=progress, node="node", failure=failure
    )


async def claimed_before(node: Node, *, uri: str = "") -> Coordinator:
    coordinator = Coordinator(uri or f"memory://{uuid4().hex}", "driver", cluster=Here())
    await coordinator.claim("before", 2)
    coordinator._node_agents._actors["node"] = node
    return coordinator


async def seconds_of_claim(coordinator: Coordinator, ranks: int = 1) -> float:
    began = time.monotonic()
    claims = await asyncio.gather(*(coordinator.claim("after", ranks) for _ in range(ranks)))
    assert {claim.attempt for claim in claims} == {2}
    return time.monotonic() - began


@pytest.fixture(autouse=True)
def short_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actor, "LAST_UPLOADS_S", WAITS_S)


def test_a_save_that_has_failed_is_not_waited_for_although_a_node_still_uploads_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(actor, "LAST_UPLOADS_S", 3600.0)  # this test may not take as long

    async def scenario() -> None:
        coordinator = await claimed_before(Node({1}))
        assert (await coordinator.report(report(1, 0, failure="no space"))).kind == "failed"
        await coordinator.handed_over(report(1, 1))
        await seconds_of_claim(coordinator)

    asyncio.run(scenario())


def test_a_save_is_waited_for_although_one_before_it_was_never_decided() -> None:
    async def scenario() -> float:
        coordinator = await claimed_before(Node({2}))
        for save in (1, 2):
            for rank in (0, 1):
                await coordinator.handed_over(report(save, rank))
        return await seconds_of_claim(coordinator)

    assert asyncio.run(scenario()) >= WAITS_S


def test_a_coordinator_that_was_started_again_waits_too() -> None:
    async def scenario() -> float:
        uri = f"memory://{uuid4().hex}"
        await claimed_before(Node({}), uri=uri)
        coordinator = Coordinator(uri, "driver", cluster=Here())
        coordinator._node_agents._actors["node"] = Node({2})
        await coordinator.check_live("before")  # the group's first call of the new start
        for rank in (0, 1):
            await coordinator.handed_over(report(2, rank))
        return await seconds_of_claim(coordinator)

    assert asyncio.run(scenario()) >= WAITS_S


def test_the_ranks_of_a_large_group_wait_together() -> None:
    node = Node({1})

    async def scenario() -> None:
        coordinator = await claimed_before(node)
        for rank in (0, 1):
            await coordinator.handed_over(report(1, rank))
        assert await seconds_of_claim(coordinator, ranks=200) >= WAITS_S

    asyncio.run(scenario())

    assert node.asked <= WAITS_S / 0.1 + 1
