"""Memory checkpoints of several ranks on one node, with all of them, and the node's actor, in this process.

With Ray's actors: test_memory_checkpoints.py.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import raycheck
from raycheck.bucket.assembly.save_report import Report
from raycheck.group.coordinator.messages import Outcome
from raycheck.on_ray.nodes.node_uploads import NodeAgent
from raycheck.transfer.incremental_upload import StagedState
from tests.group.worker.test_save_triggers import Ranks
from tests.support.processes.background_call import InThread
from tests.support.processes.coordinator_in_thread import CoordinatorThread, InProcess, OneProcess

WITHIN_S = 60.0


class OneNode(OneProcess):
    """Has the actor of the only node in this process."""

    def start_agent(self, kind: type, node: str) -> Any:
        return kind()

    def alive(self) -> dict[str, str]:
        return {"here": ""}

    def tell(self, agent: Any, method: str, *args: object) -> None:
        getattr(agent, method)(*args)

    async def ask(self, agent: Any, method: str, *args: object, timeout_s: float) -> Any:
        return await asyncio.to_thread(getattr(agent, method), *args)


@dataclass(frozen=True)
class AgentHere:
    """Gives one rank's saves to that actor."""

    group: InProcess
    is_given_up: bool = False

    def prepare(self) -> None: ...

    def hurry(self, attempt: int) -> None: ...

    def save(self, staged: StagedState, report: Report, deadline: float) -> Outcome | None:
        agent: NodeAgent = self.group.ask("node_agent", NodeAgent, self.group.node, timeout_s=WITHIN_S, what="agent")
        staged.wait()
        shared = staged.to_share()
        assert shared is not None
        return agent.save(self.group, shared, report, deadline=deadline, timeout_s=WITHIN_S).outcome


@dataclass(frozen=True, kw_only=True)
class OnNode(InProcess):
    """The place of a rank on that node."""

    def node_sink(self, *, timeout_s: float, given_up: Callable[[str], object]) -> AgentHere:
        return AgentHere(self)


def test_memory_checkpoints_are_back_once_the_ranks_have_agreed_on_what_is_new(tmp_path: Path) -> None:
    uri, ranks = f"file://{tmp_path}/run", Ranks(2)
    coordinator = CoordinatorThread(uri, "me", OneNode())

    def train(rank: int) -> list[int]:
        place = OnNode(
            id="group", uri=uri, world_size=2, coordinator=coordinator, rank=rank, broadcast=ranks.broadcast_of(rank)
        )
        model = torch.nn.Linear(8, 8, bias=False)
        torch.nn.init.ones_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        settings = raycheck.SaveSettings(at_steps=[1, 4, 5], memory_every_steps=1, upload_by="node")
        newest = []
        with raycheck.Checkpointer({"model": model, "optimizer": optimizer}, settings, group=place) as ckpt:
            ckpt.restore()
            for step in range(1, 8):
                if step > 1:  # the ranks agree at step 1, before there is any momentum
                    model(torch.ones(8)).sum().backward()
                    optimizer.step()
                ckpt.end_step()
                ckpt.wait()
                memory = ckpt._live()._memory
                assert memory is not None
                memory.poll(WITHIN_S)
                newest.append(ckpt.save_status.memory_step)
        return newest

    both = [thread.join() for thread in [InThread(lambda rank=rank: train(rank)) for rank in range(2)]]

    assert both == [[-1, 2, 2, 2, 2, 6, 7]] * 2
    assert [checkpoint.step for checkpoint in raycheck.open_run(uri).checkpoints] == [1, 4, 5, 7]
