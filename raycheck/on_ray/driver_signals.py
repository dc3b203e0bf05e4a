"""Saves when the driver gets a signal: SIGUSR1, or SIGTERM, with which jobs are stopped.

SIGTERM ends the driver as before, but only after the save.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from raycheck.log import event, logger

SIGNALS = (signal.SIGUSR1, signal.SIGTERM)


@contextmanager
def saves_on_signals(save: Callable[[], bool]) -> Iterator[None]:
    """Save on each signal during the block.

    save: has the run saved, and returns whether that was committed. Each signal still has its previous effect: SIGTERM
    after the save, a user's handler of SIGUSR1 immediately. An ignored signal stays ignored. Outside the main thread,
    where Python receives no signals, this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in SIGNALS}
    before = {number: handler for number, handler in before.items() if handler not in (None, signal.SIG_IGN)}
    is_saved = threading.Event()

    def answer(number: int) -> None:
        name = signal.Signals(number).name
        try:
            end = "a save is committed" if save() else "no save was committed in time"
        except Exception as error:  # noqa: BLE001  the driver may already be ending
            end = f"no save: {error}"
        logger.warning(event(f"{name}: {end}"))
        if number == signal.SIGTERM:
            is_saved.set()
            os.kill(os.getpid(), number)

    def hear(number: int, frame: FrameType | None) -> None:
        handler: Any = before[signal.Signals(number)]
        if number == signal.SIGTERM and is_saved.is_set():
            is_saved.clear()
            if callable(handler):
                handler(number, frame)
            else:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            return
        threading.Thread(target=answer, args=(number,), name="raycheck-signal", daemon=True).start()
        if number == signal.SIGUSR1 and callable(handler):
            handler(number, frame)

    for number in before:
        signal.signal(number, hear)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
