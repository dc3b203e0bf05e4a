"""Seconds of training that stand: those of the restored state, and those of the steps since. Saves do not count."""

import time
from collections.abc import Callable


class TrainingClock:
    """Runs between the end of one `end_step` and the beginning of the next. step_s: how long the last step took."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since: float | None = None
        self.trained_s = 0.0
        self.step_s = 0.0

    def go(self, trained_s: float | None = None) -> None:
        """Training goes on; with `trained_s`, in a state that stands for so much of it."""
        if trained_s is not None:
            self.trained_s = trained_s
        self._since = self._clock()

    def skip(self, seconds: float) -> None:
        """So long until now nothing was trained."""
        if self._since is not None:
            self._since += seconds

    def stop(self) -> None:
        """A step has ended."""
        if self._since is not None:
            self.step_s = self._clock() - self._since
            self.trained_s += self.step_s
        self._since = None
