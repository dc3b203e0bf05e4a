"""Remembers which global batches each step was trained on, in a few numbers, whatever the world size.

A checkpoint keeps it. Then `raycheck data` can say what made the steps before that checkpoint.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Self

MAX_ENTRIES = 10_000
"""Older steps than these entries hold are forgotten: a training without any pattern would otherwise keep one a step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPattern:
    """Describes steps that follow each other: each took `stride` batches of an epoch, which also follow each other.

    step, batch: of the first one. A step that skipped batches has several entries of one step.
    """

    step: int
    steps: int
    epoch: int
    batch: int
    stride: int

    def at(self, step: int) -> range:
        """Returns the numbers of the batches that a step took."""
        first = self.batch + (step - self.step) * self.stride
        return range(first, first + self.stride)


class StepHistory:
    """Holds the entries of all steps that are known. steps: how many steps there were."""

    def __init__(self) -> None:
        self.steps = 0
        self.known_from = 0
        self.entries: list[StepPattern] = []

    def end_step(self, epoch: int, batches: Sequence[int]) -> None:
        """Count a step that took these batches of an epoch, in ascending order."""
        for _, run in groupby(enumerate(batches), lambda item: item[1] - item[0]):
            numbers = [number for _, number in run]
            self._add(epoch, numbers[0], len(numbers))
        self.steps += 1
        if len(self.entries) > MAX_ENTRIES:
            del self.entries[: len(self.entries) - MAX_ENTRIES * 9 // 10]
            self.known_from = self.entries[0].step + 1  # of that one, another entry may be gone

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
        """Returns the history in a saved state. Raises ValueError or TypeError for what is none."""
        found = cls()
        found.steps, found.known_from = int(state["steps"]), int(state["known_from"])
        for row in state["entries"]:
            step, steps, epoch, batch, stride = map(int, row)
            found.entries.append(StepPattern(step=step, steps=steps, epoch=epoch, batch=batch, stride=stride))
        return found

    def batches(self, first: int, end: int) -> Iterator[tuple[int, int, range]]:
        """Yields (step, epoch, numbers of batches) for the steps from `first` to before `end`."""
        for entry in self.entries:
            for step in range(max(first, entry.step), min(end, entry.step + entry.steps)):
                yield step, entry.epoch, entry.at(step)


def joined(places: Iterable[tuple[int, int, range]]) -> list[tuple[int, int, int]]:
    """Returns (epoch, first batch, last batch + 1) of these, joined where they follow each other."""
    found: list[tuple[int, int, int]] = []
    for _, epoch, batches in places:
        if found and found[-1][0] == epoch and found[-1][2] == batches.start:
            found[-1] = epoch, found[-1][1], batches.stop
        else:
            found.append((epoch, batches.start, batches.stop))
    return found
