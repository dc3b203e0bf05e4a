"""The common part of the stores behind a network: requests run on fsspec's event loop and are retried by retry.py.

A backend defines what one request is (an async function that receives its client) and what an error means
(`_translate`).
"""

import asyncio
import copy
import email.utils
import math
import os
import ssl
import time
from abc import abstractmethod
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any, Self, TypeVar

from fsspec.asyn import get_loop

from raycheck.bucket.store.address import located, shown_uri
from raycheck.bucket.store.interface import Buffer, ChangedError, Store, check_length, check_process
from raycheck.bucket.store.retry import (
    ATTEMPTS,
    CLEAN_UP_S,
    OverloadedError,
    Repeat,
    deadline,
    ends_by,
    send_with_retries,
)
from raycheck.errors import ConfigError, RaycheckError, StoreError

_WAKE_EVERY_S = 1.0
"""Ctrl-C may reach any thread of the process, but only the main thread handles it, and only when it wakes."""
T = TypeVar("T")


class RemoteStore(Store):
    """A store behind a network: runs the requests for one bucket and prefix on fsspec's event loop."""

    def __init__(self, uri: str, *, prefix: str) -> None:
        self.uri = uri
        self._prefix = f"{prefix}/" if prefix else ""
        self._process = os.getpid()

    @property
    def root_path(self) -> str:
        return self._prefix.rstrip("/")

    def _rerooted(self, way: str, uri: str) -> Self:
        other = copy.copy(self)
        other.uri, other._prefix = uri, self._full(f"{way}/")  # noqa: SLF001
        return other

    def together(self, *calls: Callable[[], T]) -> list[T]:
        with ThreadPoolExecutor(len(calls), thread_name_prefix="raycheck-together") as pool:
            begun = [pool.submit(copy_context().run, call) for call in calls]  # with this thread's deadline
        return [call.result() for call in begun]

    def _full(self, key: str) -> str:
        """Return the key in the bucket for a key or prefix that is relative to the root."""
        return located(self._prefix, key)

    @abstractmethod
    async def _client(self) -> Any:
        """Return the client that each request receives."""

    @abstractmethod
    def _translate(self, key: str, error: Exception) -> tuple[RaycheckError, Repeat]:
        """Return the typed error for a client's error, and what may be sent again after it."""

    @abstractmethod
    async def _range(self, key: str, start: int, stop: int, client: Any) -> bytes:
        """Request once the bytes from `start` to `stop`; return fewer where the object ends before."""

    def get_range(self, key: str, start: int, stop: int) -> Buffer:
        if start == stop:
            return b""
        data = self._run(key, partial(self._range, key, start, stop))
        return check_length(self.uri, key, data, start, stop)

    def _run(self, key: str, call: Callable[[Any], Awaitable[T]], *, attempts: int = ATTEMPTS) -> T:
        """Return the result of the request `call`, which may be sent several times."""
        return self._start(key, call, attempts=attempts).result()

    def _run_conditional(self, key: str, call: Callable[[Any], Awaitable[T]]) -> T:
        """Send a conditional write once, and again only after a response that says it was rejected unread."""
        return self._start(key, call, is_conditional=True).result()

    def _start(
        self,
        key: str,
        call: Callable[[Any], Awaitable[T]],
        *,
        attempts: int = ATTEMPTS,
        is_conditional: bool = False,
    ) -> Future[T]:
        """Start a request on the event loop, without waiting for it."""
        check_process(self.uri, self._process)

        async def send() -> T:
            return await call(await self._client())

        judge = partial(self._judge, key or "listing")
        repeated = send_with_retries(send, judge, attempts=attempts, until=deadline(), is_conditional=is_conditional)
        return asyncio.run_coroutine_threadsafe(repeated, get_loop())

    def _clean_up(self, key: str, call: Callable[[Any], Awaitable[object]]) -> None:
        """Send a request that cleans up after an error.

        That error matters more than one of this request, and the deadline may have passed.
        """
        with suppress(RaycheckError), ends_by(time.monotonic() + CLEAN_UP_S):
            self._run(key, call, attempts=1)

    def _judge(self, key: str, error: Exception) -> tuple[RaycheckError, Repeat]:
        if isinstance(error, RaycheckError):
            return error, Repeat.NOTHING
        if isinstance(error, TimeoutError):
            return OverloadedError(f"{self}: {key}: no answer in time"), Repeat.UNCONDITIONAL
        if isinstance(error, ChangedError):
            return StoreError(f"{self}: {key}: {error}"), Repeat.UNCONDITIONAL
        if (broken := _tls_error(error)) is not None:
            return StoreError(f"{self}: {_tls_advice(broken)}"), Repeat.NOTHING
        return self._translate(key, error)


def until_deadline(start: Callable[[], Awaitable[T]]) -> T:
    """Return the result of `start` on fsspec's event loop, for a client that RemoteStore does not know.

    It is cancelled at this thread's deadline, which raises TimeoutError, and when the thread is interrupted.
    """
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


def _tls_error(error: BaseException | None) -> ssl.SSLError | None:
    """Return the failed handshake behind a client's error, if the next handshake would fail in the same way."""
    while error is not None:
        if isinstance(error, ssl.SSLCertVerificationError) or getattr(error, "reason", "") == "WRONG_VERSION_NUMBER":
            found = getattr(error, "certificate_error", error)  # aiohttp wraps it in a class of the same kind
            return found if isinstance(found, ssl.SSLError) else None
        error = error.__cause__ or error.__context__
    return None


def _tls_advice(error: ssl.SSLError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return (
            f"the server's certificate is not trusted on this node ({getattr(error, 'verify_message', error)}): set "
            "StorageSettings(ca_bundle=...) or correct the endpoint's host name"
        )
    return (
        "the server speaks plain HTTP where https:// was requested: write http:// in StorageSettings(endpoint=...), or "
        "&scheme=http next to endpoint_override in the URI"
    )


def said(*words: object) -> str:
    """Return the words of a store's refusal, without missing ones: a response without a body has neither code nor
    message."""
    return " ".join(str(word) for word in words if word) or "no reason given"


def not_accepted(uri: str, said: str) -> ConfigError:
    """Return the error for credentials that have expired or are wrong, not for good ones that lack a permission."""
    return ConfigError(f"{shown_uri(uri)}: the store does not accept these credentials ({said}); renew or correct them")


def bucket_time(date: str | None) -> float:
    """Return the bucket's clock in seconds, from a response's Date header.

    Ages are differences of these times, never of a host's clock.
    """
    return email.utils.parsedate_to_datetime(date).timestamp() if date else time.time()


def optional_import(module: str, *, extra: str) -> ModuleType:
    """Import a store client that not every user has installed. Raises ConfigError that says how to install it."""
    try:
        return import_module(module)
    except ImportError as error:
        raise ConfigError(f"{error.name or module} is not installed: pip install 'raycheck[{extra}]'") from error
