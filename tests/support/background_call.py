"""Runs a call beside the test, with a deadline, and hands its result or its error back."""

import threading
from collections.abc import Callable
from typing import Any


class InThread:
    """Starts the call in a thread at once; `join` returns what the call returned or raises what it raised."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call
        self._result: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def join(self, timeout_s: float = 150.0) -> Any:
        self._thread.join(timeout_s)
        assert not self._thread.is_alive(), f"it did not end within {timeout_s:.0f} s"
        if self._error is not None:
            raise self._error
        return self._result

    def _run(self) -> None:
        try:
            self._result = self._call()
        except BaseException as error:
            self._error = error
