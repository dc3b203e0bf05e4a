"""Completion in zsh and in fish, typed into the shells themselves. Both are installed on first use, if by root."""

import os
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from raycheck.bucket.store import open_store
from tests.support.samples.sample_checkpoints import Driver
from tests.support.servers.debian_packages import prepare_programs

pytestmark = pytest.mark.slow
DEADLINE_S = 60.0
INSTALL = "apt-get install -y --no-install-recommends zsh fish"


@pytest.fixture(scope="module")
def shells() -> None:
    prepare_programs(["zsh", "fish"], INSTALL, who="the tests of completion need zsh and fish")


@pytest.fixture
def runs(tmp_path: Path) -> str:
    """A folder with the runs my-other and my-run, each with steps 10 and 20, and with one whose name is hostile."""
    for name in ("my-run", "my-other"):
        driver = Driver(open_store(f"file://{tmp_path}/runs/{name}"))
        driver.claim("g")
        driver.save(1, 1)
        driver.save(1, 2)
    (tmp_path / "runs" / "my$(touch hacked)").mkdir()
    (tmp_path / "runs" / "my$(touch hacked)" / "latest").touch()
    return f"file://{tmp_path}/runs"


def environment(home: Path) -> dict[str, str]:
    return {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HOME": str(home),
        "TERM": "xterm",
        "LC_ALL": "C.UTF-8",
    }


def test_fish_offers_commands_runs_and_steps(shells: None, runs: str, tmp_path: Path) -> None:
    lines = ("raycheck t", f"raycheck ls {runs}/m", f"raycheck show {runs}/my-run --at ", "raycheck show --a")
    script = "_RAYCHECK_COMPLETE=source_fish raycheck | source\n"
    script += "".join(f"complete -C '{line}'; echo ==\n" for line in lines)

    done = subprocess.run(
        ["fish", "--no-config", "-c", script],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        env=environment(tmp_path),
        cwd=tmp_path,
        check=True,
    )

    offered = [[line.split("\t")[0] for line in part.split("\n") if line] for part in done.stdout.split("==\n")]
    assert {"tensors", "top"} <= set(offered[0])
    assert sorted(offered[1]) == [f"{runs}/my-other", f"{runs}/my-run"]
    assert sorted(offered[2]) == ["10", "20"]
    assert "--at" in offered[3]
    assert not (tmp_path / "hacked").exists()


class Zsh:
    """An interactive zsh with the completion of the command, and without anybody's configuration."""

    def __init__(self, terminal: int) -> None:
        self._terminal = terminal
        self.type("PS1='% '; autoload -Uz compinit && compinit -u -D; setopt no_beep no_list_beep\r")
        self.type("eval \"$(_RAYCHECK_COMPLETE=source_zsh raycheck)\"; echo re''ady\r")
        self.read_until("ready")

    def type(self, text: str) -> None:
        os.write(self._terminal, text.encode())

    def read_until(self, wanted: str) -> str:
        """What it has written until now, without escape sequences, which must come to have `wanted` in it."""
        text, ends = "", time.monotonic() + DEADLINE_S
        while not re.search(wanted, text):
            assert time.monotonic() < ends, text
            if select.select([self._terminal], [], [], 0.2)[0]:
                text += os.read(self._terminal, 65536).decode(errors="replace")
                text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[=>]|\r|\x08", "", text)
        return text


@contextmanager
def zsh(home: Path) -> Iterator[Zsh]:
    terminal, child = pty.openpty()
    size = environment(home) | {"COLUMNS": "400", "LINES": "50"}
    with subprocess.Popen(["zsh", "-f", "-i"], stdin=child, stdout=child, stderr=child, env=size, cwd=home) as process:
        os.close(child)
        try:
            yield Zsh(terminal)
        finally:
            process.kill()
            os.close(terminal)


def test_zsh_completes_commands_runs_and_steps(shells: None, runs: str, tmp_path: Path) -> None:
    """What is unique is put into the line by Tab; a line that ends with echo shows it."""
    with zsh(tmp_path) as shell:
        shell.type("raycheck tens\t")
        shell.read_until("raycheck tensors ")
        shell.type("\x15")  # takes the line away

        shell.type(f"raycheck ls {runs}/my-r\t")
        shell.read_until("my-run")
        shell.type("\x15")

        shell.type(f"raycheck ls {runs}/m\t\t")
        text = shell.read_until(r"my-other[\s\S]*my-run")
        assert "hacked" not in text
        shell.type("\x15")

        shell.type(f"raycheck diff {runs}/my-run 1\t")
        shell.read_until(r"my-run 10 ")
    assert not (tmp_path / "hacked").exists()
