"""The README's own lines run as they stand, but for the bucket's name."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import raycheck
from raycheck.bucket.store import open_store
from tests.invariants import assert_invariants

README = (Path(__file__).parents[2] / "README.md").read_text()


@pytest.mark.ray
@pytest.mark.slow
def test_the_script_of_the_readme_trains_and_commits(tmp_path: Path) -> None:
    script, rules, settings, exports, led = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert isinstance(given(settings)["storage"], raycheck.StorageSettings)
    given(rules)
    assert isinstance(given(exports)["exports"], raycheck.ExportSettings)
    compile(led, "README.md", "exec")
    storage = f"file://{tmp_path}/runs"
    path = tmp_path / "train.py"
    path.write_text(script.replace("s3://bucket/runs", storage))
    environment = {**os.environ, "RAY_AUTH_MODE": "disabled"}

    done = subprocess.run(
        [sys.executable, str(path)], capture_output=True, text=True, check=False, timeout=200, env=environment
    )

    assert done.returncode == 0, done.stderr
    head = raycheck.open_run(f"{storage}/my-run").head.entry
    assert head.step == 32
    assert head.metrics.keys() == {"loss"}, "the save at the end has its step's metrics, too"
    assert_invariants(open_store(f"{storage}/my-run"))


def given(code: str) -> dict[str, object]:
    names: dict[str, object] = {"raycheck": raycheck}
    exec(code, names)
    return names


def test_every_file_and_command_that_the_readme_names_exists() -> None:
    root = Path(__file__).parents[2]

    for name in re.findall(r"^sh (\S+)", README, flags=re.MULTILINE) + re.findall(r"\]\((\S+)\)", README):
        assert (root / name).exists(), name
    commands = set(re.findall(r"^raycheck ([\w-]+)", README, flags=re.MULTILINE))
    known = subprocess.run(
        [sys.executable, "-m", "raycheck", "--help"], capture_output=True, text=True, check=True, timeout=60
    )
    assert commands
    assert all(command in known.stdout for command in commands)
