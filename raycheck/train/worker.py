"""The Checkpointer: what a training loop talks to. Restore, count steps, save when due, and wait only at the end.

A step pays for one copy; saver.py does the rest behind it. Decisions to save are the same on every rank: step
triggers locally, everything else by rank 0's word.
"""

import time
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import NoReturn, Self, get_args

from raycheck.errors import ConfigError, SupersededError
from raycheck.settings import SaveSettings
from raycheck.shards.restored import Restored
from raycheck.shards.rng import rng_values
from raycheck.shards.selection import EVERYTHING, Selection
from raycheck.shards.state import TrainState
from raycheck.train.alone import be_the_only_one
from raycheck.train.exporting import Exporting
from raycheck.train.group import CLAIM_TIMEOUT_S, Group
from raycheck.train.heart import Heart, Watch
from raycheck.train.lifeline import Pulse
from raycheck.train.log import logger, show_log
from raycheck.train.meeting import Claim, OnCorrupt
from raycheck.train.metrics import detached
from raycheck.train.pace import Pace
from raycheck.train.position import Position
from raycheck.train.restoring import At, restore_together, say_what_begins_anew, say_what_changed
from raycheck.train.rhythm import Due, Rhythm, due_of, strongest
from raycheck.train.saver import Saver
from raycheck.train.standing import Standing

LAST_WORDS_S = 30.0
"""How long an upload in flight may go on after the training function raised."""


class Checkpointer:
    """Saves and restores `state`: name to module, optimizer, scheduler, Batches, or anything with
    state_dict/load_state_dict. Random state and progress are added by raycheck.

    Use as a context manager. Every rank makes the same calls in the same order. group: given by hand outside Ray
    Train. position: who counts, where it is not these calls. Raises ConfigError, naming the entry, for a state that
    cannot be saved.
    """

    def __init__(
        self,
        state: Mapping[str, object],
        settings: SaveSettings | None = None,
        *,
        group: Group | None = None,
        position: Position | None = None,
    ) -> None:
        show_log()
        self.settings = settings or SaveSettings()
        group = self._group = group or Group.of_ray_train()
        self._state = TrainState(state, rank=group.rank, world_size=group.world_size, buffers=self.settings.buffers)
        self._position = position or Position(self._state.entries.values())
        self._watch = Watch(self._group)
        self._exporting = Exporting(self.settings.exports, self._group, self._state.models, self._watch)
        self._rhythm = Rhythm(self.settings if self._position.decides else self.settings.without_triggers, self._group)
        self._saver: Saver | None = None
        self._pace = Pace()
        self._heart = Heart(self._group)
        self._began_at = 0.0
        self._is_prepared = False
        self._metrics: dict[str, object] = {}
        self._begun: tuple[int, Due] = (-1, "keep")  # the newest save
        self._blocked_s = 0.0
        be_the_only_one(self, uri=group.uri, rank=group.rank)

    @property
    def is_closed(self) -> bool:
        return self._watch.is_ended

    @property
    def standing(self) -> Standing:
        """How its saves stand."""
        return Standing.of(self._saver, self._blocked_s)

    def restore(
        self,
        *,
        strict: bool = True,
        only: Iterable[str] | None = None,
        skip: Iterable[str] = (),
        on_corrupt: OnCorrupt = "previous",
    ) -> At:
        """Claim the run for this worker group and put the checkpoint that the claim names into the live state.

        only, skip: names of entries to take or to leave as they are, "rng" and "progress" (the step count) among them;
        inside a module also places ("model.head"). only=["model"] starts from trained weights at step 0.
        Done once: a checkpoint that was saved after it is restored whole by the same call, so that a restart goes on
        from where training was. strict: whether a tensor or entry on one side only is refused, or just reported.
        on_corrupt: what to do about a checkpoint that proves to be damaged. "previous": it is marked and kept for
        inspection, and all ranks take the newest good one that training came through before it, never step 0; the
        report's `refused` says so. "raise" leaves all as it is.

        Returns all zero in a fresh run. Raises FencedError, StateMismatchError (nothing changed), DamagedError,
        CorruptError, and ConfigError for what could not be saved later.
        """
        if self._saver is not None:
            raise ConfigError("restore() was called before; a Checkpointer restores once, at the start")
        if on_corrupt not in get_args(OnCorrupt):
            raise ConfigError(f"on_corrupt={on_corrupt!r}: give one of {', '.join(get_args(OnCorrupt))}")
        selection = Selection.of(only, skip)
        self._state.check()
        group = self._group
        group.check_node()
        claim: Claim = group.ask(
            "claim", group.id, group.world_size, timeout_s=CLAIM_TIMEOUT_S, what="claim of the run"
        )
        group.check_shared()
        if claim.restore is None:
            self._state.check_selection(selection)
            if selection != EVERYTHING:
                logger.warning("run %s: restore %s: there is no checkpoint; starting fresh", group.uri, selection)
            self._position.start_at(self._position.progress)
            self._begin(claim, (str(selection),) if selection != EVERYTHING else (), trained_s=0.0, began_at=None)
            if not self._has_data_position:
                say_what_begins_anew(group, None)
            return At(attempt=claim.attempt, resume=claim.resume)
        began = time.monotonic()
        claim, done, resume = restore_together(
            group, self._state, claim, selection, strict=strict, on_corrupt=on_corrupt
        )
        rng = self._apply_rng(done)
        self._position.start_at(done.progress)
        # Only now: what a failed restore left behind must never be saved.
        self._begin(claim, done.lineage, trained_s=done.trained_s, began_at=done.manifest.began_at)
        say_what_changed(group, done.manifest, self.settings)
        where = self._position.progress
        if not self._has_data_position:
            say_what_begins_anew(group, where)
        at = At.of(done, where, claim=claim, resume=resume, seconds=time.monotonic() - began, rng=rng)
        if at.report.missing or at.report.unexpected:
            logger.warning("rank %d: the checkpoint and the state differ: %s", group.rank, at.report)
        return at

    @property
    def _has_data_position(self) -> bool:
        return bool(self._position.data) or self._state.has_loader

    def _begin(self, claim: Claim, lineage: tuple[str, ...], *, trained_s: float, began_at: float | None) -> None:
        """trained_s, began_at: as the restored manifest has them."""
        self._began_at = began_at or (claim.claims[-1] if claim.restore else claim.claims[0])
        self._rhythm.start_at(self._position.progress, claim.claims)
        self._pace.go(trained_s)
        self._saver = Saver(
            self._state,
            self.settings,
            self._group,
            attempt=claim.attempt,
            restored_from=None if claim.restore is None else claim.restore.key,
            partial=lineage,
            saved_step=self._position.step,
            began_at=self._began_at,
        )
        self._begun = self._position.step, "keep"
        self._watch.start()

    def end_step(self, metrics: Mapping[str, object] | None = None, *, tokens: int = 0, episodes: int = 0) -> None:
        """One optimizer step is complete, its scheduler included. Saves when due.

        metrics: numbers or 0-dim tensors, kept with the checkpoint when finite; read only on steps that save. tokens,
        episodes: what this step added over all ranks, by rank 0's count; the sums are kept in the checkpoint. Raises
        FencedError or SupersededError when this attempt is over, SaveFailedError after too many failed saves in a row.
        """
        saver = self._claimed()
        self._pace.stop()
        self._rhythm.trained(self._pace.step_s, is_saving=saver.busy_s is not None)
        self._position.end_step(tokens=tokens, episodes=episodes)
        self._metrics = detached(metrics or {})
        if not self._is_prepared:
            self._is_prepared = True
            self._state.prepare()
        self._hear_of(saver.poll())
        if self._watch.over is not None:
            raise self._watch.over
        if self._heart.is_save_wanted:
            self._rhythm.save_soon()
        due = self._rhythm.is_due(self._position.progress, is_busy=saver.is_busy, busy_s=saver.busy_s or 0.0)
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
        saver = self._claimed()
        self._position.end_epoch()
        saver.saved_step, self._begun = -1, (-1, "keep")  # what stands now is not what was saved at this step
        self._hear_of(saver.poll())
        if due := self._rhythm.is_epoch_due(self._position.progress, is_busy=saver.is_busy):
            self.save_as(due, self._metrics)

    def save(
        self, metrics: Mapping[str, object] | None = None, *, is_rolling: bool = False, export: bool = False
    ) -> None:
        """Begin a save of the state as it stands. Does nothing when this step is saved so, or being saved, already.

        is_rolling: it stays as one of the newest `rolling_keep_last` of its kind only. export: write the model as a
        Hugging Face directory too, as `SaveSettings.exports` says."""
        self.save_as(due_of(self.settings, is_rolling=is_rolling, export=export), metrics)

    def save_as(self, due: Due, metrics: Mapping[str, object] | None) -> None:
        """The same for who knows as what."""
        step, before = self._begun
        if step != self._position.step or strongest(before, due) != before:
            self._save(metrics or {}, due)

    def _save(self, metrics: Mapping[str, object], due: Due) -> None:
        saver, progress, began = self._claimed(), self._position.progress, time.monotonic()
        self._begun = progress.step, due
        self._hear_of(saver.wait_for_buffer())
        is_news = self._rhythm.wants_news()
        name = saver.begin(progress, metrics, due=due, trained_s=self._pace.trained_s, is_news=is_news)
        self._blocked_s = time.monotonic() - began
        self._rhythm.saved(self._blocked_s, progress, due, began=began)
        hurry = self._rhythm.is_hurried or self._position.is_hurried
        if due == "export":
            self._hear_of(self._exporting.follow(saver, name, progress, is_hurried=hurry))
        self._pace.skip(time.monotonic() - began)

    def close(self) -> None:
        """Save the last step if it is not saved, and wait for the commit. Raises what kept it from being one."""
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
                self._rhythm.committed(self._saver.pointed, save_s=self._saver.save_s)
                self._rhythm.tell_ray_at_end()
                self._exporting.finish(self._saver.newest, self._position.progress)
            if self._watch.over is not None:
                raise self._watch.over
        finally:
            self._stop()

    def _leave(self, saver: Saver) -> NoReturn:
        """By on_preempt="restart": Ray starts the workers anew, on nodes that stay."""
        self._hear_of(saver.wait())
        step = self._position.step
        saved = f"step {step} is saved" if saver.saved_step == step else f"step {step} is not saved"
        self._watch.over = SupersededError(
            f'rank {self._group.rank}: a node of this group is about to go, {saved}; leaving by on_preempt="restart"'
        )
        raise self._watch.over

    def _pulse(self) -> Pulse:
        saver = self._claimed()
        return Pulse(
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

    def _claimed(self) -> Saver:
        if self._saver is None:
            raise ConfigError("call restore() before the first step: it claims the run, also a fresh one")
        return self._saver

    def _hear_of(self, committed: str | None) -> None:
        if committed is not None:
            self._rhythm.committed(self._claimed().pointed, save_s=self._claimed().save_s)
