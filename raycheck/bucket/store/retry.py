"""The retry policy: how often a request is sent, how long each try may take, and when a thread must give up.

The clients' own retries are switched off, because a client that repeats a conditional write conflicts with itself and
reports a rival that does not exist. Two retries remain outside this file. When a connection breaks, aiohttp sends a PUT
once more, and that cannot be switched off. So a ConflictError does not prove that there is a rival, and callers read
again. obstore retries its own unconditional requests (`s3/obstore_store.py`).
"""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from enum import Enum
from typing import TypeVar

from raycheck.bucket.store.jitter import CHANCE
from raycheck.errors import RaycheckError, StoreError

ATTEMPTS = 5
"""The number of tries of a request. Refusals for too many requests do not count if there is a deadline."""
MAX_PAUSE_S = 20.0
LEAST_LEFT_S = 0.5
"""With less time until the deadline, a request is not sent again."""
REQUEST_TIMEOUT_S = 60.0
CONDITIONAL_TIMEOUT_S = 15.0
"""Shorter, so that several tries fit into a swap's deadline: the body is small, and the caller judges by effect."""
CLEAN_UP_S = 10.0
"""How long cleanup requests may take after a deadline has passed."""
T = TypeVar("T")
_deadline: ContextVar[float] = ContextVar("deadline", default=math.inf)
_repeats: ContextVar[list[str] | None] = ContextVar("repeats", default=None)
_refused: ContextVar[Callable[[], bool] | None] = ContextVar("refused", default=None)


class OverloadedError(StoreError):
    """The store refused a request because there are too many, or did not answer in time: send fewer at a time."""


class Repeat(Enum):
    """A choice of what may be sent again after an error."""

    NOTHING = "the answer would not change"
    UNCONDITIONAL = "it may have been applied: repeat only a request that may be applied twice"
    EVERYTHING = "it was rejected unread: repeat a conditional write as well"


@contextmanager
def ends_by(at: float) -> Iterator[None]:
    """Set a deadline for the requests that this thread starts inside the block.

    They are cancelled at the time `at` (of time.monotonic), are not repeated after it, and raise StoreError. Only
    obstore's reads are not cancelled; they end by their own timeout.
    """
    token = _deadline.set(at)
    try:
        yield
    finally:
        _deadline.reset(token)


def deadline() -> float:
    """Return this thread's deadline as a time of time.monotonic; it is infinite where none is set."""
    return _deadline.get()


@contextmanager
def noting_repeats() -> Iterator[list[str]]:
    """Yield a list to which is added why each request had to be sent again that this thread starts inside the block.

    Requests that obstore repeats on its own are not in it.
    """
    noted: list[str] = []
    token = _repeats.set(noted)
    try:
        yield noted
    finally:
        _repeats.reset(token)


@contextmanager
def noting_refusals(refused: Callable[[], bool]) -> Iterator[None]:
    """Call `refused` whenever a request that this thread starts inside the block gets an OverloadedError.

    refused: returns whether the request is still needed; if not, it is not sent again.
    """
    token = _refused.set(refused)
    try:
        yield
    finally:
        _refused.reset(token)


def note_refusal(error: RaycheckError) -> bool:
    """Tell `noting_refusals` around this call if the error is an OverloadedError. Return whether the request is still
    needed."""
    if isinstance(error, OverloadedError) and (refused := _refused.get()) is not None:
        return refused()
    return True


def retry(call: Callable[[], T], *, on: type[Exception], pauses_s: Iterable[float]) -> T:
    """Return the result of `call`, which is called again after an error of class `on`.

    pauses_s: seconds to wait before each further call; when they are used up, the last error is raised.
    """
    for pause_s in pauses_s:
        with suppress(on):
            return call()
        time.sleep(pause_s)
    return call()


def pause_bounds(attempt: int) -> tuple[float, float]:
    """Return how many seconds to wait at least and at most after this try, counted from 1, before the next one."""
    longest = min(MAX_PAUSE_S, 0.1 * 3 ** min(attempt, 9))
    return longest / 2, longest


async def send_with_retries(
    send: Callable[[], Awaitable[T]],
    judge: Callable[[Exception], tuple[RaycheckError, Repeat]],
    *,
    attempts: int,
    until: float,
    is_conditional: bool = False,
) -> T:
    """Return the result of `send`: on an event loop, up to `attempts` tries with a timeout each, until the deadline.

    While the store says that there are too many requests, only a deadline ends the tries: with hundreds of ranks, most
    requests of the first seconds are refused several times. judge: turns a client's error into a typed one, and decides
    what may be sent again after it. is_conditional: `send` is a conditional write, which is only repeated when it was
    certainly not applied.
    """
    timeout_s = CONDITIONAL_TIMEOUT_S if is_conditional else REQUEST_TIMEOUT_S
    tries = refusals = 0
    while True:
        tries += 1
        try:
            async with asyncio.timeout(min(timeout_s, until - time.monotonic())):
                return await send()
        except Exception as error:
            typed, repeat = judge(error)
            is_needed = note_refusal(typed)
            is_refused = isinstance(typed, OverloadedError) and not isinstance(error, TimeoutError)
            refusals += is_refused and is_needed and attempts > 1 and until < math.inf
            may_repeat = repeat is Repeat.EVERYTHING or (repeat is Repeat.UNCONDITIONAL and not is_conditional)
            left_s = until - time.monotonic()
            if not is_needed or not may_repeat or tries - refusals >= attempts or left_s < LEAST_LEFT_S:
                raise typed from error
            if (noted := _repeats.get()) is not None:
                noted.append(str(typed))
        await asyncio.sleep(min(CHANCE.uniform(*pause_bounds(tries)), left_s / 2))
