"""By when the requests of a thread must have ended: a save's deadline, as the stores see it."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

CLEAN_UP_S = 10.0
"""How long requests after a deadline may take that leave nothing behind."""
_deadline: ContextVar[float] = ContextVar("deadline", default=math.inf)


@contextmanager
def ends_by(at: float) -> Iterator[None]:
    """Requests that this thread begins inside are broken off at that moment (of time.monotonic) and not repeated after
    it; obstore's reads end by their own time-out. They raise StoreError then."""
    token = _deadline.set(at)
    try:
        yield
    finally:
        _deadline.reset(token)


def deadline() -> float:
    """Infinite where nobody has set one."""
    return _deadline.get()
