"""The command `history` on the golden run of version 4, which has a dropped checkpoint and values that are no numbers."""

import getpass
import json
import math
import re
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from typer.testing import CliRunner

from raycheck.bucket.format.object_keys import HISTORY_PREFIX
from raycheck.bucket.history.attempt_facts import facts_of
from raycheck.bucket.history.facts import Facts
from raycheck.bucket.history.metric_rows import MetricRows
from raycheck.bucket.history.segments import record_facts
from raycheck.bucket.reading import read_newest
from raycheck.bucket.store import open_store
from raycheck.cli import app
from raycheck.errors import CorruptError
from raycheck.run import open_run
from tests.support.histories.small_pages import small_pages
from tests.support.samples.sample_checkpoints import Driver

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
    assert re.search(r"^2 .* lr nan *$", result.stdout, re.MULTILINE), "latest has finite metrics only"
    assert "deleted: expired" in result.stdout
    assert "1 attempt, 3 commits, metrics of 4 steps (--csv)" in result.stdout


def test_csv_has_a_line_per_step_with_exact_numbers() -> None:
    result = CliRunner().invoke(app, ["history", f"file://{GOLDEN}", "--csv"])

    assert result.stdout.splitlines() == [
        "step,attempt,is_abandoned,time,eval,loss,lr",
        "1,1,False,1700000001.125,,1.0,0.5",
        "2,1,False,1700000002.125,,0.5,nan",
        f"3,1,False,1700000003.125,,{1 / 3},inf",
        "4,1,False,1700000004.125,1e+300,0.25,0.125",
    ]


def test_csv_has_a_column_of_its_own_for_each_metric() -> None:
    uri = f"memory://{uuid4().hex}"
    store = open_store(uri)
    Driver(store).claim("g")
    names = ("step", "a\nb", "a\\nb")
    rows = MetricRows(series={(1, name): {7: float(at)} for at, name in enumerate(names)})
    record_facts(store, Facts(rows=rows), run_id="run-of-a-test", counter=1)

    result = CliRunner().invoke(app, ["history", uri, "--csv"])

    assert result.stdout.splitlines() == [
        "step,attempt,is_abandoned,time,a\\nb,a\\\\nb,metric.step",
        "7,1,False,,1.0,2.0,0.0",
    ]


@pytest.fixture
def lost_page() -> Iterator[tuple[str, str]]:
    """Yield a run of four checkpoints and the key of a page of it that is gone: it lists the first two."""
    uri = f"memory://{uuid4().hex}"
    store = open_store(uri)
    with small_pages():
        driver = Driver(store)
        driver.claim("g")
        for save in (1, 2, 3, 4):
            driver.save(1, save)
        body = driver.look()
        record_facts(store, facts_of(body), run_id=body.run_id, counter=body.counter)
        key = read_newest(store).pages[0].key
        store.delete(key)
        yield uri, key


def test_a_lost_page_is_named_and_the_rest_is_shown(lost_page: tuple[str, str]) -> None:
    uri, key = lost_page

    for command, code in ((["ls"], 1), (["show"], 1), (["history"], 0), (["top", "--once"], 0)):
        result = CliRunner().invoke(app, [*command, uri])

        assert result.exit_code == code, command
        assert f"{key}, which lists 2 checkpoints or owners, is missing" in result.stderr, command
        assert f"raycheck repair '{uri}'" in result.stderr, command
        assert result.stdout, command
    keys = [item["key"] for item in json.loads(CliRunner().invoke(app, ["ls", uri, "--json"]).stdout)]
    assert keys == ["step-000000030-a1-s3", "step-000000040-a1-s4"]
    found = json.loads(CliRunner().invoke(app, ["history", uri, "--json"]).stdout)
    assert [commit["state"] for commit in found["commits"]] == ["kept"] * 4, "what the history knows of them"
    with pytest.raises(CorruptError, match="raycheck repair"):
        _ = open_run(uri).checkpoints


def test_json_is_json_and_says_what_cannot_be_read(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN, tmp_path / "run")
    whole = json.loads(CliRunner().invoke(app, ["history", f"file://{tmp_path}/run", "--json"]).stdout)
    (segment,) = (tmp_path / "run" / "history").iterdir()
    segment.write_bytes(segment.read_bytes()[:-9] + b"x" * 9)

    result = CliRunner().invoke(app, ["history", f"file://{tmp_path}/run", "--json"])

    found = json.loads(result.stdout)
    assert [row["lr"] for row in whole["rows"]] == [0.5, "NaN", "Infinity", 0.125]
    assert math.isnan(float(whole["rows"][1]["lr"]))
    assert float(whole["rows"][2]["lr"]) == math.inf
    assert [row["step"] for row in found["rows"]] == [2, 4], "those of the commits"
    (problem,) = found["problems"]
    assert segment.name in problem
    assert segment.name in result.stderr
    assert result.exit_code == 0


WHO = f"{getpass.getuser()}@{socket.gethostname()}"
DROPS = {
    "prune": (["prune", "{uri}", "--keep-last", "1"], f"dropped by hand by {WHO}: retention keeps the newest 1"),
    "delete": (["delete", "{uri}", "step-000000010-a1-s1", "--yes"], f"dropped by hand by {WHO}"),
    "a policy": (
        ["prune-runs", "{parent}", "--policy", "{policy}"],
        f"dropped by a policy, applied by {WHO}: retention keeps the newest 1",
    ),
    "a clean": (["clean", "{parent}", "--free", "1B", "--yes"], f"dropped to free space by {WHO}"),
}


def call(words: list[str], **names: object) -> None:
    result = CliRunner().invoke(app, [word.format(**names) for word in words])
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("how", DROPS)
def test_what_somebody_drops_stays_in_the_history_with_who_and_why(
    tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run has no history, as an older raycheck left it: nobody else would ever write what it was."""
    monkeypatch.setattr("raycheck.bucket.run_status.SILENT_S", -1.0)  # a clean leaves a run that is trained alone
    monkeypatch.setattr("raycheck.bucket.run_status.SILENT_GAPS", -1)
    words, why = DROPS[how]
    uri = f"file://{tmp_path}/runs/mine"
    store = open_store(uri)
    driver = Driver(store)
    driver.claim("g1")
    for save in (1, 2, 3):
        driver.save(1, save)
    before = driver.look().live[0]
    (tmp_path / "policy.yaml").write_text("rules: [{keep_last: 1}]")
    assert not list(store.list_objects(HISTORY_PREFIX))

    call(words, uri=uri, parent=tmp_path / "runs", policy=tmp_path / "policy.yaml")

    assert list(store.list_objects(HISTORY_PREFIX)), "written at once, and not only when latest forgets it"
    for state in ("dropped", "deleted"):
        commit = first_commit(uri)
        assert (commit["state"], commit["why"]) == (state, why)
        assert (commit["size_bytes"], commit["metrics"]) == (before.size_bytes, dict(before.metrics))
        call(["prune", "{uri}", "--grace", "0"], uri=uri)
    assert driver.look().evicted == ()


def first_commit(uri: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(CliRunner().invoke(app, ["history", uri, "--json"]).stdout)["commits"][0]
    return found


def test_a_drop_that_is_only_planned_is_not_in_the_history(tmp_path: Path) -> None:
    uri = f"file://{tmp_path}/run"
    driver = Driver(open_store(uri))
    driver.claim("g1")
    for save in (1, 2, 3):
        driver.save(1, save)

    call(["prune", "{uri}", "--keep-last", "1", "--dry-run"], uri=uri)
    call(["delete", "{uri}", "step-000000010-a1-s1", "--dry-run"], uri=uri)

    assert not list(open_store(uri).list_objects(HISTORY_PREFIX))
    assert first_commit(uri)["state"] == "kept"
