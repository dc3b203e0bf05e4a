"""`raycheck watch-node` with a real Ray: what the cloud says arrives there."""

import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from subprocess import Popen
from typing import Any

import pytest

from tests.support.processes.child_processes import python, watch_node
from tests.support.servers.metadata_servers import Ec2Service, serving

pytestmark = [pytest.mark.ray, pytest.mark.slow]
WAIT_S = 90.0


class SpotCluster:
    """Speaks with the process of spot_cluster.py."""

    def __init__(self, process: Popen) -> None:
        self._process = process
        self.facts: dict[str, str] = self._heard()

    def draining(self) -> dict[str, int]:
        """Deadline in unix milliseconds by node id."""
        self._process.stdin.write("?\n")
        self._process.stdin.flush()
        return self._heard()

    def wait_until_draining(self, expected: dict[str, int]) -> None:
        end = time.monotonic() + WAIT_S
        while (found := self.draining()) != expected:
            assert time.monotonic() < end, f"draining: {found}, not {expected}"
            time.sleep(0.5)

    def _heard(self) -> Any:
        for line in self._process.stdout:
            if line.startswith("= "):
                return json.loads(line[2:])
        raise AssertionError(f"spot_cluster.py ended: {self._process.stderr.read()}")


@pytest.fixture(scope="module")
def environment() -> Iterator[dict[str, str]]:
    folder = tempfile.mkdtemp(prefix="spot", dir="/tmp")  # short: Ray's sockets lie in it
    own = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    yield own | {"RAY_AUTH_MODE": "disabled", "RAY_TMPDIR": folder}
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def cluster(environment: dict[str, str]) -> Iterator[SpotCluster]:
    with python(str(Path(__file__).parents[1] / "support/processes/spot_cluster.py"), env=environment) as process:
        yield SpotCluster(process)
        process.communicate(timeout=WAIT_S)


def test_without_a_node_id_two_nodes_on_one_machine_are_not_told_apart(cluster: SpotCluster, environment) -> None:
    with watch_node("--cloud", "aws", "--address", cluster.facts["address"], env=environment) as process:
        _, errors = process.communicate(timeout=WAIT_S)

    assert process.returncode == 2
    assert cluster.facts["head"] in errors
    assert cluster.facts["node"] in errors


def test_a_notice_drains_the_node_with_its_deadline_and_a_nearer_one_again(cluster: SpotCluster, environment) -> None:
    service, node = Ec2Service(), cluster.facts["node"]
    args = ("--address", cluster.facts["address"], "--node-id", node)
    first = int(time.time()) + 600
    with serving(service) as endpoint, watch_node("--endpoint", endpoint, *args, env=environment) as process:
        service.wait_for(5)
        before = cluster.draining()

        service.interrupt(first)
        cluster.wait_until_draining({node: first * 1000})
        service.interrupt(first - 300)
        cluster.wait_until_draining({node: (first - 300) * 1000})
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=WAIT_S)

    assert before == {}
    assert process.returncode == 0
