"""One rank's saves queue here: they are staged in the training thread, then uploaded and reported in the background.

No more saves are in flight than there are buffers, and they are uploaded one by one (save_thread.py). That bounds
memory, and it makes a buffer safe to reuse: a save ends only after every request that reads its buffer has ended.
"""

import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, replace
from functools import partial
from typing import Self

from raycheck.bucket.assembly.replica_agreement import Agreement
from raycheck.bucket.assembly.save_report import Report
from raycheck.bucket.format.label import NO_LABEL, Label
from raycheck.bucket.format.progress import Progress
from raycheck.errors import SaveFailedError, StoreError
from raycheck.group.coordinator.messages import Outcome, SaveFailure
from raycheck.group.group import Group, ask_until_decided
from raycheck.group.ports import Reporter, Sink, UnreportedCommit
from raycheck.group.worker.memory_saves import MemorySaves
from raycheck.group.worker.metric_values import numbers_of
from raycheck.group.worker.save_handle import CheckpointInfo, SaveHandle
from raycheck.group.worker.save_kind import SaveKind
from raycheck.group.worker.save_thread import SaveThread
from raycheck.group.worker.step_metrics import Columns, StepMetrics
from raycheck.group.worker.upload_and_report import Uploader
from raycheck.log import event, logger
from raycheck.settings import BuiltIn, SaveSettings
from raycheck.state.rank_buffers import advice_on
from raycheck.state.train_state import TrainState
from raycheck.transfer.incremental_upload import StagedState

MEMORY_AGREEMENT_S = 10.0
"""How long the ranks wait for each other before a memory checkpoint."""
LAST_ANSWER_S = 2.0
"""How much longer the end of training waits than a save may take, so that it learns the outcome of the last save."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveStatus:
    """The status of a rank's saves, for a driver that decides when to save.

    is_busy: the next save would have to wait. busy_s: how long the saves in progress may still take, None when there
    are none. blocked_s: how long the newest save has blocked training. save_s: how long the newest commit took.
    unnamed: why the newest commit that asked for a name did not get it; "" when it did. memory_step: the step of the
    newest memory checkpoint of this attempt; -1 when there is none.
    """

    is_busy: bool = False
    busy_s: float | None = None
    blocked_s: float = 0.0
    save_s: float = 0.0
    unnamed: str = ""
    memory_step: int = -1

    @classmethod
    def of_slowest(cls, ranks: Sequence["SaveStatus"]) -> Self:
        """Return the status of a group: each value is its slowest rank's."""
        return cls(
            is_busy=any(rank.is_busy for rank in ranks),
            busy_s=max((rank.busy_s for rank in ranks if rank.busy_s is not None), default=None),
            blocked_s=max(rank.blocked_s for rank in ranks),
            save_s=max(rank.save_s for rank in ranks),
            unnamed=max(rank.unnamed for rank in ranks),
            memory_step=min(rank.memory_step for rank in ranks),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _UnderWay:
    """A save in progress.

    is_agreed: the ranks agreed on their replicas before it. is_reported: it will be reported to Ray. outcome: how it
    ended, and when this rank learned of it.
    """

    report: Report
    began: float
    is_agreed: bool
    is_reported: bool
    commit: UnreportedCommit
    staged: StagedState
    outcome: Future[tuple[Outcome, float]]


class SaveQueue:
    """This rank's saves: staged, uploaded one by one, and each with its outcome.

    saved_step: the newest step that is committed, in flight, or restored; -1 after a failed save. newest: name of the
    checkpoint that was committed or restored last. save_s: how long the newest commit took. saves: how many saves were
    begun in this attempt. failed: how many of them have failed. unnamed: see SaveStatus. begun: the handle of the
    newest save. step_metrics: the metrics of the steps since the newest save, on rank 0.
    """

    begun: SaveHandle

    def __init__(
        self,
        state: TrainState,
        settings: SaveSettings,
        group: Group,
        *,
        attempt: int,
        restored_from: str | None,
        partial: tuple[str, ...],
        saved_step: int,
        began_at: float,
        reporter: Reporter,
    ) -> None:
        """restored_from: name of the restored checkpoint. partial, began_at: see Manifest. reporter: tells the host of
        commits."""
        self.saved_step = saved_step
        self.newest = restored_from
        self.save_s = 0.0
        self.saves = self.failed = 0
        self.unnamed = ""
        self.step_metrics = StepMetrics()
        self._reporter = reporter
        self._newest_commit: UnreportedCommit | None = None  # of this attempt
        self._has_agreed = self._has_agreed_for_memory = group.world_size == 1
        self._has_named_buffers = False
        self._must_agree_after: dict[int, bool] = {}  # by the number of a save that has ended
        self._state = state
        self._settings = settings
        self._group = group
        self._report = Report(  # all that is the same in each report of this attempt
            group=group.id,
            rank=group.rank,
            world_size=group.world_size,
            attempt=attempt,
            save=0,
            progress=Progress(),
            restored_from=restored_from,
            partial=partial,
            began_at=began_at,
            retention=settings.retention,
            node=group.node,
            settings=settings.chosen,
            keeps_drift=settings.on_drift == "keep_first",
        )
        self._failures_in_a_row = 0
        self.is_cured_by_next = False  # the newest failure: see Outcome
        self._last_failure = ""
        self._last_failed = 0  # the number of that save
        self._pending: deque[_UnderWay] = deque()
        own = Uploader(group, timeout_s=settings.save_timeout_s)
        node = group.node_sink(timeout_s=settings.save_timeout_s, given_up=self._upload_here)
        sinks: list[Sink] = [node, own] if settings.upload_by == "node" else [own]
        self._thread = SaveThread(group, sinks, timeout_s=settings.save_timeout_s, name="raycheck-save")
        if settings.upload_by == "node":
            self._thread.do_next(node.prepare)

    @property
    def is_busy(self) -> bool:
        """Return whether the next save would have to wait for a buffer."""
        return sum(not save.outcome.done() for save in self._pending) >= self._state.components.buffers

    @property
    def busy_s(self) -> float | None:
        """Return how long the saves in progress may still take, by the newest commit; None when there are none."""
        began = [save.began for save in self._pending if not save.outcome.done()]
        return max(0.0, len(began) * self.save_s - (time.monotonic() - began[0])) if began else None

    def status(self, blocked_s: float) -> SaveStatus:
        """Return this rank's status. blocked_s: how long the newest save has blocked training."""
        return SaveStatus(
            is_busy=self.is_busy, busy_s=self.busy_s, blocked_s=blocked_s, save_s=self.save_s, unnamed=self.unnamed
        )

    def begin(
        self,
        progress: Progress,
        metrics: Mapping[str, object],
        *,
        kind: SaveKind = "keep",
        label: Label = NO_LABEL,
        trained_s: float = 0.0,
        is_reported: bool = False,
        leaving: Collection[int] | None = None,
        replaces: str | None = None,
        tasks: Mapping[str, BuiltIn | bytes] | None = None,
    ) -> str:
        """Stage the state and start its upload, after `wait_for_buffer`. Return the checkpoint's name.

        When it returns, the state may change: it is copied, or the save fails. If there is still no buffer, the save
        counts as failed, and the other ranks are told. trained_s, replaces: see Manifest. is_reported: this save
        can soon be reported to Ray. leaving: the ranks that are about to be taken away, if that is why the save is
        made; from this save on, ranks that stay write what both have. tasks: see Report.
        """
        began = time.monotonic()
        self.saves += 1  # counted even when nothing is saved: the ranks' counts must stay equal
        if leaving is not None:
            self._report = replace(self._report, leaves=self._group.rank in leaving)
        report = replace(
            self._report,
            save=self.saves,
            progress=progress,
            trained_s=trained_s,
            is_rolling=kind == "roll",
            is_by_notice=leaving is not None,
            metrics=numbers_of(metrics),
            tasks=tasks or {},
            label=label,
            replaces=replaces,
            rows=self.step_metrics.take(),
        )
        info = CheckpointInfo(uri=self._group.uri, key=report.checkpoint, step=progress.step, epoch=progress.epoch)
        self.begun = SaveHandle(info, rank=report.rank, longest_s=self.longest_s)
        try:
            staged = self._begin(report, began, is_reported=is_reported)
        except Exception as error:
            self.begun.fail(error)
            if not isinstance(error, SaveFailedError | StoreError):
                raise
            self._note_failure(report, str(error))
        else:
            staged.wait_for_slices(began + self._settings.save_timeout_s)
        return report.checkpoint

    def _begin(self, report: Report, began: float, *, is_reported: bool) -> StagedState:
        """Stage the state and hand it to the save thread. Return what is staged."""
        must_agree = (self._take_doubt(report.save) or report.is_by_notice) and self._group.world_size > 1
        is_reported = is_reported and not any(save.is_reported for save in self._pending)
        counts = {"step": report.progress.step, "epoch": report.progress.epoch}
        commit = UnreportedCommit(key=report.checkpoint, metrics={**counts, **report.metrics})  # the user's `step` wins
        staged, outcome = self._thread.begin(
            report,
            partial(self._stage, report, must_agree=must_agree),
            began=began,
            committed=lambda: self._reporter.point_to(commit) if is_reported else None,
        )
        self.begun.follow(outcome)
        outcome.add_done_callback(lambda _: staged.let_slices_go())  # also if it ends before the upload begins
        save = _UnderWay(
            report=report,
            began=began,
            is_agreed=must_agree,
            is_reported=is_reported,
            commit=commit,
            staged=staged,
            outcome=outcome,
        )
        self._pending.append(save)
        return staged

    def _stage(self, report: Report, *, must_agree: bool) -> StagedState:
        """Copy the state, if there are a buffer, and an agreement where one is needed."""
        self._check_buffer(report)
        self.saved_step = report.progress.step
        if must_agree:
            self._agree(report)
        return self._state.stage(report.progress)

    def poll(self) -> str | None:
        """Return the name of the checkpoint that was committed since the last call, if there is one. It never waits.

        Raises FencedError or SupersededError, and SaveFailedError after too many failed saves in a row.
        """
        return self.wait(0)

    def wait_for_buffer(self) -> str | None:
        """Wait until the next save can be staged, for at most the save timeout. Returns and raises as `poll` does."""
        return self.wait(up_to=self._last_to_await(self.saves + 1))

    def _last_to_await(self, number: int) -> int:
        """Return the number of the last save that must have ended before the one with this number begins.

        Its buffer is needed. An agreement, or the place of a frozen component, is uncertain until the save that brought
        it has ended; in that case only one save may be in progress.
        """
        is_alone = any(save.is_agreed or save.staged.written for save in self._pending)
        return number - 1 if is_alone else number - self._state.components.buffers

    def wait(self, timeout_s: float | None = None, *, up_to: int | None = None) -> str | None:
        """Wait until the saves in flight have ended, for at most the save timeout. Returns and raises as `poll` does.

        up_to: wait only for the saves up to this number.
        """
        last = self.saves if up_to is None else up_to
        deadline = time.monotonic() + (self._settings.save_timeout_s if timeout_s is None else timeout_s)
        newest = None
        while self._pending and (self._pending[0].report.save <= last or self._pending[0].outcome.done()):
            save = self._pending[0]
            try:
                outcome, ended = save.outcome.result(max(0.0, deadline - time.monotonic()))
            except FutureTimeoutError:
                break
            except (SaveFailedError, StoreError) as error:
                outcome, ended = Outcome(kind="failed", key="", message=str(error)), time.monotonic()
            self._pending.popleft()
            if outcome.kind == "failed":
                self.step_metrics.give_back(save.report.rows)
                self._has_agreed &= not save.is_agreed  # perhaps not all ranks got the agreement
                if outcome.forgets_references:
                    self._state.components.forget(referred=True)
                self._note_failure(save.report, outcome.message, is_cured_by_next=outcome.is_cured_by_next)
            elif outcome.kind == "committed":
                self._failures_in_a_row, self.is_cured_by_next = 0, False
                self._must_agree_after[save.report.save] = outcome.must_agree_again
                self.save_s = ended - save.began
                self._state.components.committed(save.staged, outcome.places)
                newest = self.newest = outcome.key
                if save.report.label.name is not None:
                    self.unnamed = outcome.unnamed
                self._newest_commit = save.commit
        return newest

    @property
    def has_newest_failed(self) -> bool:
        """Return whether the newest save has failed, as far as this rank knows."""
        return self.saves > 0 and self._last_failed == self.saves

    @property
    def longest_s(self) -> float:
        """Return how many seconds to wait for the outcome of any save."""
        return self._settings.save_timeout_s + LAST_ANSWER_S

    @property
    def problem(self) -> str:
        """Return why, after `wait`, not all of the newest saves are committed; "" when they are.

        It looks at only as many saves as there are buffers, since all ranks must get the same answer: when they began
        to wait, some of them already knew the outcome of earlier saves, and some did not.
        """
        if self._pending:
            names = ", ".join(str(save.report.save) for save in self._pending)
            return f"save(s) {names} of this attempt have not ended in time; they continue"
        if self._last_failed > max(0, self.saves - self._settings.buffers):
            return f"not every save was committed: {self._last_failure}"
        return ""

    def finish(self, step: int) -> None:
        """Wait for the last save, which is of `step`. Raises SaveFailedError when it is not committed."""
        failures = self._failures_in_a_row
        self.wait(self.longest_s)
        if self._pending or self._failures_in_a_row > failures or self.saved_step != step:
            raise SaveFailedError(
                f"rank {self._group.rank}: the last save, of step {step}, was not committed: "
                f"{self._last_failure or 'it has not ended in time'}"
            )

    def after_saves(self, call: Callable[[], object]) -> None:
        """Call a function in the background once the saves begun so far have ended."""
        self._thread.do_next(call)

    def point_to_newest(self) -> None:
        """Make the newest commit one that the host can be told of, so that it becomes Ray's Result.checkpoint."""
        self._thread.wait_until_idle(self._settings.save_timeout_s)
        if self._newest_commit is not None:
            self._reporter.point_to(self._newest_commit)

    def unwritten_rows(self) -> Columns:
        """Return the metrics of the steps that no ended save has taken to the history. It waits for their devices."""
        for save in self._pending:
            self.step_metrics.give_back(save.report.rows)
        return self.step_metrics.take()

    def memory_saves(self) -> MemorySaves:
        """Return the maker of this rank's memory checkpoints."""
        timeout_s = self._settings.save_timeout_s
        return MemorySaves(self._state, self._group, self._report, agree=self._agree_for_memory, timeout_s=timeout_s)

    def _agree_for_memory(self, report: Report, is_in_doubt: bool) -> None:
        """Have the ranks agree for memory alone until the first save to the bucket, which has its own agreement.

        is_in_doubt: a memory checkpoint has shown since that they have to agree again.
        """
        self._has_agreed_for_memory &= not is_in_doubt
        if self.saves and not (self._has_agreed and self._has_agreed_for_memory):
            raise SaveFailedError("the replicas are in doubt; the next save to the bucket compares them")
        if not self._has_agreed_for_memory:
            self._state.use_agreement(self._agreement(report, timeout_s=MEMORY_AGREEMENT_S))
            self._has_agreed_for_memory = True

    def stop(self) -> None:
        """Let the save thread end when its save has ended."""
        self._thread.stop()

    def _upload_here(self, why: str) -> None:
        """Warn that the node's actor uploads nothing from now on. why: the reason."""
        text = f"this rank uploads itself from now on, in spite of upload_by='node': {why}"
        logger.warning(event(text, rank=self._group.rank, run=self._group.uri))

    def _take_doubt(self, number: int) -> bool:
        """Return whether it is uncertain that the replicas are equal, and that one rank writes each.

        number: the number of the save that begins. The answer comes from the newest save whose outcome all ranks know,
        and is given once. Of later saves, some ranks may know the outcome and others may not.
        """
        return self._must_agree_after.pop(number - self._settings.buffers, False) or not self._has_agreed

    def _check_buffer(self, report: Report) -> None:
        """Raise SaveFailedError when the save whose buffer this one needs has not ended."""
        if self._pending and self._pending[0].report.save <= self._last_to_await(report.save):
            raise SaveFailedError(
                f"rank {report.rank}: step {report.progress.step}: the save before it has not ended within "
                f"{self._settings.save_timeout_s:.0f} s"
            )

    def _agree(self, report: Report) -> None:
        """Have the ranks decide which of them writes each replica, and check that replicas are equal on all of them."""
        self._has_agreed = False
        agreement = self._agreement(report, timeout_s=self._settings.save_timeout_s)
        self._state.use_agreement(agreement)
        self._has_agreed = self._has_agreed_for_memory = True
        if agreement.differing and not self._has_named_buffers and not report.rank:
            self._has_named_buffers = True
            logger.warning(event(advice_on(agreement.differing), run=self._group.uri))

    def _agreement(self, report: Report, *, timeout_s: float) -> Agreement:
        """Send what this rank holds, and return what all ranks are told. Raises SaveFailedError, and ConfigError.

        A difference at the first save of a group is a bug in the script, and ends the run. A later difference may
        disappear after a restart: it fails the save, when its reports are compared.
        """
        holdings = self._state.replica_checksums(
            is_compared=report.save == 1 and not report.keeps_drift,
            may_spread=not report.keeps_drift,
            with_spares=report.leaves is not None,
        )
        deadline = time.monotonic() + timeout_s
        what = f"agreement before the save of step {report.progress.step}"
        agreement: Agreement = ask_until_decided(
            self._group,
            "agree",
            report,
            holdings,
            deadline=deadline,
            what=what,
            late=lambda missing: SaveFailedError(f"rank {report.rank}: {what}: {missing}"),
        )
        return agreement

    def _alert(self, report: Report, message: str) -> None:
        """Have people told of a failed save, if the settings say so."""
        if self._settings.alerts is not None:
            failure = SaveFailure(
                attempt=report.attempt,
                save=report.save,
                step=report.progress.step,
                message=message,
                in_a_row=self._failures_in_a_row,
                limit=self._settings.max_failed_saves,
            )
            self._group.tell("save_failed", failure)

    def _note_failure(self, report: Report, message: str, *, is_cured_by_next: bool = False) -> None:
        """Count a failed save. Raises SaveFailedError after too many in a row, and not before (I10).

        is_cured_by_next: see Outcome. The first such failure does not count: it must not end the training before the
        next save.
        """
        number = report.save
        counts = self.is_cured_by_next or not is_cured_by_next
        self.is_cured_by_next = is_cured_by_next
        self._failures_in_a_row += counts
        self.failed += 1
        self._must_agree_after[number] = True  # all ranks are told of the failure, so all will agree
        self._last_failure, self._last_failed = message, max(number, self._last_failed)
        self._state.components.forget()
        if number == self.saves:  # otherwise a later one is in flight
            self.saved_step = -1
        if self._group.rank == 0:  # all ranks are told the same outcome
            in_a_row = self._failures_in_a_row
            logger.warning(event(f"save failed: {message}", failures_in_a_row=in_a_row, run=self._group.uri))
            self._alert(report, message)
        if counts and self._failures_in_a_row >= self._settings.max_failed_saves:
            raise SaveFailedError(f"{self._failures_in_a_row} failed save(s) in a row, the last: {message}")
