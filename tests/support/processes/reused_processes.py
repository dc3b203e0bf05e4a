"""Ray actors for the tests whose processes live on: to start one costs seconds of importing torch, Ray and raycheck.

    @reused
    class Rank: ...

    rank = Rank.remote(0, 2)       # in a process that an earlier test is done with, if there is one
    ray.get(rank.train.remote(3))
    ray.kill(rank.actor)

`take_back` ends what a test has made. A process in which a thread of raycheck's is left then, for example of a Checkpointer
that was never closed, is killed and not used again.
"""

import gc
import threading
import time
from typing import Any

import ray

SETTLES_IN_S = 10.0
_idle: list[Any] = []
_lent: list["Handle"] = []


@ray.remote(num_cpus=0)
class _Process:
    """Holds one object at a time."""

    def begin(self, kind: type, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        self._held: Any = None
        self._failure: Exception | None = None
        try:
            self._held = kind(*args, **options)
        except Exception as error:  # every call raises it, as those of an actor that could not be made
            self._failure = error

    def call(self, method: str, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        if self._failure is not None:
            raise self._failure
        return getattr(self._held, method)(*args, **options)

    def end(self) -> bool:
        """Drops the object. Returns whether nothing of raycheck's runs any more."""
        self._held = None
        gc.collect()
        return not [thread for thread in threading.enumerate() if thread.name.startswith("raycheck")]


class Handle:
    """Calls the object in its process as a Ray actor is called: handle.method.remote(...). `actor` is the process."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor

    def __getattr__(self, method: str) -> "_Method":
        return _Method(self.actor, method)


class _Method:
    def __init__(self, actor: Any, name: str) -> None:
        self._actor = actor
        self._name = name

    def remote(self, *args: Any, **options: Any) -> Any:
        return self._actor.call.remote(self._name, args, options)


class _Reused:
    def __init__(self, kind: type) -> None:
        self._kind = kind

    def remote(self, *args: Any, **options: Any) -> Handle:
        actor: Any = _idle.pop() if _idle else _Process.remote()
        actor.begin.remote(self._kind, args, options)
        _lent.append(Handle(actor))
        return _lent[-1]


def reused(kind: type) -> _Reused:
    return _Reused(kind)


def take_back() -> None:
    """Ends the objects of the test that is over, and keeps their processes for the next ones."""
    ends = [(handle.actor, handle.actor.end.remote()) for handle in _lent]
    _lent.clear()
    deadline = time.monotonic() + SETTLES_IN_S
    for actor, end in ends:
        try:
            is_clean = ray.get(end, timeout=max(0.1, deadline - time.monotonic()))
        except ray.exceptions.RayError:
            is_clean = False
        if is_clean:
            _idle.append(actor)
        else:
            ray.kill(actor)
