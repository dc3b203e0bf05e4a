"""How long operations report their progress: one kind of callback, and a sum to which several threads add."""

import threading
from collections.abc import Callable

ShowProgress = Callable[[int, int], None]
"""Called with the amount done and the total, in bytes unless stated otherwise, from several threads. A total of 0 means
that it is not known yet."""


def show_nothing(done: int, total: int) -> None:
    """Ignore the progress."""


class ProgressTally:
    """The sum of what several threads have done, shown whenever it grows."""

    def __init__(self, show: ShowProgress = show_nothing, *, total: int = 0) -> None:
        self._show = show
        self._done, self._total = 0, total
        self._lock = threading.Lock()

    def expect(self, more: int) -> None:
        """Expect this much in addition to what is done."""
        with self._lock:
            self._total = self._done + more

    def add(self, done: int) -> None:
        """Add an amount that is done, and show the sum."""
        with self._lock:  # otherwise an older sum could be shown after a newer one
            self._done += done
            self._show(self._done, max(self._done, self._total) if self._total else 0)
