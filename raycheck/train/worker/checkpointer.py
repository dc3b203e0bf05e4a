"""The Checkpointer: what a training loop talks to. Restore, count steps, save when due, and wait only at the end.

A step pays for one copy; save_queue.py does the rest behind it. Decisions to save are the same on every rank: step
triggers locally, everything else by rank 0's word.
"""

import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from types import MappingProxyType, TracebackType
from typing import NoReturn, Self, get_args

from ray.exceptions import RayError

from raycheck.errors import ConfigError, SaveFailedError, StoreError, SupersededError
from raycheck.settings import SaveSettings
from raycheck.shards.entries.make_entries import ChainedState, objects_by_name
from raycheck.shards.state.preview import Preview
from raycheck.shards.state.random_state import rng_values
from raycheck.shards.state.restore_result import Restored
from raycheck.shards.state.restore_selection import EVERYTHING, Selection
from raycheck.shards.state.train_state import TrainState
from raycheck.train.coordinator.messages import Claim, HeartbeatMessage, OnCorrupt
from raycheck.train.group import CLAIM_TIMEOUT_S, Group, ask_until_decided
from raycheck.train.log import event, logger, name_of, show_log
from raycheck.train.ray_api import train_context
from raycheck.train.ray_api.controller_callbacks import is_turned_off
from raycheck.train.worker.export_wait import ExportWait
from raycheck.train.worker.group_restore import (
    RestoreResult,
    furthest_of,
    peek_together,
    restore_together,
    say_what_begins_anew,
    say_what_changed,
    warn_of_rays_checkpoint,
)
from raycheck.train.worker.heartbeat import FencingWatch, Heartbeat
from raycheck.train.worker.periodic import periodics_of, start_alone
from raycheck.train.worker.save_queue import SaveQueue
from raycheck.train.worker.save_status import SaveStatus
from raycheck.train.worker.save_triggers import SaveKind, SaveTriggers, due_of, strongest
from raycheck.train.worker.singleton import be_the_only_one
from raycheck.train.worker.step_metrics import detached
from raycheck.train.worker.training_clock import TrainingClock
from raycheck.train.worker.training_progress import ProgressCounter

LAST_WORDS_S = 30.0
"""How long an upload in flight may go on after the training function raised."""
RESTORE_FIRST = "call restore() before the first step: it claims the run, also a fresh one"


class Checkpointer:
    """Saves and restores `state`: name to module, optimizer, scheduler, Batches, or anything with
    state_dict/load_state_dict. Random state and progress are added by raycheck.

    Use as a context manager. Every rank makes the same calls in the same order. state: what there is by now, `add`
    takes the rest. group: given by hand outside Ray Train. position: who counts, where it is not these calls. Raises
    ConfigError, naming the entry, for a state that cannot be saved.

    With SaveSettings(enabled=False), and under fit(enabled=False), it counts steps and does nothing else.
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
        self._is_off = not self.settings.enabled or (group is None and is_turned_off())
        group = self._group = group or (Group.alone() if self._is_off else Group.of_ray_train())
        self._given = ChainedState()
        self._state: TrainState | None = None
        self._position = position or ProgressCounter(())
        self._take(state or {})
        self._watch = FencingWatch(self._group)
        self._exporting: ExportWait | None = None
        self._rhythm = SaveTriggers(
            self.settings if self._position.decides else self.settings.without_triggers, self._group
        )
        self._saver: SaveQueue | None = None
        self._pace = TrainingClock()
        self._heart = Heartbeat(self._group)
        self._began_at = 0.0
        self._is_restored = self._is_prepared = False
        self._claim: Claim | None = None
        self._preview: Preview | None = None
        self._metrics: dict[str, object] = {}
        self._begun: tuple[int, SaveKind] = (-1, "keep")  # the newest save
        self._begun_name = (-1, "")
        self._furthest = -1  # the step that earlier attempts had come to
        self._blocked_s = 0.0
        if self._is_off:
            logger.warning("rank %d: raycheck is turned off: nothing is saved, and nothing is restored", group.rank)
        else:
            be_the_only_one(self, uri=group.uri, rank=group.rank)

    def add(self, name: str, value: object) -> None:
        """Add an entry to the state, as it would stand in the constructor's. Before `restore`, which fills it. Raises
        ConfigError, naming the entry, for what cannot be saved, and after `restore`."""
        if self._is_restored:
            raise ConfigError(f"add({name!r}) comes after restore(), which has filled the state; call it before")
        if name in self._given:
            raise ConfigError(f"add({name!r}): the state has an entry of this name already")
        self._take(MappingProxyType({name: value}))

    def _take(self, more: Mapping[str, object]) -> None:
        given = ChainedState(*self._given.sources, more)  # bare values are read from the caller's own dict
        rank, world_size = self._group.rank, self._group.world_size
        if given and not self._is_off:
            self._state = TrainState(given, rank=rank, world_size=world_size, buffers=self.settings.buffers)
        entries = self._state.objects if self._state else objects_by_name(given)
        self._position.watch(entries.values())
        self._periodics = periodics_of(entries, self._group, is_led=not self._position.decides)
        self._given = given

    @property
    def is_closed(self) -> bool:
        return self._watch.is_ended

    @property
    def is_repeating(self) -> bool:
        """Whether the newest step had been trained before, by an attempt that was lost, as far as this driver knows.

        A logger that is told of the other steps only never goes backwards. What is known is rank 0's last word to the
        coordinator, about a second old: after a hard kill the last steps before it may come twice.
        """
        return self._position.step <= self._furthest

    @property
    def standing(self) -> SaveStatus:
        """How its saves stand."""
        return SaveStatus.of(self._saver, self._blocked_s)

    def peek(
        self, *, only: Iterable[str] | None = None, skip: Iterable[str] = (), on_corrupt: OnCorrupt = "previous"
    ) -> Preview:
        """Claim the run for this worker group and say what `restore` will come to, before there is anything to fill.

        Every rank calls it, or none. The restore takes the same checkpoint; should that prove to be damaged only then,
        the attempt ends with SupersededError, and the next one's peek answers for another checkpoint. Asked again it
        gives the same answer. only, skip, on_corrupt: as for `restore`. Raises FencedError, DamagedError, CorruptError.
        """
        selection = Selection.of(only, skip)
        _check_choice(on_corrupt)
        if self._preview is not None:
            if selection != self._preview.selection:
                raise ConfigError("peek() was asked with another only or skip before; ask for the same")
            return self._preview
        if self._is_restored:
            raise ConfigError("peek() comes before restore(), whose result has the step, the epoch and the report")
        if self._is_off:
            self._preview = Preview(attempt=1, selection=selection)
            return self._preview
        claim = self._claim_run()
        if claim.restore is None:
            self._preview = Preview(attempt=claim.attempt, selection=selection)
        else:
            self._claim, self._preview = peek_together(self._group, claim, selection, on_corrupt=on_corrupt)
        return self._preview

    def restore(
        self,
        *,
        strict: bool = True,
        only: Iterable[str] | None = None,
        skip: Iterable[str] = (),
        on_corrupt: OnCorrupt = "previous",
        cast: bool = False,
    ) -> RestoreResult:
        """Claim the run for this worker group and put the checkpoint that the claim names into the live state.

        only, skip: names of entries to take or to leave as they are, "rng" and "progress" (the step count) among them;
        inside a module also places ("model.head"). only=["model"] starts from trained weights at step 0.
        Done once: a checkpoint that was saved after it is restored whole by the same call, so that a restart goes on
        from where training was. strict: whether a tensor or entry on one side only is refused, or just reported.
        on_corrupt: what to do about a checkpoint that proves to be damaged. "previous": it is marked and kept for
        inspection, and all ranks take the newest good one that training came through before it, never step 0; the
        report's `refused` says so. "raise" leaves all as it is.
        cast: floating-point tensors of modules and optimizers are converted where they were saved in another
        floating-point type, as stock DCP does it; the report's `cast` names them. Without it that is refused.

        Tensors on the meta device get memory, on their module's device, and stay the objects that they are.

        Returns all zero in a fresh run. Raises FencedError, StateMismatchError (nothing changed), DamagedError,
        CorruptError, and ConfigError for what could not be saved later.
        """
        if self._is_restored:
            raise ConfigError("restore() was called before; a Checkpointer restores once, at the start")
        _check_choice(on_corrupt)
        selection = Selection.of(only, skip)
        if self._is_off:
            self._is_restored = True
            self._position.start_at(self._position.progress)
            start_alone(self._periodics, lambda: self._position.progress, world_size=self._group.world_size)
            return RestoreResult(**asdict(self._position.progress), attempt=1)
        state, claim = self._checked_state(), self._claim_run()
        if self._preview is not None:
            self._preview.check(selection)
        if claim.restore is None:
            at = self._start_fresh(state, claim, selection)
        else:
            at = self._fill(state, claim, selection, strict=strict, on_corrupt=on_corrupt, cast=cast)
        self._save_at_start()
        return at

    def _start_fresh(self, state: TrainState, claim: Claim, selection: Selection) -> RestoreResult:
        state.check()
        state.check_selection(selection)
        if selection != EVERYTHING:
            uri = self._group.uri
            logger.warning("%s: restore %s: there is no checkpoint; starting fresh", name_of(uri), selection)
        self._position.start_at(self._position.progress)
        self._begin(claim, (str(selection),) if selection != EVERYTHING else (), trained_s=0.0, began_at=None)
        if not self._has_data_position(state):
            say_what_begins_anew(self._group, None)
        warn_of_rays_checkpoint(self._group, None)
        self._furthest = furthest_of(claim.resume)
        return RestoreResult(
            attempt=claim.attempt, resume=claim.resume
        )  # what ended with nothing committed is begun anew

    def _fill(
        self,
        state: TrainState,
        claim: Claim,
        selection: Selection,
        *,
        strict: bool,
        on_corrupt: OnCorrupt,
        cast: bool,
    ) -> RestoreResult:
        """Put a checkpoint into the live state."""
        group, began = self._group, time.monotonic()
        claim, done, resume = restore_together(
            group,
            state,
            claim,
            selection,
            strict=strict,
            on_corrupt=on_corrupt,
            cast=cast,
            preview=self._preview,
        )
        state.check_memory()
        rng = self._apply_rng(done)
        self._position.start_at(done.progress)
        # Only now: what a failed restore left behind must never be saved.
        self._begin(claim, done.lineage, trained_s=done.trained_s, began_at=done.manifest.began_at)
        if done.is_whole:  # else nothing in the bucket holds what stands here, and save() must save it
            self._begun = self._position.step, "roll" if done.manifest.rolling else "keep"
        say_what_changed(group, done.manifest, self.settings)
        warn_of_rays_checkpoint(group, done.manifest)
        self._furthest = furthest_of(resume)
        where = self._position.progress
        if not self._has_data_position(state):
            say_what_begins_anew(group, where)
        at = RestoreResult.of(done, where, claim=claim, resume=resume, seconds=time.monotonic() - began, rng=rng)
        if at.report.missing or at.report.unexpected:
            logger.warning("rank %d: the checkpoint and the state differ: %s", group.rank, at.report)
        self._say_where_it_differs(at)
        return at

    def _has_data_position(self, state: TrainState) -> bool:
        return bool(self._position.data) or state.has_loader

    def _checked_state(self) -> TrainState:
        """The whole state, before the run is claimed. Raises ConfigError for what could not be saved or exported."""
        if self._state is None:
            raise ConfigError("the state is empty; give at least the model and the optimizer")
        self._exporting = ExportWait(self.settings.exports, self._group, self._state.models, self._watch)
        self._state.check(is_before_restore=True)
        return self._state

    def _claim_run(self) -> Claim:
        """Done once, by `peek` or by `restore`."""
        if self._claim is None:
            group = self._group
            group.check_node()
            claim: Claim = group.ask(
                "claim", group.id, group.world_size, timeout_s=CLAIM_TIMEOUT_S, what="claim of the run"
            )
            group.check_shared()
            self._claim = claim
        return self._claim

    def _say_where_it_differs(self, at: RestoreResult) -> None:
        """A place in the data that is not the one which the script was told: its Batches were not restored."""
        if self._preview is None:
            return
        there = {name: (getattr(self._preview, name), count) for name, count in asdict(self._position.progress).items()}
        lines = [
            f"{name}: peek() said {said}, restore() {count}" for name, (said, count) in there.items() if said != count
        ]
        if lines:
            logger.warning("rank %d: restored %s; %s", self._group.rank, at.checkpoint, "; ".join(lines))

    def _save_at_start(self) -> None:
        """By SaveSettings(at_start=True), where training begins at step 0 in a state that no checkpoint has."""
        is_saved = self._begun[0] == self._position.step
        if self.settings.at_start and self._position.decides and not self._position.step and not is_saved:
            self._save({}, "keep")

    def _begin(self, claim: Claim, lineage: tuple[str, ...], *, trained_s: float, began_at: float | None) -> None:
        """trained_s, began_at: as the restored manifest has them."""
        self._began_at = began_at or (claim.claims[-1] if claim.restore else claim.claims[0])
        assert self._state is not None, "it was restored"
        self._is_restored = True
        self._rhythm.start_at(self._position.progress, claim.claims)
        self._pace.go(trained_s)
        self._saver = SaveQueue(
            self._state,
            self.settings,
            self._group,
            attempt=claim.attempt,
            restored_from=None if claim.restore is None else claim.restore.key,
            partial=lineage,
            saved_step=self._position.step,
            began_at=self._began_at,
        )
        for periodic in self._periodics:
            periodic.start(lambda: (self._position.progress, self._rhythm.clock_s))
        self._watch.start()

    def end_step(self, metrics: Mapping[str, object] | None = None, *, tokens: int = 0, episodes: int = 0) -> None:
        """One optimizer step is complete, its scheduler included. Saves when due.

        metrics: numbers or 0-dim tensors, kept with the checkpoint when finite; read only on steps that save. tokens,
        episodes: what this step added over all ranks, by rank 0's count; the sums are kept in the checkpoint. Raises
        FencedError or SupersededError when this attempt is over, SaveFailedError after too many failed saves in a row.
        """
        if self._is_counting_only():
            self._position.end_step(tokens=tokens, episodes=episodes)
            return
        saver = self._claimed()
        self._pace.stop()
        self._rhythm.trained(self._pace.step_s, is_saving=saver.busy_s is not None)
        self._position.end_step(tokens=tokens, episodes=episodes)
        self._metrics = detached(metrics or {})
        if not self._is_prepared and self._state is not None:
            self._is_prepared = True
            self._state.prepare()
        self._hear_of(saver.poll())
        if self._watch.over is not None:
            raise self._watch.over
        if self._heart.is_save_wanted:
            self._rhythm.save_soon()
        due = self._rhythm.is_due(
            self._position.progress, is_busy=saver.is_busy, busy_s=saver.busy_s or 0.0, metrics=self._metrics
        )
        if due:
            self.save_as(due, metrics)
        if self._rhythm.must_leave:
            self._leave(saver)
        self._rhythm.tell_ray()
        self._heart.beat(self._pulse)
        self._pace.go()

    def end_epoch(self) -> None:
        """An epoch is complete, with what the script does at its end (evaluation, a scheduler's step). Saves when due,
        and what is saved from now on goes on in the next epoch. Raises as end_step does."""
        if self._is_counting_only():
            self._position.end_epoch()
            return
        saver = self._claimed()
        self._position.end_epoch()
        saver.saved_step, self._begun = -1, (-1, "keep")  # what stands now is not what was saved at this step
        self._hear_of(saver.poll())
        if due := self._rhythm.is_epoch_due(self._position.progress, is_busy=saver.is_busy):
            self.save_as(due, self._metrics)

    def save(
        self,
        metrics: Mapping[str, object] | None = None,
        *,
        is_rolling: bool = False,
        export: bool = False,
        validate: bool = False,
    ) -> None:
        """Begin a save of the state as it stands. Does nothing, and logs that, when this step is saved so already, is
        being saved so, or was restored whole.

        is_rolling: it stays as one of the newest `rolling_keep_last` of its kind only. export: write the model as a
        Hugging Face directory too, as `SaveSettings.exports` says. validate: have Ray run the trainer's validation
        function (ValidationConfig) on this step's checkpoint once it is committed."""
        validate &= not self._is_off
        if validate:
            train_context.check_validation(is_ray_train=self._group.is_ray_train)
        self.save_as(due_of(self.settings, is_rolling=is_rolling, export=export), metrics)
        if validate:
            self._validate()

    def save_as(self, due: SaveKind, metrics: Mapping[str, object] | None) -> None:
        """Like `save`, for callers that have already chosen the kind of save."""
        if self._is_counting_only():
            return
        step, before = self._begun
        if step != self._position.step or strongest(before, due) != before:
            self._save(metrics or {}, due)
        elif not self._group.rank:
            logger.info("%s: nothing to save: step %d is saved already", name_of(self._group.uri), step)

    def _save(self, metrics: Mapping[str, object], due: SaveKind) -> None:
        saver, progress, began = self._claimed(), self._position.progress, time.monotonic()
        self._begun = progress.step, due
        self._hear_of(saver.wait_for_buffer())
        is_news = self._rhythm.wants_news()
        name = saver.begin(progress, metrics, due=due, trained_s=self._pace.trained_s, is_news=is_news)
        self._begun_name = progress.step, name
        self._blocked_s = time.monotonic() - began
        self._rhythm.saved(self._blocked_s, progress, due, began=began)
        hurry = self._rhythm.is_hurried or self._position.is_hurried
        if due == "export" and self._exporting is not None:
            self._hear_of(self._exporting.follow(saver, name, progress, is_hurried=hurry))
        self._pace.skip(time.monotonic() - began)

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until every save begun so far is committed; nothing is saved that is not under way. Every rank calls it.

        timeout_s: how long at most; None, or longer than that: as long as a save may take. Raises SaveFailedError when
        one of the newest saves, as many as there are buffers, has failed or not ended then; else as end_step does.
        After a wait without timeout_s that raised it, `save` saves this step once more.
        """
        if timeout_s is not None and not (isinstance(timeout_s, int | float) and timeout_s >= 0):
            raise ConfigError(f"wait(timeout_s={timeout_s!r}): give a number of seconds")
        if self._is_counting_only():
            return
        saver = self._claimed()
        began = time.monotonic()
        self._hear_of(saver.wait(saver.longest_s if timeout_s is None else min(timeout_s, saver.longest_s)))
        self._pace.skip(time.monotonic() - began)
        if self._watch.over is not None:
            raise self._watch.over
        if problem := saver.problem:
            if timeout_s is None:  # else some ranks may have heard of it and some not, and all must save alike
                self._begun = -1, "keep"
            raise SaveFailedError(f"rank {self._group.rank}: wait(): {problem}")

    def _validate(self) -> None:
        saver, (step, name) = self._claimed(), self._begun_name
        if step != self._position.step:
            uri, at = self._group.uri, self._position.step
            logger.warning("%s: step %d is not validated: it was not saved in this attempt", name_of(uri), at)
            return
        saver.validate(name)
        self._rhythm.committed(saver.pointed, save_s=saver.save_s)  # it is told in its own turn

    def close(self) -> None:
        """Save the last step if it is not saved, wait for the commit, and put down in `latest` that the run has
        finished. Raises what kept the save from being committed."""
        if self.is_closed:
            return
        try:
            if self._saver is not None:
                self._heart.beat(self._pulse, is_last=True)
            if self._saver is not None and self._watch.over is None:
                self._hear_of(self._saver.wait())  # then all ranks know the same of it
                if self._saver.saved_step != self._position.step or self._begun == (self._position.step, "roll"):
                    self._save(self._metrics, "keep")
                self._saver.finish(self._position.step)
                self._saver.point_ray_to_newest()
                self._rhythm.must_tell(self._saver.take_validations())
                self._rhythm.committed(self._saver.pointed, save_s=self._saver.save_s)
                self._rhythm.tell_ray_at_end()
                if self._exporting is not None:
                    self._exporting.finish(self._saver.newest, self._position.progress)
            if self._watch.over is not None:
                raise self._watch.over
            if self._saver is not None:
                self._finish()
        finally:
            self._stop()

    def _finish(self) -> None:
        """Put the end down, once all is committed. A store or a rank that keeps this from being done is a warning.
        Raises FencedError or SupersededError when somebody else has gone on with the run."""
        group, wait_s = self._group, self.settings.save_timeout_s
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
        except (StoreError, RayError) as error:
            logger.warning(event(f"the run has finished, but latest does not say so: {error}", run=group.uri))

    def _leave(self, saver: SaveQueue) -> NoReturn:
        """By on_preempt="restart": Ray starts the workers anew, on nodes that stay."""
        self._hear_of(saver.wait())
        step = self._position.step
        saved = f"step {step} is saved" if saver.saved_step == step else f"step {step} is not saved"
        self._watch.over = SupersededError(
            f'rank {self._group.rank}: a node of this group is about to go, {saved}; leaving by on_preempt="restart"'
        )
        raise self._watch.over

    def _pulse(self) -> HeartbeatMessage:
        saver = self._claimed()
        return HeartbeatMessage(
            step=self._position.step,
            trained_s=self._pace.trained_s,
            step_s=self._pace.step_s,
            began_at=self._began_at,
            begun=self._begun[0],
            failed=saver.failed,
            skipped=self._rhythm.skipped,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        if self._saver is not None:
            self._heart.beat(self._pulse, is_last=True)
        # Nothing new is saved: the state may be half-way through a step. What is in flight is whole.
        try:
            if self._saver is not None:
                self._saver.wait(LAST_WORDS_S)
        except Exception as late:  # noqa: BLE001  nothing may take the place of the error that brought us here
            logger.warning("rank %d: the save in flight was lost: %s", self._group.rank, late)
        finally:
            self._stop()

    def _apply_rng(self, done: Restored) -> str:
        """Now, and inside an epoch once more just before the first batch: what a script draws before it, a shuffle or
        an iterator's seed, was drawn before the checkpoint in the run that is gone on with."""
        rank = self._group.rank
        said = done.apply_rng(rank)
        applied = rng_values()

        def again() -> None:
            if rng_values() != applied:
                logger.info(
                    "rank %d: random numbers were drawn between restore() and the first batch; the checkpoint's random "
                    "state is put back, as it was in the middle of the epoch",
                    rank,
                )
            done.apply_rng(rank)

        for data in self._position.data if done.rng_values else ():
            data.before_first_batch(again)
        return said

    def _stop(self) -> None:
        self._watch.end()
        if self._saver is not None:
            self._saver.stop()

    def _is_counting_only(self) -> bool:
        """Whether it is turned off. Raises ConfigError before a restore even then, as when it is on."""
        if self._is_off and not self._is_restored:
            raise ConfigError(RESTORE_FIRST)
        return self._is_off

    def _claimed(self) -> SaveQueue:
        if self._saver is None:
            raise ConfigError(RESTORE_FIRST)
        return self._saver

    def _hear_of(self, committed: str | None) -> None:
        saver = self._claimed()
        self._rhythm.must_tell(saver.take_validations())
        if committed is not None:
            self._rhythm.committed(saver.pointed, save_s=saver.save_s)


def _check_choice(on_corrupt: OnCorrupt) -> None:
    if on_corrupt not in get_args(OnCorrupt):
        raise ConfigError(f"on_corrupt={on_corrupt!r}: give one of {', '.join(get_args(OnCorrupt))}")
