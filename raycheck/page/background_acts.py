"""Lets a long act go on in the background, and says how far it is. One at a time: each may need much memory."""

import threading
from collections.abc import Callable
from dataclasses import dataclass

from raycheck.errors import ConfigError, RaycheckError


@dataclass
class BackgroundAct:
    """Is an act under way, or one that has ended. text: how far it is, or what came of it."""

    text: str = "begun"
    is_done: bool = False
    has_failed: bool = False


class BackgroundActs:
    """Holds the acts of one page's server, the newest last."""

    def __init__(self) -> None:
        self._acts: dict[str, BackgroundAct] = {}
        self._lock = threading.Lock()

    def start(self, work: Callable[[Callable[[str], None]], str]) -> str:
        """Starts `work` in a thread; it is given a function that takes its progress. Returns the act's id.

        Raises ConfigError while another one is under way.
        """
        with self._lock:
            if any(not act.is_done for act in self._acts.values()):
                raise ConfigError("another act of this page is still under way; wait until it has ended")
            number = str(len(self._acts) + 1)
            act = self._acts[number] = BackgroundAct()

        def run() -> None:
            def told(text: str) -> None:
                act.text = text

            try:
                act.text = work(told)
            except RaycheckError as error:
                act.text, act.has_failed = str(error), True
            except Exception as error:  # noqa: BLE001  the page says what it was; the server goes on
                act.text, act.has_failed = f"{type(error).__name__}: {error}", True
            finally:
                act.is_done = True

        threading.Thread(target=run, name="raycheck-act", daemon=True).start()
        return number

    def get(self, number: str) -> BackgroundAct | None:
        """Returns the act with this id; None when there is none."""
        return self._acts.get(number)
