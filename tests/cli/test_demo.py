"""The demo as a newcomer runs it, in a process of its own."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

import raycheck
from raycheck.bucket.store import open_store
from tests.support.histories.invariants import assert_invariants
from tests.support.processes.forked_ray_workers import script_command


def demo(*args: str) -> "subprocess.CompletedProcess[str]":
    command = [*script_command("raycheck"), "demo", *args]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, env=dict(os.environ))


def lose_a_worker() -> dict[str, Any]:
    """Run the demo. Returns what it says about itself."""
    done = demo("--json", "--workers", "2", "--steps", "4", "--kill-step", "3", "--save-every", "1")
    assert done.returncode == 0, done.stderr
    facts: dict[str, Any] = json.loads(done.stdout)
    return facts


@pytest.mark.ray
def test_the_demo_loses_a_worker_and_goes_on(forks: None) -> None:
    facts = lose_a_worker()

    assert (facts["killed_rank"], facts["killed_at_step"], facts["final_step"]) == (1, 3, 4)
    assert facts["restored_step"] in (2, 3)
    assert facts["steps_lost"] == 3 - facts["restored_step"]
    assert facts["attempts"] == 2
    assert_invariants(open_store(facts["run_uri"]))


@pytest.mark.ray
@pytest.mark.slow
def test_the_kept_run_of_a_demo_can_be_resumed() -> None:
    uri = lose_a_worker()["run_uri"]
    root = uri.removesuffix("/demo")

    second = demo("--root", root, "--workers", "2", "--steps", "10", "--kill-step", "0", "--save-every", "3")

    assert second.returncode == 0, second.stderr
    assert "restored step 4" in second.stdout
    assert "Hugging Face directory" in second.stdout
    body = assert_invariants(open_store(uri))
    assert raycheck.open_run(uri).head.step == 10
    assert body.attempt.number == 3
    assert Path(root.removeprefix("file://")).is_dir()


def test_a_kill_that_could_never_happen_is_refused() -> None:
    answer = demo("--steps", "5", "--kill-step", "5")

    assert answer.returncode == 2
    assert "--kill-step 5" in answer.stderr
