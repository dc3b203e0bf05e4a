"""Acts at every await point of some coroutines of this project, so that a test needs no timing to meet a race.

Give `Watched` tasks by an event loop's task factory. A point is named by the functions of raycheck that wait, from the
outermost to the innermost, and by their lines: as a coroutine's frames say it while it is suspended.
"""

import asyncio
from collections.abc import Callable, Coroutine
from types import CodeType
from typing import Any


class Watched(Coroutine[Any, Any, Any]):
    """A coroutine that calls `at("resumed", point)` before it goes on, and `at("suspended", point)` when it waits."""

    def __init__(self, inner: Any, at: Callable[[str, str], None]) -> None:
        self._inner, self._at = inner, at

    def send(self, value: Any) -> Any:
        return self._step(lambda: self._inner.send(value))

    def throw(self, *error: Any) -> Any:
        return self._step(lambda: self._inner.throw(*error))

    def close(self) -> None:
        self._inner.close()

    def __await__(self) -> Any:
        return self._inner.__await__()

    def _step(self, step: Callable[[], Any]) -> Any:
        self._at("resumed", point_of(self._inner))
        found = step()
        self._at("suspended", point_of(self._inner))
        return found


def point_of(waiting: Any) -> str:
    """Where a coroutine waits, e.g. "ModelQueue._run:95 ModelQueue._result_of:161 ModelQueue._open:194"."""
    frames = []
    while is_ours(getattr(waiting, "cr_code", None)):
        frames.append(f"{waiting.cr_code.co_qualname}:{waiting.cr_frame.f_lineno if waiting.cr_frame else 'end'}")
        waiting = waiting.cr_await
    return " ".join(frames)


def is_ours(code: CodeType | None) -> bool:
    return code is not None and "/raycheck/" in code.co_filename and "/tests/" not in code.co_filename


def watch(loop: asyncio.AbstractEventLoop, prefix: str, at: Callable[[str, str], None]) -> None:
    """Watch all tasks of the loop whose coroutine's qualified name begins with `prefix`."""

    def make(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
        is_watched = getattr(coroutine, "__qualname__", "").startswith(prefix)
        return asyncio.Task(Watched(coroutine, at) if is_watched else coroutine, loop=loop, **options)

    loop.set_task_factory(make)
