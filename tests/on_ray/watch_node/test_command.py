"""`raycheck watch-node` as a process, and what it makes of a Ray that is away. No Ray is started.

Every address of Ray here is a closed or a silent port of this machine: a Ray that runs here meanwhile is left alone.
"""

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from raycheck.errors import ConfigError
from raycheck.on_ray.watch_node import drain
from tests.support.processes.child_processes import python, watch_node
from tests.support.processes.command_line import raycheck
from tests.support.servers.metadata_servers import WAIT_S, Ec2Service, GceService, serving

NOWHERE = "127.0.0.2:1"
"""Nobody listens there. (127.0.0.1 would become the machine's outer address: Ray takes it for that.)"""


@pytest.fixture
def silent() -> Iterator[str]:
    """An address that takes connections and never answers."""
    with socket.create_server(("127.0.0.2", 0)) as server:
        yield f"127.0.0.2:{server.getsockname()[1]}"


def test_a_ray_that_hangs_is_given_up_in_time(silent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drain, "ATTEMPT_S", 3.0)

    with pytest.raises(ConnectionError, match="within 3 s"):
        drain.drain_node(silent, None, deadline=0.0, reason="test")


def test_waiting_for_ray_ends_with_what_is_missing() -> None:
    slept, now = [], [0.0]

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds

    with pytest.raises(ConfigError, match="waited 7 s, see --wait-for-ray"):
        drain.wait_for_node(NOWHERE, None, timeout_s=7, clock=lambda: now[0], sleep=sleep)

    assert slept == [drain.PAUSE_S]


ALIVE = {"aa": "10.0.0.1", "bb": "10.0.0.2", "cc": "10.0.0.2"}


@pytest.mark.parametrize(
    ("wanted", "local", "own_ip", "chosen"),
    [
        ("cc", {"aa"}, "10.0.0.1", "cc"),
        (None, {"bb"}, "10.0.0.2", "bb"),
        (None, {"bb", "of another Ray, or dead"}, "10.0.0.9", "bb"),
        (None, set(), "10.0.0.1", "aa"),
    ],
)
def test_the_node_is_the_one_named_else_this_machines(wanted, local, own_ip, chosen) -> None:
    assert drain.choose(ALIVE, wanted=wanted, local=local, own_ip=own_ip, address="head:6379") == chosen


@pytest.mark.parametrize(
    ("wanted", "local", "own_ip", "error"),
    [
        (None, {"bb", "cc"}, "10.0.0.9", ConfigError),
        (None, set(), "10.0.0.2", ConfigError),
        (None, {"dead"}, "10.0.0.9", ConnectionError),
        ("dd", {"aa"}, "10.0.0.1", ConnectionError),
    ],
)
def test_an_unclear_node_is_never_guessed(wanted, local, own_ip, error) -> None:
    with pytest.raises(error, match=r"--node-id|no live node"):
        drain.choose(ALIVE, wanted=wanted, local=local, own_ip=own_ip, address="head:6379")


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--cloud", "ec2"), "there are: aws, azure, gce"),
        (("--cloud", "aws", "--endpoint", "https://169.254.169.254"), "plain HTTP"),
        (("--cloud", "aws", "--node-id", "ffff:1", "--address", "127.0.0.1:1"), "ray list nodes"),
        (("--cloud", "aws", "--address", "ray://head:10001"), "give HOST:PORT"),
        (("--cloud", "aws", "--interval", "0"), "interval"),
    ],
)
def test_a_mistake_ends_the_command_at_once(args: tuple[str, ...], said: str) -> None:
    ended = raycheck("watch-node", *args)

    assert ended.returncode == 2
    assert said in ended.stderr


def test_no_ray_within_the_time_given_ends_the_command() -> None:
    service = Ec2Service()
    with (
        serving(service) as endpoint,
        watch_node("--endpoint", endpoint, "--address", NOWHERE, "--wait-for-ray", "0") as process,
    ):
        _, errors = process.communicate(timeout=WAIT_S)

    assert process.returncode == 2
    assert NOWHERE in errors
    assert service.paths()[-1] == "PUT /latest/api/token", "the cloud was found by itself"


def test_sigterm_ends_the_command_while_it_waits_for_ray() -> None:
    with watch_node("--cloud", "aws", "--address", NOWHERE) as process:
        first = process.stderr.readline()
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=WAIT_S)

    assert NOWHERE in first
    assert process.returncode == 0


LOOP = """
import sys
from raycheck.on_ray.watch_node.cloud_notices import Gce
from raycheck.on_ray.watch_node.watch import end_on_sigterm, watch

end_on_sigterm()
watch(Gce(sys.argv[1]), lambda deadline, reason: print("drained:", reason, flush=True), interval_s=3600)
"""


@pytest.mark.parametrize("preempted", ["TRUE", "FALSE"])
def test_sigterm_ends_the_loop_after_a_last_look(preempted: str) -> None:
    service = GceService()
    with serving(service) as endpoint, python("-c", LOOP, endpoint) as process:
        service.wait_for(2)
        service.items["preempted"] = preempted
        process.send_signal(signal.SIGTERM)
        said, _ = process.communicate(timeout=WAIT_S)

    assert process.returncode == 0
    assert said.count("drained") == (preempted == "TRUE")


DROPPED = """
import os, signal
from raycheck.on_ray.watch_node.watch import end_on_sigterm, watch

class Connection:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)
        for _ in range(1000):  # the handler runs in here
            pass

class Source:
    looks = 0
    def notices(self, now):
        Source.looks += 1
        if Source.looks == 1:
            Connection()
        return ()

end_on_sigterm()
try:
    watch(Source(), lambda deadline, reason: None, interval_s=3600)
finally:
    print("looks:", Source.looks, flush=True)
"""


def test_sigterm_ends_the_loop_also_when_it_arrives_in_a_finalizer() -> None:
    with python("-c", DROPPED) as process:
        said, errors = process.communicate(timeout=WAIT_S)

    assert "Exception ignored" in errors, "Python has dropped the exception"
    assert said.strip() == "looks: 2"
    assert process.returncode == 0


def test_the_watch_loads_neither_ray_nor_torch_nor_a_store() -> None:
    code = (
        "import raycheck.on_ray.watch_node.watch, raycheck.on_ray.watch_node.drain, sys;"
        "print(sorted({'ray', 'torch', 'numpy', 'fsspec'} & set(sys.modules)))"
    )

    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=WAIT_S)

    assert found.stdout.strip() == "[]"
