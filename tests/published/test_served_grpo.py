"""The example of samplers that are processes of their own, with a trainer and a sampler killed on the way."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import raycheck
from tests.examples.grpo_served import new_policy
from tests.published.weights import assert_equal, loaded

pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).parents[1] / "examples/grpo_served.py"
STEPS, WITHIN_S = 30, 240


def started(tmp_path: Path, what: str, *rest: str) -> "subprocess.Popen[bytes]":
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"] if what == "train" else []
    words = [sys.executable, *torchrun, str(SCRIPT), what, f"file://{tmp_path}/run", str(tmp_path / "rollouts"), *rest]
    environment = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "PYTHONPATH": str(SCRIPT.parents[2])}
    return subprocess.Popen(words, env=environment, start_new_session=True)


def end(process: "subprocess.Popen[bytes]") -> None:
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def wait_until_published(tmp_path: Path, step: int) -> None:
    deadline = time.monotonic() + WITHIN_S
    while time.monotonic() < deadline:
        time.sleep(0.2)
        if (tmp_path / "run/latest").exists():
            found = raycheck.open_run(f"file://{tmp_path}/run").published()
            if found is not None and found.versions[-1].step >= step:
                return
    raise AssertionError(f"step {step} is not published")


def test_trainer_and_samplers_are_killed_and_continue(tmp_path: Path):
    samplers = [started(tmp_path, "sample") for _ in range(2)]
    trainer = started(tmp_path, "train", str(STEPS))
    try:
        wait_until_published(tmp_path, 5)
        end(samplers.pop())
        samplers.append(started(tmp_path, "sample"))
        wait_until_published(tmp_path, 10)
        end(trainer)
        trainer = started(tmp_path, "train", str(STEPS))
        assert trainer.wait(WITHIN_S) == 0
    finally:
        for process in [*samplers, trainer]:
            if process.poll() is None:
                end(process)

    run = raycheck.open_run(f"file://{tmp_path}/run")
    assert len(run.history().attempts) == 2
    policy = new_policy()
    run.restore(into={"policy": policy})
    with raycheck.follow(run.uri, tmp_path / "local") as follower:
        version = follower.update()
        assert version.step == STEPS
        assert_equal(loaded(version.path), policy.state_dict())
