"""Records which global batches each step was trained on, in a few numbers, whatever the world size.

A checkpoint stores it, so that `raycheck data` can list what the steps before that checkpoint were trained on.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Self

MAX_ENTRIES = 10_000
"""The most entries; older steps are forgotten. Training without any pattern would otherwise add one entry per step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPattern:
    """Consecutive steps, each of which took `stride` consecutive batches of an epoch.

    step, batch: those of the first step. A step that skipped batches has several entries with the same step.
    """

    step: int
    steps: int
    epoch: int
    batch: int
    stride: int

    def at(self, step: int) -> range:
        """Return the numbers of the batches that a step took."""
        first = self.batch + (step - self.step) * self.stride
        return range(first, first + self.stride)


class StepHistory:
    """The entries of all known steps. steps: how many steps there were."""

    def __init__(self) -> None:
        self.steps = 0
        self.known_from = 0
        self.entries: list[StepPattern] = []

    def end_step(self, epoch: int, batches: Sequence[int]) -> None:
        """Record a step that took these batches of an epoch, in ascending order."""
        for _, run in groupby(enumerate(batches), lambda item: item[1] - item[0]):
            numbers = [number for _, number in run]
            self._add(epoch, numbers[0], len(numbers))
        self.steps += 1
        if len(self.entries) > MAX_ENTRIES:
            del self.entries[: len(self.entries) - MAX_ENTRIES * 9 // 10]
            self.known_from = self.entries[0].step + 1  # another entry of that step may have been dropped

    def _add(self, epoch: int, batch: int, stride: int) -> None:
        last = self.entries[-1] if self.entries else None
        is_next = last is not None and (last.epoch, last.stride, last.step + last.steps) == (epoch, stride, self.steps)
        if last is not None and is_next and last.at(self.steps).start == batch:
            self.entries[-1] = replace(last, steps=last.steps + 1)
        else:
            self.entries.append(StepPattern(step=self.steps, steps=1, epoch=epoch, batch=batch, stride=stride))

    def state(self) -> dict[str, Any]:
        rows = [[entry.step, entry.steps, entry.epoch, entry.batch, entry.stride] for entry in self.entries]
        return {"steps": self.steps, "known_from": self.known_from, "entries": rows}

    @classmethod
    def of(cls, state: dict[str, Any]) -> Self:
        """Return the history from a saved state. Raises ValueError or TypeError for anything else."""
        found = cls()
        found.steps, found.known_from = int(state["steps"]), int(state["known_from"])
        for row in state["entries"]:
            step, steps, epoch, batch, stride = map(int, row)
            found.entries.append(StepPattern(step=step, steps=steps, epoch=epoch, batch=batch, stride=stride))
        return found

    def batches(self, first: int, end: int) -> Iterator[tuple[int, int, range]]:
        """Yield (step, epoch, numbers of batches) for the steps from `first` to before `end`."""
        for entry in self.entries:
            for step in range(max(first, entry.step), min(end, entry.step + entry.steps)):
                yield step, entry.epoch, entry.at(step)


def joined(places: Iterable[tuple[int, int, range]]) -> list[tuple[int, int, int]]:
    """Return (epoch, first batch, last batch + 1) for these batches, with consecutive ones joined."""
    found: list[tuple[int, int, int]] = []
    for _, epoch, batches in places:
        if found and found[-1][0] == epoch and found[-1][2] == batches.start:
            found[-1] = epoch, found[-1][1], batches.stop
        else:
            found.append((epoch, batches.start, batches.stop))
    return found
