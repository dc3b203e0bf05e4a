"""The bar that long commands show: what is done, the rate and the time left."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)


class ProgressBar:
    """Shows on stderr what it is called with: what is done, and what there is in all, 0 when nobody knows it yet.

    It appears with the first call. Several threads may call it. Where stderr is no terminal, nothing is written.
    """

    def __init__(self, unit: str) -> None:
        console = Console(stderr=True, highlight=False)
        done = (
            (DownloadColumn(), TransferSpeedColumn()) if unit == "bytes" else (MofNCompleteColumn(), TextColumn(unit))
        )
        columns: list[ProgressColumn] = [BarColumn(), *done, TextColumn("time left"), TimeRemainingColumn()]
        # stdout stays as it is: it may be a pipe to another program, and rich would write to stderr what goes there.
        self._bar = Progress(
            *columns, console=console, transient=True, disable=not console.is_terminal, redirect_stdout=False
        )
        self._task = self._bar.add_task("", total=None)
        self._lock = threading.Lock()

    def __call__(self, done: int, total: int) -> None:
        with self._lock:
            self._bar.start()
            self._bar.update(self._task, completed=done, total=total or None)

    def clear(self) -> None:
        """Takes the bar away, so that a line can be printed. The next call brings it back."""
        with self._lock:
            if not self._bar.disable:
                self._bar.stop()


@contextmanager
def progress_bar(unit: str = "bytes") -> Iterator[ProgressBar]:
    """Yield a bar that is gone when the block has ended. unit: what it counts."""
    bar = ProgressBar(unit)
    try:
        yield bar
    finally:
        bar.clear()
