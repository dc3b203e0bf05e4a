"""Runs a user's driver as a process of its own: `python -m tests.support.processes.driver_process '{"uri": ..., "name": ...}'`."""

import json
import logging
import os
import sys
from pathlib import Path

import ray
import ray.train
import ray.train.torch

import raycheck
from tests.support.samples.numbered_samples_job import train


def main() -> None:
    config = json.loads(sys.argv[1])
    (Path(config["folder"]) / "driver.pid").write_text(str(os.getpid()))
    cpus = os.environ.get("RAYCHECK_TEST_LOCAL_CPUS")  # else RAY_ADDRESS says where
    ray.init(logging_level=logging.ERROR, **({"num_cpus": int(cpus), "address": "local"} if cpus else {}))
    workers = config["workers"]
    elastic = {"elastic_resize_monitor_interval_s": 3} if isinstance(workers, list) else {}
    trainer = ray.train.torch.TorchTrainer(
        train,
        train_loop_config=config,
        scaling_config=ray.train.ScalingConfig(
            num_workers=tuple(workers) if isinstance(workers, list) else workers,
            resources_per_worker={"CPU": 1},
            **elastic,
        ),
        run_config=ray.train.RunConfig(
            name=config["name"],
            storage_path=config["uri"],
            failure_config=ray.train.FailureConfig(max_failures=config.get("max_failures", 3)),
        ),
    )
    if config.get("is_plain"):
        trainer.fit()
    else:
        raycheck.fit(trainer)


if __name__ == "__main__":
    main()
