"""The files of cluster/ as the tests read them."""

import re
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[3]
CLUSTER = ROOT / "cluster"
JOB = CLUSTER / "kuberay/ray-job.train.yaml"
STAYING = CLUSTER / "kuberay/ray-cluster.autoscaler.yaml"
TINKER = CLUSTER / "kuberay/ray-job.tinker.yaml"
PAGE = CLUSTER / "kuberay/deployment.page.yaml"
AWS = CLUSTER / "autoscaler/aws.yaml"
GCP = CLUSTER / "autoscaler/gcp.yaml"
KUBERAY = [JOB, STAYING]
RAY_UP = [AWS, GCP]
RAY_VERSION = re.search(r"^ray==(\S+)", (CLUSTER / "constraints.txt").read_text(), re.MULTILINE)[1]
"""What the figures of this project were measured on."""


def objects(path: Path) -> dict[str, dict]:
    """By kind; no file has two of one kind."""
    found = list(yaml.safe_load_all(path.read_text()))
    by_kind = {item["kind"]: item for item in found}
    assert len(by_kind) == len(found)
    return by_kind


def cluster_spec(path: Path) -> dict:
    found = objects(path)
    return found["RayJob"]["spec"]["rayClusterSpec"] if "RayJob" in found else found["RayCluster"]["spec"]


def head_pod(path: Path) -> dict:
    return cluster_spec(path)["headGroupSpec"]["template"]


def worker_pod(path: Path) -> dict:
    """That of the one worker group, which is on spot nodes."""
    (group,) = cluster_spec(path)["workerGroupSpecs"]
    return group["template"]


def environment(pod: dict) -> dict[str, str]:
    (container,) = pod["spec"]["containers"]
    return {item["name"]: item["value"] for item in container["env"]}
