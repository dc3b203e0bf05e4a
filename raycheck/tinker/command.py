"""Starts the server for the command line: its Ray, its state file, and its end by a signal."""

import asyncio
import logging
import signal
from collections.abc import Callable, Collection, Coroutine
from contextlib import suppress
from typing import Any

from raycheck.errors import ConfigError
from raycheck.frameworks.versions import require
from raycheck.http_server import bound
from raycheck.tinker.access import check_bind
from raycheck.tinker.checkpoint_store import CheckpointStore
from raycheck.tinker.engine.actor import RayEngine
from raycheck.tinker.journal import Journal, ReplacedError
from raycheck.tinker.server import serve
from raycheck.tinker.service import ServerSettings, Service


def run_server(
    settings: ServerSettings,
    *,
    engine: RayEngine,
    checkpoints: CheckpointStore,
    state: str,
    ray_address: str | None,
    host: str,
    port: int,
    key: str | None,
    allow_hosts: Collection[str],
    on_start: Callable[[str, str], None],
) -> None:
    """Serve until the process is interrupted or terminated. Raises ConfigError.

    state: the path of the server's state file. ray_address: None starts a separate Ray for the server. The arguments
    after it are those of serve, and the port, which is bound before Ray and the model are started.
    """
    require("tinker", "0.38", extra="tinker")
    check_bind(host, key)
    if settings.direct_downloads and not checkpoints.root.startswith("s3://"):
        raise ConfigError("direct_downloads: only s3:// buckets can sign URLs; leave it out for this bucket")
    with bound(host, port) as sockets:  # before the minutes that Ray and the model may take
        checkpoints.runs()  # fail at once if the bucket cannot be read

        async def serve_until_terminated() -> None:
            task = asyncio.current_task()
            assert task is not None, "it runs in a task"
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
            service = Service(settings, journal=Journal(state), engine=engine, checkpoints=checkpoints)
            await serve(service, host=host, sockets=sockets, key=key, allow_hosts=allow_hosts, on_start=on_start)

        logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        logging.getLogger("raycheck.tinker").setLevel(logging.INFO)
        try:
            _run_on_ray(serve_until_terminated, ray_address)
        except ReplacedError as error:
            raise ConfigError(f"state={state}: {error}") from None


def _run_on_ray(server: Callable[[], Coroutine[Any, Any, None]], ray_address: str | None) -> None:
    """Run the server until it is interrupted or terminated, with a Ray that it starts unless it has an address."""
    import ray

    address = ray_address or "local"  # without an address, ray.init joins whatever Ray was last started here
    ray.init(address=address, include_dashboard=None if ray_address else False)
    try:
        with suppress(KeyboardInterrupt, asyncio.CancelledError):
            asyncio.run(server())
    finally:
        ray.shutdown()
