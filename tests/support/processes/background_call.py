"""Runs a call beside the test, with a deadline, and hands its result or its error back."""

import threading
from collections.abc import Callable, Iterable
from typing import Any


class InThread:
    """Starts the call in a thread at once; `join` returns what the call returned or raises what it raised."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call
        self._result: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def ends_within(self, timeout_s: float) -> bool:
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def join(self, timeout_s: float = 150.0) -> Any:
        assert self.ends_within(timeout_s), f"it did not end within {timeout_s:.0f} s"
        if self._error is not None:
            raise self._error
        return self._result

    def _run(self) -> None:
        try:
            self._result = self._call()
        except BaseException as error:
            self._error = error


def start_on_all(objects: Iterable[Any], method: str, *args: Any, **options: Any) -> list[InThread]:
    """Start a method of every object, each in a thread of its own, as the ranks of a training do."""
    return [InThread(lambda one=one: getattr(one, method)(*args, **options)) for one in objects]  # type: ignore[misc]


def on_all(objects: Iterable[Any], method: str, *args: Any, **options: Any) -> list[Any]:
    """Call a method of every object at the same time. Return what the calls returned, or raise what one has raised."""
    return [call.join() for call in start_on_all(objects, method, *args, **options)]
