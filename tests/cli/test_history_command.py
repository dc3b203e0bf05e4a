"""The command `history` on the golden run of version 4, which has a dropped checkpoint and values that are no numbers."""

import json
import shutil
from pathlib import Path

from typer.testing import CliRunner

from raycheck.cli import app

GOLDEN = Path(__file__).parent.parent / "golden" / "v4" / "run"


def test_it_prints_every_attempt_and_commit_and_what_became_of_each() -> None:
    result = CliRunner().invoke(app, ["history", f"file://{GOLDEN}"])

    assert result.exit_code == 0, result.output
    lines = [line.split() for line in result.stdout.splitlines() if "step-" in line]
    assert [line[:2] for line in lines] == [
        ["2", "step-000000002-a1-s1"],
        ["4", "step-000000004-a1-s2"],
        ["1", "step-000000001-a1-s9"],
    ]
    assert "deleted: expired" in result.stdout
    assert "1 attempts, 3 commits, metrics of 4 steps (--csv)" in result.stdout


def test_csv_has_a_line_per_step_with_exact_numbers() -> None:
    result = CliRunner().invoke(app, ["history", f"file://{GOLDEN}", "--csv"])

    assert result.stdout.splitlines() == [
        "step,attempt,is_abandoned,time,eval,loss,lr",
        "1,1,False,1700000001.125,,1.0,0.5",
        "2,1,False,1700000002.125,,0.5,nan",
        f"3,1,False,1700000003.125,,{1 / 3},inf",
        "4,1,False,1700000004.125,1e+300,0.25,0.125",
    ]


def test_json_is_json_and_says_what_cannot_be_read(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN, tmp_path / "run")
    whole = json.loads(CliRunner().invoke(app, ["history", f"file://{tmp_path}/run", "--json"]).stdout)
    (segment,) = (tmp_path / "run" / "history").iterdir()
    segment.write_bytes(segment.read_bytes()[:-9] + b"x" * 9)

    result = CliRunner().invoke(app, ["history", f"file://{tmp_path}/run", "--json"])

    found = json.loads(result.stdout)
    assert [row["lr"] for row in whole["rows"]] == [0.5, None, None, 0.125]
    assert [row["step"] for row in found["rows"]] == [2, 4], "those of the commits"
    (problem,) = found["problems"]
    assert segment.name in problem
    assert segment.name in result.stderr
    assert result.exit_code == 0
