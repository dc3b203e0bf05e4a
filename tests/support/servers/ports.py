"""Ports of servers that tests start on this host.

They are below those that the kernel gives to clients and above those that Ray gives to workers, and no process takes
one twice: a client of a server that has ended, which tries again, meets nobody instead of the next test's server.
"""

import os
import socket
import subprocess
import time
from collections.abc import Iterator

START_TIMEOUT_S = 90.0
_PORTS = range(20_000, 32_000)
_BLOCK = 250  # ports that one process reserves at a time


def free_port() -> int:
    """Return a port at which nobody listens, that no other process of the tests gets, and this one gets once."""
    global _walk, _owner
    if _owner != os.getpid():  # a fork has reserved nothing yet
        _walk, _owner = _reserved_ports(), os.getpid()
    for port in _walk:
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
    raise AssertionError(f"no port from {_PORTS.start} to {_PORTS.stop} is left")


def _reserved_ports() -> Iterator[int]:
    """Yield the ports of block after block, each reserved on this host by a name in the kernel until the process ends."""
    for first in _PORTS[::_BLOCK]:
        reservation = socket.socket(socket.AF_UNIX)
        try:
            reservation.bind(f"\0raycheck-tests-ports-{first}")
        except OSError:
            reservation.close()
            continue
        _reservations.append(reservation)
        yield from range(first, first + _BLOCK)


_walk: Iterator[int] = iter(())
_owner = 0
_reservations: list[socket.socket] = []


def wait_until_up(server: subprocess.Popen, port: int, *, what: str) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        assert server.poll() is None, f"{what} ended at once"
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            time.sleep(0.1)
        else:
            return
    raise AssertionError(f"{what} did not listen within {START_TIMEOUT_S:.0f} s")
