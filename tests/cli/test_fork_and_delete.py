"""Tests the commands that fork and delete, on a folder, as a user types them."""

import json

import pytest
import torch

import raycheck
from raycheck.bucket.store import open_store
from tests.support.command_line import raycheck_command
from tests.support.save_without_ray import save_state


@pytest.fixture
def base(tmp_path) -> str:
    uri = f"file://{tmp_path}/base"
    save_state(open_store(uri), {"model": torch.nn.Linear(30, 20)}, step=7)
    return uri


def test_a_fork_is_restored_and_the_base_can_only_go_after_it(base, tmp_path) -> None:
    variant = f"file://{tmp_path}/variant"
    seen = json.loads(raycheck_command("fork", base, variant, "--dry-run", "--json").stdout)
    assert seen["copies"] is False

    done = json.loads(raycheck_command("fork", base, variant, "--json").stdout)

    assert done["is_new"]
    assert done["copied_bytes"] < done["borrowed_bytes"]
    model = torch.nn.Linear(30, 20)
    assert raycheck.open_run(variant).restore(into={"model": model}) == 7
    refused = raycheck_command("delete-run", base, "--yes", "--live", code=2)
    assert "../variant" in refused.stderr
    assert "--yes" in raycheck_command("delete-run", variant, "--live", code=2).stderr
    raycheck_command("delete-run", variant, "--yes", "--live")
    raycheck_command("delete-run", base, "--yes", "--live")
    assert list(tmp_path.rglob("*.distcp")) == []


def test_the_head_is_not_deleted(base) -> None:
    assert "rewind" in raycheck_command("delete", base, "7", "--yes", code=2).stderr
