"""Signals to the driver: SIGUSR1 asks for a save, and so does SIGTERM, by which jobs are stopped, before it ends it."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from raycheck.train.log import logger

SIGNALS = (signal.SIGUSR1, signal.SIGTERM)


@contextmanager
def saves_on_signals(save: Callable[[], bool]) -> Iterator[None]:
    """save: has the run saved; whether that was committed. Outside the main thread, where no signal can be heard,
    nothing happens. After a SIGTERM the signal does what it would have done here."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before: dict[int, Any] = {}
    is_over = False

    def answer(number: int) -> None:
        nonlocal is_over
        name = signal.Signals(number).name
        try:
            end = "a save is committed" if save() else "no save was committed in time"
        except Exception as error:  # noqa: BLE001  the driver may be ending already
            end = f"no save: {error}"
        logger.warning("%s: %s", name, end)
        if number == signal.SIGTERM:
            is_over = True
            os.kill(os.getpid(), number)

    def hear(number: int, frame: FrameType | None) -> None:
        if not is_over:
            threading.Thread(target=answer, args=(number,), name="raycheck-signal", daemon=True).start()
        elif callable(before[number]):
            before[number](number, frame)
        else:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    before.update({number: signal.signal(number, hear) for number in SIGNALS})
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
