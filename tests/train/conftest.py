"""Starts one local Ray for all Ray tests of the session."""

import logging
import os
from collections.abc import Iterator
from uuid import uuid4

import pytest
import ray
import ray.cloudpickle
import ray.train
import ray.train.torch

import tests.support.ray_jobs
from raycheck.bucket.store.address import join_uri
from tests.support.reused_processes import take_back

SECRETS = ("hush-" + uuid4().hex, "token-" + uuid4().hex)
"""The secrets that the cluster's processes have. The embedded server takes any."""


@pytest.fixture(scope="session")
def cluster(s3: str, forks: None) -> Iterator[None]:
    """Starts Ray. Its workers inherit this process's environment: credentials of the S3 server, quicker polls."""
    if ray.is_initialized():  # by this fixture, under another folder's name
        yield
        return
    os.environ.update(RAY_AUTH_MODE="disabled", RAY_TRAIN_HEALTH_CHECK_INTERVAL_S="0.5")
    os.environ["AWS_SECRET_ACCESS_KEY"], os.environ["AWS_SESSION_TOKEN"] = SECRETS
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    # Ray's own watcher of preempted nodes is one more process in each fit. raycheck asks for notices by itself, and the
    # tests on a Ray of several nodes have the watcher.
    os.environ["RAY_TRAIN_ENABLE_PREEMPTION_WATCHER"] = "0"
    os.environ.update(RAY_prestart_worker_first_driver="0")  # eight processes that no test may come to use
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    ray.cloudpickle.register_pickle_by_value(tests.support.ray_jobs)
    yield
    ray.shutdown()


@pytest.fixture(autouse=True)
def reused_processes() -> Iterator[None]:
    """Takes back the processes that a test had from tests.support.reused_processes."""
    yield
    take_back()


@pytest.fixture
def job(cluster: None, tmp_path):
    """Makes trainers: job(uri, "name", workers=2, mode="fsdp", ...) -> TorchTrainer."""

    def make(
        storage: str,
        name: str,
        *,
        workers: int = 2,
        max_failures: int = 0,
        train=tests.support.ray_jobs.train,
        **config,
    ):
        config = {"mode": "fsdp", "epochs": 2, "folder": str(tmp_path), "uri": join_uri(storage, name), **config}
        return ray.train.torch.TorchTrainer(
            train,
            train_loop_config=config,
            scaling_config=ray.train.ScalingConfig(num_workers=workers),
            run_config=ray.train.RunConfig(
                name=name, storage_path=storage, failure_config=ray.train.FailureConfig(max_failures=max_failures)
            ),
        )

    return make
