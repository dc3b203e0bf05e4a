"""The Checkpointer: what a training loop talks to. Restore, count steps, save when due, and wait only at the end.

A step pays for one copy. Upload, report and commit run in one background thread, one save at a time; that thread is
also what makes the staging buffer safe to reuse. Decisions to save are the same on every rank: step triggers
locally, everything else by rank 0's word.
"""

import logging
import math
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

import torch

from raycheck.bucket import layout
from raycheck.bucket.catalog import Checkpoint
from raycheck.bucket.index import dump_index
from raycheck.bucket.manifest import ShardRecord
from raycheck.errors import (
    ConfigError,
    CorruptError,
    FencedError,
    RaycheckError,
    SaveFailedError,
    StoreError,
    SupersededError,
)
from raycheck.settings import SaveSettings
from raycheck.shards.report import Report
from raycheck.shards.stager import Staged
from raycheck.shards.state import COMPONENT, Progress, Restored, TrainState
from raycheck.train.coordinator import Claim, Outcome
from raycheck.train.data import Batches
from raycheck.train.group import Group
from raycheck.train.rhythm import Rhythm

CLAIM_TIMEOUT_S = 300.0
LAST_WORDS_S = 30.0
"""How long an upload in flight may go on after the training function raised."""

logger = logging.getLogger("raycheck")


@dataclass(frozen=True, kw_only=True, slots=True)
class At:
    """Where training stands after a restore; all zero in a fresh run.

    step: index of the next optimizer step. epoch, samples: consumed position of the data. checkpoint: the name of
    what was restored, None when fresh. attempt: this life of the worker group. saved_world_size: ranks that wrote
    it. seconds, bytes_fetched, tensors: of this rank's restore. rng: what was done about random state.
    """

    step: int = 0
    epoch: int = 0
    samples: int = 0
    checkpoint: str | None = None
    attempt: int
    saved_world_size: int = 0
    seconds: float = 0.0
    bytes_fetched: int = 0
    tensors: int = 0
    rng: str = "untouched"


class Checkpointer:
    """Saves and restores `state`: name to module, optimizer, scheduler, Batches, or anything with
    state_dict/load_state_dict. Random state and progress are added by raycheck.

    Use as a context manager. Every rank makes the same calls in the same order. group: given by hand outside Ray
    Train. Raises ConfigError, naming the entry, for a state that cannot be saved.
    """

    def __init__(
        self, state: Mapping[str, object], settings: SaveSettings | None = None, *, group: Group | None = None
    ) -> None:
        self.settings = settings or SaveSettings()
        self._data = [value for value in state.values() if isinstance(value, Batches)]
        if len(self._data) > 1:
            raise ConfigError("the state holds two Batches; a run has one position in its data")
        self._group = group or Group.of_ray_train()
        self._state = TrainState(state, rank=self._group.rank, world_size=self._group.world_size)
        self._rhythm = Rhythm(self.settings, self._group)
        self._claim: Claim | None = None
        self._step = 0
        self._saved_step = -1  # newest step that is committed, in flight, or restored
        self._saves = 0
        self._failures = 0
        self._pending: Future[Outcome] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="raycheck-save")
        self._over: RaycheckError | None = None
        self._closed = threading.Event()

    def restore(self) -> At:
        """Claim the run for this worker group and put the checkpoint that the claim names into the live state.

        Returns all zero in a fresh run. Raises FencedError, StateMismatchError (nothing changed), CorruptError.
        """
        if self._claim is not None:
            raise ConfigError("restore() was called before; a Checkpointer restores once, at the start")
        group = self._group
        claim: Claim = group.ask(
            "claim", group.id, group.world_size, timeout_s=CLAIM_TIMEOUT_S, what="claim of the run"
        )
        if claim.restore is None:
            self._saved_step = 0  # nothing to save before the first step
            self._begin(claim)
            return At(attempt=claim.attempt)
        began = time.monotonic()
        done = self._state.apply(Checkpoint(group.store, claim.restore))
        rng = self._apply_rng(done)
        self._begin(claim)  # only now: what a failed restore left behind must never be saved
        self._step = self._saved_step = done.progress.step
        self._rhythm.start_at(self._step)
        at = At(
            step=done.progress.step,
            epoch=done.progress.epoch,
            samples=done.progress.samples,
            checkpoint=claim.restore.key,
            attempt=claim.attempt,
            saved_world_size=done.manifest.world_size,
            seconds=time.monotonic() - began,
            bytes_fetched=done.bytes_fetched,
            tensors=done.tensors,
            rng=rng,
        )
        if group.rank == 0:
            logger.info(
                "restored %s in attempt %d: step %d, %d -> %d ranks, rank 0 read %.1f MB in %.2f s",
                at.checkpoint,
                at.attempt,
                at.step,
                at.saved_world_size,
                group.world_size,
                at.bytes_fetched / 1e6,
                at.seconds,
            )
        return at

    def _begin(self, claim: Claim) -> None:
        self._claim = claim
        if self._group.rank == 0:
            threading.Thread(target=self._watch, name="raycheck-watch", daemon=True).start()

    def end_step(self, metrics: Mapping[str, object] | None = None) -> None:
        """One optimizer step is complete, its scheduler included. Saves when due.

        metrics: numbers or 0-dim tensors, kept with the checkpoint when finite; read only on steps that save. Raises
        FencedError or SupersededError when this attempt is over, SaveFailedError after too many failed saves in a row.
        """
        self._refuse_before_restore()
        self._step += 1
        for data in self._data:
            data.end_step()
        self._take_outcome(wait_s=0)
        if self._over is not None:
            raise self._over
        if self._rhythm.is_due(self._step):
            self.save(metrics)
        self._rhythm.tell_ray()

    def save(self, metrics: Mapping[str, object] | None = None) -> None:
        """Begin a save of the state as it stands. Does nothing when this step is saved or being saved already."""
        self._refuse_before_restore()
        if self._step == self._saved_step:
            return
        is_free = self._take_outcome(wait_s=self.settings.save_timeout_s)  # the buffer is in use until then
        began = time.monotonic()
        report = self._report(metrics or {})
        if not is_free:
            self._give_up(report)
            return
        self._saved_step = self._step
        staged = self._state.stage(report.progress)
        report = replace(report, common=staged.common, blocked_s=time.monotonic() - began)
        self._rhythm.saved()
        self._pending = self._thread.submit(
            self._upload_and_report, staged, report, began + self.settings.save_timeout_s
        )

    def _report(self, metrics: Mapping[str, object]) -> Report:
        """A new save of this rank, still without its shard. Counted even when it comes to nothing: the ranks' counts
        must stay equal."""
        assert self._claim is not None, "refused before restore()"
        self._saves += 1
        restore = self._claim.restore
        return Report(
            group=self._group.id,
            rank=self._group.rank,
            world_size=self._group.world_size,
            attempt=self._claim.attempt,
            save=self._saves,
            progress=self._progress(),
            restored_from=None if restore is None else restore.key,
            metrics=_numbers(metrics),
            keep_last=self.settings.keep_last,
        )

    def _give_up(self, report: Report) -> None:
        """The save before still holds the buffer: this one fails, and the other ranks are told so."""
        text = f"the save before it has not ended within {self.settings.save_timeout_s:.0f} s"
        self._group.tell("report", replace(report, failure=text))
        self._failed(f"rank {report.rank}: step {report.progress.step}: {text}")

    def close(self) -> None:
        """Save the last step if it is not saved, and wait for the commit. Raises what kept it from being one."""
        if self._closed.is_set():
            return
        try:
            if self._claim is not None and self._over is None:
                self.save()
                self._take_outcome(wait_s=self.settings.save_timeout_s, is_last=True)
                self._rhythm.tell_ray_at_end()
            if self._over is not None:
                raise self._over
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
        # Nothing new is saved: the state may be half-way through a step. What is in flight is whole.
        try:
            self._take_outcome(wait_s=LAST_WORDS_S)
        except Exception as late:  # noqa: BLE001  nothing may take the place of the error that brought us here
            logger.warning("rank %d: the save in flight was lost: %s", self._group.rank, late)
        finally:
            self._stop()

    def _upload_and_report(self, staged: Staged, report: Report, deadline: float) -> Outcome:
        """In the save thread. Always ends in an outcome that all ranks are told, or in an error at the deadline."""
        key = layout.shard_key(report.checkpoint, COMPONENT, report.rank)
        began = time.monotonic()
        try:
            store = self._group.store
            store.put_parts(key, staged.parts(store.part_bytes(staged.size_bytes)), staged.size_bytes)
            shard = ShardRecord(component=COMPONENT, rank=report.rank, size_bytes=staged.size_bytes, crc32=staged.crc32)
            report = replace(report, shards=(shard,), section=dump_index(staged.section()))
        except Exception as error:  # noqa: BLE001  whatever it was, the other ranks must not wait for this one (I9)
            report = replace(report, failure=f"upload of {key}: {type(error).__name__}: {error}")
        report = replace(report, upload_s=time.monotonic() - began)
        while True:
            what = f"save of step {report.progress.step} ({key})"
            outcome: Outcome = self._group.ask(
                "report", report, timeout_s=max(1.0, deadline - time.monotonic()), what=what
            )
            if outcome.kind != "pending":
                return outcome
            if time.monotonic() > deadline:
                raise SaveFailedError(
                    f"rank {report.rank}: {what} was not committed within {self.settings.save_timeout_s:.0f} s: "
                    f"{outcome.message}"
                )

    def _take_outcome(self, *, wait_s: float, is_last: bool = False) -> bool:
        """Look at the save in flight, if it has ended or ends within `wait_s`. Whether none is in flight any more."""
        if self._pending is None:
            return True
        try:
            outcome = self._pending.result(timeout=wait_s)
        except FutureTimeoutError:
            if is_last:
                raise SaveFailedError(
                    f"rank {self._group.rank}: the save of step {self._saved_step} has not ended after {wait_s:.0f} s"
                ) from None
            return False
        except (SaveFailedError, StoreError) as error:
            outcome = Outcome(kind="failed", key="", message=str(error))
        except (FencedError, SupersededError) as error:
            self._over = error
            raise
        self._pending = None
        if outcome.kind == "committed":
            self._failures = 0
            self._rhythm.committed(outcome.key)
        elif outcome.kind == "failed":
            self._failed(outcome.message, is_last=is_last)
        return True

    def _failed(self, message: str, *, is_last: bool = False) -> None:
        self._failures += 1
        self._saved_step = -1
        if self._group.rank == 0:
            logger.warning("save failed (%d in a row): %s", self._failures, message)
        if is_last or self._failures >= self.settings.max_failed_saves:
            raise SaveFailedError(f"{self._failures} failed save(s) in a row, the last: {message}")

    def _apply_rng(self, done: Restored) -> str:
        """Now, and once more just before the first batch: building iterators in between may draw from it."""
        for data in self._data:
            data.before_first_batch(lambda: done.apply_rng(self._group.rank))
        return done.apply_rng(self._group.rank)

    def _progress(self) -> Progress:
        for data in self._data:
            return Progress(step=self._step, epoch=data.epoch, samples=data.samples)
        return Progress(step=self._step)

    def _watch(self) -> None:
        """Rank 0's thread: learn that the attempt is over even when no save is due. Raised at the next step's end."""
        while not self._closed.is_set():
            try:
                self._group.ask("watch", self._group.id, timeout_s=CLAIM_TIMEOUT_S, what="watch")
            except (FencedError, SupersededError, CorruptError) as error:
                self._over = error
                return
            except RaycheckError as error:
                logger.warning("the run's latest could not be watched: %s", error)
                self._closed.wait(30.0)

    def _stop(self) -> None:
        self._closed.set()
        self._thread.shutdown(wait=False)

    def _refuse_before_restore(self) -> None:
        if self._claim is None:
            raise ConfigError("call restore() before the first step: it claims the run, also a fresh one")


def _numbers(metrics: Mapping[str, object]) -> dict[str, float]:
    numbers = {}
    for name, value in metrics.items():
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            value = value.item()  # noqa: PLW2901  read only on a step that saves
        if not isinstance(value, int | float):
            raise ConfigError(f"metrics[{name!r}] is a {type(value).__name__}; give a number or a 0-dim tensor")
        if math.isfinite(value):  # JSON has no nan, and a run that diverges must still be saved
            numbers[name] = float(value)
    return numbers
