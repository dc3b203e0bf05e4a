"""The processes of the tests' own Ray are those of a user's Ray, whoever starts them (forked_ray_workers.py)."""

import os
import random
from uuid import uuid4

import numpy as np
import pytest
import ray

pytestmark = pytest.mark.ray


@ray.remote(num_cpus=0)
class Worker:
    def look(self) -> dict[str, object]:
        from raycheck.bucket.store.jitter import CHANCE  # above it would be part of this class, which Ray sends over

        drawn = float(np.random.rand())  # noqa: NPY002  # the generator that all code of a process shares
        return {
            "process": os.getpid(),
            "python": random.random(),
            "numpy": drawn,
            "raycheck": CHANCE.random(),
            "ray": ray.ObjectRef.from_random().hex(),
            "id": str(uuid4()),
        }

    def environment(self, *names: str) -> list[str | None]:
        return [os.environ.get(name) for name in names]


def test_workers_have_random_numbers_and_an_environment_of_their_own(cluster: None) -> None:
    env_vars = {"HOME_OF_TEST": "${HOME}/of-test"}
    workers = [Worker.options(runtime_env={"env_vars": env_vars}).remote() for _ in range(2)]

    one, other = ray.get([worker.look.remote() for worker in workers])
    secret, of_worker = ray.get(workers[0].environment.remote("AWS_SECRET_ACCESS_KEY", "HOME_OF_TEST"))

    assert not set(one.values()) & set(other.values())
    assert (secret, of_worker) == (os.environ["AWS_SECRET_ACCESS_KEY"], os.environ["HOME"] + "/of-test")
    assert "HOME_OF_TEST" not in os.environ
