"""Runs long actions in the background, one at a time since each may need much memory, and reports their progress."""

import threading
from collections.abc import Callable
from dataclasses import dataclass

from raycheck.errors import ConfigError, RaycheckError


@dataclass
class BackgroundAct:
    """An action, running or ended. text: its progress or its result."""

    text: str = "begun"
    is_done: bool = False
    has_failed: bool = False


class BackgroundActs:
    """The actions of one page server, newest last."""

    def __init__(self) -> None:
        self._acts: dict[str, BackgroundAct] = {}
        self._lock = threading.Lock()

    def start(self, work: Callable[[Callable[[str], None]], str]) -> str:
        """Start `work` in a thread, and give it a function that receives its progress. Returns the action's id.

        Raises ConfigError while another action is running.
        """
        with self._lock:
            if any(not act.is_done for act in self._acts.values()):
                raise ConfigError("another action of this page is still running; wait until it has ended")
            number = str(len(self._acts) + 1)
            act = self._acts[number] = BackgroundAct()

        def run() -> None:
            def told(text: str) -> None:
                act.text = text

            try:
                act.text = work(told)
            except RaycheckError as error:
                act.text, act.has_failed = str(error), True
            except Exception as error:  # noqa: BLE001  the page shows the error; the server continues
                act.text, act.has_failed = f"{type(error).__name__}: {error}", True
            finally:
                act.is_done = True

        threading.Thread(target=run, name="raycheck-act", daemon=True).start()
        return number

    def get(self, number: str) -> BackgroundAct | None:
        """Return the action with this id, or None if there is none."""
        return self._acts.get(number)
