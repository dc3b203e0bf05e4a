"""Tests the commands that fork and delete, on a folder, as a user types them."""

import json

import pytest
import torch

import raycheck
from raycheck.bucket.store import open_store
from tests.support.command_line import raycheck as command
from tests.support.save_without_ray import save_state


def done_with(code: int, *args: str):
    done = command(*args)
    assert done.returncode == code, done.stderr
    return done


@pytest.fixture
def base(tmp_path) -> str:
    uri = f"file://{tmp_path}/base"
    save_state(open_store(uri), {"model": torch.nn.Linear(300, 200)}, step=7)
    return uri


def test_a_fork_is_restored_and_the_base_can_only_go_after_it(base, tmp_path) -> None:
    variant = f"file://{tmp_path}/variant"
    seen = json.loads(done_with(0, "fork", base, variant, "--dry-run", "--json").stdout)
    assert seen["copies"] is False

    done = json.loads(done_with(0, "fork", base, variant, "--json").stdout)

    assert done["is_new"]
    assert json.loads(done_with(0, "fork", base, variant, "--dry-run", "--json").stdout)["is_new"] is False
    assert done["copied_bytes"] < done["borrowed_bytes"]
    model = torch.nn.Linear(300, 200)
    assert raycheck.open_run(variant).restore(into={"model": model}) == 7
    refused = done_with(2, "delete-run", base, "--yes", "--live")
    assert "../variant" in refused.stderr
    assert "--yes" in done_with(2, "delete-run", variant, "--live").stderr
    done_with(0, "delete-run", variant, "--yes", "--live")
    done_with(0, "delete-run", base, "--yes", "--live")
    assert list(tmp_path.rglob("*.distcp")) == []


def test_the_head_is_not_deleted(base) -> None:
    assert "rewind" in done_with(2, "delete", base, "7", "--yes").stderr


def test_a_dry_run_refuses_what_the_delete_would_refuse(base, tmp_path) -> None:
    assert "rewind" in done_with(2, "delete", base, "7", "--dry-run").stderr
    assert "--live" in done_with(2, "delete-run", base, "--dry-run").stderr
    raycheck.fork_run(base, f"file://{tmp_path}/variant")
    assert "--keep-shared" in done_with(2, "delete-run", base, "--dry-run", "--live").stderr

    plan = json.loads(done_with(0, "delete-run", base, "--dry-run", "--live", "--keep-shared", "--json").stdout)

    assert plan["used_by"] == ["../variant"]
    assert (tmp_path / "base/latest").exists()


def test_no_time_for_readers_of_one_checkpoint_leaves_that_of_others(base, tmp_path) -> None:
    for step in (8, 9):
        save_state(open_store(base), {"model": torch.nn.Linear(3, 2)}, step=step, save_number=step)
    done_with(0, "delete", base, "7", "--yes")

    done_with(0, "delete", base, "8", "--yes", "--grace", "0")

    left = sorted(path.name.partition("-a")[0] for path in (tmp_path / "base/checkpoints").iterdir())
    assert left == ["step-000000007", "step-000000009"]
