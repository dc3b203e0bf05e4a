"""Tests the commands that fork and delete, on a folder, as a user types them."""

import json
from urllib.parse import parse_qs, urlsplit
from uuid import uuid4

import pytest
import torch

import raycheck
from raycheck.bucket.store import open_store
from raycheck.bucket.store.address import join_uri
from tests.support.processes.command_line import raycheck as command
from tests.support.processes.save_without_ray import save_state
from tests.support.servers.http_fault_proxy import FaultProxy


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
    assert not (tmp_path / "variant").exists()
    copied = raycheck.catalog.fork_run(base, variant, copy=True, dry_run=True)
    assert (copied.copied_bytes, copied.borrowed_bytes) == (seen["copied_bytes"] + seen["borrowed_bytes"], 0)

    done = json.loads(done_with(0, "fork", base, variant, "--json").stdout)

    assert done["is_new"]
    assert seen == done | {"key": ""}
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


def test_a_deleted_run_that_others_use_is_listed_as_deleted(base, tmp_path) -> None:
    variant = f"file://{tmp_path}/variant"
    raycheck.catalog.fork_run(base, variant)
    assert not raycheck.catalog.delete_run(base, keep_shared=True, live=True).is_gone

    found = {run.name: run for run in raycheck.list_runs(f"file://{tmp_path}")}
    listed = done_with(0, "runs", f"file://{tmp_path}").stdout

    assert (found["base"].state, found["base"].is_resumable) == ("deleted", False)
    assert found["variant"].state == "idle"
    for text in (found["base"].text, " ".join(listed.split()), done_with(0, "show", base).stdout):
        assert "kept for other runs, which use checkpoints of it: ../variant." in text
    raycheck.catalog.delete_run(variant, live=True)
    assert raycheck.catalog.delete_run(base, live=True).is_gone


def test_who_is_not_asked_before_a_delete_does_not_wait_for_a_count(wire: FaultProxy) -> None:
    uri = join_uri(wire.uri, name := uuid4().hex)
    save_state(open_store(uri), {"model": torch.nn.Linear(3, 2)}, step=7)
    wire.heads.clear()

    done_with(0, "delete-run", uri, "--yes", "--live")

    queries = [parse_qs(urlsplit(head.target).query) for head in wire.heads]
    whole = [query for query in queries if query.get("prefix") == [f"{name}/"] and "delimiter" not in query]
    assert len(whole) == 2, "one that looks for another run in the folder, and one of what the prune has left"


def test_the_head_is_not_deleted(base) -> None:
    assert "rewind" in done_with(2, "delete", base, "7", "--yes").stderr


def test_a_dry_run_refuses_what_the_delete_would_refuse(base, tmp_path) -> None:
    assert "rewind" in done_with(2, "delete", base, "7", "--dry-run").stderr
    assert "--live" in done_with(2, "delete-run", base, "--dry-run").stderr
    raycheck.catalog.fork_run(base, f"file://{tmp_path}/variant")
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
