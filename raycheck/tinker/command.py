"""Assembles the server for the command line: Ray, the engine, the state file, and the bucket."""

import asyncio
import logging
import signal
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass

from raycheck import StorageSettings
from raycheck.errors import ConfigError
from raycheck.tinker.access import check_bind
from raycheck.tinker.checkpoint_store import CheckpointStore
from raycheck.tinker.engine.actor import RayEngine
from raycheck.tinker.journal import Journal, ReplacedError
from raycheck.tinker.server import serve
from raycheck.tinker.service import ServerSettings, Service


@dataclass(frozen=True, kw_only=True, slots=True)
class TinkerOptions:
    """The options of `raycheck tinker`.

    base_model: a folder's absolute path, or a name on the Hub. model_name: the name that clients use for it. key: the
    key that clients must send; None if the server generates one and keeps it in its state file; "" for none.
    allow_hosts: host names, besides this machine's and `host`, that clients may use. ray_address: None starts a
    separate Ray for the server.
    """

    base_model: str
    model_name: str
    checkpoints: str
    host: str
    port: int
    key: str | None
    allow_hosts: Collection[str]
    state: str
    max_models: int
    ray_address: str | None
    dtype: str
    num_gpus: float
    ranks: int
    session_timeout_s: float | None
    direct_downloads: bool
    storage: StorageSettings | None


def run_server(options: TinkerOptions, *, on_start: Callable[[str, str], None]) -> None:
    """Serve until the process is interrupted or terminated. Raises ConfigError. on_start: see serve."""
    import ray

    check_bind(options.host, options.key)
    if options.direct_downloads and not options.checkpoints.startswith("s3://"):
        raise ConfigError("direct_downloads: only s3:// buckets can sign URLs; leave it out for this bucket")
    CheckpointStore(options.checkpoints, options.storage).runs()  # fail at once if the bucket cannot be read
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("raycheck.tinker").setLevel(logging.INFO)
    address = options.ray_address or "local"  # without an address, ray.init joins whatever Ray was last started here
    ray.init(address=address, include_dashboard=None if options.ray_address else False)
    try:
        with suppress(KeyboardInterrupt, asyncio.CancelledError):
            asyncio.run(_serve(options, on_start))
    except ReplacedError as error:
        raise ConfigError(f"state={options.state}: {error}") from None
    finally:
        ray.shutdown()


async def _serve(options: TinkerOptions, on_start: Callable[[str, str], None]) -> None:
    task = asyncio.current_task()
    assert task is not None, "serve runs in a task"
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)

    def make_service(on_replaced: Callable[[], None]) -> Service:
        return Service(
            ServerSettings(
                base_model=options.model_name,
                session_timeout_s=options.session_timeout_s,
                direct_downloads=options.direct_downloads,
                max_models=options.max_models,
            ),
            journal=Journal(options.state),
            engine=RayEngine(options.base_model, dtype=options.dtype, ranks=options.ranks, num_gpus=options.num_gpus),
            checkpoints=CheckpointStore(options.checkpoints, options.storage),
            on_replaced=on_replaced,
        )

    await serve(
        make_service,
        host=options.host,
        port=options.port,
        key=options.key,
        allow_hosts=options.allow_hosts,
        on_start=on_start,
    )
