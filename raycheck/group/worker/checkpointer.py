"""The Checkpointer is what a training loop talks to: it restores, counts steps, saves when due, and waits at the end.

This module is the public surface, and what happens before training: claim, peek and restore. What happens at each step
is in live_attempt.py, when to save in save_triggers.py, and what a save does in save_queue.py. All ranks make the same
decisions.
"""

import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Self, get_args

from raycheck.bucket.attempt_records import ResumeRecord
from raycheck.bucket.format.label import NO_LABEL, Label, NoteValue, label_of
from raycheck.bucket.protocol.resume import AUTO, Resume, parse_at
from raycheck.data.loader_checks import check_loaders
from raycheck.errors import ConfigError
from raycheck.group.coordinator.messages import Claim, OnCorrupt
from raycheck.group.group import Group, alone
from raycheck.group.worker.after_commit import AfterCommitTasks
from raycheck.group.worker.base_run import refer_to_base
from raycheck.group.worker.data_proof import prove_together
from raycheck.group.worker.group_restore import (
    RestoreOptions,
    RestoreResult,
    apply_random_state,
    claim_run,
    peek_together,
    restore_together,
)
from raycheck.group.worker.heartbeat import FencingWatch
from raycheck.group.worker.live_attempt import LiveAttempt, StartingPoint
from raycheck.group.worker.periodic import periodics_of, start_alone
from raycheck.group.worker.restore_notices import (
    log_what_starts_over,
    say_what_changed,
    warn_of_differences,
    warn_of_other_position,
)
from raycheck.group.worker.save_handle import SaveHandle, check_timeout
from raycheck.group.worker.save_kind import SaveKind, kind_asked_for
from raycheck.group.worker.save_queue import SaveStatus
from raycheck.group.worker.save_triggers import SaveTriggers
from raycheck.group.worker.singleton import register_open
from raycheck.group.worker.step_metrics import Columns
from raycheck.group.worker.training_progress import ProgressCounter
from raycheck.host import host
from raycheck.log import event, logger, show_log
from raycheck.settings import SaveSettings
from raycheck.state.entries.make_entries import ChainedState, objects_by_name
from raycheck.state.preview import Preview
from raycheck.state.restore_selection import EVERYTHING, Selection
from raycheck.state.train_state import TrainState

if TYPE_CHECKING:
    from raycheck.bucket.reading import Checkpoint

RESTORE_FIRST = "call restore() before the first step: it claims the run, also a fresh one"


class Checkpointer:
    """The object that saves and restores a training run's state, on all ranks together, directly in object storage.

    Use it as a context manager. Every rank makes the same calls in the same order.

    state: maps names to modules, optimizers, schedulers, Batches, RayData, or anything with state_dict and
        load_state_dict. Pass what exists already; add the rest with `add`. raycheck adds the random state and the
        progress automatically.
    settings: when and how to save.
    group: this rank's place in a group outside Ray Train; by default Ray Train's.
    position: the counts of progress, if a driver keeps them instead of these calls.

    With SaveSettings(enabled=False), and under fit(enabled=False), it only counts steps. Raises ConfigError, naming the
    entry, for a state that cannot be saved.
    """

    def __init__(
        self,
        state: Mapping[str, object] | None = None,
        settings: SaveSettings | None = None,
        *,
        group: Group | None = None,
        position: ProgressCounter | None = None,
    ) -> None:
        show_log()
        self.settings = settings or SaveSettings()
        self._is_off = not self.settings.enabled or (group is None and host().is_turned_off())
        group = self._group = group or (alone() if self._is_off else host().group())
        if group.retention is not None:
            self.settings = self.settings.keeping(group.retention, "RunConfig(checkpoint_config=CheckpointConfig(...))")
        self._given = ChainedState()
        self._state: TrainState | None = None
        self._counter = position or ProgressCounter(())
        self._attempt: LiveAttempt | None = None  # from restore() on
        with self._told_to_others():
            self._take(state or {})
        self._watch = FencingWatch(self._group)
        self._triggers = SaveTriggers(
            self.settings if self._counter.decides else self.settings.without_triggers, self._group
        )
        self._is_restored = False
        self._claim: Claim | None = None
        self._at: Resume = AUTO  # what that claim asked for
        self._preview: Preview | None = None
        self._peeked: Checkpoint | None = None  # the one that it describes, until that is restored
        self._furthest = -1  # the last step that earlier attempts are known to have completed
        if self._is_off:
            logger.warning(event("raycheck is turned off: nothing is saved, and nothing is restored", rank=group.rank))
        else:
            register_open(self, uri=group.uri, rank=group.rank)

    def add(self, name: str, value: object) -> None:
        """Add an entry to the state, as if it had been passed to the constructor. Call it before `restore`.

        Raises ConfigError, naming the entry, for a value that cannot be saved, for a name that is already in the state,
        and after `restore`, which has filled the state.
        """
        if self._is_restored:
            raise ConfigError(f"add({name!r}) comes after restore(), which has filled the state; call it before")
        with self._told_to_others():
            if name in self._given:
                raise ConfigError(f"add({name!r}): the state has an entry of this name already")
            self._take(MappingProxyType({name: value}))

    def _take(self, more: Mapping[str, object]) -> None:
        given = ChainedState(*self._given.sources, more)  # bare values are read from the caller's own dict
        rank, world_size = self._group.rank, self._group.world_size
        if given and not self._is_off:
            self._state = TrainState(
                given,
                rank=rank,
                world_size=world_size,
                role=self._group.role,
                buffers=self.settings.buffers,
                is_shared=self.settings.upload_by == "node",
                has_memory=self.settings.memory_every_steps is not None,
            )
        entries = self._state.objects if self._state else objects_by_name(given)
        self._counter.watch(entries.values())
        self._periodics = periodics_of(entries, self._group, is_led=not self._counter.decides)
        self._given = given

    @property
    def uri(self) -> str:
        """Return the URI of the run that this saves to, as `raycheck.open_run` accepts it; "" when turned off."""
        return self._group.uri

    @property
    def is_closed(self) -> bool:
        """Return whether `close` was called, or the context has been left."""
        return self._watch.is_ended

    @property
    def is_off(self) -> bool:
        """Return whether raycheck is turned off: by SaveSettings(enabled=False), or by fit(enabled=False)."""
        return self._is_off

    @property
    def is_repeating(self) -> bool:
        """Return whether a lost attempt had already trained the newest step, as far as this driver knows.

        A logger that skips such steps never goes backwards. The driver knows only what rank 0 last reported to the
        coordinator, about a second earlier: after a hard kill, the last steps before it may be logged twice.
        """
        return self._counter.step <= self._furthest

    @property
    def save_status(self) -> SaveStatus:
        """Return the status of this rank's saves, for a driver that decides when to save."""
        return self._attempt.save_status if self._attempt is not None else SaveStatus()

    def peek(
        self,
        *,
        at: str | int | None = None,
        only: Iterable[str] | None = None,
        skip: Iterable[str] = (),
        on_corrupt: OnCorrupt = "previous",
    ) -> Preview:
        """Claim the run for this worker group and return what `restore` will find, before there is anything to fill.

        Call it on every rank, or on none. `restore` then uses the checkpoint that was found. If that checkpoint turns
        out to be damaged only at the restore, the attempt ends with SupersededError, and the next attempt's peek finds
        another checkpoint. A second call returns the first result. at, only, skip, on_corrupt: as for `restore`.

        Raises FencedError, DamagedError, CorruptError, and ConfigError if called after `restore`, or if `at`, only or
        skip would change the first result.
        """
        if self._is_restored and self._preview is None:
            raise ConfigError("peek() comes before restore(), whose result has the step, the epoch and the report")
        with self._told_to_others():
            selection, wish = Selection.of(only, skip), parse_at(at)
            _check_choice(on_corrupt)
            claim = None if self._is_off else self._claim_run(wish, selection)
            if self._preview is not None:
                return self._preview
            if claim is None or claim.entry is None:
                self._preview = Preview(attempt=claim.attempt if claim else 1, selection=selection)
            else:
                self._claim, self._peeked, self._preview = peek_together(
                    self._group, claim, selection, on_corrupt=on_corrupt
                )
            return self._preview

    def restore(
        self,
        *,
        at: str | int | None = None,
        strict: bool = True,
        only: Iterable[str] | None = None,
        skip: Iterable[str] = (),
        on_corrupt: OnCorrupt = "previous",
        cast: bool = False,
        defer_optimizer: bool = False,
    ) -> RestoreResult:
        """Claim the run for this worker group and load the checkpoint that the claim names into the live state.

        Call it on every rank, once, at the start, even in a fresh run.

        at: where the run starts, in the words of `fit(resume=...)`: a step, a checkpoint's name, "best", "never" or
            "must". None: as `fit` says; by default, at the newest checkpoint. It must be the same on all ranks. It
            applies once in each call of `fit`: after a restart of the workers, training continues from the newest
            checkpoint. Under torchrun, it applies at every start.
        only, skip: names of entries to restore, or to leave unchanged. "rng" and "progress" (the step count) are names
            too, and so is a part of a module ("model.head"). only=["model"] starts from trained weights at step 0. A
            selection is applied once: a checkpoint that was saved after it is restored whole by the same call, so that
            a restart continues from where training was.
        strict: whether a tensor or entry that only one side has is refused, or just reported.
        on_corrupt: what to do if a checkpoint turns out to be damaged. "previous" marks it and keeps it for inspection,
            and all ranks restore the newest good checkpoint before it in this training's history, never step 0; the
            report lists the damaged one under `refused`. "raise" changes nothing.
        cast: whether to convert floating-point tensors of modules and optimizers that were saved in another
            floating-point type, as stock DCP does; the report lists them under `cast`. By default they are refused.
        defer_optimizer: whether to return before the tensors of torch's own optimizers are read. The first optimizer
            step waits for them, and raises on all ranks if one cannot read its part. All ranks must pass the same.

        Tensors on the meta device get memory on their module's device and remain the same objects.

        Returns a RestoreResult, all zero in a fresh run. Raises FencedError, StateMismatchError (nothing was changed),
        DamagedError, CorruptError, and ConfigError for a state that could not be saved later.
        """
        if self._is_restored:
            raise ConfigError("restore() was called before; a Checkpointer restores once, at the start")
        _check_choice(on_corrupt)
        selection, wish = Selection.of(only, skip), parse_at(at)
        how = RestoreOptions(strict=strict, on_corrupt=on_corrupt, cast=cast, defer_optimizer=defer_optimizer)
        if self._is_off:
            self._is_restored = True
            self._counter.start_at(self._counter.progress)
            start_alone(self._periodics, lambda: self._counter.progress, world_size=self._group.world_size)
            return RestoreResult(**asdict(self._counter.progress), attempt=1)
        with self._told_to_others():
            state, tasks = self._checked_state()
            stream = next(iter(self._counter.data), None)
            name = next((name for name, value in state.objects.items() if value is stream is not None), None)
            proof = None if stream is None else stream.prove()
            claim = self._claim_run(wish, selection)
            prove_together(self._group, name, stream, proof)
            if claim.entry is None:
                result = self._start_fresh(state, claim, selection, tasks)
            else:
                result = self._fill(state, claim, selection, tasks, how)
            self._live().save_at_start()
        return result

    @contextmanager
    def _told_to_others(self) -> Iterator[None]:
        """Report an error of the block to the other ranks, which would otherwise wait for this one."""
        try:
            yield
        except Exception as error:
            self._tell_others(error)
            raise

    def _tell_others(self, error: Exception) -> None:
        if not self._is_off:
            self._group.tell_failure(error, saves=self._attempt.saves if self._attempt is not None else 0)

    def _checked_state(self) -> tuple[TrainState, AfterCommitTasks]:
        """Check the whole state before the run is claimed. Raises ConfigError if it could not be saved or exported."""
        if self._state is None:
            raise ConfigError("the state is empty; give at least the model and the optimizer")
        tasks = AfterCommitTasks(self.settings.tasks, self._group, self._state.models, self._watch)
        self._state.check(is_before_restore=True)
        check_loaders(self._state.objects, rank=self._group.rank)
        return self._state, tasks

    def _claim_run(self, at: Resume, selection: Selection) -> Claim:
        """Claim the run, unless `peek` has done so. Raises ConfigError if `peek` was called with another `at`."""
        if self._claim is None:
            self._at, self._claim = at, claim_run(self._group, at, self.settings.alerts)
        elif at not in (AUTO, self._at):
            raise ConfigError(
                "peek() has already claimed the run, with another at=...: pass at=... to the first peek(), or to "
                "restore() alone"
            )
        if self._preview is not None:
            self._preview.check(selection)
        return self._claim

    def _start_fresh(
        self, state: TrainState, claim: Claim, selection: Selection, tasks: AfterCommitTasks
    ) -> RestoreResult:
        state.check()
        state.check_selection(selection)
        if selection != EVERYTHING:
            text = "starting fresh: there is no checkpoint to restore from"
            logger.warning(event(text, selection=str(selection), run=self._group.uri))
        self._refer_to_base(state)
        self._counter.start_at(self._counter.progress)
        self._begin(state, StartingPoint.fresh(claim, selection), tasks)
        if not self._has_data_position(state):
            log_what_starts_over(self._group, None)
        self._triggers.reporter.restored(None)
        # An attempt that ended before its first commit starts over: its steps are repeated.
        self._furthest = _furthest_of(claim.resume)
        return RestoreResult(attempt=claim.attempt, resume=claim.resume)

    def _fill(
        self,
        state: TrainState,
        claim: Claim,
        selection: Selection,
        tasks: AfterCommitTasks,
        how: RestoreOptions,
    ) -> RestoreResult:
        """Put a checkpoint into the live state."""
        group, began = self._group, time.monotonic()
        claim, done, resume = restore_together(
            group,
            state,
            claim,
            selection,
            how,
            peeked=self._peeked,
            timeout_s=self.settings.save_timeout_s,
        )
        self._peeked = None  # with its whole index
        state.check_memory()
        self._refer_to_base(state, [component.name for component in done.manifest.components])
        rng = apply_random_state(done, group, self._counter.data)
        self._counter.start_at(done.progress)
        # Only now: what a failed restore left behind must never be saved.
        self._begin(state, StartingPoint.restored(claim, done), tasks)
        progress = self._counter.progress
        say_what_changed(group, done.manifest, self.settings)
        self._triggers.reporter.restored(done.manifest)
        self._furthest = _furthest_of(resume)
        if not self._has_data_position(state):
            log_what_starts_over(group, progress)
        result = RestoreResult.of(done, progress, claim=claim, resume=resume, seconds=time.monotonic() - began, rng=rng)
        warn_of_differences(group, result.report)
        if self._preview is not None:
            warn_of_other_position(group, self._preview, progress)
        return result

    def _begin(self, state: TrainState, start: StartingPoint, tasks: AfterCommitTasks) -> None:
        """Start the attempt: from now on, steps are counted and saved."""
        self._is_restored = True
        self._attempt = LiveAttempt(
            state,
            self.settings,
            self._group,
            start=start,
            counter=self._counter,
            triggers=self._triggers,
            watch=self._watch,
            tasks=tasks,
        )
        for periodic in self._periodics:
            periodic.start(lambda: (self._counter.progress, self._triggers.clock_s))
        self._watch.start()

    def _refer_to_base(self, state: TrainState, known: Sequence[str] = ()) -> None:
        """Look for frozen components in the base run. known: those that the restored checkpoint has."""
        if self.settings.base is not None:
            refer_to_base(self._group, state, self.settings.base, known)

    def _has_data_position(self, state: TrainState) -> bool:
        return bool(self._counter.data) or state.has_loader

    def end_step(self, metrics: Mapping[str, object] | None = None, *, tokens: int = 0, episodes: int = 0) -> None:
        """Call this when an optimizer step is complete, including its scheduler. It saves when a save is due.

        metrics: real numbers, and tensors or arrays of one. Rank 0's go into the run's history, and those of a step
        that saves also into the checkpoint, if they are finite. Tensors on a device are read at the next save. tokens,
        episodes: how many this step added over all ranks, as counted on rank 0; the checkpoint stores the sums. Raises
        FencedError or SupersededError when this attempt is over, SaveFailedError after too many failed saves in a row,
        and ConfigError, naming the metric, for one that is not a number, of which each rank has only a part, or whose
        name is longer than 1,000 bytes in JSON.
        """
        if self._is_counting_only():
            self._counter.end_step(tokens=tokens, episodes=episodes)
            return
        self._complete().end_step(metrics, tokens=tokens, episodes=episodes)

    def end_epoch(self) -> None:
        """Call this when an epoch is complete, including the script's work at its end (evaluation, a scheduler's step).

        It saves when a save is due. Later saves belong to the next epoch. Raises as end_step does.
        """
        if self._is_counting_only():
            self._counter.end_epoch()
            return
        self._complete().end_epoch()

    def save(
        self,
        metrics: Mapping[str, object] | None = None,
        *,
        step: int | None = None,
        is_rolling: bool = False,
        after_commit: str | Sequence[str] = (),
        name: str | None = None,
        note: Mapping[str, NoteValue] | None = None,
        expire_after_s: float | None = None,
        overwrite: bool = False,
    ) -> SaveHandle:
        """Begin a save of the current state. Return a handle, which waits for the commit.

        If this step is already saved in this way, is being saved, or was restored whole, it only logs that: the handle
        is then that save's. All ranks must pass the same arguments, except metrics, of which rank 0's are used.

        metrics: as for end_step; None: those of the newest end_step.
        step: how many steps are complete, for a script that counts them itself, perhaps with gaps, and never calls
            end_step; the triggers of the settings are not asked then. A script that calls end_step may pass the step
            that this has counted to, and no other.
        is_rolling: keep it only as one of the newest `rolling_keep_last` rolling saves.
        after_commit: run these tasks of `SaveSettings.after_commit` on this step's checkpoint once it is committed,
            even if the step is saved already: "export", the name of a function, or several of them.
        name: a name by which the checkpoint can be restored, and under which retention keeps it. If a checkpoint of
            another step already has the name, this one is committed without it, and pinned; an error in the log and
            `save_status.unnamed` say so.
        overwrite: move the name from that checkpoint to this one.
        note: a few facts to store with it (text, int, float, bool by name, 4 KiB at most).
        expire_after_s: from this many seconds after the commit, nothing keeps it; None: as the settings say, and never
            if it has a name.

        Raises as end_step does, and ConfigError for a task that is not in the settings, and for a step that goes back
        or contradicts end_step.
        """
        label = label_of(name, note, expire_after_s, overwrite=overwrite)
        kind, tasks = kind_asked_for(self.settings, is_rolling=is_rolling, after_commit=after_commit)
        return self.save_as(kind, metrics, label, tasks=tasks, step=step)

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
        """Begin a save like `save`, for a driver that has already chosen the kind of save, its label and its tasks.

        leaving: the ranks that are about to be taken away, if that is why the save is made.
        """
        if self._is_counting_only():
            if step is not None:
                self._counter.count_to(step)
            return SaveHandle.committed(uri=self.uri, key="", progress=self._counter.progress)
        return self._complete().save_as(kind, metrics, label, tasks=tasks, leaving=leaving, step=step)

    def keep_rows(self, rows: Columns) -> None:
        """Take the metrics of steps that a driver has kept. The next save takes them to the history."""
        if not self._is_counting_only():
            self._live().keep_rows(rows)

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until every save that has begun is committed. This does not begin a save. Call it on every rank.

        timeout_s: seconds to wait at most; None, or more than that: as long as a save may take.

        Raises SaveFailedError if one of the newest saves, as many as there are buffers, has failed or has not finished
        by then; otherwise it raises as end_step does. After a wait without timeout_s that raised SaveFailedError,
        `save` saves this step again.
        """
        check_timeout("wait", timeout_s)
        if not self._is_counting_only():
            self._complete().wait(timeout_s)

    def close(self) -> None:
        """Save the last step if it is not saved, wait for the commit, and write into `latest` that the run has ended.

        Leaving the context without an exception calls it. Raises the error that prevented the commit.
        """
        if self.is_closed:
            return
        try:
            if self._attempt is not None:
                with self._told_to_others():
                    self._complete().finish()
        finally:
            self._stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        try:
            if self._attempt is not None:
                self._attempt.abandon()
            if isinstance(error, Exception):
                if self._attempt is not None:
                    self._group.tell_end(error)
                self._tell_others(error)
        finally:
            self._stop()

    def _stop(self) -> None:
        self._watch.end()
        if self._attempt is not None:
            self._attempt.stop()
        if self._state is not None:
            self._state.abandon_deferred()

    def _is_counting_only(self) -> bool:
        """Return whether raycheck is turned off. Raises ConfigError before a restore, even when it is turned off."""
        if not self._is_restored:
            raise ConfigError(RESTORE_FIRST)
        return self._is_off

    def _live(self) -> LiveAttempt:
        if self._attempt is None:
            raise ConfigError(RESTORE_FIRST)
        return self._attempt

    def _complete(self) -> LiveAttempt:
        """Return the live attempt once everything is restored."""
        live = self._live()
        if self._state is not None:
            self._state.wait()
        return live


def _check_choice(on_corrupt: OnCorrupt) -> None:
    if on_corrupt not in get_args(OnCorrupt):
        raise ConfigError(f"on_corrupt={on_corrupt!r}: give one of {', '.join(get_args(OnCorrupt))}")


def _furthest_of(resume: ResumeRecord | None) -> int:
    """Return the last step that earlier attempts are known to have completed; -1 for none."""
    return -1 if resume is None or resume.furthest_step is None else resume.furthest_step
