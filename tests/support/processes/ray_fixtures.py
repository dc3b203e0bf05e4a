"""Fixtures of tests with Ray: one local Ray for all of the session, and trainers on it.

What loads Ray is imported inside them, since pytest loads this file for every test.
"""

import logging
import os
import sys
from collections.abc import Iterator
from uuid import uuid4

import pytest

from raycheck.bucket.store.address import join_uri

SECRETS = ("hush-" + uuid4().hex, "token-" + uuid4().hex)
"""The secrets that the cluster's processes have. The embedded server takes any."""


@pytest.fixture(scope="session")
def cluster(s3: str, forks: None) -> Iterator[None]:
    """Starts Ray. Its workers inherit this process's environment: credentials of the S3 server, quicker polls."""
    import ray
    import ray.cloudpickle

    import tests.support.processes.ray_jobs

    os.environ.update(RAY_AUTH_MODE="disabled", RAY_TRAIN_HEALTH_CHECK_INTERVAL_S="0.5")
    os.environ["AWS_SECRET_ACCESS_KEY"], os.environ["AWS_SESSION_TOKEN"] = SECRETS
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    # Ray's own watcher of preempted nodes is one more process in each fit. raycheck asks for notices by itself, and the
    # tests on a Ray of several nodes have the watcher.
    os.environ["RAY_TRAIN_ENABLE_PREEMPTION_WATCHER"] = "0"
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    ray.cloudpickle.register_pickle_by_value(tests.support.processes.ray_jobs)
    yield
    ray.shutdown()


@pytest.fixture(autouse=True)
def reused_processes() -> Iterator[None]:
    """Takes back the processes that a test had from tests.support.processes.reused_processes."""
    yield
    if reused := sys.modules.get("tests.support.processes.reused_processes"):
        reused.take_back()


@pytest.fixture
def job(cluster: None, tmp_path):
    """Makes trainers: job(uri, "name", workers=2, mode="fsdp", ...) -> TorchTrainer."""
    import ray.train
    import ray.train.torch

    import tests.support.processes.ray_jobs

    def make(
        storage: str,
        name: str,
        *,
        workers: int = 2,
        max_failures: int = 0,
        train=None,
        **config,
    ):
        config = {"mode": "fsdp", "epochs": 2, "folder": str(tmp_path), "uri": join_uri(storage, name), **config}
        return ray.train.torch.TorchTrainer(
            train or tests.support.processes.ray_jobs.train,
            train_loop_config=config,
            scaling_config=ray.train.ScalingConfig(num_workers=workers),
            run_config=ray.train.RunConfig(
                name=name, storage_path=storage, failure_config=ray.train.FailureConfig(max_failures=max_failures)
            ),
        )

    return make
