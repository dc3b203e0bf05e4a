"""Every committed checkpoint is registered once with a real MLflow server, and in wandb's offline runs."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import raycheck
from tests.support.frameworks import trackers

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def installed() -> None:
    trackers.prepare()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with trackers.mlflow_server(tmp_path_factory.mktemp("mlflow")) as address:
        yield address


def train(folder: Path, until: int, *, is_killed: bool = False, **job: Any) -> Any:
    told = {"uri": f"file://{folder}/run", "until": until, **job}
    return trackers.run(json.dumps(told), home=folder, is_killed=is_killed)


def test_mlflow_lists_every_checkpoint_once_and_a_restart_resumes_the_run(server: str, tmp_path: Path) -> None:
    job = {"logger": "mlflow", "arguments": [server], "options": {"experiment": "plain"}}

    train(tmp_path, 4, **job)
    done = train(tmp_path, 7, **job)

    found = trackers.run("mlflow", server, "plain", home=tmp_path)
    (run,) = found["runs"]
    assert (done["start"], run["name"], run["status"]) == (4, "run", "FINISHED")
    assert run["tags"]["raycheck.run_id"] == done["run_id"]
    assert run["attempt"] == [[2, 1.0], [4, 1.0], [6, 2.0], [7, 2.0]]
    assert sorted(run["outputs"]) == [2, 4, 6, 7]
    assert [model["name"] for model in found["models"]] == [item["key"] for item in done["live"]]
    for model, item in zip(found["models"], done["live"], strict=True):
        assert model["tags"]["raycheck.address"] == item["address"]
        assert model["tags"]["raycheck.digest"] == item["digest"]
        assert model["metrics"]["loss"] == 1.0 / item["step"]
        assert model["status"].endswith("READY")


@pytest.mark.parametrize("dies_at", ["log_batch", "log_outputs", "finalize_logged_model", "set_terminated"])
def test_a_task_that_dies_at_any_call_is_completed_by_the_next_without_a_second_value(
    dies_at: str, server: str, tmp_path: Path
) -> None:
    job = {"logger": "mlflow", "arguments": [server], "options": {"experiment": dies_at}}

    train(tmp_path, 2, dies_at=dies_at, is_killed=True, **job)
    train(tmp_path, 6, **job)

    found = trackers.run("mlflow", server, dies_at, home=tmp_path)
    (run,) = found["runs"]
    assert [step for step, _ in run["loss"]] == [2, 4, 6]
    assert sorted(run["outputs"]) == [2, 4, 6]
    assert [model["status"].rpartition(".")[2] for model in found["models"]] == ["READY"] * 3


def test_mlflow_keeps_the_first_value_of_a_step_that_is_trained_again(server: str, tmp_path: Path) -> None:
    job = {"logger": "mlflow", "arguments": [server], "options": {"experiment": "rewound"}}

    train(tmp_path, 4, **job)
    raycheck.open_run(f"file://{tmp_path}/run").rewind(2)
    train(tmp_path, 6, **job)

    found = trackers.run("mlflow", server, "rewound", home=tmp_path)
    assert found["runs"][0]["attempt"] == [[2, 1.0], [4, 1.0], [6, 3.0]]
    again = [model for model in found["models"] if model["tags"]["raycheck.step"] == "4"]
    assert [json.loads(model["tags"]["raycheck.metrics"])["attempt"] for model in again] == [1.0, 3.0]


def test_wandb_offline_has_every_checkpoint_once_in_runs_of_one_id(tmp_path: Path) -> None:
    job = {"logger": "wandb", "arguments": ["mine"], "options": {"offline": True, "folder": f"{tmp_path}/wandb"}}

    train(tmp_path, 4, **job)
    raycheck.open_run(f"file://{tmp_path}/run").rewind(2)
    done = train(tmp_path, 7, **job)
    train(tmp_path, 7, **job)

    found = trackers.run("wandb", f"{tmp_path}/wandb", home=tmp_path)
    assert {*found["ids"]} == {f"raycheck-{done['run_id']}"}
    assert [(item["step"], item["attempt"]) for item in found["history"] if "attempt" in item] == [
        (2, 1.0),
        (4, 1.0),
        (6, 3.0),
        (7, 3.0),
    ]
    assert [item["key"] for item in found["artifacts"]] == [item["key"] for item in done["live"]]
    for artifact, item in zip(found["artifacts"], done["live"], strict=True):
        assert (artifact["address"], artifact["digest"]) == (item["address"], item["digest"])
        assert artifact["metadata"]["step"] == item["step"]
        assert (artifact["name"], artifact["type"]) == ("run-checkpoints", "checkpoint")
        assert f"step-{item['step']}" in artifact["aliases"]
    assert not list(Path(f"{tmp_path}/wandb").rglob("*.distcp")), "no bytes are copied"
