"""cluster/kuberay/ray-job.tinker.yaml: the job's own command serves the SDK's clients, and keeps its state on the volume."""

import os
import shlex
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import psutil
import pytest
import yaml

from raycheck.cli.tinker import KEY_VARIABLE
from tests.support.processes.cluster_files import CLUSTER, ROOT, TINKER, cluster_spec, head_pod, objects, worker_pod
from tests.support.servers.ports import free_port
from tests.support.servers.tinker_server import write_base_model

JOB = objects(TINKER)["RayJob"]["spec"]
(HEAD,) = head_pod(TINKER)["spec"]["containers"]
KEY = "tml-the-word-in-the-secret"
START_S = 120.0


def server_command() -> list[str]:
    """Returns the words of the server in the job's entrypoint, which starts it again when it dies."""
    words = shlex.split(JOB["entrypoint"], comments=False)
    assert words[0] == "until"
    assert words[-3:] == ["sleep", "5;", "done"]
    end = next(number for number, word in enumerate(words) if word.endswith(";"))
    return [*words[1:end], words[end].rstrip(";")]


def option(name: str) -> str:
    words = server_command()
    return words[words.index(name) + 1]


def test_the_service_leads_to_the_head_and_to_the_servers_port() -> None:
    service = objects(TINKER)["Service"]["spec"]
    (port,) = service["ports"]

    assert option("--port") == str(port["targetPort"]) == str(port["port"])
    assert option("--host") == "0.0.0.0"
    assert service["selector"]["run"] == head_pod(TINKER)["metadata"]["labels"]["run"]
    budget = objects(TINKER)["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"]
    assert budget == service["selector"]


def test_the_state_is_on_the_volume_and_the_key_in_a_secret() -> None:
    (volume,) = head_pod(TINKER)["spec"]["volumes"]
    (mount,) = HEAD["volumeMounts"]
    (secret,) = HEAD["env"]

    assert volume["persistentVolumeClaim"]["claimName"] == objects(TINKER)["PersistentVolumeClaim"]["metadata"]["name"]
    assert mount["name"] == volume["name"]
    assert option("--state").startswith(f"{mount['mountPath']}/")
    assert secret["name"] == KEY_VARIABLE
    created = f"kubectl create secret generic {secret['valueFrom']['secretKeyRef']['name']} --from-literal=key=tml-"
    for path in (TINKER, CLUSTER / "README.md"):
        assert created in path.read_text()


def test_there_are_as_many_gpu_pods_as_ranks() -> None:
    (group,) = cluster_spec(TINKER)["workerGroupSpecs"]
    (worker,) = worker_pod(TINKER)["spec"]["containers"]

    assert group["replicas"] == int(option("--ranks"))
    assert worker["resources"]["limits"]["nvidia.com/gpu"] == int(option("--num-gpus"))
    assert "raycheck[tinker,fast]" in yaml.safe_load(JOB["runtimeEnvYAML"])["pip"]


def answers(url: str, process: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + START_S
    while True:
        assert process.poll() is None, "the job's command has ended"
        assert time.monotonic() < deadline
        try:
            urllib.request.urlopen(f"{url}/api/v1/healthz", timeout=5).close()
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
        else:
            return


def servers_below(process: "subprocess.Popen[bytes]") -> list[psutil.Process]:
    return [child for child in psutil.Process(process.pid).children() if "raycheck" in " ".join(child.cmdline())]


@pytest.mark.slow
@pytest.mark.ray
def test_the_jobs_entrypoint_serves_and_starts_a_killed_server_again(tmp_path: Path) -> None:
    """Its text, with another model, bucket, file and port, without a GPU, and with a Ray of its own."""
    port = free_port()
    changed = {
        "raycheck tinker": f"{sys.executable} -m raycheck tinker",
        option("--base-model"): write_base_model(tmp_path / "model"),
        option("--checkpoints"): f"file://{tmp_path}/bucket",
        option("--state"): str(tmp_path / "tinker.sqlite"),
        "--host 0.0.0.0": "--host 127.0.0.1",
        f"--port {option('--port')}": f"--port {port}",
        "--ray-address auto ": "",
        "--num-gpus 1": "--num-gpus 0",
    }
    text = JOB["entrypoint"]
    for word, other in changed.items():
        assert text.count(word) == 1, word
        text = text.replace(word, other)
    surroundings = {**os.environ, KEY_VARIABLE: KEY}
    with subprocess.Popen(["bash", "-c", text], cwd=ROOT, env=surroundings, start_new_session=True) as process:
        try:
            answers(f"http://127.0.0.1:{port}", process)
            (server,) = servers_below(process)
            server.kill()
            server.wait(30)
            answers(f"http://127.0.0.1:{port}", process)
            with pytest.raises(urllib.error.HTTPError, match="401"):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/api/v1/training_runs", timeout=10)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
