"""The bar that long commands show: the bytes that are done, the rate and the time left."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn


@contextmanager
def progress_bar() -> Iterator[Callable[[int, int], None]]:
    """Yields what is told the bytes done and those in all, and shows both on stderr, with the rate and the time left.

    It can be called from several threads. A total of 0 means that nobody knows it yet. Where stderr is no terminal,
    nothing is written. The bar is gone when the command has ended.
    """
    console = Console(stderr=True, highlight=False)
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TextColumn("time left"), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total or None)
