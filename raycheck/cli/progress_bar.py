"""The progress bar of long commands: the amount done, the rate, and the time left."""

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
    """A bar on stderr, called with the amount done and the total, which is 0 while it is unknown.

    It appears at the first call. Several threads may call it. If stderr is not a terminal, nothing is written.
    """

    def __init__(self, unit: str) -> None:
        console = Console(stderr=True, highlight=False)
        done = (
            (DownloadColumn(), TransferSpeedColumn()) if unit == "bytes" else (MofNCompleteColumn(), TextColumn(unit))
        )
        columns: list[ProgressColumn] = [BarColumn(), *done, TextColumn("time left"), TimeRemainingColumn()]
        # stdout stays unchanged: it may be a pipe to another program, and rich would redirect its output to stderr.
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
        """Remove the bar so that a line can be printed. The next call shows it again."""
        with self._lock:
            if not self._bar.disable:
                self._bar.stop()


@contextmanager
def progress_bar(unit: str = "bytes") -> Iterator[ProgressBar]:
    """Yield a bar that disappears at the end of the block. unit: what it counts."""
    bar = ProgressBar(unit)
    try:
        yield bar
    finally:
        bar.clear()
