"""Counts the work of raycheck's code by its executed lines: the same on every machine, however busy it is."""

import sys
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import raycheck

PACKAGE = str(Path(raycheck.__file__).parent)


class Lines:
    """The number of lines that all threads have executed in raycheck's code, and in other code that is given."""

    def __init__(self, *, also: Collection[CodeType] = (), background: Collection[CodeType] = ()) -> None:
        """also: further code that counts. background: code that does not, nor what its thread does until it returns."""
        self._also = also
        self._background = background
        self._made: dict[int, int] = {}  # by thread
        self._in_background: set[int] = set()  # threads

    def __call__(self) -> float:
        return sum(self._made.values())

    @contextmanager
    def counted(self) -> Iterator[None]:
        threading.settrace(self._enter)
        sys.settrace(self._enter)
        try:
            yield
        finally:
            sys.settrace(None)
            threading.settrace(None)  # type: ignore[arg-type]

    def _enter(self, frame: FrameType, event: str, arg: Any) -> Any:
        thread = threading.current_thread()
        if frame.f_code in self._background:
            self._in_background.add(thread.ident or 0)
            return self._until_it_returns
        if thread.ident in self._in_background or thread.name.startswith("raycheck-records"):
            return None
        is_counted = frame.f_code in self._also or frame.f_code.co_filename.startswith(PACKAGE)
        return self._count if is_counted else None

    def _until_it_returns(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "return":
            self._in_background.discard(threading.get_ident())
        return self._until_it_returns

    def _count(self, frame: FrameType, event: str, arg: Any) -> Any:
        thread = threading.get_ident()
        self._made[thread] = self._made.get(thread, 0) + 1
        return self._count
