"""Finds this machine's node in Ray and drains it. All unstable names of Ray's core are here; written for Ray 2.60.

Each call is a separate process, killed after ATTEMPT_S. A client of Ray's GCS can block for 40 s in its constructor,
where no signal arrives, and ends its process when the GCS is unreachable for a minute. The watch itself never loads
Ray.
"""

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from importlib import import_module
from logging import getLogger
from typing import Any

from raycheck.errors import ConfigError

logger = getLogger("raycheck")
ATTEMPT_S = 30.0
"""The limit for one call. Loading Ray takes most of the time: 0.7 s, and up to 15 s on an overloaded machine."""
CONNECT_S = 3.0
CALL_S = 8.0
PAUSE_S = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RayNode:
    """The identity of a Ray node. address: the address of the cluster's GCS, as host:port."""

    node_id: str
    address: str


def wait_for_node(
    address: str | None,
    node_id: str | None,
    *,
    timeout_s: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> RayNode:
    """Call find_node until it finds the node.

    Raises ConfigError after timeout_s, or immediately if waiting cannot help.
    """
    end = clock() + timeout_s
    said = ""
    while True:
        try:
            return find_node(address, node_id)
        except ConnectionError as error:
            if clock() + PAUSE_S > end:
                raise ConfigError(f"{error} (waited {timeout_s:.0f} s, see --wait-for-ray)") from None
            if str(error) != said:
                logger.warning("waiting for Ray on this machine: %s", error)
            said = str(error)
        sleep(PAUSE_S)


def find_node(address: str | None, node_id: str | None) -> RayNode:
    """Find this machine's live node.

    address: host:port of the GCS. If None, use RAY_ADDRESS, otherwise the Ray that runs here. node_id: Ray's hex id;
    None: find it. Raises ConnectionError if the node is not there, perhaps not yet. Raises ConfigError if several nodes
    of this machine match.
    """
    return _in_child({"address": address, "node_id": node_id})


def drain_node(address: str | None, node_id: str | None, *, deadline: float, reason: str) -> RayNode:
    """Have Ray drain this machine's node, which is looked up again since Ray may have been restarted.

    deadline: unix seconds. Raises ConnectionError or ConfigError if the node was not drained.
    """
    return _in_child({"address": address, "node_id": node_id, "drain": (round(deadline * 1000), reason)})


def choose(alive: Mapping[str, str], *, wanted: str | None, local: Iterable[str], own_ip: str, address: str) -> str:
    """Choose the node of this machine.

    alive: the IP of each live node, by id. wanted: the id that the user gave. local: ids found in the processes of this
    machine. Raises as find_node does.
    """
    if wanted is not None:
        if wanted not in alive:
            raise ConnectionError(f"--node-id {wanted} is not one of the {len(alive)} live nodes of Ray at {address}")
        return wanted
    # A container next to Ray's does not see Ray's processes, but shares its address.
    found = sorted(alive.keys() & set(local)) or sorted(name for name, ip in alive.items() if ip == own_ip)
    if len(found) > 1:
        raise ConfigError(
            f"{len(found)} nodes of Ray at {address} run here; set --node-id to one of: {', '.join(found)}"
        )
    if not found:
        raise ConnectionError(f"Ray at {address} has no live node on this machine ({own_ip})")
    return found[0]


def _in_child(request: Mapping[str, Any]) -> RayNode:
    """Call Ray in a child process (this file as a script), and raise its error here."""
    node_id = request["node_id"]
    if node_id is not None and not re.fullmatch(r"[0-9a-f]{8,}", node_id):
        raise ConfigError(f"--node-id {node_id}: give the hex id that ray list nodes shows")
    command = [sys.executable, "-P", "-m", "raycheck.on_ray.watch_node.drain", json.dumps(request)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        done = subprocess.run(  # noqa: S603
            command, capture_output=True, text=True, check=False, timeout=ATTEMPT_S, env=environment
        )
    except subprocess.TimeoutExpired:
        given = _named(request["address"])
        raise ConnectionError(f"Ray's GCS ({given}) was not reached within {ATTEMPT_S:.0f} s") from None
    try:
        answer = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise ConnectionError(f"the call of Ray ended with exit code {done.returncode}: {last}") from None
    if "error" in answer:
        raise (ConfigError if answer["is_final"] else ConnectionError)(answer["error"])
    return RayNode(**answer)


def _call_ray(address: str | None, node_id: str | None, drain: tuple[int, str] | None = None) -> RayNode:
    """Find the node, in the child process.

    drain: drain it too, with this deadline in unix milliseconds and this reason.
    """
    services = import_module("ray._private.services")
    gcs = _reachable(services, address)
    try:
        client = import_module("ray._raylet").GcsClient(address=gcs)
        is_alive = import_module("ray.core.generated.gcs_pb2").GcsNodeInfo.ALIVE
        nodes = client.get_all_node_info(timeout=CALL_S).values()
        alive = {info.node_id.hex(): info.node_manager_address for info in nodes if info.state == is_alive}
        own = {"local": services.find_node_ids(), "own_ip": services.get_node_ip_address(gcs)}
        node = RayNode(node_id=choose(alive, wanted=node_id, address=gcs, **own), address=gcs)
        if drain is not None:
            # A node cannot reject a drain for this reason. Ray also "accepts" the drain of an unknown id.
            reasons = import_module("ray.core.generated.autoscaler_pb2").DrainNodeReason
            reason = reasons.Value("DRAIN_NODE_REASON_PREEMPTION")
            is_accepted, why_not = client.drain_node(node.node_id, reason, drain[1], drain[0], timeout=CALL_S)
            if not is_accepted:
                raise ConnectionError(f"Ray rejects the drain of node {node.node_id}: {why_not}")
    except import_module("ray.exceptions").RayError as error:
        raise ConnectionError(f"Ray's GCS at {gcs}: {error}") from None
    return node


def _reachable(services: Any, address: str | None) -> str:
    """Return host:port of the GCS, after connecting to it: with a closed port Ray's own client would retry for 40 s."""
    given = _named(address)
    try:
        gcs = str(services.canonicalize_bootstrap_address_or_die(address))
        host, _, port = gcs.rpartition(":")
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S).close()
    except ValueError as error:
        raise ConfigError(f"--address {given}: give HOST:PORT of Ray's GCS ({error})") from None
    except OSError as error:
        raise ConnectionError(f"Ray's GCS ({given}) does not answer: {error}") from None
    return gcs


def _named(address: str | None) -> str:
    return address or os.environ.get("RAY_ADDRESS") or "of the Ray that runs here"


def _main() -> None:
    """Answer one request in the child process: print the node, or the error, as JSON."""
    try:
        answer = asdict(_call_ray(**json.loads(sys.argv[1])))
    except ConfigError as error:
        answer = {"error": str(error), "is_final": True}
    except ModuleNotFoundError as error:
        answer = {"error": f"{error}: pip install 'raycheck[train]' where Ray runs", "is_final": True}
    except (ImportError, AttributeError, TypeError) as error:
        answer = {"error": f"this Ray has other internal names than 2.60: {error}", "is_final": True}
    except OSError as error:
        answer = {"error": str(error), "is_final": False}
    print(json.dumps(answer))  # noqa: T201


if __name__ == "__main__":
    _main()
