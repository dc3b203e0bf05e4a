"""Saves are uploaded by an actor on the ranks' node, out of the training's processes (SaveSettings(upload_by="node")).

A rank tells the actor where its staged copy lies in shared memory; the actor maps it, uploads it and reports it. From
then on the save no longer needs the rank. The coordinator starts the actor, and a claim waits for its saves
(train/coordinator/node_agents.py). A rank whose node has no such actor, or cannot share memory with it, uploads itself.
"""

import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from raycheck.bucket.assembly.save_report import Report
from raycheck.errors import RaycheckError, SaveFailedError
from raycheck.shards.transfer.incremental_upload import SharedState, StagedState
from raycheck.shards.transfer.shard import Shard
from raycheck.train.coordinator.messages import Outcome
from raycheck.train.group import Group
from raycheck.train.log import event, logger, show_log
from raycheck.train.worker.upload_and_report import Uploader

START_TIMEOUT_S = 60.0
LAST_ANSWER_S = 5.0
"""How much longer than a save may take the rank waits for the actor, which gives up a save by itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeAnswer:
    """Says what became of a save that a rank has handed to its node's actor.

    outcome: what all ranks are told; None when the actor did not take the save. shards: the rows of each shard of a
    committed save that it has uploaded, by component. problem: why the rank has to upload from now on; "" when it need
    not.
    """

    outcome: Outcome | None = None
    shards: Mapping[str, Shard] = field(default_factory=dict)
    problem: str = ""


class NodeAgent:
    """Uploads and reports the staged saves of the ranks on its node; also when they die meanwhile.

    It holds no truth: when it dies, each rank uploads what it has staged itself. Ray calls its methods in threads.
    """

    def __init__(self) -> None:
        show_log()
        self._lock = threading.Lock()
        self._uploaders: dict[int, tuple[str, Uploader]] = {}  # by rank: of its newest group
        self._under_way: set[tuple[str, int, int]] = set()  # group, rank and number of each save

    def save(
        self, group: Group, shared: SharedState, report: Report, *, deadline: float, timeout_s: float
    ) -> NodeAnswer:
        """Upload a rank's staged save, report it, and return what came of it. Raises what `Uploader` does.

        group: the rank's. deadline: by time.monotonic, which is one clock for all processes of a node.
        """
        try:
            staged = shared.open()
        except OSError as error:
            return NodeAnswer(problem=f"its memory cannot be reached: {error}")
        at = (group.id, group.rank, report.save)
        uploader = self._uploader(group, timeout_s)
        with self._lock:
            self._under_way.add(at)
        try:
            group.tell("handed_over", report)
            outcome = uploader.upload_and_report(staged, report, deadline)
        finally:
            with self._lock:
                self._under_way.discard(at)
        if outcome.kind != "committed":  # the rank may have credentials that this process has not
            return NodeAnswer(outcome=outcome, problem=uploader.refusal)
        return NodeAnswer(outcome=outcome, shards={shard.name.component: shard.shard() for shard in staged.staged})

    def is_saving(self, group: str, save: int, ranks: Iterable[int]) -> bool:
        """Return whether the save with this number of all these ranks is under way here."""
        with self._lock:
            return all((group, rank, save) in self._under_way for rank in ranks)

    def _uploader(self, group: Group, timeout_s: float) -> Uploader:
        with self._lock:
            known = self._uploaders.get(group.rank)
            if known is None or known[0] != group.id:
                known = self._uploaders[group.rank] = (group.id, Uploader(group, timeout_s=timeout_s))
            return known[1]


class NodeUploads:
    """Hands the saves of one rank to its node's actor, for as long as that works."""

    def __init__(self, group: Group, *, timeout_s: float) -> None:
        """timeout_s: how long a save may take; errors name it."""
        self._group = group
        self._timeout_s = timeout_s
        self._agent: Any = None
        self._is_given_up = False

    def save(self, staged: StagedState, report: Report, deadline: float) -> Outcome | None:
        """Have a staged save uploaded and reported, and wait for the outcome. deadline: by time.monotonic.

        Returns None when the rank has to upload it itself. Raises what `Uploader` does.
        """
        if self._is_given_up:
            return None
        began = time.monotonic()
        try:
            staged.wait()
            shared = staged.to_share()
        except Exception as error:  # noqa: BLE001  the rank's own upload meets it again, and reports it (I9)
            self._give_up(repr(error))
            return None
        if shared is None:
            self._give_up("this system, or this accelerator, cannot share the memory of a staged copy")
            return None
        report = replace(report, staged_s=report.blocked_s + time.monotonic() - began)
        try:
            answer = self._ask(shared, report, deadline)
        except RayActorError as error:
            # It may be alive and still read the copy: then it writes the same bytes as this rank will.
            staged.keep_buffers_apart()
            self._agent = None
            reason = str(error).partition("\n")[0]
            self._warn(f"the actor that uploads for this node is gone, so this rank uploads: {reason}")
            return None
        except GetTimeoutError as error:
            staged.keep_buffers_apart()
            self._agent = None
            raise SaveFailedError(
                f"rank {report.rank}: save of step {report.progress.step}: the actor that uploads for this node did "
                f"not answer within {self._timeout_s:.0f} s"
            ) from error
        if answer is None:
            self._give_up("there is no Ray that could start an actor")
            return None
        if answer.problem:
            self._give_up(answer.problem)
        for shard in staged.staged:
            if shard.name.component in answer.shards:
                shard.uploaded_elsewhere(answer.shards[shard.name.component])
        return answer.outcome

    def _ask(self, shared: SharedState, report: Report, deadline: float) -> NodeAnswer | None:
        """Returns the actor's answer; None where no actor can be started."""
        group = self._group
        if self._agent is None:
            what = "start of the actor that uploads for this node"
            self._agent = group.ask("node_agent", NodeAgent, group.node, timeout_s=START_TIMEOUT_S, what=what)
        if self._agent is None:
            return None
        own = replace(group, broadcast=None, notice=None)  # what the actor needs of it
        reference = self._agent.save.remote(own, shared, report, deadline=deadline, timeout_s=self._timeout_s)
        try:
            answer: NodeAnswer = ray.get(reference, timeout=max(0.0, deadline - time.monotonic()) + LAST_ANSWER_S)
        except RayTaskError as error:
            cause = getattr(error, "cause", None)
            if isinstance(cause, RaycheckError):
                raise cause from None
            raise
        return answer

    def _give_up(self, why: str) -> None:
        """Have the rank upload from now on."""
        self._is_given_up = True
        self._warn(f"this rank uploads itself from now on, in spite of upload_by='node': {why}")

    def _warn(self, text: str) -> None:
        logger.warning(event(text, rank=self._group.rank, run=self._group.uri))
