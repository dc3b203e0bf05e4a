"""The script of the guide to torchrun, from an empty folder: a killed rank comes back, and nothing is trained twice."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from raycheck.bucket.reading import read_latest
from raycheck.bucket.store import open_store
from raycheck.errors import NotFoundError
from raycheck.group import served_group
from tests.support.histories.invariants import assert_invariants
from tests.support.samples.documents import PACKAGE, blocks

GUIDE = PACKAGE / "docs/torchrun.md"
WITHIN_S = 240.0


def script(folder: Path, epochs: int) -> str:
    """The guide's script, with a folder for the bucket, more epochs, and steps that take a while."""
    (found,) = (block.text for block in blocks(GUIDE) if block.kind == "python")
    slower = found.replace("optimizer.step()\n", "optimizer.step()\n            time.sleep(0.05)\n")
    return "import time\n" + slower.replace("s3://bucket", f"file://{folder}").replace(
        "at.epoch, 2", f"at.epoch, {epochs}"
    )


def command() -> list[str]:
    """The command of the guide for one node."""
    (line,) = re.findall(r"^torchrun --standalone .*$", GUIDE.read_text(), re.MULTILINE)
    assert "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in GUIDE.read_text()
    return [sys.executable, "-m", "torch.distributed.run", *line.split()[1:]]


def committed_steps(uri: str) -> list[int]:
    try:
        return [entry.step for entry in read_latest(open_store(uri)).live]
    except NotFoundError:
        return []


def ranks_of(agent: int) -> list[int]:
    """The ids of the processes that the agent has started, rank 0 first."""
    return sorted(int(pid) for pid in Path(f"/proc/{agent}/task/{agent}/children").read_text().split())


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_comes_back_and_the_run_ends(tmp_path: Path, rank: int) -> None:
    (tmp_path / "train.py").write_text(script(tmp_path / "bucket", epochs=4))
    uri = f"file://{tmp_path}/bucket/runs/my-run"
    env = os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with (
        (tmp_path / "log").open("w") as log,
        subprocess.Popen(command(), cwd=tmp_path, env=env, stdout=log, stderr=log) as agent,
    ):
        deadline = time.monotonic() + WITHIN_S
        while not committed_steps(uri):
            assert agent.poll() is None, (tmp_path / "log").read_text()
            assert time.monotonic() < deadline, (tmp_path / "log").read_text()
            time.sleep(0.1)
        os.kill(ranks_of(agent.pid)[rank], signal.SIGKILL)
        code = agent.wait(WITHIN_S)

    said = (tmp_path / "log").read_text()
    assert code == 0, said
    assert "the ranks may not meet" not in said
    body = read_latest(open_store(uri))
    assert (body.attempt.number, body.is_finished) == (2, True)
    assert committed_steps(uri)[-1] == 64, "four epochs of 16 steps"
    assert_invariants(open_store(uri))


@pytest.mark.parametrize(
    ("uses_old_store", "restarts", "warns"), [("True", "3", True), ("False", "3", False), ("True", "0", False)]
)
def test_where_a_restart_would_use_old_addresses_it_says_so(
    uses_old_store: str, restarts: str, warns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", uses_old_store)
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", restarts)

    assert served_group._meets_by_old_addresses() is warns
