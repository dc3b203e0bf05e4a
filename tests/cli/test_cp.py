"""`raycheck cp`, as people and as programs call it."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from raycheck.bucket.reading import read_latest
from raycheck.bucket.store import open_store
from raycheck.errors import NotFoundError
from tests.support.histories.invariants import assert_invariants
from tests.support.processes.command_line import raycheck
from tests.support.samples.sample_checkpoints import Driver, everything


@pytest.fixture
def run(tmp_path: Path) -> Driver:
    driver = Driver(open_store(f"file://{tmp_path}/runs/mine"))
    driver.claim("group")
    for save in (1, 2, 3):
        driver.save(1, save)
    return driver


def test_cp_copies_a_run_and_says_what_it_did(run: Driver, tmp_path: Path) -> None:
    target = f"file://{tmp_path}/copy"

    plan = raycheck("cp", run.store.uri, target, "--dry-run", "--json")
    assert everything(open_store(target)) == {}
    text, again = raycheck("cp", run.store.uri, target), raycheck("cp", run.store.uri, target, "--json")

    assert len(json.loads(plan.stdout)["copied"]) == 3
    assert "3 checkpoints copied" in text.stdout
    assert (json.loads(again.stdout)["copied"], text.stderr) == ({}, "")
    assert assert_invariants(open_store(target)).head == run.look().head
    assert "mirror of" in raycheck("show", target).stdout


def test_cp_copies_one_checkpoint_into_a_new_run(run: Driver, tmp_path: Path) -> None:
    target = f"file://{tmp_path}/copy"

    done = json.loads(raycheck("cp", run.store.uri, target, "--at", "20", "--json").stdout)

    assert done["head"] == "step-000000020-a0-s1"
    assert assert_invariants(open_store(target)).run_id == done["run_id"]
    assert raycheck("cp", run.store.uri, target, "--at", "20", "--dry-run").returncode == 0
    other = [raycheck("cp", run.store.uri, target, "--at", "10", *words) for words in ([], ["--dry-run"])]
    assert [(it.returncode, "another run" in it.stderr) for it in other] == [(2, True)] * 2


@pytest.mark.parametrize("words", [["--until-finished"], ["--follow", "--at", "20"], ["--follow", "--every", "0"]])
def test_cp_refuses_what_does_not_go_together(run: Driver, tmp_path: Path, words: list[str]) -> None:
    done = raycheck("cp", run.store.uri, f"file://{tmp_path}/copy", *words)

    assert done.returncode == 2
    assert "--" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_follow_cleanly(run: Driver, tmp_path: Path, number: signal.Signals) -> None:
    target = f"file://{tmp_path}/copy"
    command = [sys.executable, "-m", "raycheck", "cp", run.store.uri, target, "--follow", "--every", "0.1", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["step"] == 30
        run.save(1, 4)
        assert json.loads(process.stdout.readline())["step"] == 40
        process.send_signal(number)
        _, said = process.communicate(timeout=30)

    assert (process.returncode, said) == (0, "")
    assert assert_invariants(open_store(target)).head == run.look().head


def test_a_follow_ends_with_the_run(run: Driver, tmp_path: Path) -> None:
    target = f"file://{tmp_path}/copy"
    run.finish("group")

    done = raycheck("cp", run.store.uri, target, "--follow", "--until-finished")

    assert done.returncode == 0
    assert "step 30 is here" in done.stdout
    assert read_latest(open_store(target)).is_finished


def test_a_follow_of_nothing_is_not_begun_silently(tmp_path: Path) -> None:
    done = raycheck("cp", f"file://{tmp_path}/none", f"file://{tmp_path}/copy", "--json")

    assert done.returncode == 2
    assert "no run here" in done.stderr
    with pytest.raises(NotFoundError):
        read_latest(open_store(f"file://{tmp_path}/copy"))
