"""Memory checkpoints of one rank: its state is staged into memory that its node's actor then holds.

There are two buffers: the newest listed memory checkpoint lies in one, while the next is staged into the other. Nothing
that goes wrong here stops the training, or touches the bucket: a memory checkpoint is then not listed.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import replace

from raycheck.bucket.assembly.save_report import Report
from raycheck.bucket.format.progress import Progress
from raycheck.errors import RaycheckError, SaveFailedError
from raycheck.group.group import Group
from raycheck.log import event, logger
from raycheck.state.train_state import TrainState
from raycheck.transfer.incremental_upload import StagedState

MAX_PAUSE_S = 300.0
"""The longest pause after failures: each costs the training a copy of the state."""
OUTCOME_S = 1.0
"""How long a rank waits for an outcome that rank 0 has heard already."""


class MemorySaves:
    """Stages this rank's memory checkpoints, one at a time, and has its node's actor hold them.

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
        """report: all that is the same in each report of this attempt. agree: has the ranks settle who writes each
        replica, unless they have; True: anew. It raises SaveFailedError when they cannot now. timeout_s: how long
        one may take."""
        self._agree = agree
        self._state = state
        self._group = group
        self._report = replace(report, is_in_memory=True, save=0)
        self._timeout_s = timeout_s
        self._node = group.node_sink(
            timeout_s=timeout_s,
            otherwise="there are no memory checkpoints from now on",
            given_up=lambda why: group.tell("no_memory", f"rank {group.rank}: its node holds none any more: {why}"),
        )
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="raycheck-memory")
        self._thread.submit(self._node.prepare)
        self._pending: Future[bool] | None = None
        self._slot = 0
        self.newest_step = -1
        self._said = ""
        self._failures = 0  # in a row
        self._must_agree = False
        self._not_before = 0.0

    @property
    def is_busy(self) -> bool:
        """Return whether the next one has to be left out: the one before is under way, or has just failed."""
        if self._node.is_given_up:
            return True
        return time.monotonic() < self._not_before or (self._pending is not None and not self._pending.done())

    def begin(self, progress: Progress, *, trained_s: float, is_by_notice: bool = False) -> None:
        """Stage the state for a memory checkpoint of this step. Every rank calls it at the same steps.

        is_by_notice: it is one because a node is about to go.
        """
        began = time.monotonic()
        report = replace(self._report, progress=progress, trained_s=trained_s, is_by_notice=is_by_notice)
        try:
            if not self._wait_for_last():
                raise SaveFailedError("the memory checkpoint before it is still under way")
            if self._node.is_given_up:
                raise SaveFailedError("its node does not hold memory checkpoints")
            self._agree(report, self._must_agree)
            self._must_agree = False
            staged = self._state.stage_for_memory(progress, self._slot)
        except RaycheckError as error:
            self._say(str(error))
            self._group.tell("report", replace(report, failure=str(error)))  # the others must not wait for this rank
            return
        report = replace(report, blocked_s=time.monotonic() - began)
        self._pending = self._thread.submit(self._hold, staged, report, began + self._timeout_s)

    def hurry(self) -> None:
        """Have the copies to other nodes go without pauses from now on, since a node is about to go."""
        self._node.hurry(self._report.attempt)

    def wait(self, timeout_s: float) -> None:
        """Wait until the one under way, if any, has ended. timeout_s: seconds at most."""
        if self._pending is not None:
            wait([self._pending], timeout_s)

    def stop(self) -> None:
        """Let the thread end."""
        self._thread.shutdown(wait=False)

    def _wait_for_last(self) -> bool:
        """Wait a while for the memory checkpoint before, and learn which buffer is free. Returns whether it has ended.

        Rank 0 has heard of its outcome, or the next one would not have begun.
        """
        if self._pending is None:
            return True
        try:
            is_listed = self._pending.result(OUTCOME_S)
        except FutureTimeoutError:
            return False
        except Exception:  # noqa: BLE001  nothing here may end the training
            is_listed = False
        self._pending = None
        self._slot = 1 - self._slot if is_listed else self._slot
        return True

    def _hold(self, staged: StagedState, report: Report, deadline: float) -> bool:
        """Have the node's actor hold a staged state. Returns whether it is listed."""
        is_listed = self._hand_over(staged, report, deadline)
        self._failures = 0 if is_listed else self._failures + 1
        if is_listed:
            self.newest_step = report.progress.step
        else:
            self._not_before = time.monotonic() + min(2.0 ** min(self._failures, 10), MAX_PAUSE_S)
        return is_listed

    def _hand_over(self, staged: StagedState, report: Report, deadline: float) -> bool:
        """Hand a staged state over, and wait for the outcome. Returns whether the coordinator has listed it."""
        try:
            outcome = self._node.save(staged, report, deadline)
            if outcome is None:
                self._group.tell("report", replace(report, failure=f"rank {report.rank}: its node does not hold it"))
                return False
            if outcome.kind == "failed":
                self._say(outcome.message)
            self._must_agree |= outcome.agree_anew
        except Exception as error:  # noqa: BLE001  whatever it was, training goes on, and the bucket has the truth
            staged.keep_buffers_apart()  # the coordinator may list it all the same
            self._say(f"{type(error).__name__}: {error}")
            return False
        return outcome.kind == "committed"

    def _say(self, problem: str) -> None:
        """Warn of a problem, once while it is the same."""
        if problem != self._said:
            self._said = problem
            text = f"no memory checkpoint: {problem}"
            logger.warning(event(text, rank=self._group.rank, run=self._group.uri))
