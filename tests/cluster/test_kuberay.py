"""cluster/kuberay: the API server and Ray's autoscaler would take the files, and they hold what they promise on spot nodes."""

import copy
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import pytest
import yaml
from ray._private import ray_constants
from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr
from ray.runtime_env import RuntimeEnv
from ray.train.v2._internal import constants as train_constants

from tests.support.processes.cluster_files import (
    JOB,
    KUBERAY,
    PAGE,
    RAY_VERSION,
    STAYING,
    TINKER,
    cluster_spec,
    environment,
    head_pod,
    objects,
    worker_pod,
)

each_file = pytest.mark.parametrize("path", KUBERAY, ids=lambda path: path.name)
FREE = {"labels", "annotations", "matchLabels", "rayStartParams", "requests", "limits"}
"""Maps in which any key is one."""
SPOT_NODES = {
    "GKE": {"cloud.google.com/gke-spot": "true"},
    "EKS": {"eks.amazonaws.com/capacityType": "SPOT"},
    "Karpenter": {"karpenter.sh/capacity-type": "spot"},
    "AKS": {"kubernetes.azure.com/scalesetpriority": "spot"},
}
NORMAL_NODES = {
    "GKE and AKS": {"kubernetes.io/os": "linux"},
    "EKS": {"eks.amazonaws.com/capacityType": "ON_DEMAND"},
    "Karpenter": {"karpenter.sh/capacity-type": "on-demand"},
}
AKS_TAINT = {"key": "kubernetes.azure.com/scalesetpriority", "value": "spot", "effect": "NoSchedule"}


def closed(schema: object) -> object:
    """The same, where an object has no properties but those named."""
    if isinstance(schema, list):
        return [closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    shut = {name: closed(item) for name, item in schema.items()}
    return {**shut, "additionalProperties": False} if isinstance(shut.get("properties"), dict) else shut


SCHEMA = closed(yaml.safe_load((Path(__file__).parent / "kuberay.schema.yaml").read_text()))


def problems(item: dict) -> list[str]:
    validator = jsonschema.Draft202012Validator({**SCHEMA, "$ref": f"#/$defs/{item['kind']}"})
    return [f"{error.json_path}: {error.message}" for error in validator.iter_errors(item)]


def misspelt(item: dict) -> Iterator[tuple[str, dict]]:
    """The same object with one name of a property wrong, for each property that has one."""
    places = [((), item)]
    while places:
        path, value = places.pop()
        children = value.items() if isinstance(value, dict) else enumerate(value)
        for key, child in children:
            is_free = key in FREE or (*path, key) == ("spec", "metadata")
            is_free = is_free or (item["kind"] == "Service" and key == "selector")
            if isinstance(child, dict | list) and not is_free:
                places.append(((*path, key), child))
            if isinstance(value, dict) and (*path, key) != ("kind",):
                wrong = copy.deepcopy(item)
                holder = wrong
                for step in path:
                    holder = holder[step]
                holder[f"{key}x"] = holder.pop(key)
                yield ".".join(map(str, (*path, key))), wrong


def allows(pod: dict, labels: dict[str, str]) -> bool:
    """Whether the pod's required node affinity lets it onto a node with these labels."""
    affinity = pod["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]

    def holds(rule: dict) -> bool:
        is_one = labels.get(rule["key"]) in rule["values"]
        return is_one if rule["operator"] == "In" else not is_one

    return any(all(holds(rule) for rule in term["matchExpressions"]) for term in affinity["nodeSelectorTerms"])


def tolerates(pod: dict, taint: dict[str, str]) -> bool:
    return any(
        rule["key"] == taint["key"]
        and rule["effect"] == taint["effect"]
        and (rule["operator"] == "Exists" or rule["value"] == taint["value"])
        for rule in pod["spec"].get("tolerations", [])
    )


@pytest.mark.parametrize("path", [*KUBERAY, PAGE, TINKER], ids=lambda path: path.name)
def test_the_api_server_would_take_every_object(path: Path) -> None:
    for item in objects(path).values():
        assert problems(item) == []


@pytest.mark.parametrize("path", [*KUBERAY, PAGE, TINKER], ids=lambda path: path.name)
def test_a_misspelt_name_would_be_refused(path: Path) -> None:
    for item in objects(path).values():
        wrongs = list(misspelt(item))

        assert len(wrongs) >= 4
        assert [place for place, wrong in wrongs if not problems(wrong)] == []


@each_file
def test_rays_autoscaler_understands_the_groups(path: Path) -> None:
    resource = {"metadata": {"name": "any", "namespace": "default"}, "spec": cluster_spec(path)}

    config = _derive_autoscaling_config_from_ray_cr(resource)

    head, spot = config["available_node_types"]["headgroup"], config["available_node_types"]["spot"]
    assert head["resources"]["CPU"] == 0, "no training worker there"
    assert (spot["resources"]["CPU"], spot["resources"]["GPU"]) == (8, 1)
    assert spot["min_workers"] < spot["max_workers"] == 4


@each_file
def test_a_pod_outlives_its_drain(path: Path) -> None:
    for pod in (head_pod(path), worker_pod(path)):
        drain_s = float(environment(pod)["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"])

        assert pod["spec"]["terminationGracePeriodSeconds"] >= drain_s + 10, "what follows the drain takes time, too"


@each_file
def test_ray_knows_every_setting(path: Path) -> None:
    for pod in (head_pod(path), worker_pod(path)):
        for name in environment(pod):
            assert name in train_constants.ENV_VARS_TO_PROPAGATE or hasattr(ray_constants, name), name


@each_file
@pytest.mark.parametrize("cloud", SPOT_NODES)
def test_workers_go_to_spot_nodes_and_the_head_does_not(path: Path, cloud: str) -> None:
    assert allows(worker_pod(path), SPOT_NODES[cloud])
    assert not allows(head_pod(path), SPOT_NODES[cloud])


@each_file
@pytest.mark.parametrize("cloud", NORMAL_NODES)
def test_the_head_goes_to_normal_nodes_and_workers_do_not(path: Path, cloud: str) -> None:
    assert allows(head_pod(path), NORMAL_NODES[cloud])
    assert not allows(worker_pod(path), NORMAL_NODES[cloud])


@each_file
def test_only_workers_tolerate_the_taint_of_spot_nodes(path: Path) -> None:
    assert tolerates(worker_pod(path), AKS_TAINT)
    assert not tolerates(head_pod(path), AKS_TAINT)


@each_file
def test_the_budget_holds_the_head_and_no_worker(path: Path) -> None:
    budget = objects(path)["PodDisruptionBudget"]["spec"]
    wanted = budget["selector"]["matchLabels"].items()

    assert budget == {"minAvailable": 1, "selector": budget["selector"]}, "Kubernetes counts an operator's pods so only"
    assert wanted <= {**head_pod(path)["metadata"]["labels"], "ray.io/node-type": "head"}.items()
    assert not wanted <= {**worker_pod(path)["metadata"]["labels"], "ray.io/node-type": "worker"}.items()


@each_file
def test_nothing_holds_up_the_eviction_of_a_worker(path: Path) -> None:
    assert "karpenter.sh/do-not-disrupt" not in worker_pod(path)["metadata"]["annotations"]


@each_file
def test_every_pod_has_the_account_of_the_trainer(path: Path) -> None:
    name = objects(path)["ServiceAccount"]["metadata"]["name"]

    assert {pod["spec"]["serviceAccountName"] for pod in (head_pod(path), worker_pod(path))} == {name}


@each_file
def test_all_pods_have_the_one_ray_that_was_measured(path: Path) -> None:
    images = {pod["spec"]["containers"][0]["image"] for pod in (head_pod(path), worker_pod(path))}

    assert cluster_spec(path)["rayVersion"] == RAY_VERSION
    assert images == {f"rayproject/ray:{RAY_VERSION}-py311-gpu"}


def test_the_job_is_submitted_again_and_its_cluster_goes_with_it() -> None:
    spec = objects(JOB)["RayJob"]["spec"]

    assert spec["submissionMode"] == "HTTPMode", "resubmits after the loss of a head, and has no pod of its own to lose"
    assert spec["backoffLimit"] > 0
    assert spec["shutdownAfterJobFinishes"]
    assert spec["entrypoint"] == "python train.py"
    (group,) = spec["rayClusterSpec"]["workerGroupSpecs"]
    assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]


def test_ray_takes_the_runtime_environment_of_the_job() -> None:
    text = objects(JOB)["RayJob"]["spec"]["runtimeEnvYAML"]

    environment = RuntimeEnv(**yaml.safe_load(text))

    assert environment.working_dir() == "s3://bucket/runs/my-run.zip"
    assert "raycheck[train,fast]" in environment["pip"]["packages"]


def test_the_cluster_that_stays_can_be_scaled_by_autoscaler_v2() -> None:
    spec = cluster_spec(STAYING)

    assert spec["enableInTreeAutoscaling"]
    assert spec["autoscalerOptions"]["version"] == "v2"
    for pod in (head_pod(STAYING), worker_pod(STAYING)):
        assert pod["spec"].get("restartPolicy", "Never") == "Never", "v2 takes no other"
    (group,) = spec["workerGroupSpecs"]
    assert "replicas" not in group, "the number is the autoscaler's: applying the file again must not reset it"
