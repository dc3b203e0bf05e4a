"""Tests the rules by which many runs are pruned, on a folder with runs in several states."""

import json
from pathlib import Path

import pytest
import yaml

import raycheck
from raycheck.bucket.store import open_store
from raycheck.errors import ConfigError
from tests.support.histories.invariants import assert_invariants
from tests.support.processes.command_line import raycheck as command
from tests.support.samples.sample_checkpoints import Driver


def trained(uri: str, saves: int, *, finishes: bool = False) -> None:
    driver = Driver(open_store(uri))
    driver.claim("g1")
    for save in range(1, saves + 1):
        driver.save(1, save)
    if finishes:
        driver.finish("g1")


@pytest.fixture
def runs(tmp_path: Path) -> str:
    trained(f"file://{tmp_path}/runs/a/done", 5, finishes=True)
    trained(f"file://{tmp_path}/runs/b/live", 5)
    return f"file://{tmp_path}/runs"


def steps(uri: str) -> list[int]:
    assert assert_invariants(open_store(uri)) is not None
    return [checkpoint.step for checkpoint in raycheck.open_run(uri).checkpoints]


def test_the_first_rule_that_fits_decides_and_others_are_left_alone(runs: str) -> None:
    policy = {"rules": [{"states": ["finished"], "keep_last": 1}, {"name": "a", "keep_last": 4}]}

    planned = raycheck.catalog.prune_runs(runs, policy, dry_run=True)
    assert steps(f"{runs}/a/done") == [10, 20, 30, 40, 50]
    done = raycheck.catalog.prune_runs(runs, policy, grace_s=0.0)

    assert [(run.name, run.rule, len(run.names), run.problem) for run in done] == [
        ("a/done", 1, 4, ""),
        ("b/live", None, 0, ""),
    ]
    assert [run.freed_bytes for run in planned] == [run.freed_bytes for run in done]
    assert done[0].freed_bytes > 4 * 64
    assert steps(f"{runs}/a/done") == [50]
    assert steps(f"{runs}/b/live") == [10, 20, 30, 40, 50]


def test_what_is_not_old_enough_stays(runs: str) -> None:
    rules = [{"states": ["finished", "died"], "idle_days": 30, "delete": True}]

    assert [run.rule for run in raycheck.catalog.prune_runs(runs, {"rules": rules})] == [None, None]
    assert len(steps(f"{runs}/a/done")) == 5


def test_an_abandoned_run_is_deleted_and_one_that_others_use_is_named(runs: str, tmp_path: Path) -> None:
    raycheck.catalog.fork_run(f"{runs}/a/done", f"file://{tmp_path}/other/fork")
    rules = [{"states": ["finished", "running"], "idle_days": 1e-9, "keep_last": 5}]
    assert [run.rule for run in raycheck.catalog.prune_runs(runs, {"rules": rules})] == [1, 1]
    delete = {"rules": [{"states": ["finished"], "idle_days": 1e-9, "delete": True}]}

    (refused, _) = raycheck.catalog.prune_runs(runs, delete)
    raycheck.catalog.delete_run(f"file://{tmp_path}/other/fork", live=True)
    (done, _) = raycheck.catalog.prune_runs(runs, delete)

    assert "fork" in refused.problem
    assert (done.problem, done.is_deleted) == ("", True)
    assert not (tmp_path / "runs/a/done/latest").exists()


def test_a_run_that_is_started_after_the_listing_is_not_deleted(runs: str, monkeypatch) -> None:
    trained(f"{runs}/z/restarted", 2, finishes=True)
    listed = raycheck.list_runs(runs, sort="name")

    def list_runs(*_, **__):
        Driver(open_store(f"{runs}/z/restarted"), owner="bob").claim("g2")
        return listed

    monkeypatch.setattr("raycheck.catalog.policy.list_runs", list_runs)
    done = raycheck.catalog.prune_runs(runs, {"rules": [{"states": ["finished"], "idle_days": 1e-9, "delete": True}]})

    assert [(run.name, run.state, run.is_deleted) for run in done] == [
        ("a/done", "finished", True),
        ("b/live", "running", False),
        ("z/restarted", "running", False),
    ]
    assert steps(f"{runs}/z/restarted") == [10, 20]


def test_a_run_without_a_checkpoint_counts_as_idle_since_its_claim(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("raycheck.bucket.run_status.SILENT_S", -1.0)
    uri = f"file://{tmp_path}/runs/empty"
    trained(uri, 0)
    rule = {"states": ["uncommitted"], "delete": True}

    (kept,) = raycheck.catalog.prune_runs(f"file://{tmp_path}/runs", {"rules": [rule | {"idle_days": 1}]})
    (gone,) = raycheck.catalog.prune_runs(f"file://{tmp_path}/runs", {"rules": [rule | {"idle_days": 1e-9}]})

    assert (kept.rule, gone.is_deleted) == (None, True)
    assert not (tmp_path / "runs/empty/latest").exists()


@pytest.mark.parametrize(
    ("policy", "why"),
    [
        ({}, "rules"),
        ({"rules": []}, "at least one"),
        ({"rules": [{"keep_lats": 1}]}, "rule 1"),
        ({"rules": [{"states": ["done"], "keep_last": 1}]}, "states"),
        ({"rules": [{"keep_last": 0}]}, "rule 1: keep_last"),
        ({"rules": [{"keep_last": 1, "delete": True}]}, "either"),
        ({"rules": [{"delete": True}]}, "idle_days"),
        ({"rules": [{"states": ["running"], "idle_days": 1, "delete": True}]}, "states among"),
    ],
)
def test_a_policy_that_makes_no_sense_is_refused_before_anything_is_read(policy, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        raycheck.catalog.prune_runs("s3://nowhere/at-all", policy)


def test_the_command_says_what_it_would_free(runs: str, tmp_path: Path) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text(yaml.safe_dump({"rules": [{"states": ["finished"], "keep_last": 2}]}))

    done = command("prune-runs", runs, "--policy", str(file), "--dry-run", "--json")

    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [len(run["names"]) for run in found["runs"]] == [3, 0]
    assert found["cost_per_month"] > 0
    assert len(steps(f"{runs}/a/done")) == 5
