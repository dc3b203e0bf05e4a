"""`pack`, `unpack` and `download` as real processes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from raycheck.bucket.store import open_store
from raycheck.run import open_run
from tests.support.histories.invariants import assert_invariants
from tests.support.processes.command_line import raycheck
from tests.support.processes.save_without_ray import save_state


@pytest.fixture
def uri(tmp_path: Path) -> str:
    uri = f"{tmp_path}/runs/mine"
    for number, step in enumerate((3, 6), 1):
        save_state(open_store(uri), {"model": torch.nn.Linear(40, 30)}, save_number=number, step=step)
    return uri


def test_a_checkpoint_goes_from_run_to_file_to_run(uri: str, tmp_path: Path) -> None:
    file, new = f"{tmp_path}/a.tar", f"{tmp_path}/runs/new"

    packed = raycheck("pack", uri, "3", file, "--json")
    looked = raycheck("unpack", file, new, "--dry-run")
    unpacked = raycheck("unpack", file, new)
    again = raycheck("unpack", file, new)

    facts = json.loads(packed.stdout)
    assert (facts["file"], facts["step"]) == (file, 3)
    assert sum(facts["members"].values()) == facts["size_bytes"] < Path(file).stat().st_size
    assert "is intact; nothing was written" in looked.stdout
    assert "is the head of the new run" in unpacked.stdout
    assert (again.returncode, again.stdout) == (2, "")
    assert "there is already a run" in again.stderr
    assert packed.stderr == unpacked.stderr == "", "quiet where stderr is no terminal"
    assert open_run(new).head.step == 3
    assert_invariants(open_store(new))


def test_an_archive_goes_through_a_pipe(uri: str, tmp_path: Path) -> None:
    command = f"'{sys.executable}' -m raycheck"

    done = subprocess.run(
        f"{command} pack '{uri}' HEAD - --zstd | zstd -dc | {command} unpack - '{tmp_path}/new' --json",
        shell=True,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )

    assert json.loads(done.stdout)["checkpoint"] == "step-000000006-a1-s2"
    assert_invariants(open_store(f"{tmp_path}/new"))


def test_a_download_says_what_was_fetched_now(uri: str, tmp_path: Path) -> None:
    first = raycheck("download", uri, "HEAD", f"{tmp_path}/here", "--json")
    second = raycheck("download", uri, "6", f"{tmp_path}/here", "--component", "train")

    facts = json.loads(first.stdout)
    assert facts["fetched_bytes"] == sum(facts["files"].values()) - facts["files"]["manifest.json"] > 0
    assert "0 B fetched now" in second.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["pack", "URI", "HEAD", "-", "--json"], "name a file"),
        (["pack", "URI", "5", "x.tar"], "no checkpoint of step 5"),
        (["download", "URI", "HEAD", "x", "--format", "zip"], "--format 'zip' is not one of dcp, safetensors"),
        (["unpack", "nothing.tar", "URI-new"], "no object nothing.tar"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_exits_with_2(uri: str, arguments: list[str], said: str) -> None:
    done = raycheck(*(word.replace("URI", uri) for word in arguments))

    assert done.returncode == 2
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
