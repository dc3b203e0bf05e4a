"""Reads from the bucket in threads, limited in number and time, and reads a live run once for all its tabs."""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from raycheck.views.context_pool import reads_for

T = TypeVar("T")
AT_ONCE = 16
"""How many views may read at a time. Each may have many requests in flight."""
LIVE_EVERY_S = 4.5
"""How long an answer about a live run is reused: slightly less than a tab's polling interval (static/page.js)."""
MAX_LIVE = 1000


class BusyError(Exception):
    """AT_ONCE views are already reading."""


class ViewThreads:
    """A pool of threads for views.

    A thread cannot be stopped from outside. So a call that exceeds its time keeps running and occupies its place until
    it ends. It does end, because none of its requests is started or retried after its time. A slow bucket can make the
    page refuse views for a while, but never takes threads from anything else.
    """

    def __init__(self, *, at_once: int = AT_ONCE, timeout_s: float) -> None:
        self._at_once = at_once
        self._timeout_s = timeout_s
        self._pool = ThreadPoolExecutor(at_once, thread_name_prefix="raycheck-view")
        self._lock = threading.Lock()
        self._under_way = 0

    async def read(self, call: Callable[[], T]) -> T:
        """Return the result of `call`. Raises TimeoutError, and BusyError at once if all places are taken."""

        def within_time() -> T:
            with reads_for(self._timeout_s):
                return call()

        return await self.do(within_time)

    async def do(self, call: Callable[[], T]) -> T:
        """Do the same as `read` for a call that changes something: its requests are not cut off."""
        with self._lock:
            if self._under_way >= self._at_once:
                raise BusyError
            self._under_way += 1
        told = self._pool.submit(call)
        told.add_done_callback(self._ended)
        return await asyncio.wait_for(asyncio.wrap_future(told), self._timeout_s)

    def _ended(self, told: Future[Any]) -> None:
        del told
        with self._lock:
            self._under_way -= 1

    def close(self) -> None:
        """Let the threads exit when their current calls end."""
        self._pool.shutdown(wait=False, cancel_futures=True)


@dataclass(frozen=True, slots=True)
class _Answer:
    at: float
    told: "asyncio.Task[Any]"


class LiveAnswers:
    """A cache that reads a run at most once per LIVE_EVERY_S, however many tabs show it. Use it on one event loop."""

    def __init__(
        self,
        ask: Callable[[str], Awaitable[Any]],
        *,
        every_s: float = LIVE_EVERY_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ask = ask
        self._every_s = every_s
        self._clock = clock
        self._answers: dict[str, _Answer] = {}

    async def get(self, name: str) -> Any:
        """Return the answer for the run `name`, at most every_s seconds old."""
        now = self._clock()
        known = self._answers.get(name)
        if known is None or now - known.at >= self._every_s:
            self._forget(before=now - self._every_s)
            known = self._answers[name] = _Answer(now, asyncio.ensure_future(self._asked(name)))
        return await asyncio.shield(known.told)  # another tab may be waiting for it too

    async def _asked(self, name: str) -> Any:
        return await self._ask(name)

    def _forget(self, *, before: float) -> None:
        """Drop old answers, and the oldest ones beyond MAX_LIVE, because names come from URLs that anyone may type."""
        fresh = {name: answer for name, answer in self._answers.items() if answer.at > before}
        self._answers = dict(list(fresh.items())[-MAX_LIVE + 1 :])
