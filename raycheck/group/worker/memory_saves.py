"""Memory checkpoints of one rank: saves whose sink is the memory of its node's actor.

There are two buffers: one holds the newest listed memory checkpoint, while the next is staged into the other. Nothing
that goes wrong here stops the training, or touches the bucket: a memory checkpoint is then not listed, and the
coordinator's log says why.
"""

import time
from collections.abc import Callable
from concurrent.futures import wait
from dataclasses import replace
from functools import partial

from raycheck.bucket.assembly.save_report import Report
from raycheck.bucket.format.progress import Progress
from raycheck.errors import RaycheckError, SaveFailedError
from raycheck.group.coordinator.messages import Outcome
from raycheck.group.group import Group
from raycheck.group.worker.save_thread import SaveThread, StagedSave
from raycheck.log import event, logger
from raycheck.state.train_state import TrainState
from raycheck.transfer.incremental_upload import StagedState

MAX_PAUSE_S = 300.0
"""The longest pause after failures: each costs the training a copy of the state."""
OUTCOME_S = 1.0
"""How long a rank waits for an outcome that rank 0 has received already."""


class MemorySaves:
    """This rank's memory checkpoints, made one at a time.

    newest_step: the step of the newest that is listed; -1 for none.
    """

    def __init__(
        self,
        state: TrainState,
        group: Group,
        report: Report,
        *,
        agree: Callable[[Report, bool], None],
        timeout_s: float,
    ) -> None:
        """report: everything that is the same in each report of this attempt. agree: has the ranks agree on who writes
        each replica, unless they have; called with True, the agreement is in doubt. It raises SaveFailedError if they
        cannot agree now. timeout_s: how long one may take."""
        self._agree = agree
        self._state = state
        self._group = group
        self._report = replace(report, is_in_memory=True, save=0)
        self._node = group.node_sink(
            timeout_s=timeout_s,
            given_up=lambda why: group.tell("no_memory", f"rank {group.rank}: its node holds none any more: {why}"),
        )
        self._thread = SaveThread(group, [self._node], timeout_s=timeout_s, name="raycheck-memory")
        self._thread.do_next(self._node.prepare)
        self._under_way: StagedSave | None = None
        self._slot = 0
        self.newest_step = -1
        self._failures = 0  # in a row
        self._is_in_doubt = False  # whether one rank writes each replica, as the last one has shown
        self._not_before = 0.0

    @property
    def is_busy(self) -> bool:
        """Return whether the next one has to be left out: by the last `poll`, one is under way or has just failed."""
        return self._node.is_given_up or self._under_way is not None or time.monotonic() < self._not_before

    def begin(self, progress: Progress, *, trained_s: float, is_by_notice: bool = False) -> None:
        """Stage the state for a memory checkpoint of this step. Every rank calls it at the same steps.

        is_by_notice: it is made because a node is about to be taken away.
        """
        report = replace(self._report, progress=progress, trained_s=trained_s, is_by_notice=is_by_notice)

        def listed() -> None:
            self.newest_step = progress.step

        began = time.monotonic()
        try:
            self._under_way = self._thread.begin(report, partial(self._stage, report), began=began, committed=listed)
        except RaycheckError:
            return  # the coordinator is told, and logs it

    def poll(self, timeout_s: float = 0.0) -> None:
        """Take the outcome of the memory checkpoint in progress, if there is one. timeout_s: how long to wait for it.

        If it was listed, its buffer is in use from now on, and the other one is free.
        """
        if self._under_way is None:
            return
        staged, outcome = self._under_way
        if wait([outcome], timeout_s).not_done:
            return
        self._under_way = None
        try:
            found, ended = outcome.result()
        except Exception as error:  # noqa: BLE001  whatever it was, training continues, and the bucket has the truth
            staged.keep_buffers_apart()  # the coordinator may list it all the same
            text = f"no memory checkpoint: {type(error).__name__}: {error}"
            logger.warning(event(text, rank=self._group.rank, run=self._group.uri))
            found, ended = Outcome(kind="failed", key=""), time.monotonic()
        self._is_in_doubt |= found.must_agree_again
        if found.kind == "committed":
            self._slot, self._failures = 1 - self._slot, 0
        else:
            self._failures += 1
            self._not_before = ended + min(2.0 ** min(self._failures, 10), MAX_PAUSE_S)

    def hurry(self) -> None:
        """Send the copies to other nodes without pauses from now on, because a node is about to be taken away."""
        self._node.hurry(self._report.attempt)

    def stop(self) -> None:
        """Let the thread end."""
        self._thread.stop()

    def _stage(self, report: Report) -> StagedState:
        self.poll(OUTCOME_S)  # on rank 0 it has ended, or this one would not have begun
        if self._under_way is not None:
            raise SaveFailedError("the previous memory checkpoint is still in progress")
        is_in_doubt, self._is_in_doubt = self._is_in_doubt, False
        self._agree(report, is_in_doubt)
        return self._state.stage_for_memory(report.progress, self._slot)
