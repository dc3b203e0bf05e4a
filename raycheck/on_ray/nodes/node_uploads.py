"""Uploads saves from an actor on the ranks' node, outside the training processes (SaveSettings(upload_by="node")).

A rank tells the actor where its staged copy is in shared memory; the actor maps it, uploads it and reports it. From
then on the save no longer needs the rank. The coordinator starts the actor, and a claim waits for its saves
(group/coordinator/node_agents.py). A rank whose node has no such actor, or cannot share memory with it, uploads itself.
"""

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError

from raycheck.bucket.assembly.save_report import Report
from raycheck.bucket.format.object_keys import CheckpointName
from raycheck.errors import RaycheckError, SaveFailedError
from raycheck.group.coordinator.messages import HeldShard, Outcome
from raycheck.group.group import Group
from raycheck.group.worker.upload_and_report import Uploader
from raycheck.log import event, logger, show_log
from raycheck.on_ray.api.calls import as_raised
from raycheck.on_ray.nodes.memory_shards import AttemptAndStep, Bytes, MemoryShards, send
from raycheck.transfer.incremental_upload import SharedState, StagedState
from raycheck.transfer.stage.local_box import TRAIN
from raycheck.transfer.stage.shard import Shard

START_TIMEOUT_S = 60.0
LAST_ANSWER_S = 5.0
"""A rank waits this much longer than the save timeout, after which the actor itself gives up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeAnswer:
    """The result of a save that a rank has handed to its node's actor.

    outcome: what all ranks are told; None when the actor did not take the save. shards: if the save was committed, the
    rows of each shard outside `train`, by component: a later save may refer to these. problem: why the rank has to
    upload from now on; "" when it need not.
    """

    outcome: Outcome | None = None
    shards: Mapping[str, Shard] = field(default_factory=dict)
    problem: str = ""


class NodeAgent:
    """The actor of a node: uploads and reports the staged saves of its ranks, even if they die meanwhile, and holds the
    shards of memory checkpoints.

    Nothing depends on it: if it dies, each rank uploads what it has staged itself. Ray calls its methods in threads.
    """

    def __init__(self, *, event: Callable[[], threading.Event] = threading.Event) -> None:
        """event: creates, for each attempt, the event that a pause between two parts of a copy waits for."""
        show_log()
        self._lock = threading.Lock()
        self._shards = MemoryShards()
        self._event = event
        # By rank, and whether it is for memory checkpoints: of the rank's newest group.
        self._uploaders: dict[tuple[int, bool], tuple[str, Uploader]] = {}
        self._under_way: set[tuple[str, int, int]] = set()  # group, rank and number of each save
        self._hurries: dict[int, threading.Event] = {}  # by attempt

    def save(
        self, group: Group, shared: SharedState, report: Report, *, deadline: float, timeout_s: float
    ) -> NodeAnswer:
        """Upload a rank's staged save, report it, and return the result. Raises the errors of `Uploader`.

        group: the rank's. deadline: by time.monotonic, which is one clock for all processes of a node.
        """
        try:
            staged = shared.open()
            uploader = self._uploader(group, timeout_s, is_in_memory=report.is_in_memory)
        except OSError as error:
            return NodeAnswer(problem=f"its memory cannot be reached: {error}")
        except RaycheckError as error:  # this process may have got another endpoint, or no credentials
            problem = str(error).replace(group.uri, group.uri.partition("?")[0])
            return NodeAnswer(problem=f"the node's actor does not reach the run: {problem}")
        if report.is_in_memory:
            return NodeAnswer(outcome=uploader.save(staged, report, deadline))
        at = (group.id, group.rank, report.save)
        with self._lock:
            self._under_way.add(at)
        try:
            group.tell("handed_over", report)
            outcome = uploader.save(staged, report, deadline)
        finally:
            with self._lock:
                self._under_way.discard(at)
        if outcome.kind != "committed":  # the rank may have credentials that this process has not
            return NodeAnswer(outcome=outcome, problem=uploader.refusal)
        apart = [shard for shard in staged.staged if shard.name.component != TRAIN]
        return NodeAnswer(outcome=outcome, shards={shard.name.component: shard.shard() for shard in apart})

    def is_saving(self, group: str, save: int, ranks: Iterable[int]) -> bool:
        """Return whether the save with this number is in progress here for all these ranks."""
        with self._lock:
            return all((group, rank, save) in self._under_way for rank in ranks)

    def held_shards(self) -> dict[str, HeldShard]:
        """Return the shards of memory checkpoints of which this node has all bytes, by key."""
        return self._shards.whole()

    def read_shard(self, key: str, start: int, stop: int) -> Bytes | None:
        """Return bytes start..stop of such a shard; None when it is not here."""
        return self._shards.read(key, start, stop)

    def receive(self, key: str, size_bytes: int, start: int, chunk: Bytes) -> None:
        """Store the bytes from `start` on of another node's shard. Raises ConfigError when there is no room for it."""
        self._shards.receive(key, size_bytes, start, chunk)

    def send_shards(self, checkpoint: str, to: Any, timeout_s: float) -> str:
        """Copy the shards of a memory checkpoint that ranks of this node have to another node's actor.

        Return why this failed; "" if it did not.
        """
        name = CheckpointName.parse(checkpoint)
        assert name is not None, "the ranks make the names"
        try:
            send(self._shards.own(checkpoint), to, timeout_s=timeout_s, pause=self._hurry_of(name.attempt).wait)
        except Exception as error:  # noqa: BLE001  whatever the other node's actor met there
            return _first_line(error)
        return ""

    def hurry(self, attempt: int) -> None:
        """Copy an attempt's memory checkpoints without pauses from now on, including one that is pausing."""
        self._hurry_of(attempt).set()

    def _hurry_of(self, attempt: int) -> threading.Event:
        with self._lock:
            return self._hurries.setdefault(attempt, self._event())

    def keep_shards(self, checkpoint: str | None, floor: AttemptAndStep) -> None:
        """Free all shards except those of this memory checkpoint and of those above the floor."""
        self._shards.keep(checkpoint, floor)

    def _uploader(self, group: Group, timeout_s: float, *, is_in_memory: bool) -> Uploader:
        """Return the rank's uploader. The first call raises ConfigError or StoreError if this process cannot reach the
        run."""
        with self._lock:
            known = self._uploaders.get((group.rank, is_in_memory))
        if known is None or known[0] != group.id:
            group.check_shared()
            known = (group.id, Uploader(group, timeout_s=timeout_s, hold=self._shards.put if is_in_memory else None))
            with self._lock:
                self._uploaders[group.rank, is_in_memory] = known
        return known[1]


class NodeUploads:
    """The path of one rank's saves to its node's actor, used for as long as it works."""

    def __init__(self, group: Group, *, timeout_s: float, given_up: Callable[[str], object]) -> None:
        """timeout_s: how long a save may take; errors name it. given_up: called with the reason when the actor is given
        up."""
        self._group = group
        self._given_up = given_up
        self._timeout_s = timeout_s
        self._agent: Any = None
        self._hurried: int | None = None  # the attempt whose copies are to go without pauses
        self._has_failed = False  # it, or its start, since it last answered
        self._is_given_up = False

    @property
    def is_given_up(self) -> bool:
        """Return whether the actor is no longer used."""
        return self._is_given_up

    def prepare(self) -> None:
        """Have the actor started, so that the first save does not wait for it."""
        try:
            self._start(time.monotonic() + 2 * START_TIMEOUT_S)
        except Exception as error:  # noqa: BLE001  the first save meets it again
            self._note_failure(error)

    def save(self, staged: StagedState, report: Report, deadline: float) -> Outcome | None:
        """Have a staged save uploaded and reported, and wait for the outcome. deadline: by time.monotonic.

        Return None if the rank has to upload it itself. Raises the errors of `Uploader`.
        """
        if self._is_given_up or staged.slices:  # another process cannot read live tensors
            return None
        began = time.monotonic()
        try:
            staged.wait()
            shared = staged.to_share()
            if shared is None:
                self._give_up("this system, or this accelerator, cannot share the memory of a staged copy")
                return None
            if self._agent is None:
                self._start(deadline)
        except ActorUnavailableError as error:  # Ray starts it again, which may take a while
            self._warn(f"the actor that uploads for this node is being started again: {_first_line(error)}")
            return None
        except Exception as error:  # noqa: BLE001  what is wrong with the copy, the rank's own upload meets again (I9)
            self._note_failure(error)
            return None
        report = replace(report, staged_s=report.blocked_s + time.monotonic() - began)
        try:
            answer = self._ask(shared, report, deadline)
        except RaycheckError:
            raise  # the actor has ended this save
        except Exception as error:
            # The actor may be alive and still read the copy: then it writes the same bytes as this rank will.
            staged.keep_buffers_apart()
            self._note_failure(error)
            if not isinstance(error, GetTimeoutError):
                return None
            raise SaveFailedError(
                f"rank {report.rank}: save of step {report.progress.step}: the actor that uploads for this node did "
                f"not answer within {self._timeout_s:.0f} s"
            ) from error
        self._has_failed = False
        if answer.problem:
            self._give_up(answer.problem)
        for shard in staged.staged:
            if shard.name.component in answer.shards:
                shard.uploaded_elsewhere(answer.shards[shard.name.component])
        return answer.outcome

    def hurry(self, attempt: int) -> None:
        """Have the actor copy an attempt's memory checkpoints to other nodes without pauses from now on.

        Do not wait for the actor. An actor that is started later is told as well.
        """
        if self._hurried != attempt:
            self._hurried = attempt
            self._tell_to_hurry()

    def _tell_to_hurry(self) -> None:
        if self._agent is not None and self._hurried is not None:
            with suppress(Exception):  # the actor's death is met elsewhere
                self._agent.hurry.remote(self._hurried)

    def _start(self, deadline: float) -> None:
        """Have the node's actor started and wait until it answers. Raises Ray's errors, StoreError."""
        timeout_s = min(START_TIMEOUT_S, (deadline - time.monotonic()) / 2)  # the rest is for the rank's own upload
        what = "start of the actor that uploads for this node"
        agent = self._group.ask("node_agent", NodeAgent, self._group.node, timeout_s=timeout_s, what=what)
        ray.get(agent.__ray_ready__.remote(), timeout=timeout_s)  # no save waits for one that does not start
        self._agent = agent
        self._tell_to_hurry()

    def _ask(self, shared: SharedState, report: Report, deadline: float) -> NodeAnswer:
        """Return the actor's answer."""
        own = replace(self._group, broadcast=None, notice=None)  # what the actor needs of it
        reference = self._agent.save.remote(own, shared, report, deadline=deadline, timeout_s=self._timeout_s)
        with as_raised():
            answer: NodeAnswer = ray.get(reference, timeout=max(0.0, deadline - time.monotonic()) + LAST_ANSWER_S)
        return answer

    def _note_failure(self, error: Exception) -> None:
        """Look the actor up again at the next save: Ray restarts a dead one. At a second failure in a row, give it up.

        The training's saves must not all fail, nor each need a new buffer, because of an actor.
        """
        self._agent = None
        reason = _first_line(error)
        if self._has_failed:
            self._give_up(reason)
        else:
            self._warn(f"the actor that uploads for this node cannot take this save: {reason}")
        self._has_failed = True

    def _give_up(self, why: str) -> None:
        """Stop using the actor."""
        self._is_given_up = True
        self._given_up(why)

    def _warn(self, text: str) -> None:
        logger.warning(event(text, rank=self._group.rank, run=self._group.uri))


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
