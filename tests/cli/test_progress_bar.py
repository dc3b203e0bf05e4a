"""Long commands show the same bar at a terminal, and nothing elsewhere."""

import io
import json
import os
import pty
import re
import shutil
import subprocess
import sys
from pathlib import Path
from threading import Thread

import pytest
import torch

from raycheck.bucket.protocol.commit import finish
from raycheck.bucket.protocol.swap import Register
from raycheck.bucket.store import open_store
from tests.support.processes.command_line import raycheck
from tests.support.processes.save_without_ray import ME, save_state


class Terminal(io.StringIO):
    """Looks like a terminal to rich."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A folder with a finished run of three checkpoints, and beside it what else a command needs."""
    store = open_store(f"{tmp_path}/runs/mine")
    for number in (1, 2, 3):
        save_state(store, {"model": torch.nn.Linear(40, 30)}, save_number=number, step=number)
    finish(Register(store), ME, group="group-of-1")
    torch.save({"w": torch.zeros(1000)}, tmp_path / "model.pt")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "policy.yaml").write_text("rules:\n  - states: [finished]\n    keep_last: 1\n")
    return tmp_path / "runs"


COMMANDS = {
    "verify": ("verify RUN", "kB"),
    "pack": ("pack RUN 3 BESIDE/a.tar", "kB"),
    "unpack": ("unpack BESIDE/a.tar BESIDE/runs/new", "kB"),
    "download": ("download RUN 3 BESIDE/here", "kB"),
    "cp": ("cp RUN BESIDE/copy", "kB"),
    "cp --follow": ("cp RUN BESIDE/copy --follow --until-finished", "kB"),
    "import": ("import BESIDE/model.pt BESIDE/runs/imported", "kB"),
    "export-hf": ("export-hf RUN BESIDE/exported --config-from BESIDE", "kB"),
    "prune": ("prune RUN --keep-last 1 --grace 0", "objects"),
    "prune --dry-run": ("prune RUN --keep-last 1 --grace 0 --dry-run", "objects"),
    "prune-runs": ("prune-runs BESIDE/runs --policy BESIDE/policy.yaml --grace 0", "1/1 runs"),
    "delete": ("delete RUN 1 --yes --grace 0", "objects"),
    "delete-run": ("delete-run RUN --yes", "objects"),
    "delete-run --dry-run": ("delete-run RUN --dry-run", "objects"),
}
WITHOUT_TOTAL = ("prune --dry-run", "delete", "delete-run", "delete-run --dry-run")
"""Commands that count objects while they list them."""


@pytest.mark.parametrize("verb", COMMANDS)
def test_a_long_command_shows_how_far_it_is_at_a_terminal_only(runs: Path, verb: str) -> None:
    line, unit = COMMANDS[verb]
    words = [word.replace("RUN", f"{runs}/mine").replace("BESIDE", str(runs.parent)) for word in line.split()]
    if verb == "unpack":
        assert not raycheck("pack", f"{runs}/mine", "3", f"{runs.parent}/a.tar").returncode

    twin = f"{runs.parent}-twin"
    shutil.copytree(runs.parent, twin)
    terminal = Terminal()
    shown = raycheck(*words, stderr=terminal)
    quiet = raycheck(*(word.replace(str(runs.parent), twin) for word in words))

    assert (shown.returncode, quiet.returncode) == (0, 0), shown.stderr + quiet.stderr
    assert quiet.stderr == ""
    said = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.stderr)
    assert "time left" in said
    assert unit in said
    last, total = re.findall(r"([\d.]+)/([\d.?]+)", said.replace("B/s", ""))[-1]
    assert float(last) > 0
    assert total == (last if verb not in WITHOUT_TOTAL else "?"), said
    assert quiet.stdout.replace(twin, str(runs.parent)) == shown.stdout or verb.startswith(("cp", "export-hf"))
    assert "time left" not in shown.stdout


def test_a_bar_at_a_real_terminal_is_gone_at_the_end_and_leaves_the_pipe_to_others(runs: Path) -> None:
    """The lines of --json go where stdout leads, also while the bar is on the terminal."""
    command = ["cp", f"{runs}/mine", f"{runs.parent}/copy", "--follow", "--until-finished", "--json"]

    shown, printed = _at_terminal([sys.executable, "-m", "raycheck", *command])

    assert "time left" in shown
    assert "\x1b[2K" in shown, "the line is erased"
    assert json.loads(printed.splitlines()[-1])["step"] == 3
    assert "is here" not in shown


def _at_terminal(command: list[str]) -> tuple[str, str]:
    """Returns what a command writes to its stderr when that is a terminal, and to its stdout, which is a pipe."""
    master, terminal = pty.openpty()
    pieces: list[bytes] = []

    def read() -> None:
        try:
            while piece := os.read(master, 65536):
                pieces.append(piece)
        except OSError:  # the other side is closed
            pass

    reader = Thread(target=read, daemon=True)
    reader.start()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "120"}
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=terminal, env=environment, check=True, timeout=120)
    os.close(terminal)
    reader.join(timeout=60)
    assert not reader.is_alive()
    os.close(master)
    return b"".join(pieces).decode(), done.stdout.decode()
