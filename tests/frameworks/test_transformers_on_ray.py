"""The documentation's examples of transformers and TRL on Ray Train, with raycheck: a worker is killed, the size changes."""

import os
import signal
import time
from pathlib import Path
from types import ModuleType

import pytest
import ray.cloudpickle
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import raycheck
from raycheck.bucket.store import open_store
from raycheck.errors import NotFoundError
from tests.examples import hf_trainer_with_raycheck, trl_sft_with_raycheck
from tests.on_ray.test_examples import train_workers
from tests.support.histories.invariants import assert_invariants
from tests.support.processes.background_call import InThread

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore")]  # Ray itself warns


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("CI", "1")


def wait_for_commit(uri: str, step: int, *, within_s: float = 240.0) -> None:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            head = raycheck.open_run(uri).head
        except NotFoundError:
            head = None
        if head is not None and head.step >= step:
            return
        time.sleep(0.05)
    raise TimeoutError(f"no commit of step {step} in {uri}")


def train_and_kill(module: ModuleType, storage: Path, name: str, **config: int) -> str:
    """Returns the URI of a run in which one worker was killed after the first commit."""
    ray.cloudpickle.register_pickle_by_value(module)
    uri = f"file://{storage}/{name}"
    training = InThread(lambda: module.main(str(storage), **config))
    wait_for_commit(uri, 20)
    os.kill(train_workers()[-1], signal.SIGKILL)
    training.join()
    return uri


def restored(uri: str) -> list[str | None]:
    body = assert_invariants(open_store(uri))
    return [attempt.restore_key for attempt in body.attempts]


def model_of(uri: str) -> dict[str, torch.Tensor]:
    model = LlamaForCausalLM(LlamaConfig(**hf_trainer_with_raycheck.SIZES))
    raycheck.open_run(uri).restore(into={"model": model})
    return model.state_dict()


def test_the_example_of_transformers_survives_a_killed_worker(cluster: None, tmp_path: Path) -> None:
    uri = train_and_kill(hf_trainer_with_raycheck, tmp_path, "trainer", epochs=6)

    attempts = restored(uri)
    assert len(attempts) == 2, attempts
    assert attempts[1] is not None
    assert raycheck.open_run(uri).head.step == 6 * 32


@pytest.mark.slow
def test_a_killed_worker_changes_no_bit_of_the_result(cluster: None, tmp_path: Path) -> None:
    hurt = train_and_kill(hf_trainer_with_raycheck, tmp_path / "hurt", "trainer", epochs=12)
    hf_trainer_with_raycheck.main(str(tmp_path / "whole"), epochs=12)

    found, expected = model_of(hurt), model_of(f"file://{tmp_path}/whole/trainer")

    assert len(restored(hurt)) == 2
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.slow
def test_the_example_goes_on_with_another_number_of_workers(cluster: None, tmp_path: Path) -> None:
    ray.cloudpickle.register_pickle_by_value(hf_trainer_with_raycheck)
    hf_trainer_with_raycheck.main(str(tmp_path), workers=2, epochs=1)

    hf_trainer_with_raycheck.main(str(tmp_path), workers=1, epochs=2)

    uri = f"file://{tmp_path}/trainer"
    assert raycheck.open_run(uri).head.step == 2 * 32
    assert [key is None for key in restored(uri)] == [True, False]


@pytest.mark.slow
def test_the_example_of_trl_survives_a_killed_worker(cluster: None, tmp_path: Path) -> None:
    uri = train_and_kill(trl_sft_with_raycheck, tmp_path, "sft", epochs=12)

    assert len(restored(uri)) == 2
    assert raycheck.open_run(uri).head.step == 12 * 32
