"""The README's own lines run as they stand, but for the bucket's name."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import raycheck
from raycheck.bucket.run_status import read_status
from raycheck.bucket.store import open_store
from tests.support.histories.invariants import assert_invariants

README = (Path(__file__).parents[2] / "README.md").read_text()


@pytest.mark.ray
@pytest.mark.slow
def test_the_script_of_the_readme_trains_and_commits(tmp_path: Path) -> None:
    (script,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    storage = f"file://{tmp_path}/runs"
    path = tmp_path / "train.py"
    path.write_text(script.replace("s3://bucket/runs", storage))
    environment = {**os.environ, "RAY_AUTH_MODE": "disabled"}

    heads = []
    for _ in range(2):  # the second time it is a finished run that somebody submits again
        done = subprocess.run(
            [sys.executable, str(path)], capture_output=True, text=True, check=False, timeout=200, env=environment
        )
        assert done.returncode == 0, done.stderr
        heads.append(raycheck.open_run(f"{storage}/my-run").head._stored.entry)

    assert heads[0] == heads[1], "the second had nothing to save"
    assert heads[0].step == 32
    assert heads[0].metrics.keys() == {"loss"}, "the save at the end has its step's metrics, too"
    assert read_status(open_store(f"{storage}/my-run")).state == "finished"
    assert_invariants(open_store(f"{storage}/my-run"))
    log = [line for line in done.stderr.splitlines() if "raycheck" in line]
    assert not [line for line in log if line.count(f"{storage}/my-run") > 1], "a line names the run's URI twice"


def test_every_file_and_command_that_the_readme_names_exists() -> None:
    root = Path(__file__).parents[2]

    for name in re.findall(r"^\$ sh (\S+)", README, flags=re.MULTILINE) + re.findall(r"\]\((\S+)\)", README):
        assert (root / name).exists(), name
    commands = set(re.findall(r"`raycheck ([\w-]+)", README))
    known = subprocess.run(
        [sys.executable, "-m", "raycheck", "--help"], capture_output=True, text=True, check=True, timeout=60
    )
    assert commands
    assert all(command in known.stdout for command in commands)
