"""Inside Ray Tune: a trial is a driver, has a run name of its own, and hears what the script reports."""

from pathlib import Path

import pytest
import ray.train.torch
import ray.tune
import torch
from ray.train import RunConfig, ScalingConfig
from ray.tune.integration.ray_train import TuneReportCallback

import raycheck
import raycheck.train.worker.ray_reports
from raycheck.bucket.format.object_keys import pointed_by
from raycheck.bucket.store import open_store
from tests.support.invariants import assert_invariants

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore")]  # Ray itself warns


@pytest.mark.slow
def test_every_trial_of_ray_tune_is_a_run_with_a_name_of_its_own(cluster: None, tmp_path) -> None:
    folder = str(tmp_path)

    def train_fn(config: dict) -> None:
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"])
        with raycheck.Checkpointer({"model": model, "optimizer": optimizer}) as ckpt:
            for _ in range(ckpt.restore().step, 4):
                model(torch.ones(1, 4)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                ckpt.end_step()

    def trial(config: dict) -> None:
        trainer = ray.train.torch.TorchTrainer(
            train_fn,
            train_loop_config=config,
            scaling_config=ScalingConfig(num_workers=1),
            run_config=RunConfig(name=f"lr-{config['lr']}", storage_path=f"{folder}/runs"),
        )
        raycheck.fit(trainer)
        ray.tune.report({"done": 1})

    tuner = ray.tune.Tuner(
        trial,
        param_space={"lr": ray.tune.grid_search([0.1, 0.2])},
        run_config=ray.tune.RunConfig(name="search", storage_path=f"{folder}/search"),
    )
    results = tuner.fit()

    assert [result.error for result in results] == [None, None]
    for lr in (0.1, 0.2):
        body = assert_invariants(open_store(f"file://{folder}/runs/lr-{lr}"))
        assert [entry.step for entry in body.live] == [4]


def reporting(config: dict) -> None:
    """Saves at every step, tells Ray of each commit, and reports a loss at every second step, as Ray's guide has it."""
    raycheck.train.worker.ray_reports.RAY_REPORT_PAUSE_S = 0.0
    with raycheck.Checkpointer({"model": torch.nn.Linear(4, 1)}, raycheck.SaveSettings(every_steps=1)) as ckpt:
        for step in range(ckpt.restore().step, 6):
            ckpt.end_step({"unscored": step})
            if step % 2:
                ray.train.report({"loss": config["lr"] / step})


@pytest.mark.parametrize("by", ["raycheck.fit", pytest.param("trainer.fit", marks=pytest.mark.slow)])
def test_what_tune_counts_and_scores_is_what_the_script_reports(cluster: None, tmp_path: Path, by: str) -> None:
    folder = str(tmp_path)

    def trial(config: dict) -> None:
        trainer = ray.train.torch.TorchTrainer(
            reporting,
            train_loop_config=config,
            scaling_config=ScalingConfig(num_workers=1),
            run_config=RunConfig(
                name=f"lr-{config['lr']}", storage_path=f"{folder}/runs", callbacks=[TuneReportCallback()]
            ),
        )
        raycheck.fit(trainer) if by == "raycheck.fit" else trainer.fit()

    tuner = ray.tune.Tuner(
        trial,
        param_space={"lr": ray.tune.grid_search([3.0, 1.5])},
        tune_config=ray.tune.TuneConfig(metric="loss", mode="min", max_concurrent_trials=1),
        run_config=ray.tune.RunConfig(name="search", storage_path=f"{folder}/search"),
    )
    results = tuner.fit()

    assert [result.error for result in results] == [None, None]
    best = results.get_best_result()
    assert best.metrics["loss"] == pytest.approx(0.3)
    assert best.metrics["training_iteration"] == 3
    assert "unscored" not in best.metrics
    assert pointed_by(best.metrics["checkpoint_path"]) is not None, "the newest commit that Ray knows"
    body = assert_invariants(open_store(f"file://{folder}/runs/lr-1.5"))
    assert [entry.step for entry in body.live] == [1, 2, 3, 4, 5, 6]
