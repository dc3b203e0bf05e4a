"""Runs processes one store call at a time, on a bucket whose every fault the test chooses (fault_injection.py).

There are two ways to run one. `play` runs it to its end by a script, at full speed in this thread. `Task` runs it in a
thread of its own that stops before every call until the test says `go`, so that a test can interleave several of them.
Exactly one thread ever runs, and under `simulated` no real time passes: equal choices give equal runs.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from types import TracebackType
from typing import Any, Self
from uuid import UUID

import pytest

from raycheck.bucket import reading
from raycheck.bucket.format import latest, manifest
from raycheck.bucket.format.object_keys import HISTORY_PREFIX
from raycheck.bucket.protocol import preflight, repair, rewind, swap
from raycheck.bucket.protocol.removal import prune_and_sweep
from raycheck.bucket.protocol.sharing import holds
from raycheck.bucket.store import retry
from raycheck.errors import RaycheckError
from tests.support.servers.fault_injection import Call, Crashed, Mode, Wire, World

STEP_DEADLINE_S = 30.0
"""The real time after which a task that neither stops at a call nor ends fails its test: it may wait for a lock."""


def play(world: World, work: Callable[[Wire], Any], choose: Callable[[int, Call], Mode | None]) -> Any:
    """Run one process to its end in this thread. choose: the mode of its n-th call, from 0; None crashes it there.

    Returns the value, the RaycheckError that ended it, or a Crashed.
    """
    number = -1
    is_dead = False

    def ask(call: Call) -> Mode:
        nonlocal number, is_dead
        number += 1
        mode = None if is_dead else choose(number, call)
        if mode is None:
            is_dead = True
            raise Crashed
        return mode

    try:
        return work(Wire(world, ask))
    except (RaycheckError, Crashed) as outcome:
        return outcome


class Task:
    """Runs one process up to its next store call. Two tasks must not share a lock, so each has its Register."""

    def __init__(self, world: World, work: Callable[[Wire], Any]) -> None:
        self.pending: Call | None = None
        self.wire = Wire(world, self._stop)
        self._mode: Mode | None = Mode.APPLY
        self._outcome: Any = None
        self._work = work
        self._may_go, self._has_stopped = threading.Lock(), threading.Lock()  # each is let go by the other thread
        self._may_go.acquire()
        self._has_stopped.acquire()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self._wait()

    @property
    def is_done(self) -> bool:
        return self.pending is None

    def go(self, mode: Mode = Mode.APPLY) -> None:
        """Let the pending call go as `mode` says, and run on to the next one."""
        assert self.pending is not None, "this task is done"
        self._mode = mode
        self._may_go.release()
        self._wait()

    def crash(self) -> None:
        """Let the process die before its pending call. Does nothing to one that is done."""
        if not self.is_done:
            self._mode = None
            self._may_go.release()
            self._wait()

    def finish(self) -> Any:
        """Run on without faults to the end."""
        while not self.is_done:
            self.go()
        return self.result()

    def result(self) -> Any:
        """Return its value, the RaycheckError that ended it, or a Crashed. Raises any other error that it raised."""
        assert self.is_done
        if isinstance(self._outcome, BaseException) and not isinstance(self._outcome, RaycheckError | Crashed):
            raise self._outcome
        return self._outcome

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.crash()

    def _run(self) -> None:
        try:
            self._outcome = self._work(self.wire)
        except BaseException as error:
            self._outcome = error
        self.pending = None
        self._has_stopped.release()

    def _stop(self, call: Call) -> Mode:
        if self._mode is not None and call.key.startswith(HISTORY_PREFIX):
            return Mode.APPLY  # no process decides anything by the history, so the order of these calls is no matter
        if self._mode is not None:
            self.pending = call
            self._has_stopped.release()
            if not self._may_go.acquire(timeout=STEP_DEADLINE_S):
                self._mode = None
        if self._mode is None:
            raise Crashed
        return self._mode

    def _wait(self) -> None:
        assert self._has_stopped.acquire(timeout=STEP_DEADLINE_S), f"{self.pending} neither stops nor ends"


class Clock:
    """Replaces `time` and `uuid4` under `simulated`: host time passes only in sleeps, and ids are counted."""

    def __init__(self) -> None:
        self.now = 1e6
        self.next_id = 1  # set back, a run is repeated to the byte; two processes in one bucket must not get the same

    def uuid4(self) -> UUID:
        self.next_id += 1
        return UUID(int=self.next_id << 80)  # its first digits, which some take alone, are the number

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def time(self) -> float:
        return self.now

    monotonic = time


class InOrder:
    """Replaces a thread pool: the deletes of a sweep come one after another, in the order of their keys."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.map = map

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


@contextmanager
def simulated() -> Iterator[Clock]:
    """Make backoffs and deadlines cost no real time, and a process have one thread, inside of this context."""
    clock = Clock()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(swap, "time", clock)
        patch.setattr(retry, "time", clock)
        for module in (preflight, rewind, repair):
            patch.setattr(module, "uuid4", clock.uuid4)
        patch.setattr(prune_and_sweep, "ThreadPoolExecutor", InOrder)
        for module in (latest, manifest, holds):  # a third of the work: few documents, often
            patch.setattr(module, "load", lru_cache(maxsize=20_000)(module.load))
        patch.setattr(reading, "load_index", lru_cache(maxsize=100)(reading.load_index))
        yield clock
