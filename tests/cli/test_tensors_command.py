"""`raycheck tensors` and `raycheck diff`, as a user and a program see them."""

import json
from pathlib import Path

import pytest
import torch

from raycheck.bucket.store import open_store
from tests.cli.test_terminal import is_fit
from tests.support.processes.command_line import raycheck
from tests.support.processes.save_without_ray import save_state

HOSTILE = "a\x1b]0;owned\x07[bold]b"


@pytest.fixture
def run(tmp_path: Path) -> str:
    """A run with two checkpoints, between which the first layer alone was trained."""
    uri = f"file://{tmp_path}/run"
    model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    state = {"model": model, "optimizer": optimizer, "extra": {HOSTILE: torch.ones(2)}}
    save_state(open_store(uri), state, save_number=1, step=1)
    with torch.no_grad():
        model[0].weight += 1
    save_state(open_store(uri), state, save_number=2, step=2)
    return uri


def test_tensors_are_listed_with_their_moments_below_them(run: str) -> None:
    done = raycheck("tensors", run)

    names = [line[:60].split("  float32")[0].rstrip() for line in done.stdout.splitlines()[1:]]
    at = names.index("model.0.weight")
    assert names[at + 1] == "  optimizer.state.0.weight.step"
    assert {"  optimizer.state.0.weight.exp_avg", "  optimizer.state.0.weight.exp_avg_sq"} <= set(
        names[at + 1 : at + 4]
    )
    assert "of step-000000002-a1-s2" in done.stdout
    assert is_fit(done.stdout)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_search_and_json_have_exact_numbers(run: str) -> None:
    said = json.loads(raycheck("tensors", run, "--at", "1", "--search", "0.weight", "--json").stdout)

    sizes = {item["name"]: item["size_bytes"] for item in said}
    assert sizes["model.0.weight"] == 8 * 4 * 4
    assert all("0.weight" in name for name in sizes)


def test_values_of_a_tensor_are_described(run: str) -> None:
    done = raycheck("tensors", run, "--values", "model.0.weight")

    assert "32 of 32 values (all), 128 B read, checksums compared" in done.stdout
    assert "#" * 40 in done.stdout
    missing = raycheck("tensors", run, "--values", "model.9.weight")
    assert (missing.returncode, missing.stdout) == (2, "")
    assert "has no tensor 'model.9.weight'" in missing.stderr


def test_diff_names_what_changed_and_nothing_else(run: str) -> None:
    done = raycheck("diff", run, "1", "2")

    changed = [line for line in done.stdout.splitlines() if line.startswith("changed")]
    assert [line.split()[1] for line in changed] == ["model.0.weight"]
    assert "no tensor was read" in done.stdout
    assert done.stdout.splitlines()[:3] == ["from step-000000001-a1-s1", "to   step-000000002-a1-s2", ""]
    said = json.loads(raycheck("diff", run, "1", "2", "--json").stdout)
    assert said["counts"]["changed"] == 1
    assert said["values_changed"] == ["progress"]
    everything = raycheck("diff", run, "1", "2", "--all").stdout
    assert is_fit(everything)
    assert "equal" in everything


def test_diff_reads_no_shard(run: str, tmp_path: Path) -> None:
    for shard in tmp_path.rglob("*.distcp"):
        shard.unlink()

    assert raycheck("diff", run, "1", "2").returncode == 0
