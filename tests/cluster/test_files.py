"""cluster/: what the files call bucket and run is one thing, and what the texts name exists."""

import re

import pytest

from tests.support.processes.cluster_files import CLUSTER, JOB, KUBERAY, RAY_UP, ROOT, environment, head_pod, objects

FOLDERS = ("bucket", "kuberay", "autoscaler")
TEXTS = [CLUSTER / "README.md", *(path for name in FOLDERS for path in (CLUSTER / name).rglob("*") if path.is_file())]
READMES = [path for path in TEXTS if path.suffix == ".md"]
SCRIPT = (ROOT / "README.md").read_text()


def test_the_run_and_its_storage_are_called_the_same_everywhere() -> None:
    uris = {uri for path in TEXTS for uri in re.findall(r"\b(?:s3|gs)://[\w./-]*\w", path.read_text())}
    name, storage = re.search(r'RunConfig\(name="([^"]+)", storage_path="([^"]+)"\)', SCRIPT).groups()

    assert uris <= {"s3://bucket", "gs://bucket", storage, f"{storage}/{name}", f"{storage}/{name}.zip"}
    assert objects(JOB)["RayJob"]["metadata"]["name"] == name
    assert objects(JOB)["RayJob"]["spec"]["metadata"] == {"raycheck_run": f"{storage}/{name}"}


def test_the_settings_of_ray_are_the_same_by_every_way() -> None:
    by_kuberay = [set(environment(head_pod(path)).items()) for path in KUBERAY]
    by_ray_up = [set(re.findall(r"(RAY_TRAIN_\w+)=(\d+)", path.read_text())) for path in RAY_UP]

    assert by_kuberay[0] == by_kuberay[1]
    assert by_ray_up[0] == by_ray_up[1] == {item for item in by_kuberay[0] if item[0].startswith("RAY_TRAIN_")}


def test_the_readme_says_what_the_files_set() -> None:
    text = (CLUSTER / "README.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| [^|]+ \| (\d+)", text, flags=re.MULTILINE))

    assert environment(head_pod(JOB)).items() <= rows.items()
    assert int(rows["terminationGracePeriodSeconds"]) == head_pod(JOB)["spec"]["terminationGracePeriodSeconds"]


@pytest.mark.parametrize("path", READMES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_file_that_a_readme_names_exists(path) -> None:
    text = path.read_text()

    for link in re.findall(r"\]\(([^)#]+)\)", text):
        assert (path.parent / link).exists(), link
    for name in re.findall(r"(?:cluster|tests)/[\w./-]+\.(?:yaml|json|sh|py)", text):
        assert (ROOT / name).exists(), name
