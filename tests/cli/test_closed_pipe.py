"""Commands whose reader has gone, as `raycheck ls ... | head -1` has it: exit code 141, and not a word on stderr.

Those that serve or follow continue, and a missing reader of stderr changes no exit code.
"""

import json
import os
import subprocess
import sys
from http.client import HTTPConnection
from pathlib import Path

import pytest
import torch

from raycheck.bucket.protocol.commit import finish
from raycheck.bucket.protocol.swap import Register
from raycheck.bucket.reading import read_latest
from raycheck.bucket.store import open_store
from raycheck.cli import app
from tests.support.processes.save_without_ray import ME, save_state
from tests.support.servers.ports import free_port, wait_until_up

# Each command is a child of one process, which has loaded the package: a process of its own costs seconds.
RUN_EACH = """
import json, os, sys, tempfile
from raycheck.cli import main
import raycheck.catalog.importing.import_checkpoint, raycheck.catalog.archive.pack

def outcome(words, stream):
    sys.stdout.flush()
    said = tempfile.TemporaryFile()
    reads, writes = os.pipe()
    os.close(reads)
    child = os.fork()
    if not child:
        os.dup2(writes, stream)
        os.dup2(said.fileno(), 3 - stream)
        for name, number in (("stdout", 1), ("stderr", 2)):
            setattr(sys, name, open(number, "w", 1 if number == 2 else -1, closefd=False))
        sys.argv = ["raycheck", *words]
        code = 0
        try:
            main()
        except SystemExit as end:
            code = end.code or 0
        except BaseException as error:
            code = repr(error)
        finally:
            try:
                sys.stdout.flush()
                sys.stderr.flush()
            except BaseException as error:
                code = repr(error)
            os._exit(code if isinstance(code, int) else 99)
    os.close(writes)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    said.seek(0)
    return code, said.read().decode()

print(json.dumps([outcome(words, stream) for words, stream in json.load(sys.stdin)]))
"""
NO_OUTPUT_TO_LOSE = {"page", "tinker", "submit", "watch-node", "export-hf", "publish", "demo", "top", "prune-exports"}
"""These serve, train or need more than a run on this machine; `top --once` stands for the last of them but one."""


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """One line of words for each command; every one of them prints at least one line."""
    folder = tmp_path_factory.mktemp("pipes")
    uri = f"file://{folder}/runs/mine"
    for number, step in enumerate((3, 6, 9), 1):
        save_state(open_store(uri), {"model": torch.nn.Linear(40, 30)}, save_number=number, step=step)
    torch.save({"model": torch.nn.Linear(2, 2).state_dict()}, folder / "model.pt")
    return {
        "ls": ["ls", uri],
        "show": ["show", uri],
        "history": ["history", uri],
        "doctor": ["doctor", uri],
        "watch": ["watch", "--help"],
        "verify": ["verify", uri],
        "tensors": ["tensors", uri],
        "diff": ["diff", uri, "3", "6"],
        "top --once": ["top", uri, "--once"],
        "runs": ["runs", f"file://{folder}/runs"],
        "prune": ["prune", uri, "--dry-run", "--keep-last", "1"],
        "sweep": ["sweep", uri, "--dry-run"],
        "rewind": ["rewind", uri, "3", "--dry-run"],
        "delete": ["delete", uri, "3", "--dry-run"],
        "delete-run": ["delete-run", uri, "--dry-run", "--live"],
        "prune-runs": ["prune-runs", "--help"],
        "clean": ["clean", "--help"],
        "pin": ["pin", uri, "3"],
        "unpin": ["unpin", uri, "3"],
        "name": ["name", uri, "3", "base"],
        "rename": ["rename", uri, "base", "root"],
        "unname": ["unname", uri, "root"],
        "score": ["score", uri, "3", "mmlu=0.5"],
        "fork": ["fork", uri, f"file://{folder}/runs/fork"],
        "cp": ["cp", uri, f"file://{folder}/runs/copy"],
        "pack": ["pack", uri, "6", "-"],
        "unpack": ["unpack", "--help"],
        "download": ["download", uri, "6", str(folder / "here")],
        "pull": ["pull", "--help"],
        "import": ["import", str(folder / "model.pt"), f"file://{folder}/runs/imported"],
        "repair": ["repair", "--help"],
        "data": ["data", "--help"],
        "docs": ["docs"],
        "docs data": ["docs", "data"],
        "--help": ["--help"],
        "--version": ["--version"],
        "--json": ["ls", uri, "--json"],
    }


def test_every_command_ends_quietly_when_its_reader_has_gone(commands: dict[str, list[str]], tmp_path: Path) -> None:
    source, copy = (open_store(f"file://{tmp_path}/{name}") for name in ("mine", "copy"))
    save_state(source, {"model": torch.nn.Linear(40, 30)}, save_number=1, step=1)
    finish(Register(source), ME, group="group-of-1")
    follow = ["cp", source.uri, copy.uri, "--follow", "--until-finished"]
    errors = {"an error": ["ls", "file:///nowhere/at-all"], "a wrong option": ["ls", "--wrong"]}
    given = [(words, 1) for words in (*commands.values(), follow)] + [(words, 2) for words in errors.values()]
    expected = {name: [141, ""] for name in commands} | {"follow": [0, ""]} | {name: [2, ""] for name in errors}

    done = subprocess.run(
        [sys.executable, "-c", RUN_EACH], input=json.dumps(given), capture_output=True, text=True, check=True
    )

    assert dict(zip(expected, json.loads(done.stdout), strict=True)) == expected
    assert done.stderr == ""
    assert read_latest(copy).is_finished


def test_a_server_continues_when_nobody_reads_its_lines(tmp_path: Path) -> None:
    port = free_port()
    reads, writes = os.pipe()
    os.close(reads)
    command = [sys.executable, "-m", "raycheck", "page", str(tmp_path), "--port", str(port)]
    with subprocess.Popen(command, stdout=writes, stderr=writes) as server:
        os.close(writes)
        try:
            wait_until_up(server, port, what="the page")
            page = HTTPConnection("127.0.0.1", port, timeout=60)
            page.request("GET", "/")
            assert page.getresponse().status == 401
            page.close()
        finally:
            server.terminate()


def test_no_command_is_forgotten_here(commands: dict[str, list[str]]) -> None:
    names = {(item.name or "") for item in app.registered_commands}

    assert names - NO_OUTPUT_TO_LOSE == {words[0] for words in commands.values() if words[0][0] != "-"} - {"top"}


def test_an_archive_that_is_cut_off_by_its_reader_is_no_error(tmp_path: Path) -> None:
    uri = f"file://{tmp_path}/mine"
    more_than_a_pipe_holds = {"model": torch.nn.Linear(400, 300)}
    save_state(open_store(uri), more_than_a_pipe_holds, save_number=1, step=6)
    shell = f"set -o pipefail; {sys.executable} -m raycheck pack {uri} 6 - | head -c 10 > {tmp_path}/cut"

    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=False)

    assert (done.returncode, done.stderr) == (141, "")
    assert (tmp_path / "cut").stat().st_size == 10
