"""By when the requests of a thread must have ended: a save's deadline, as the stores see it."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_deadline: ContextVar[float] = ContextVar("deadline", default=math.inf)


@contextmanager
def ends_by(at: float) -> Iterator[None]:
    """Requests that this thread begins inside are not repeated after that moment (of time.monotonic), and those of
    fsspec's clients are broken off; obstore's end by their own time-out. They raise StoreError then."""
    token = _deadline.set(at)
    try:
        yield
    finally:
        _deadline.reset(token)


def deadline() -> float:
    """Infinite where nobody has set one."""
    return _deadline.get()
