"""What `raycheck doctor` finds out on a node where ranks may run: this machine, or every node of a Ray cluster."""

import importlib.util
import logging
import socket
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

from raycheck.bucket.diagnosis.checks import check_clock, check_rights
from raycheck.bucket.diagnosis.finding import BucketFinding, any_wrong, found, ok
from raycheck.bucket.format import object_keys
from raycheck.bucket.protocol.preflight import check_same_place
from raycheck.bucket.store import Store, open_store
from raycheck.bucket.store.address import kind_of
from raycheck.bucket.store.ray_filesystem import ray_filesystem
from raycheck.errors import ConfigError, RaycheckError
from raycheck.on_ray.api.run_location import check_ray_files

NODES_S = 180.0
"""How long the nodes of a cluster may take, all at the same time: a cold start of Ray's workers, and Ray's own client,
which may wait for a minute."""
REACH_S = 10.0
RAYS_FILES = "Ray's file system"


def examine_node(store: Store, *, node: str) -> tuple[BucketFinding, ...]:
    """Return the findings of this machine. node: its name, for errors. Without the rights, nothing else is tried."""
    rights = found("rights", lambda: check_rights(store, node=node))
    if any_wrong(rights):
        return rights
    others = found("clock", lambda: check_clock(store)), found(RAYS_FILES, lambda: _check_rays_files(store))
    return (*rights, *others[0], *others[1])


def _check_rays_files(store: Store) -> Iterator[BucketFinding]:
    if kind_of(store.uri) == "memory":
        return
    if importlib.util.find_spec("pyarrow") is None:
        yield BucketFinding(
            name=RAYS_FILES, state="unknown", text="not tried: pyarrow, which Ray writes with, is not installed here"
        )
        return
    path, files = ray_filesystem(store.uri) or (store.uri, None)
    check_ray_files(store, path, files)
    yield ok(RAYS_FILES, f"reads what raycheck writes, and the reverse ({'pyarrow' if files is None else 'fsspec'})")


def examine_nodes(uri: str, address: str) -> tuple[BucketFinding, ...]:
    """Return the findings of every node of the cluster at `address`, each with the node's name.

    This raycheck is sent to the nodes, unless this process is connected to Ray already. Raises ConfigError if there is
    no such cluster.
    """
    try:
        import ray
    except ImportError as error:
        raise ConfigError(f"address={address}: Ray is not installed here: {error}") from error
    was_connected = ray.is_initialized()
    if not was_connected:
        package = str(Path(__file__).parents[1])
        try:
            _reach(address)
            ray.init(address, runtime_env={"py_modules": [package]}, log_to_driver=False, logging_level=logging.ERROR)
        except (OSError, RuntimeError, ValueError, SystemExit) as error:  # Ray ends a process that it cannot serve
            raise ConfigError(f"address={address}: no Ray cluster there: {error}") from error
    try:
        return _of_all_nodes(open_store(uri))
    finally:
        if not was_connected:
            ray.shutdown()


def _reach(address: str) -> None:
    """Raise OSError if nothing listens at an address: Ray itself tries for two minutes."""
    host, colon, port = address.rpartition("://")[2].rpartition(":")
    if colon and port.isdigit():
        socket.create_connection((host, int(port)), timeout=REACH_S).close()


def _of_all_nodes(store: Store) -> tuple[BucketFinding, ...]:
    """Examine all nodes while an object of this machine's is there, which each of them has to see."""
    key = object_keys.probe_key(uuid4().hex)
    try:
        store.put(key, b"seen by all nodes")
    except RaycheckError:  # this machine's own findings say it
        return _asked(store.uri, None)
    try:
        return _asked(store.uri, key)
    finally:
        with suppress(RaycheckError):
            store.delete(key)


def _asked(uri: str, key: str | None) -> tuple[BucketFinding, ...]:
    import ray
    from ray.exceptions import RayError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    task = ray.remote(num_cpus=0, max_retries=0)(_examine)
    names = {node["NodeID"]: str(node["NodeManagerHostname"]) for node in ray.nodes() if node["Alive"]}
    shown = {id_: name if list(names.values()).count(name) == 1 else f"{name} {id_[:8]}" for id_, name in names.items()}
    asked = {
        task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(id_, soft=False)).remote(uri, key): name
        for id_, name in shown.items()
    }
    ray.wait(list(asked), num_returns=len(asked), timeout=NODES_S)
    findings: list[BucketFinding] = []
    for answer, name in asked.items():
        try:
            of_node = ray.get(answer, timeout=0)
        except RayError as error:
            text = f"no answer within {NODES_S:.0f} s, or an error: {type(error).__name__}: {error}".strip()
            of_node = (BucketFinding(name="node", state="wrong", text=text),)
        findings += [replace(finding, name=f"{name}: {finding.name}") for finding in of_node]
    return tuple(findings)


def _examine(uri: str, key: str | None) -> tuple[BucketFinding, ...]:
    """Return the findings of the node on which this runs. key: the object that it has to see."""
    node = socket.gethostname()

    def examine() -> Iterator[BucketFinding]:
        store = open_store(uri)
        yield from examine_node(store, node=node)
        if key is not None:
            check_same_place(store, key, node=node)
            yield ok("same place", "what this machine has written is seen there")

    return found("node", examine)
