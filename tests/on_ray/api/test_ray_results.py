"""Ray is told of commits, of each once: for its Result, its choice of the best, and its validation functions."""

import logging
import time
from pathlib import Path
from typing import Any

import pytest
import ray.train
import ray.train.torch
import torch
from ray.train import CheckpointConfig, RunConfig, ScalingConfig
from ray.train.v2.api.validation_config import ValidationConfig

import raycheck
import raycheck.on_ray.reports.ray_reporter
from raycheck.bucket.protocol.rewind import rewind
from raycheck.bucket.protocol.swap import Register
from raycheck.bucket.store import open_store
from tests.support.histories.invariants import assert_invariants

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore")]  # Ray itself warns


def trainer_of(train_fn, folder: Path, *, workers: int = 1, checkpoints: CheckpointConfig | None = None, **more: Any):
    return ray.train.torch.TorchTrainer(
        train_fn,
        train_loop_config={"folder": str(folder), **more.pop("config", {})},
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=RunConfig(name="run", storage_path=f"file://{folder}/runs", checkpoint_config=checkpoints),
        **more,
    )


def names(result: Any) -> list[str]:
    return [checkpoint.path.rpartition("/")[2] for checkpoint, _ in result.best_checkpoints]


def test_ray_ranks_commits_by_their_metrics_and_its_result_has_those_of_the_last(cluster: None, tmp_path: Path) -> None:
    def train_fn(config: dict) -> None:
        raycheck.on_ray.reports.ray_reporter.RAY_REPORT_PAUSE_S = 0.0
        model = torch.nn.Linear(2, 1, bias=False)
        metrics: list[dict] = [{"loss": 3.0}, {"loss": float("nan")}, {"loss": 1.0}, {"other": 7}, {"loss": 2.0}]
        with raycheck.Checkpointer({"model": model}, raycheck.SaveSettings(every_steps=1)) as ckpt:
            ckpt.restore()
            for step, mine in enumerate(metrics, start=1):
                with torch.no_grad():
                    model.weight.fill_(step)
                ray.train.report({"own": step})
                ckpt.end_step(mine)
                wait_until(lambda: ckpt.save_status.busy_s is None)

    def wait_until(holds) -> None:
        deadline = time.monotonic() + 60
        while not holds():
            assert time.monotonic() < deadline
            time.sleep(0.01)

    rule = CheckpointConfig(num_to_keep=2, checkpoint_score_attribute="loss", checkpoint_score_order="min")

    result = raycheck.fit(trainer_of(train_fn, tmp_path, checkpoints=rule))

    assert result.metrics == {"step": 5, "epoch": 0, "loss": 2.0}
    assert [metrics["step"] for _, metrics in result.best_checkpoints] == [5, 3], "not one that has no loss"
    best = raycheck.open_checkpoint(result.get_best_checkpoint("loss", "min"))
    model = torch.nn.Linear(2, 1, bias=False)
    assert (best.step, dict(best.metrics), best.restore(into={"model": model})) == (3, {"loss": 1.0}, 3)
    assert model.weight.tolist() == [[3.0, 3.0]]
    body = assert_invariants(open_store(f"file://{tmp_path}/runs/run"))
    assert [entry.step for entry in body.live] == [3, 5], "the bucket obeys Ray's rule too"


def test_a_function_of_the_script_scores_commits_in_ray_tasks(cluster: None, tmp_path: Path) -> None:
    def evaluate(uri: str, key: str) -> None:
        model = torch.nn.Linear(2, 1, bias=False)
        run = raycheck.open_run(uri)
        seen = run.restore(key, into={"model": model})
        run.score(key, {"weight": 10 * model.weight.sum().item(), "seen": seen})

    def train_fn(config: dict) -> None:
        model = torch.nn.Linear(2, 1, bias=False)
        tasks = [
            raycheck.AfterCommit(evaluate, every_steps=2),
            raycheck.AfterCommit(ray.remote(num_cpus=0.5)(fail), at_end=False, mode="sync"),
        ]
        with raycheck.Checkpointer({"model": model}, raycheck.SaveSettings(every_steps=2, after_commit=tasks)) as ckpt:
            ckpt.restore()
            for step in range(1, 7):
                with torch.no_grad():
                    model.weight.fill_(step)
                ckpt.end_step({"loss": 1.0 / step})
                if step == 5:
                    ckpt.save(after_commit=["evaluate", "fail"])
                    ckpt.save(after_commit="evaluate")

    def fail(uri: str, key: str) -> None:
        Path(tmp_path, key).touch()
        raise ValueError("what fails here is not the training")

    result = raycheck.fit(trainer_of(train_fn, tmp_path, workers=2))

    assert len(set(names(result))) == len(result.best_checkpoints), "no pointer is listed twice"
    assert raycheck.open_checkpoint(result.checkpoint).step == 6
    run = raycheck.open_run(f"file://{tmp_path}/runs/run")
    assert {item.step: dict(item.scores) for item in run.checkpoints if item.scores} == {
        2: {"weight": 40.0, "seen": 2.0},
        4: {"weight": 80.0, "seen": 4.0},
        5: {"weight": 100.0, "seen": 5.0},
        6: {"weight": 120.0, "seen": 6.0},
    }, "scores, by which keep_best chooses and which ls shows"
    assert [Path(tmp_path, item.key).exists() for item in run.checkpoints] == [False, False, True, False]


def test_a_validation_that_nobody_would_do_is_refused_at_once(cluster: None, tmp_path: Path) -> None:
    config = ValidationConfig(fn=lambda checkpoint: {})

    with pytest.raises(raycheck.errors.ConfigError, match=r"validation_config.*AfterCommit"):
        raycheck.fit(trainer_of(lambda config: None, tmp_path, validation_config=config))


@pytest.mark.slow
def test_a_script_is_told_when_rays_own_checkpoint_is_of_another_step_than_the_restored_one(
    cluster: None, tmp_path: Path
) -> None:
    def train_fn(config: dict) -> None:
        logging.getLogger("raycheck").addHandler(logging.FileHandler(f"{config['folder']}/{config['log']}"))
        with raycheck.Checkpointer({"model": torch.nn.Linear(2, 1)}, raycheck.SaveSettings(every_steps=2)) as ckpt:
            for _ in range(ckpt.restore().step, config["steps"]):
                ckpt.end_step()

    def fit(steps: int, log: str) -> str:
        raycheck.fit(trainer_of(train_fn, tmp_path, config={"steps": steps, "log": log}))
        return "\n".join(line for line in (tmp_path / log).read_text().splitlines() if "get_checkpoint()" in line)

    first, second = fit(4, "first"), fit(6, "second")
    store = open_store(f"file://{tmp_path}/runs/run")
    rewind(Register(store), next(entry.key for entry in assert_invariants(store).live if entry.step == 2))
    third = fit(8, "third")

    assert (first, second) == ("", "")
    assert "restored step 2" in third
    assert "is of step 6" in third
    assert third.count("\n") == 0, "said once"
