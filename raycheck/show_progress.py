"""How long work says how far it is: one kind of callback, and a sum to which several threads add."""

import threading
from collections.abc import Callable

ShowProgress = Callable[[int, int], None]
"""Is called with what is done and what there is in all, in bytes where nothing else is said, from several threads.
0 in all: nobody knows it yet."""


def show_nothing(done: int, total: int) -> None:
    """Ignores what it is told."""


class ProgressTally:
    """Adds up what several threads have done, and shows the sum."""

    def __init__(self, show: ShowProgress = show_nothing, *, total: int = 0) -> None:
        self._show = show
        self._done, self._total = 0, total
        self._lock = threading.Lock()

    def expect(self, more: int) -> None:
        """Say that this much is to come, beside what is done."""
        with self._lock:
            self._total = self._done + more

    def add(self, done: int) -> None:
        """Say that this much more is done."""
        with self._lock:  # else an older sum could be shown after a newer one
            self._done += done
            self._show(self._done, max(self._done, self._total) if self._total else 0)
