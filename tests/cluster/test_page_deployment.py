"""cluster/kuberay/deployment.page.yaml: the pod's own command serves the page, and asks the bucket for a reader's rights."""

import os
import re
import subprocess
import sys
import time
import tomllib
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from raycheck.bucket.store import open_store
from raycheck.bucket.store.address import join_uri
from raycheck.cli.views.page import TOKEN_VARIABLE
from tests.bucket.protocol.test_iam_policy import refused
from tests.support.processes.cluster_files import CLUSTER, PAGE, ROOT, objects
from tests.support.samples.sample_checkpoints import Driver
from tests.support.servers.http_fault_proxy import FaultProxy
from tests.support.servers.ports import free_port

POD: dict[str, Any] = objects(PAGE)["Deployment"]["spec"]["template"]
(PAGE_CONTAINER,) = POD["spec"]["containers"]
(INSTALL,) = POD["spec"]["initContainers"]
PROBES = ("startupProbe", "readinessProbe", "livenessProbe")
TOKEN = "the-word-in-the-secret"
DEADLINE_S = 60.0


def test_the_service_and_the_policy_choose_the_pods_of_the_deployment() -> None:
    found = objects(PAGE)
    labels = POD["metadata"]["labels"]

    assert found["Deployment"]["spec"]["selector"]["matchLabels"] == labels
    assert found["Service"]["spec"]["selector"] == labels
    assert found["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"] == labels
    (port,) = found["Service"]["spec"]["ports"]
    assert port["targetPort"] == PAGE_CONTAINER["ports"][0]["name"]
    assert {PAGE_CONTAINER[name]["httpGet"]["port"] for name in PROBES} == {port["targetPort"]}


def test_the_pod_has_a_readers_account_and_no_right_in_the_cluster() -> None:
    account = objects(PAGE)["ServiceAccount"]["metadata"]

    assert POD["spec"]["serviceAccountName"] == account["name"]
    assert POD["spec"]["automountServiceAccountToken"] is False
    assert all(re.search(r"\breader\b", who) for who in account["annotations"].values())
    assert "Role" not in " ".join(objects(PAGE))


def test_no_container_can_gain_rights_or_write_to_its_image() -> None:
    assert POD["spec"]["securityContext"]["runAsNonRoot"]
    assert POD["spec"]["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in (PAGE_CONTAINER, INSTALL):
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert "memory" in container["resources"]["limits"]
    mounts = {mount["name"]: mount for mount in PAGE_CONTAINER["volumeMounts"]}
    assert mounts["packages"]["readOnly"], "what serves cannot change its own code"
    assert {mount["name"] for mount in INSTALL["volumeMounts"]} == {item["name"] for item in POD["spec"]["volumes"]}


def test_what_is_installed_is_pinned_to_what_is_tested() -> None:
    wanted = [word for word in INSTALL["command"] if "==" in word]
    pinned = (CLUSTER / "constraints.txt").read_text().split()
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]

    assert wanted[0] == f"raycheck[page]=={version}"
    assert set(wanted[1:]) <= set(pinned)
    assert f"--target={environment()['PYTHONPATH']}" in INSTALL["command"]
    assert INSTALL["command"][:4] == ["python", "-m", "pip", "install"]
    nightly = (PAGE.parent / "cron-job.prune.yaml").read_text().split()
    assert [word for word in nightly if "==" in word] == [f"raycheck=={version}", *wanted[1:]]


def environment() -> dict[str, str]:
    return {item["name"]: item["value"] for item in PAGE_CONTAINER["env"] if "value" in item}


def test_the_token_comes_from_a_secret_alone() -> None:
    (secret,) = [item for item in PAGE_CONTAINER["env"] if "valueFrom" in item]

    assert secret["name"] == TOKEN_VARIABLE
    assert "--token" not in PAGE_CONTAINER["command"]
    created = f"kubectl create secret generic {secret['valueFrom']['secretKeyRef']['name']} --from-literal=token="
    for path in (PAGE, CLUSTER / "README.md"):
        assert created in path.read_text()
    assert secret["valueFrom"]["secretKeyRef"]["key"] == "token"


def ask(port: int, path: str, **headers: str) -> int:
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            answer.read()
            return answer.status
    except urllib.error.HTTPError as error:
        error.close()
        return error.code


def wait_until_up(process: "subprocess.Popen[bytes]", port: int, path: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while True:
        assert process.poll() is None, "the page has ended"
        assert time.monotonic() < deadline
        try:
            assert ask(port, path, Host="10.1.2.3:8766") == 200, "a probe knows the pod's address alone"
        except urllib.error.URLError:
            time.sleep(0.2)
        else:
            return


@pytest.mark.server
def test_the_pods_command_serves_with_a_readers_rights(wire: FaultProxy, tmp_path: Path) -> None:
    """Its command, with another bucket and port, is asked for all that it shows."""
    uri = join_uri(wire.uri, "runs")
    driver = Driver(open_store(join_uri(uri, "my-run")))
    driver.claim("g1")
    for save in (1, 2):
        driver.save(1, save)
    key, other = (entry.key for entry in driver.look().live)
    port = free_port()
    changed = {"python": sys.executable, "s3://bucket/runs": uri, "8766": str(port), "0.0.0.0": "127.0.0.1"}
    command = [changed.get(word, word) for word in PAGE_CONTAINER["command"]]
    assert sum(a != b for a, b in zip(command, PAGE_CONTAINER["command"], strict=True)) == len(changed)
    begun = len(wire.requests)
    surroundings = {**os.environ, TOKEN_VARIABLE: TOKEN}
    with subprocess.Popen(command, cwd=ROOT, env=surroundings, stdout=subprocess.DEVNULL) as process:
        try:
            for probe in PROBES:
                wait_until_up(process, port, PAGE_CONTAINER[probe]["httpGet"]["path"])
            cookie = f"raycheck-token-{port}={TOKEN}"
            assert ask(port, "/") == 401
            views = ("/", "/run?name=my-run", "/live?name=my-run", f"/checkpoint?name=my-run&at={key}")
            for path in (*views, f"/diff?name=my-run&before={key}&after={other}"):
                assert ask(port, path, Cookie=cookie) == 200, path
            assert ask(port, "/run?name=gone", Cookie=cookie) == 404
        finally:
            process.terminate()
    asked = wire.requests[begun:]
    assert len(asked) > 5
    assert refused("reader", asked) == []
