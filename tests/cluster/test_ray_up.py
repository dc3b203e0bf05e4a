"""cluster/autoscaler: Ray and EC2 would take the files, and the notice of every spot node is listened to."""

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import botocore.session
import pytest
import yaml
from botocore.validate import ParamValidator
from ray.autoscaler._private.util import prepare_config, validate_config
from ray.train.v2._internal import constants as train_constants

from tests.support.processes.cluster_files import AWS, GCP, RAY_UP, RAY_VERSION

each_file = pytest.mark.parametrize("path", RAY_UP, ids=lambda path: path.name)
WAIT_S = 90.0


def load(path: Path) -> dict:
    return yaml.safe_load(path.read_text())


def node_config(path: Path, node_type: str) -> dict:
    return load(path)["available_node_types"][node_type]["node_config"]


@each_file
def test_ray_up_takes_the_file(path: Path) -> None:
    config = prepare_config(load(path))

    validate_config(config)
    types = config["available_node_types"]
    assert config["head_node_type"] == "head"
    assert types["head"]["max_workers"] == 0
    assert types["head"]["resources"]["CPU"] == 0, "no training worker there"
    assert types["spot"]["max_workers"] == config["max_workers"] > 0


@each_file
def test_rays_own_commands_for_unknown_images_are_left_out(path: Path) -> None:
    """Its defaults install a nightly Ray, and are used where the file says nothing."""
    config = prepare_config(load(path))

    for kind in ("setup_commands", "head_setup_commands", "worker_setup_commands"):
        assert not [command for command in config[kind] if "wheels/latest" in command]


@each_file
def test_every_node_has_the_one_ray_that_was_measured(path: Path) -> None:
    config = load(path)

    assert config["docker"]["image"] == f"rayproject/ray:{RAY_VERSION}-py311-gpu"
    assert f"'ray[train]=={RAY_VERSION}'" in config["setup_commands"][0], "raycheck must not bring a newer one"


@each_file
def test_ray_knows_every_setting(path: Path) -> None:
    text = " ".join(load(path)["head_start_ray_commands"])

    names = re.findall(r"(RAY_\w+)=", text)
    assert len(names) == 3
    assert set(names) <= train_constants.ENV_VARS_TO_PROPAGATE


@pytest.mark.parametrize("node_type", ["head", "spot"])
def test_ec2_would_take_every_field_of_a_node(node_type: str) -> None:
    shape = botocore.session.get_session().get_service_model("ec2").operation_model("RunInstances").input_shape
    asked = {**node_config(AWS, node_type), "MinCount": 1, "MaxCount": 1}

    report = ParamValidator().validate(asked, shape)

    assert not report.has_errors(), report.generate_report()


def test_on_ec2_workers_are_spot_and_the_head_is_not() -> None:
    market = node_config(AWS, "spot")["InstanceMarketOptions"]

    assert market["MarketType"] == "spot"
    assert market["SpotOptions"]["InstanceInterruptionBehavior"] == "terminate"
    assert "InstanceMarketOptions" not in node_config(AWS, "head")
    assert load(AWS)["provider"]["cache_stopped_nodes"] is False, "a spot node that was taken cannot be started again"


def test_on_compute_engine_workers_are_spot_and_the_head_is_not() -> None:
    assert node_config(GCP, "spot")["scheduling"] == {
        "provisioningModel": "SPOT",
        "instanceTerminationAction": "DELETE",
        "onHostMaintenance": "TERMINATE",
        "automaticRestart": False,
    }
    assert "scheduling" not in node_config(GCP, "head")


@pytest.mark.parametrize(("path", "field"), [(AWS, "IamInstanceProfile"), (GCP, "serviceAccounts")], ids=["aws", "gcp"])
def test_workers_have_another_identity_than_the_head_that_may_launch_nodes(path: Path, field: str) -> None:
    assert node_config(path, "spot")[field] != node_config(path, "head")[field]


@pytest.mark.parametrize(("path", "cloud"), [(AWS, "aws"), (GCP, "gce")], ids=["aws", "gcp"])
def test_every_worker_listens_for_its_notice(path: Path, cloud: str) -> None:
    *_, start, watch = load(path)["worker_start_ray_commands"]

    assert "ray start" in start, "what is watched is there first"
    assert f"raycheck watch-node --cloud {cloud};" in watch
    assert watch.endswith(">>/tmp/ray/session_latest/logs/raycheck-watch-node.log 2>&1")
    assert "watch-node" not in " ".join(load(path)["head_start_ray_commands"])


class Node:
    """A machine on which the watching command is run as `ray up` runs it, with a raycheck that only says it is there."""

    def __init__(self, path: Path, folder: Path) -> None:
        self._calls, self._pid = folder / "calls", folder / "pid"
        command = load(path)["worker_start_ray_commands"][-1]
        for old, new in (
            ("/tmp/raycheck-watch-node.pid", str(self._pid)),
            ("/tmp/ray/session_latest/logs/raycheck-watch-node.log", str(folder / "log")),
            ("sleep 5", "sleep 0.05"),
        ):
            assert old in command
            command = command.replace(old, new)
        self._command = command
        self._environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
        (folder / "raycheck").write_text(f"#!/bin/sh\necho $$ >>{self._calls}\nexec sleep 600\n")
        (folder / "raycheck").chmod(0o755)

    def start(self) -> None:
        subprocess.run(["bash", "-c", f"({self._command})"], env=self._environment, check=True, timeout=WAIT_S)

    @property
    def watchers(self) -> list[int]:
        """Every raycheck that was ever started."""
        return [int(line) for line in self._calls.read_text().split()] if self._calls.exists() else []

    def stop(self) -> None:
        """Of a command that does not do what it should, too: every loop that was started."""
        for pid in (int(self._pid.read_text()), *self.watchers):
            with suppress(ProcessLookupError):
                os.killpg(os.getpgid(pid), signal.SIGKILL)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {WAIT_S:.0f} s: {what}"
        time.sleep(0.01)


@pytest.fixture(params=RAY_UP, ids=lambda path: path.name)
def node(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Node]:
    node = Node(request.param, tmp_path)
    node.start()
    yield node
    node.stop()


def test_a_watcher_that_dies_is_started_again(node: Node) -> None:
    wait_until(lambda: len(node.watchers) == 1, "the first watcher")

    os.kill(node.watchers[0], signal.SIGKILL)

    wait_until(lambda: len(node.watchers) == 2, "the second watcher")
    assert is_alive(node.watchers[1])


def test_a_node_that_is_started_again_has_one_watcher(node: Node) -> None:
    wait_until(lambda: len(node.watchers) == 1, "the first watcher")

    node.start()

    wait_until(lambda: len(node.watchers) == 2, "the second watcher")
    wait_until(lambda: not is_alive(node.watchers[0]), "the end of the first")
    assert [is_alive(pid) for pid in node.watchers] == [False, True]
