"""Counts a training's progress, and measures how long it trains.

The counts are stored in a checkpoint as `progress`; the seconds are its `trained_s`.
"""

import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from operator import index

from raycheck.bucket.format.progress import Progress
from raycheck.data.data_stream import DataStream
from raycheck.errors import ConfigError
from raycheck.state.entries.per_rank_entries import PerRank, RankZero, inside


class ProgressCounter:
    """The counts of steps, tokens and episodes; also of epochs and samples, unless a DataStream in the state counts
    them.

    decides: whether this rank takes part in the decision to save; False when a driver decides for it. is_preempted: a
    node of the group is about to be taken away, as far as that driver has said.
    """

    decides = True
    is_preempted = False

    def __init__(self, entries: Iterable[object]) -> None:
        self.watch(entries)
        self.progress = Progress()
        self._has_counted = False  # whether end_step was called since the start

    def watch(self, entries: Iterable[object]) -> None:
        """Get epochs and samples from the stream of data among these entries. Raises ConfigError for two of them."""
        entries = list(entries)
        for value in entries:
            if isinstance(value, PerRank | RankZero) and isinstance(inside(value), DataStream):
                kind, wrapper = type(inside(value)).__qualname__, type(value).__name__
                raise ConfigError(
                    f"the state holds {wrapper}({kind}): it would stay where it is, since nobody counts its steps. "
                    f"Give the {kind} itself, which has one position for all ranks"
                )
        self.data = [value for value in entries if isinstance(value, DataStream)]
        if len(self.data) > 1:
            names = " and ".join(type(data).__qualname__ for data in self.data)
            raise ConfigError(f"the state holds two streams of data ({names}); a run has one position in its data")
        for data in self.data:
            data.leave_to_state(value.value if isinstance(value, PerRank) else value for value in entries)

    @property
    def step(self) -> int:
        return self.progress.step

    def end_step(self, *, tokens: int, episodes: int) -> None:
        """Count one step. Raises ConfigError for tokens or episodes that are not integers of at least 0."""
        for name, count in (("tokens", tokens), ("episodes", episodes)):
            if type(count) is not int or count < 0:
                raise ConfigError(f"end_step({name}={count!r}): give a whole number of at least 0")
        for data in self.data:
            data.end_step()
        self._has_counted = True
        at = self.progress
        counts = {"step": at.step + 1, "epoch_step": at.epoch_step + 1}
        self.go_to(replace(at, **counts, tokens=at.tokens + tokens, episodes=at.episodes + episodes))

    def count_to(self, step: int) -> int:
        """Count to a step that the script has counted. Return how many steps that adds.

        Raises ConfigError, and counts nothing, for a step that contradicts what was counted here.
        """
        at, call = self.progress, f"save(step={step!r})"
        number = -1
        if not isinstance(step, bool):
            with suppress(TypeError):  # NumPy's integers are steps too
                number = index(step)
        if number < 0:
            raise ConfigError(f"{call}: give a whole number of at least 0")
        if number < at.step:
            raise ConfigError(f"{call}: the training is at step {at.step} already; steps never go back")
        added = number - at.step
        if added and self._has_counted:
            raise ConfigError(
                f"{call}: end_step has counted {at.step} steps; call it after each step, or count without it"
            )
        if added and self.data:
            kind = type(self.data[0]).__qualname__
            raise ConfigError(f"{call}: {kind} in the state counts samples at each end_step; call that after each step")
        self.go_to(replace(at, step=number, epoch_step=at.epoch_step + added))
        return added

    def end_epoch(self) -> None:
        """Count one epoch, and begin the next one."""
        for data in self.data:
            data.end_epoch()
        self.go_to(replace(self.progress, epoch=self.progress.epoch + 1, epoch_step=0))

    def start_at(self, progress: Progress) -> None:
        """Start counting here, after a restore or in a fresh run."""
        for data in self.data:
            data.end_loaders()
        self._has_counted = False
        self.go_to(progress)

    def go_to(self, progress: Progress) -> None:
        """Set these counts, except those that a stream of data keeps itself."""
        for data in self.data:
            progress = replace(progress, epoch=data.epoch, epoch_step=data.epoch_step, samples=data.samples)
        self.progress = progress


class TrainingClock:
    """The seconds of training: those in the restored state, plus those of the steps since. Saves do not count.

    It runs between the end of one `end_step` and the beginning of the next. trained_s: the sum. step_s: how long the
    last step took.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since: float | None = None
        self.trained_s = 0.0
        self.step_s = 0.0

    def go(self, trained_s: float | None = None) -> None:
        """Start the clock. trained_s: seconds of training in the restored state, given once after a restore."""
        if trained_s is not None:
            self.trained_s = trained_s
        self._since = self._clock()

    def skip(self, seconds: float) -> None:
        """Subtract the last `seconds`: they were not training."""
        if self._since is not None:
            self._since += seconds

    def stop(self) -> None:
        """Stop at the end of a step, and add its seconds."""
        if self._since is not None:
            self.step_s = self._clock() - self._since
            self.trained_s += self.step_s
        self._since = None
