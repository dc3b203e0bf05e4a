"""The examples of transformers and Accelerate on a Ray of two nodes, of which one dies: the other goes on alone."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import raycheck
from tests.frameworks.test_transformers_on_ray import restored, wait_for_commit
from tests.support.processes.ray_cluster import arena

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # Ray itself warns

SCRIPT = """
import ast, importlib, sys
import ray, ray.cloudpickle
ray.init()
example = importlib.import_module(f"tests.examples.{sys.argv[1]}")
ray.cloudpickle.register_pickle_by_value(example)
example.main(**ast.literal_eval(sys.argv[2]))
"""


@pytest.mark.parametrize(
    ("example", "run", "options", "steps", "said"),
    [
        (
            "hf_trainer_with_raycheck",
            "trainer",
            {"workers": (1, 2), "epochs": 10},
            10 * 32,
            "gradient_accumulation_steps=4 instead of 2",
        ),
        ("accelerate_bert_with_raycheck", "bert", {"num_workers": (1, 2), "num_epochs": 25}, 25 * 12, "world_size=1"),
    ],
    ids=["transformers", "accelerate"],
)
def test_a_worker_that_is_left_alone_does_all_steps(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    example: str,
    run: str,
    options: dict[str, Any],
    steps: int,
    said: str,
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    uri = f"file://{tmp_path}/{run}"
    with arena() as nodes, (tmp_path / "driver.log").open("w") as log:
        _, second = nodes.add(2)
        driver = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, example, repr({"storage_path": str(tmp_path), **options})],
            env={**os.environ, "RAY_ADDRESS": nodes.address},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            wait_for_commit(uri, 20)
            nodes.kill(second)
            assert driver.wait(300) == 0, (tmp_path / "driver.log").read_text()[-4000:]
        finally:
            driver.kill()
            driver.wait()

    head = raycheck.open_run(uri).head
    assert (head.step, head.details().world_size) == (steps, 1)
    first, *others = restored(uri)
    assert first is None
    assert None not in others
    assert others
    assert said in (tmp_path / "driver.log").read_text()
