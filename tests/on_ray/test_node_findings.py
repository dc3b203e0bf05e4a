"""raycheck doctor --address: every node of a Ray examines the place with its own clock, rights and file system."""

import json
import os
import re
import subprocess
from pathlib import Path
from uuid import uuid4

import pytest

from raycheck.bucket.store import open_store
from raycheck.bucket.store.address import join_uri
from raycheck.on_ray.node_findings import examine_nodes
from tests.support.processes.forked_ray_workers import script_command
from tests.support.processes.ray_cluster import ENV, arena

pytestmark = pytest.mark.ray
ROOT = Path(__file__).parents[2]


def test_a_node_whose_clock_is_wrong_is_named_and_the_others_are_fit(forks: None, s3: str) -> None:
    uri = join_uri(s3, uuid4().hex)
    path = os.pathsep.join((str(ROOT / "tests/elastic/clock"), ENV["PYTHONPATH"]))
    with arena() as ray:
        (_fit,) = ray.add()
        (_late,) = ray.add(env_vars={"PYTHONPATH": path, "RAYCHECK_TEST_CLOCK_S": "-3500"})

        arguments = ["doctor", uri, "--address", ray.address, "--transfer-size", "1MiB", "--json"]
        done = subprocess.run(
            [*script_command("raycheck"), *arguments],
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
        )

    assert done.returncode == 1, done.stderr + done.stdout
    findings = json.loads(done.stdout)["findings"]
    of_nodes = [item for item in findings if item["name"].endswith("Ray's file system") and ": " in item["name"]]
    assert [item["state"] for item in of_nodes] == ["ok"] * 3
    (wrong,) = (item for item in findings if item["state"] == "wrong")
    assert wrong["name"].endswith(": clock")
    assert re.search(r"3[45]\d\d s behind", wrong["text"])
    assert list(open_store(uri).list_objects("")) == []


def test_nodes_that_see_another_place_at_the_same_address_are_wrong(cluster: None, tmp_path: Path) -> None:
    apart = examine_nodes(f"memory://{uuid4().hex}", "auto")
    together = examine_nodes(f"file://{tmp_path}/runs", "auto")

    (finding,) = [finding for finding in apart if finding.state == "wrong"]
    assert "is another place than the driver's" in finding.text
    assert [finding.state for finding in together if finding.name.endswith(": same place")] == ["ok"]
    assert list(open_store(f"file://{tmp_path}/runs").list_objects("")) == []
