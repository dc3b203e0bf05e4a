"""Inside Ray Tune: a trial is a driver, has a run name of its own, and hears what the script reports."""

import time
from pathlib import Path

import pytest
import ray.train.torch
import ray.tune
import ray.tune.schedulers
import torch
from ray.train import RunConfig, ScalingConfig
from ray.tune.integration.ray_train import TuneReportCallback

import raycheck
import raycheck.on_ray.reports.ray_reporter
from raycheck.bucket.format.object_keys import pointed_by
from raycheck.bucket.store import open_store
from tests.support.histories.invariants import assert_invariants

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
    raycheck.on_ray.reports.ray_reporter.RAY_REPORT_PAUSE_S = 0.0
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


def growing(config: dict) -> None:
    """Its weight grows by lr per step; the loss that it reports is the negative of it."""
    raycheck.on_ray.reports.ray_reporter.RAY_REPORT_PAUSE_S = 0.0
    torch.set_num_threads(1)
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    with raycheck.Checkpointer({"model": model}, raycheck.SaveSettings(every_steps=1, keep_last=100)) as ckpt:
        for step in range(ckpt.restore().step, 16):
            with torch.no_grad():
                model.weight += config["lr"]
            ckpt.end_step()
            ckpt.wait()
            if step % 2:
                ckpt.end_epoch()  # a report of the commit comes with the next decision
                ray.train.report({"weight": model.weight.item(), "step": step + 1})
                time.sleep(config["pause_s"])


@pytest.mark.slow
def test_population_based_training_clones_a_trial_by_a_fork_that_moves_no_tensor(cluster: None, tmp_path: Path) -> None:
    folder = str(tmp_path)

    def trial(config: dict) -> None:
        trainer = ray.train.torch.TorchTrainer(
            growing,
            train_loop_config=config,
            scaling_config=ScalingConfig(num_workers=1),
            run_config=RunConfig(
                name=ray.tune.get_context().get_trial_id(),
                storage_path=f"{folder}/runs",
                callbacks=[TuneReportCallback()],
            ),
        )
        raycheck.fit(trainer)

    scheduler = ray.tune.schedulers.PopulationBasedTraining(
        time_attr="training_iteration",
        perturbation_interval=3,
        quantile_fraction=0.5,
        resample_probability=0.0,
        hyperparam_mutations={"lr": [0.001, 1.0]},
        synch=True,
    )
    tuner = ray.tune.Tuner(
        trial,
        param_space={"lr": ray.tune.grid_search([0.001, 1.0]), "pause_s": 0.5},
        tune_config=ray.tune.TuneConfig(metric="weight", mode="max", scheduler=scheduler),
        run_config=ray.tune.RunConfig(name="search", storage_path=f"{folder}/search"),
    )
    results = tuner.fit()

    assert [result.error for result in results] == [None, None]
    runs = {path.name: raycheck.open_run(f"file://{path}") for path in (tmp_path / "runs").iterdir()}
    clones = {name: run for name, run in runs.items() if "-from-" in name}
    assert clones, "the worse trial was cloned from the better one"
    for name, run in clones.items():
        own, _, better = name.partition("-from-")
        assert {own, better.rpartition("-")[0]} <= runs.keys()
        assert run.borrowed, "it uses the other run's tensors where they are"
        first = next(attempt.restored for attempt in run.history().attempts if attempt.restored)
        objects = Path(folder, "runs", name, "checkpoints", first)
        assert objects.exists()
        assert list(objects.rglob("*.distcp")) == [], "no tensor was copied"
        assert min(result.metrics["weight"] for result in results) > 1.0, "the worse one has the better one's weights"
    for run in runs.values():
        assert_invariants(run._store)
