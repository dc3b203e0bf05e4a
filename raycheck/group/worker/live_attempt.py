"""Runs one rank's saving while its attempt is the live one: from the end of restore() to the end of training.

A step costs one copy of the state; save_queue.py does the rest in the background. `end_step` shows the order in which
everything happens.
"""

import threading
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import NoReturn, Self

from raycheck.bucket.format.label import NO_LABEL, Label
from raycheck.errors import SaveFailedError, StoreError, SupersededError
from raycheck.group.coordinator.messages import Claim, HeartbeatMessage, StepRows
from raycheck.group.group import Group, ask_until_decided
from raycheck.group.worker.after_commit import AfterCommitTasks
from raycheck.group.worker.heartbeat import FencingWatch, Heartbeat
from raycheck.group.worker.metric_values import checked
from raycheck.group.worker.save_handle import SaveHandle
from raycheck.group.worker.save_kind import SaveKind, strongest
from raycheck.group.worker.save_queue import SaveQueue, SaveStatus
from raycheck.group.worker.save_triggers import SaveTriggers
from raycheck.group.worker.step_metrics import Columns
from raycheck.group.worker.training_progress import ProgressCounter, TrainingClock
from raycheck.log import event, logger
from raycheck.settings import SaveSettings
from raycheck.state.restore_result import Restored
from raycheck.state.restore_selection import EVERYTHING, Selection
from raycheck.state.train_state import TrainState

LAST_WORDS_S = 30.0
"""How long an upload in flight may continue after the training function raised."""
LAST_ROWS_S = 10.0
"""How long a rank waits then until the metrics of the last steps are in the history."""
MEMORY_COPY_S = 30.0
"""How long a group that leaves a node waits until a memory checkpoint is on other nodes."""
NOTHING_SAVED: tuple[int, SaveKind] = (-1, "keep")


@dataclass(frozen=True, kw_only=True, slots=True)
class StartingPoint:
    """The point where an attempt begins: a fresh run, or the state that a restore has filled.

    lineage: the partial restores that the state has gone through. trained_s: seconds of training in the state.
    began_at: when the run began, in unix seconds by the store's clock. saved_as: the kind of the checkpoint that has
    exactly this state, None when no checkpoint does. label: the name, note and expiry of that checkpoint.
    """

    claim: Claim
    lineage: tuple[str, ...] = ()
    trained_s: float = 0.0
    began_at: float
    saved_as: SaveKind | None = None
    label: Label = NO_LABEL

    @classmethod
    def fresh(cls, claim: Claim, selection: Selection) -> Self:
        lineage = (str(selection),) if selection != EVERYTHING else ()
        return cls(claim=claim, lineage=lineage, began_at=claim.claims[0])

    @classmethod
    def restored(cls, claim: Claim, done: Restored) -> Self:
        if claim.memory is not None:  # the bucket has not got this state
            return cls(
                claim=claim,
                lineage=done.lineage,
                trained_s=done.trained_s,
                began_at=done.manifest.began_at or claim.claims[-1],
            )
        kind: SaveKind = "roll" if done.manifest.rolling else "keep"
        return cls(
            claim=claim,
            lineage=done.lineage,
            trained_s=done.trained_s,
            began_at=done.manifest.began_at or claim.claims[-1],
            saved_as=kind if done.is_whole else None,
            label=Label(
                name=claim.restore.name if claim.restore else None,
                note=done.manifest.note,
                expire_after_s=done.manifest.expire_after_s,
            ),
        )


class LiveAttempt:
    """One rank's part in the live attempt: counts, decides, saves and reports, from the restore to the end."""

    def __init__(
        self,
        state: TrainState,
        settings: SaveSettings,
        group: Group,
        *,
        start: StartingPoint,
        counter: ProgressCounter,
        triggers: SaveTriggers,
        watch: FencingWatch,
        tasks: AfterCommitTasks,
    ) -> None:
        """counter: has the counts from which training continues."""
        self._number = start.claim.attempt
        self._state = state
        self._settings = settings
        self._group = group
        self._counter = counter
        self._triggers = triggers
        self._watch = watch
        self._tasks = tasks
        self._clock = TrainingClock()
        self._heartbeat = Heartbeat(group)
        self._began_at = start.began_at
        self._queue = SaveQueue(
            state,
            settings,
            group,
            attempt=start.claim.attempt,
            restored_from=None if start.claim.restore is None else start.claim.restore.key,
            partial=start.lineage,
            saved_step=counter.step if start.claim.memory is None else -1,
            began_at=start.began_at,
            reporter=triggers.reporter,
        )
        self._queue.begun = SaveHandle.committed(  # which `save` returns if a checkpoint has this very state
            uri=group.uri, key=self._queue.newest or "", progress=counter.progress
        )
        self._memory = self._queue.memory_saves() if settings.memory_every_steps is not None else None
        self._is_prepared = False
        self._metrics: Mapping[str, object] = {}  # of the newest step
        self._begun = (counter.step, start.saved_as) if start.saved_as else NOTHING_SAVED  # the newest save
        self._begun_label = start.label  # of that save
        self._begun_name = (-1, "")  # step and name of the newest save, or of the checkpoint that has this very state
        if start.saved_as and start.claim.restore:
            self._begun_name = (counter.step, start.claim.restore.key)
        self._replaceable: str | None = None  # that name, if nothing but retention wants this very checkpoint
        self._replaced: str | None = None  # the name that that save replaces
        self._blocked_s = 0.0
        triggers.start_at(counter.progress, start.claim.claims)
        self._clock.go(start.trained_s)

    @property
    def saves(self) -> int:
        """Return how many saves were begun in this attempt."""
        return self._queue.saves

    @property
    def save_status(self) -> SaveStatus:
        status = self._queue.status(self._blocked_s)
        return status if self._memory is None else replace(status, memory_step=self._memory.newest_step)

    def end_step(self, metrics: Mapping[str, object] | None, *, tokens: int, episodes: int) -> None:
        """Do everything that happens at the end of a step. See Checkpointer.end_step."""
        queue, values = self._queue, checked(metrics or {})
        self._clock.stop()
        self._triggers.trained(self._clock.step_s, is_saving=queue.busy_s is not None)
        self._counter.end_step(tokens=tokens, episodes=episodes)
        self._metrics = values
        if not self._group.rank:
            queue.step_metrics.add(self._counter.step, values)
            if queue.step_metrics.are_many:
                self._group.tell("keep_rows", self._rows(queue.step_metrics.take()))
        if not self._is_prepared:
            self._is_prepared = True
            self._state.prepare()
        self._note_commit(queue.poll())
        self._raise_if_over()
        if self._heartbeat.take_save_request():
            self._triggers.save_soon()
        kind = self._triggers.decide_at_step(
            self._counter.progress,
            is_busy=queue.is_busy,
            busy_s=queue.busy_s or 0.0,
            metrics=self._metrics,
            alone_bytes=self._state.alone_bytes,
        )
        self._save_to_memory(kind)
        if kind:
            self.save_as(kind, metrics, tasks=self._triggers.tasks, leaving=self._triggers.leaving)
        if self._triggers.must_leave:
            self._leave_node()
        self._triggers.report_to_host()
        self._heartbeat.send(self._message)
        self._clock.go()

    def _save_to_memory(self, kind: SaveKind | None) -> None:
        """Begin a memory checkpoint if one is due. kind: the kind of the save to the bucket that this step begins, if
        any.

        When this step also saves to the bucket, a memory checkpoint is begun only if a node is about to be taken away,
        because the other nodes then have a copy sooner.
        """
        is_by_notice = self._triggers.must_reach_memory
        if self._memory is None or (kind and not is_by_notice):
            return
        if is_by_notice:
            self._memory.hurry()
        self._memory.poll()
        is_first_commit_awaited = self._queue.newest is None and bool(self._state.frozen_components())
        is_busy = is_first_commit_awaited or self._memory.is_busy
        if self._triggers.decide_on_memory(self._counter.step, is_busy=is_busy):
            self._memory.begin(self._counter.progress, trained_s=self._clock.trained_s, is_by_notice=is_by_notice)

    def end_epoch(self) -> None:
        """Count an epoch, and save when due. See Checkpointer.end_epoch."""
        self._counter.end_epoch()
        self._queue.saved_step, self._begun = -1, NOTHING_SAVED  # the state differs now from what this step saved
        self._note_commit(self._queue.poll())
        if kind := self._triggers.decide_at_epoch_end(self._counter.progress, is_busy=self._queue.is_busy):
            self.save_as(kind, self._metrics, tasks=self._triggers.tasks)

    def save_at_start(self) -> None:
        """Save step 0 for SaveSettings(at_start=True), unless a checkpoint has this state."""
        is_saved = self._begun[0] == self._counter.step
        if self._settings.at_start and self._counter.decides and not self._counter.step and not is_saved:
            self._save({}, "keep")

    def save_as(
        self,
        kind: SaveKind,
        metrics: Mapping[str, object] | None,
        label: Label = NO_LABEL,
        *,
        tasks: Collection[str] = (),
        leaving: Collection[int] | None = None,
        step: int | None = None,
    ) -> SaveHandle:
        """Begin a save, unless this step is saved already as this kind or as one that includes it, with the same label.

        tasks: what follows the commit, of this save or of the one that this step has. leaving: the ranks that are
        about to be taken away, if that is why the save is made. step: that the script has counted. Returns the handle
        of that save.
        """
        if step is not None:
            self._count_to(step)
        step, before = self._begun
        if step != self._counter.step or strongest(before, kind) != before or label.adds_to(self._begun_label):
            self._save(self._metrics if metrics is None else metrics, kind, label, tasks=tasks, leaving=leaving)
        elif tasks:
            began, key = time.monotonic(), self._begun_name[1]
            if not self._group.rank:
                self._queue.after_saves(partial(self._tasks.begin, key, self._counter.progress, tasks))
            self._replaceable = None
            self._triggers.tasks_begun(tasks, began=began)
            self._follow(key, tasks)
            self._clock.skip(time.monotonic() - began)
        elif not self._group.rank:
            logger.info(event("nothing to save: the step is saved already", step=step, run=self._group.uri))
        return self._queue.begun

    def _count_to(self, step: int) -> None:
        """Do what the end of a step does besides deciding, for a script that counts its steps itself."""
        if not (added := self._counter.count_to(step)):
            return
        self._clock.stop()
        self._clock.step_s /= added
        if not self._is_prepared:
            self._is_prepared = True
            self._state.prepare()
        self._note_commit(self._queue.poll())
        self._raise_if_over()
        self._heartbeat.send(self._message)
        self._clock.go()

    def _follow(self, key: str, tasks: Collection[str]) -> None:
        """Wait for the tasks after the commit of checkpoint `key`, as their modes say."""
        is_preempted = self._triggers.is_preempted or self._counter.is_preempted
        self._note_commit(
            self._tasks.follow(self._queue, key, self._counter.progress, tasks, is_preempted=is_preempted)
        )

    def _save(
        self,
        metrics: Mapping[str, object],
        kind: SaveKind,
        label: Label = NO_LABEL,
        *,
        tasks: Collection[str] = (),
        leaving: Collection[int] | None = None,
    ) -> None:
        queue, progress, began = self._queue, self._counter.progress, time.monotonic()
        if kind == "keep":
            tasks = dict.fromkeys((*tasks, *self._tasks.of_every_save))
        is_again = self._begun_name[0] == progress.step and label.expire_after_s is None
        self._begun, self._begun_label = (progress.step, kind), label
        self._note_commit(queue.wait_for_buffer())
        if queue.has_newest_failed:  # what it was to replace is still there
            self._replaceable = self._replaced
        replaces = self._replaceable if is_again else None
        is_reported = self._triggers.can_report_soon()
        name = queue.begin(
            progress,
            metrics,
            kind=kind,
            label=label,
            trained_s=self._clock.trained_s,
            is_reported=is_reported,
            leaving=leaving,
            replaces=replaces,
            tasks=self._tasks.of(tasks) if not self._group.rank else None,
        )
        self._begun_name, self._replaced = (progress.step, name), replaces
        self._replaceable = name if not tasks and not label.adds_to(NO_LABEL) else None
        self._blocked_s = time.monotonic() - began
        self._triggers.saved(self._blocked_s, progress, kind, began=began, tasks=tasks)
        if tasks:
            self._follow(name, tasks)
        self._clock.skip(time.monotonic() - began)

    def wait(self, timeout_s: float | None) -> None:
        """Wait until the saves begun so far are committed. See Checkpointer.wait."""
        queue, began = self._queue, time.monotonic()
        self._note_commit(queue.wait(queue.longest_s if timeout_s is None else min(timeout_s, queue.longest_s)))
        self._clock.skip(time.monotonic() - began)
        self._raise_if_over()
        if problem := queue.problem:
            if timeout_s is None:  # with a timeout, some ranks may not know of it, and all must do the same
                self._begun = NOTHING_SAVED
            raise SaveFailedError(f"rank {self._group.rank}: wait(): {problem}")

    def finish(self) -> None:
        """Save the last step, wait for everything in progress, and write into `latest` that the run has finished."""
        try:
            self._finish()
        except Exception:
            self._write_last_rows()
            raise

    def _finish(self) -> None:
        queue = self._queue
        self._heartbeat.send(self._message, is_last=True)
        if self._watch.over is None:
            self._note_commit(queue.wait())  # afterwards all ranks know of the same saves
            if queue.saved_step != self._counter.step or self._begun == (self._counter.step, "roll"):
                self._save(self._metrics, "keep")
                self._note_commit(queue.wait(queue.longest_s))
                if queue.is_cured_by_next:
                    self._save(self._metrics, "keep")
            queue.finish(self._counter.step)
            queue.point_to_newest()
            self._triggers.committed(queue.save_s)
            self._triggers.reporter.committed()
            self._triggers.report_all_to_host()
            self._tasks.finish(queue.newest, self._counter.progress)
            self._write_last_rows()  # of a save that failed while the last one was in progress
        self._raise_if_over()
        _write_finish(self._group, wait_s=self._settings.save_timeout_s)

    def abandon(self) -> None:
        """Give the saves in flight a short time to end after training has raised, and save nothing new.

        The state may be in the middle of a step; the saves in flight have complete copies.
        """
        self._heartbeat.send(self._message, is_last=True)
        try:
            self._queue.wait(LAST_WORDS_S)
        except Exception as late:  # noqa: BLE001  nothing may take the place of the error that ended training
            logger.warning(event("lost the save in flight", rank=self._group.rank, cause=late, run=self._group.uri))
        self._write_last_rows()

    def _write_last_rows(self) -> None:
        """Have the metrics that no ended save has taken written into the history, since no further save takes them."""

        def write() -> None:
            try:
                if rows := self._queue.unwritten_rows():
                    what = "metrics since the last save"
                    self._group.ask("keep_rows", self._rows(rows), timeout_s=LAST_ROWS_S, what=what)
            except Exception as lost:  # noqa: BLE001  nothing may take the place of the error that ended training
                logger.warning(event("lost the metrics since the last save", cause=lost, run=self._group.uri))

        if not self._group.rank:
            writing = threading.Thread(target=write, name="raycheck-rows", daemon=True)
            writing.start()
            writing.join(LAST_ROWS_S)
            if writing.is_alive():  # a device that hangs never gives its metrics
                logger.warning(event("the metrics since the last save are not written yet", run=self._group.uri))

    def keep_rows(self, rows: Columns) -> None:
        """Take the metrics of steps that a driver has kept."""
        self._queue.step_metrics.give_back(rows)

    def _rows(self, rows: Columns) -> StepRows:
        return StepRows(attempt=self._number, rows=rows, sent_at=time.time())

    def stop(self) -> None:
        """Let the save thread end."""
        self._queue.stop()
        if self._memory is not None:
            self._memory.stop()

    def _leave_node(self) -> NoReturn:
        """End the attempt for on_preempt="restart": Ray restarts the workers on nodes that stay."""
        self._note_commit(self._queue.wait())
        if self._memory is not None:
            self._memory.poll(MEMORY_COPY_S)
            if self._triggers.must_reach_memory:  # it could not begin while the previous one was in progress
                self._save_to_memory(None)
                self._memory.poll(MEMORY_COPY_S)
        step = self._counter.step
        saved = f"step {step} is saved" if self._queue.saved_step == step else f"step {step} is not saved"
        self._watch.over = SupersededError(
            f"rank {self._group.rank}: a node of this group is about to be taken away, {saved}; "
            'leaving by on_preempt="restart"'
        )
        raise self._watch.over

    def _note_commit(self, committed: str | None) -> None:
        """Pass on what the queue has just reported. committed: name of a checkpoint that was committed since."""
        if committed is not None:
            self._triggers.committed(self._queue.save_s)
            self._triggers.reporter.committed()

    def _raise_if_over(self) -> None:
        if self._watch.over is not None:
            raise self._watch.over

    def _message(self) -> HeartbeatMessage:
        return HeartbeatMessage(
            step=self._counter.step,
            trained_s=self._clock.trained_s,
            step_s=self._clock.step_s,
            began_at=self._began_at,
            begun=self._begun[0],
            failed=self._queue.failed,
            skipped=self._triggers.skipped,
            alerts=self._settings.alerts,
        )


def _write_finish(group: Group, *, wait_s: float) -> None:
    """Write into `latest` that the run has finished, once all ranks are at the end and everything is committed.

    Only warns when the store or another rank prevents this: the checkpoints are complete. Raises FencedError or
    SupersededError when somebody else has continued the run.
    """
    try:
        ask_until_decided(
            group,
            "finish",
            group.id,
            group.rank,
            group.world_size,
            deadline=time.monotonic() + wait_s,
            what="end of the run",
            late=lambda missing: StoreError(f"{missing} within {wait_s:.0f} s"),
        )
    except StoreError as error:
        logger.warning(event(f"the run has finished, but latest does not say so: {error}", run=group.uri))
