"""`raycheck import`, as a user types it."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from raycheck.cli import app
from raycheck.run import open_run


@pytest.fixture
def source(tmp_path: Path) -> Path:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(reversed(list(model.parameters())))
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    torch.save({"net": model.state_dict(), "opt": optimizer.state_dict(), "step": 4}, tmp_path / "last.pt")
    return tmp_path / "last.pt"


def test_import_makes_a_run_and_says_what_is_in_it(source: Path, tmp_path: Path) -> None:
    words = ["import", str(source), f"file://{tmp_path}/run", "--entry", "model=net", "--json"]

    dry = json.loads(CliRunner().invoke(app, [*words, "--dry-run"]).stdout)
    assert not (tmp_path / "run").exists()
    done = json.loads(CliRunner().invoke(app, words).stdout)

    assert (dry["is_new"], done["is_new"]) == (False, True)
    assert dry["entries"] == done["entries"]
    assert [(entry["name"], entry["kind"], entry["num_tensors"]) for entry in done["entries"]] == [
        ("model", "module", 2),
    ]
    assert done["left_out"] == ["opt", "step"]
    head = open_run(f"file://{tmp_path}/run").head
    assert head is not None
    assert head.key == done["checkpoint"] == "step-000000004-a0-s1"


def test_import_tells_plainly_that_the_state_of_the_optimizer_is_left_out(source: Path, tmp_path: Path) -> None:
    shown = CliRunner().invoke(app, ["import", str(source), f"file://{tmp_path}/run"])

    assert shown.exit_code == 0
    assert "left out: opt\n" in shown.stdout
    assert "optimizers start with an empty state" in shown.stdout


def test_errors_name_the_options_and_a_hostile_name_is_harmless(source: Path, tmp_path: Path) -> None:
    dest = f"file://{tmp_path}/run"

    refused = CliRunner().invoke(app, ["import", str(source), dest, "--entry", "opt"])
    assert "--entry" in str(refused.exception)
    torch.save({"model": {"w": torch.ones(2)}, "x\x1b[31m": {"a": 1}}, source)
    shown = CliRunner().invoke(app, ["import", str(source), dest, "--entry", "model"])

    assert shown.exit_code == 0
    assert "\x1b" not in shown.stdout
    assert "left out: x" in shown.stdout
