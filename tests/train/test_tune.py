"""Inside Ray Tune: a trial is a driver, and has a run name of its own."""

import pytest
import ray.train.torch
import ray.tune
import torch
from ray.train import RunConfig, ScalingConfig

import raycheck
from raycheck.bucket.store import open_store
from tests.invariants import assert_invariants

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # Ray itself warns


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
