"""Long commands show the same bar at a terminal, and nothing elsewhere."""

import os
import pty
import subprocess
import sys
from pathlib import Path
from threading import Thread

import pytest
import torch

from raycheck.bucket.store import open_store
from tests.support.save_without_ray import save_state


@pytest.mark.parametrize("verb", ["verify", "pack", "download", "cp", "import"])
def test_a_long_command_shows_bytes_rate_and_time_left_at_a_terminal_only(tmp_path: Path, verb: str) -> None:
    uri = f"{tmp_path}/runs/mine"
    save_state(open_store(uri), {"model": torch.nn.Linear(40, 30)}, save_number=1, step=3)
    torch.save({"w": torch.zeros(1000)}, tmp_path / "model.pt")

    def command(number: int) -> list[str]:
        arguments = {
            "verify": [uri],
            "pack": [uri, "3", f"{tmp_path}/{number}.tar"],
            "download": [uri, "3", f"{tmp_path}/{number}"],
            "cp": [uri, f"{tmp_path}/runs/{number}"],
            "import": [f"{tmp_path}/model.pt", f"{tmp_path}/runs/{number}"],
        }
        return [sys.executable, "-m", "raycheck", verb, *arguments[verb]]

    quiet = subprocess.run(command(1), capture_output=True, text=True, check=True, timeout=120)
    shown = _at_terminal(command(2))

    assert quiet.stderr == ""
    assert "time left" in shown
    assert "B/s" in shown or "kB" in shown or "bytes" in shown


def _at_terminal(command: list[str]) -> str:
    """Returns what a command writes to its stderr when that is a terminal."""
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
    subprocess.run(command, stdout=subprocess.PIPE, stderr=terminal, env=environment, check=True, timeout=120)
    os.close(terminal)
    reader.join(timeout=20)
    assert not reader.is_alive()
    os.close(master)
    return b"".join(pieces).decode()
