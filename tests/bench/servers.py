"""The store under measure: a server on 127.0.0.1 with a core of its own, its clients on the other cores.

Ceph RGW on memory where Debian's packages install, else ministack: each says so in what it prints. Without two cores
nothing is pinned, and that is said as well.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from raycheck.demo.server import s3_server
from tests.support.servers import ceph_server, seaweed_server
from tests.support.servers.ministack_server import VERSION, ministack_server

IDLE_SHARE = 0.15
IDLE_WITHIN_S = 2.0
LOOK_EVERY_S = 0.1
TICK_S = 1 / os.sysconf("SC_CLK_TCK")
# Deleted objects must be gone before their bytes add up; by default they stay for hours.
ROOM = """
[osd]
memstore device bytes = 12G
[client]
rgw gc obj min wait = 2
rgw gc processor period = 4
rgw gc processor max time = 4
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Server:
    """kind: "ceph", "ministack", "moto", "seaweed" or "other". pids: its processes, empty for one that was there
    before."""

    kind: str
    name: str
    uri: str
    pids: tuple[int, ...]
    placement: str

    def settle(self) -> None:
        """Wait until it is idle, so that no side pays for what the one before left to do. Gives up after 2 s."""
        deadline = time.monotonic() + IDLE_WITHIN_S
        before = self._cpu_s()
        while self.pids and time.monotonic() < deadline:
            time.sleep(LOOK_EVERY_S)
            now = self._cpu_s()
            if now - before < IDLE_SHARE * LOOK_EVERY_S:
                return
            before = now

    def _cpu_s(self) -> float:
        return sum(_cpu_s(pid) for pid in self.pids)


@contextmanager
def started(kind: str) -> Iterator[Server]:
    """A running server with one empty bucket. kind: "auto", "ceph", "ministack", "moto", "seaweed". Afterwards this
    process, and what it starts, stays off the server's core."""
    if kind == "auto":
        kind = "ceph" if _can_have_ceph() else "ministack"
    all_cores = sorted(os.sched_getaffinity(0))
    server_cores, client_cores = all_cores[-1:], all_cores[:-1] or all_cores
    before = set(_children())
    os.sched_setaffinity(0, server_cores)
    try:
        with _SERVERS[kind]() as (name, uri):
            os.sched_setaffinity(0, client_cores)
            yield Server(
                kind=kind,
                name=name,
                uri=uri,
                pids=tuple(set(_children()) - before),
                placement=_placement(server_cores, client_cores),
            )
    finally:
        os.sched_setaffinity(0, all_cores)


@contextmanager
def _ceph() -> Iterator[tuple[str, str]]:
    with ceph_server.ceph_server("memstore", more=ROOM) as cluster:
        yield "Ceph RGW on memstore", cluster.uri


@contextmanager
def _ministack() -> Iterator[tuple[str, str]]:
    with ministack_server() as uri:
        yield f"ministack {VERSION}", uri


@contextmanager
def _moto() -> Iterator[tuple[str, str]]:
    with s3_server() as uri:
        yield "moto", uri


@contextmanager
def _seaweed() -> Iterator[tuple[str, str]]:
    with seaweed_server.seaweed_server(volumes=500) as uri:
        yield f"SeaweedFS {seaweed_server.VERSION}", uri


_SERVERS = {"ceph": _ceph, "ministack": _ministack, "moto": _moto, "seaweed": _seaweed}


def _can_have_ceph() -> bool:
    try:
        ceph_server.prepare()
    except RuntimeError as error:
        print(f"no Ceph here ({str(error).splitlines()[0]}); ministack instead")
        return False
    return True


def _placement(server: list[int], clients: list[int]) -> str:
    if set(server) == set(clients):
        return f"server and clients share core {server[0]}, the only one"
    return f"server pinned to core {server[0]}; trainer and clients to core {', '.join(map(str, clients))}"


def _children() -> list[int]:
    """Of all of this process' threads."""
    tasks = Path("/proc/self/task").glob("*/children")
    return [int(pid) for task in tasks for pid in task.read_text().split()]


def _cpu_s(pid: int) -> float:
    """User and system time so far; 0 for a process that is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) * TICK_S
