"""`raycheck watch-node`: runs next to Ray on every preemptible node and turns the cloud's notice into a Ray drain."""

from typing import Annotated

import typer

from raycheck.cli.closed_pipe import continue_without_reader
from raycheck.log import show_log
from raycheck.on_ray.watch_node.cloud_notices import source_of
from raycheck.on_ray.watch_node.drain import drain_node, wait_for_node
from raycheck.on_ray.watch_node.metadata_service import ENDPOINT
from raycheck.on_ray.watch_node.watch import INTERVAL_S, end_on_sigterm, logger, watch


def watch_node(  # noqa: PLR0917  typer makes options of them
    cloud: Annotated[
        str | None, typer.Option(help="aws, azure or gce; default: whose metadata service answers.")
    ] = None,
    endpoint: Annotated[str, typer.Option(help="URL of the metadata service.")] = ENDPOINT,
    address: Annotated[
        str | None, typer.Option(help="HOST:PORT of Ray's GCS; default: RAY_ADDRESS, else the Ray that runs here.")
    ] = None,
    node_id: Annotated[str | None, typer.Option(help="Ray's hex id of the node; default: this machine's.")] = None,
    interval: Annotated[
        float, typer.Option(min=0.2, help="Seconds between two requests to the metadata service.")
    ] = INTERVAL_S,
    rebalance_deadline: Annotated[
        float | None,
        typer.Option(
            min=1, help="Also drain at EC2's rebalance recommendation, with a deadline this many seconds ahead."
        ),
    ] = None,
    wait_for_ray: Annotated[
        float, typer.Option(min=0, help="Seconds to wait at the start for Ray on this machine.")
    ] = 300.0,
) -> None:
    """Drain this Ray node before the cloud takes it away.

    Waits for the cloud's preemption notice and drains the node, so that training saves in time. Runs until the machine
    is stopped, or until SIGTERM.
    """
    continue_without_reader()
    show_log()
    end_on_sigterm()
    source = source_of(cloud, endpoint)
    node = wait_for_node(address, node_id, timeout_s=wait_for_ray)
    logger.info("watching %s for node %s of Ray at %s", source.endpoint, node.node_id, node.address)

    def drain(deadline: float, reason: str) -> None:
        drain_node(address, node_id, deadline=deadline, reason=reason)

    watch(source, drain, interval_s=interval, rebalance_deadline_s=rebalance_deadline)
