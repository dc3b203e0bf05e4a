"""Runs a measurement in one worker of Ray Train, as users train, and brings its result back."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer


def seconds_in_worker(train: Callable[[], list[float]], storage: Path, name: str, fit: Callable[[Any], Any]) -> Any:
    """Returns what `train` returns in the worker. storage: a local folder, into which Ray uploads. fit: runs a trainer."""
    answer = storage / f"{name}.json"

    def train_func() -> None:
        import warnings

        warnings.simplefilter("ignore")
        answer.write_text(json.dumps(train()))

    if not ray.is_initialized():
        ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    fit(TorchTrainer(train_func, scaling_config=ScalingConfig(num_workers=1), run_config=config_of(storage, name)))
    return json.loads(answer.read_text())


def config_of(storage: Path, name: str) -> RunConfig:
    return RunConfig(name=name, storage_path=str(storage))
