"""Serves the Tinker API by aiohttp, until it is interrupted or another server takes over."""

import asyncio
from collections.abc import Callable
from contextlib import suppress

from aiohttp import web

from raycheck import ConfigError
from raycheck.tinker.access import check_bind, guard
from raycheck.tinker.journal import ReplacedError
from raycheck.tinker.routes import catalog, downloads, futures, sampling, sessions, training
from raycheck.tinker.routes.requests import MAX_BODY_BYTES, SAMPLING, SERVICE
from raycheck.tinker.sampling import Sampling
from raycheck.tinker.service import Service


def make_app(service: Service, sampling_requests: Sampling, *, key: str = "") -> web.Application:
    """Returns the application. key: what clients must show; "" asks for none."""
    app = web.Application(middlewares=[guard(key)], client_max_size=MAX_BODY_BYTES)
    app[SERVICE] = service
    app[SAMPLING] = sampling_requests
    for topic in (sessions, training, futures, sampling, catalog, downloads):
        topic.add_to(app)
    return app


async def serve(
    make_service: Callable[[Callable[[], None]], Service],
    *,
    host: str,
    port: int,
    key: str,
    on_start: Callable[[str], None],
) -> None:
    """Serve until the task is cancelled. Raises ReplacedError once another server has the state file.

    make_service: is given what it has to call then. host, port: where to bind; port 0 takes a free one. on_start:
    called with the address. Raises ConfigError for an address that others can reach without a key.
    """
    check_bind(host, key)
    replaced = asyncio.Event()
    service = make_service(replaced.set)
    sampling_requests = Sampling(service)
    runner = web.AppRunner(make_app(service, sampling_requests, key=key), access_log=None, auto_decompress=False)
    try:
        await service.start()
        sampling_requests.start()
        await runner.setup()
        try:
            await web.TCPSite(runner, host, port).start()
        except OSError as error:
            raise ConfigError(f"host={host} port={port}: {error.strerror or error}") from None
        address = runner.addresses[0]
        shown = f"[{address[0]}]" if ":" in address[0] else address[0]
        on_start(f"http://{shown}:{address[1]}")
        await replaced.wait()
        raise ReplacedError("another server was started with this state file; this one has ended")
    finally:
        await sampling_requests.stop()
        with suppress(ReplacedError):
            await service.stop()
        await runner.cleanup()
