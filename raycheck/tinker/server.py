"""Serves the Tinker API with aiohttp until it is interrupted or another server takes over."""

from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from socket import socket

from aiohttp import web

from raycheck.http_callers import known_hosts
from raycheck.http_server import HttpLimits, listen
from raycheck.tinker.access import check_bind, guard, new_key
from raycheck.tinker.journal import ReplacedError
from raycheck.tinker.routes import catalog, downloads, futures, sampling, sessions, training
from raycheck.tinker.routes.requests import MAX_BODY_BYTES, SAMPLING, SERVICE
from raycheck.tinker.sampling import Sampling
from raycheck.tinker.service import Service

LIMITS = HttpLimits(body_s=300.0, connections=2048)
"""Limits per client. The SDK waits for each result on a separate connection and opens up to 1000."""


def make_app(service: Service, sampling_requests: Sampling, *, key: str, hosts: Collection[str]) -> web.Application:
    """Return the web application. key, hosts: see guard."""
    app = web.Application(middlewares=[guard(key, hosts)], client_max_size=MAX_BODY_BYTES)
    app[SERVICE] = service
    app[SAMPLING] = sampling_requests
    for topic in (sessions, training, futures, sampling, catalog, downloads):
        topic.add_to(app)
    return app


async def serve(
    service: Service,
    *,
    host: str,
    sockets: Sequence[socket],
    key: str | None,
    on_start: Callable[[str, str], None],
    allow_hosts: Collection[str] = (),
    limits: HttpLimits = LIMITS,
) -> None:
    """Serve until the task is cancelled. Raises ReplacedError if another server takes the state file.

    host, sockets: where to listen, from http_server.bound. key: the key that clients must send; None for the one in the
    state file, which is generated once; "" for none. allow_hosts: further host names that clients may use. on_start:
    called with the address and, if it was generated, the key. Raises ConfigError for an address that others can reach
    without a key.
    """
    check_bind(host, key)
    sampling_requests = Sampling(service)
    try:
        kept_key = service.journal.kept_key(new_key()) if key is None else ""
        hosts = known_hosts(host, allow_hosts)
        app = make_app(service, sampling_requests, key=kept_key or key or "", hosts=hosts)
        await service.start()
        sampling_requests.start()
        async with listen(app, sockets, limits=limits, auto_decompress=False) as address:
            on_start(address, kept_key)
            try:
                await service.replaced.wait()
            finally:  # before closing the listener, which waits for clients that wait for results
                await _stop(service, sampling_requests)
            raise ReplacedError("another server was started with this state file; this one has stopped")
    finally:
        await _stop(service, sampling_requests)


async def _stop(service: Service, sampling_requests: Sampling) -> None:
    await sampling_requests.stop()
    with suppress(ReplacedError):
        await service.stop()
