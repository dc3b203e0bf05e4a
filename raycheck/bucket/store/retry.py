"""What the stores behind a network share: requests on fsspec's event loop, each with a time-out and repeated here.

A backend says what one request is (`call`, given its client) and what an error means (`_translate`); how often a
request is sent, and that a conditional write is not sent twice, stands in this file alone. The clients' own retries are
off: a client that repeats a conditional write collides with itself and reports a rival that does not exist. (aiohttp
cannot be told: on a broken connection it sends a PUT once more. So a ConflictError proves no rival; callers look.)

Bodies go out as `Pieces`: copies of 1 MiB, so that what a connection still holds when a request has failed is never the
caller's buffer. It is faster than handing over a whole part, which asyncio would copy at once and cut again.
"""

import asyncio
import email.utils
import math
import os
import ssl
import time
from abc import abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from enum import Enum
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any, Self, TypeVar

from fsspec.asyn import get_loop

from raycheck.bucket.store.deadline import CLEAN_UP_S, deadline, ends_by
from raycheck.bucket.store.interface import Buffer, ChangedError, Store, check_length, check_process
from raycheck.bucket.store.jitter import CHANCE
from raycheck.errors import ConfigError, RaycheckError, StoreError

ATTEMPTS = 5
REQUEST_TIMEOUT_S = 60.0
CONDITIONAL_TIMEOUT_S = 15.0  # small, and judged by effect afterwards: several tries fit into a swap's deadline
PIECE_BYTES = 1024 * 1024
_WAKE_EVERY_S = 1.0  # Ctrl-C may be told to any thread of the process, and is heard by the main one when it wakes
T = TypeVar("T")
P = TypeVar("P")


class Repeat(Enum):
    """What may be sent again after an error."""

    NOTHING = "the answer would be the same"
    UNCONDITIONAL = "it may have been applied: only what can be applied twice"
    EVERYTHING = "it was turned away unread: a conditional write as well"


class RemoteStore(Store):
    """One bucket and prefix behind a client whose coroutines run on fsspec's loop."""

    def __init__(self, uri: str) -> None:
        self.uri = uri
        self._process = os.getpid()

    @abstractmethod
    async def _client(self) -> Any:
        """What each `call` is given."""

    @abstractmethod
    def _translate(self, key: str, error: Exception) -> tuple[RaycheckError, Repeat]:
        """The typed error, and what may be sent again after it."""

    @abstractmethod
    async def _range(self, key: str, start: int, stop: int, client: Any) -> bytes:
        """One request for the bytes from `start` to `stop`; fewer where the object ends before."""

    def get_range(self, key: str, start: int, stop: int) -> Buffer:
        if start == stop:
            return b""
        data = self._run(key, partial(self._range, key, start, stop))
        return check_length(self.uri, key, data, start, stop)

    def _run(self, key: str, call: Callable[[Any], Awaitable[T]], *, attempts: int = ATTEMPTS) -> T:
        return self._start(key, call, attempts=attempts).result()

    def _run_conditional(self, key: str, call: Callable[[Any], Awaitable[T]]) -> T:
        """Once, except after an answer that says it was turned away unread."""
        check_process(self.uri, self._process)
        return asyncio.run_coroutine_threadsafe(
            self._repeated(key, call, ATTEMPTS, CONDITIONAL_TIMEOUT_S, deadline(), is_conditional=True), get_loop()
        ).result()

    def _start(self, key: str, call: Callable[[Any], Awaitable[T]], *, attempts: int = ATTEMPTS) -> Future[T]:
        check_process(self.uri, self._process)
        return asyncio.run_coroutine_threadsafe(
            self._repeated(key, call, attempts, REQUEST_TIMEOUT_S, deadline(), is_conditional=False), get_loop()
        )

    async def _repeated(
        self,
        key: str,
        call: Callable[[Any], Awaitable[T]],
        attempts: int,
        timeout_s: float,
        until: float,
        *,
        is_conditional: bool,
    ) -> T:
        for attempt in range(1, attempts + 1):
            pause_s = CHANCE.uniform(0.5, 1.0) * 0.1 * 3**attempt
            try:
                async with asyncio.timeout(min(timeout_s, until - time.monotonic())):
                    return await call(await self._client())
            except Exception as error:
                translated, repeat = self._judge(key, error)
                may_repeat = repeat is Repeat.EVERYTHING or (repeat is Repeat.UNCONDITIONAL and not is_conditional)
                if not may_repeat or attempt == attempts or time.monotonic() + pause_s > until:
                    raise translated from error
            await asyncio.sleep(pause_s)
        raise AssertionError("unreachable: the last attempt returns or raises")

    def _clean_up(self, key: str, call: Callable[[Any], Awaitable[object]]) -> None:
        """After an error that matters more than this one, and a deadline that may have passed."""
        with suppress(RaycheckError), ends_by(time.monotonic() + CLEAN_UP_S):
            self._run(key, call, attempts=1)

    def _judge(self, key: str, error: Exception) -> tuple[RaycheckError, Repeat]:
        if isinstance(error, RaycheckError):
            return error, Repeat.NOTHING
        if isinstance(error, TimeoutError):
            return StoreError(f"{self.uri}: {key}: no answer in time"), Repeat.UNCONDITIONAL
        if isinstance(error, ChangedError):
            return StoreError(f"{self.uri}: {key}: {error}"), Repeat.UNCONDITIONAL
        if (broken := _tls_error(error)) is not None:
            return StoreError(f"{self.uri}: {_no_tls(broken)}"), Repeat.NOTHING
        return self._translate(key, error)


def until_deadline(start: Callable[[], Awaitable[T]]) -> T:
    """What a client of another kind `start`s, broken off at the deadline of this thread, or when the thread is
    interrupted. Raises TimeoutError at the deadline."""
    until = deadline()

    async def bounded() -> T:
        async with asyncio.timeout(None if until == math.inf else until - time.monotonic()):
            return await start()

    future = asyncio.run_coroutine_threadsafe(bounded(), get_loop())
    try:
        while not wait([future], timeout=_WAKE_EVERY_S).done:
            pass
        return future.result()
    except BaseException:
        future.cancel()
        raise


def send_parts(parts: Iterable[P], start: Callable[[int, P], Future[T]], *, in_flight: int) -> list[T]:
    """`start` each part with its number from 1, so many at a time, pulling the next one while they fly.

    When it raises, every request that was started has ended: the buffer behind the parts is free again.
    """
    sent: list[Future[T]] = []
    try:
        for number, part in enumerate(parts, 1):
            sent.append(start(number, part))
            flying = [future for future in sent if not future.done()]
            if len(flying) >= in_flight:
                wait(flying, return_when=FIRST_COMPLETED)
            for future in sent:
                if future.done():
                    future.result()
        return [future.result() for future in sent]
    except BaseException:
        wait(sent)  # each is bounded by its attempts and their time-outs
        raise


class Pieces:
    """A request's body, as often as it is asked for. After `with` nothing reads it any more, nor could.

    What iterates may outlive its request: a failure cancels aiohttp's writer, which the loop ends a turn later.
    """

    def __init__(self, *buffers: Buffer) -> None:
        self._views = [memoryview(buffer).cast("B") for buffer in buffers]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for view in self._views:
            view.release()

    @property
    def size_bytes(self) -> int:
        return sum(len(view) for view in self._views)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for view in self._views:
            for at in range(0, len(view), PIECE_BYTES):
                yield bytes(view[at : at + PIECE_BYTES])


def _tls_error(error: BaseException | None) -> ssl.SSLError | None:
    """The failed handshake behind a client's error, if the next one would fail alike."""
    while error is not None:
        if isinstance(error, ssl.SSLCertVerificationError) or getattr(error, "reason", "") == "WRONG_VERSION_NUMBER":
            found = getattr(error, "certificate_error", error)  # aiohttp wraps it in a class of the same kind
            return found if isinstance(found, ssl.SSLError) else None
        error = error.__cause__ or error.__context__
    return None


def _no_tls(error: ssl.SSLError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return (
            f"the server's certificate is not trusted on this node ({getattr(error, 'verify_message', error)}): set "
            "StorageSettings(ca_bundle=...) or correct the endpoint's host name"
        )
    return (
        "the server speaks plain HTTP where https:// was asked for: write http:// in StorageSettings(endpoint=...), or "
        "&scheme=http beside endpoint_override in the URI"
    )


def said(*words: object) -> str:
    """What a store said of a refusal, less what it left out: answers without a body have neither code nor message."""
    return " ".join(str(word) for word in words if word) or "no reason given"


def not_accepted(uri: str, said: str) -> ConfigError:
    """For credentials that have expired or are wrong, as opposed to right ones that may not do something."""
    return ConfigError(f"{uri}: the store does not accept these credentials ({said}); renew or correct them")


def bucket_time(date: str | None) -> float:
    """The bucket's clock, from an answer's Date header. Ages are differences of these, never of a host's clock."""
    return email.utils.parsedate_to_datetime(date).timestamp() if date else time.time()


def optional_import(module: str, *, extra: str) -> ModuleType:
    """A store client that not every user has. Raises ConfigError that says how to get it."""
    try:
        return import_module(module)
    except ImportError as error:
        raise ConfigError(f"{error.name or module} is not installed: pip install 'raycheck[{extra}]'") from error
