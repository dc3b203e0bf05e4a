"""`raycheck runs`, and what `ls` and `show` say of a run without its `latest`, as a user and a program see them."""

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from raycheck.bucket.store import open_store
from raycheck.bucket.store.address import join_uri, shown_uri
from raycheck.terminal import printable
from tests.catalog.test_listing import HOSTILE_NAMES, STATES
from tests.cli.test_terminal import is_fit
from tests.support.processes.command_line import raycheck
from tests.support.samples.many_runs import a_run, mixed_runs, place
from tests.support.servers.http_fault_proxy import FaultProxy


@pytest.fixture(params=["file", "s3"])
def bucket(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A bucket with a run in every state."""
    uri = f"file://{tmp_path}/bucket"
    if request.param == "s3":
        uri = join_uri(request.getfixturevalue("s3"), f"runs-{tmp_path.name}")
    for name, (_, objects) in mixed_runs().items():
        place(open_store(uri), name, objects)
    return uri


def test_runs_shows_a_line_for_each_run_and_says_what_to_do(bucket: str) -> None:
    done = raycheck("runs", bucket, "--sort", "name")

    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines[1 : 1 + len(STATES)]] == sorted(STATES)
    (died,) = (line for line in lines if line.startswith("bob/died"))
    assert "died, resumable" in died
    assert " 20 " in died
    assert "24 h ago" in died
    assert "loss 0.047619" in died
    assert f"raycheck repair '{bucket.partition('?')[0]}/lost" in done.stdout
    assert "--price-per-gib-month" in lines[-1]
    assert "assuming 0.023 per GiB" in lines[-1]
    assert done.returncode == 1, "a run has lost its latest"
    assert done.stderr == ""


def test_runs_gives_programs_exact_numbers(bucket: str) -> None:
    done = raycheck("runs", bucket, "--json", "--price-per-gib-month", "1024")

    said = json.loads(done.stdout)
    assert {run["name"]: run["state"] for run in said["runs"]} == STATES
    for run in said["runs"]:
        assert run["cost_per_month"] == run["size_bytes"] / 2**20
    assert done.returncode == 1


def test_runs_of_one_state_are_shown_alone_and_a_lost_run_still_counts(bucket: str) -> None:
    done = raycheck("runs", bucket, "--state", "died", "--state", "lost", "--sort", "name")
    none = raycheck("runs", join_uri(bucket, "ann"), "--state", "died", "--depth", "1")
    unknown = raycheck("runs", bucket, "--state", "dead")

    wanted = sorted(name for name, state in STATES.items() if state in ("died", "lost"))
    assert [line.split()[0] for line in done.stdout.splitlines()[1:] if line and line[0] != " "][
        : len(wanted)
    ] == wanted
    assert f"\n{len(wanted)} runs, " in done.stdout
    assert done.returncode == 1
    assert "no run here has the state died (2 others)" in none.stdout
    assert unknown.returncode == 2
    assert "--state dead: give one of" in unknown.stderr


def test_runs_lists_one_run_and_is_content(bucket: str) -> None:
    done = raycheck("runs", join_uri(bucket, "ann"), "--depth", "1")
    none = raycheck("runs", join_uri(bucket, "nobody"))

    assert done.returncode == none.returncode == 0
    assert "2 runs, " in done.stdout
    assert "no runs here" in none.stdout


def test_runs_says_what_it_cannot_do(bucket: str) -> None:
    for args, text in ((("--depth", "-1"), "--depth -1"), (("--sort", "x"), "--sort x: give one of age, name, size")):
        done = raycheck("runs", bucket, *args)

        assert done.returncode == 2
        assert text in done.stderr


def test_a_prefix_that_is_denied_is_one_line_and_exit_code_2(wire: FaultProxy) -> None:
    wire.rule("deny", "GET", ".*", times=99)

    done = raycheck("runs", wire.uri, "--json")

    assert (done.returncode, done.stdout) == (2, "")
    assert "access denied" in done.stderr


def test_no_name_in_a_listing_is_obeyed_by_a_terminal(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}")
    for name in HOSTILE_NAMES:
        store.put(f"{name}/latest", a_run()["latest"])
        store.put(f"{name}'/latest", b"torn")

    text, data = raycheck("runs", f"file://{tmp_path}"), raycheck("runs", f"file://{tmp_path}", "--json")

    assert is_fit(text.stdout)
    assert is_fit(data.stdout)
    for name in HOSTILE_NAMES:
        assert printable(name) in text.stdout
    names = {run["name"] for run in json.loads(data.stdout)["runs"]}
    assert names == {*HOSTILE_NAMES, *(f"{name}'" for name in HOSTILE_NAMES)}


def test_a_thousand_runs_in_a_folder_are_listed(tmp_path: Path) -> None:
    latest = a_run(steps=10)["latest"]
    for number in range(1000):
        folder = tmp_path / f"run-{number:04d}"
        folder.mkdir()
        (folder / "latest").write_bytes(latest)

    done = raycheck("runs", f"file://{tmp_path}", "--json")

    assert done.returncode == 0
    assert len(json.loads(done.stdout)["runs"]) == 1000


def test_runs_tells_a_terminal_how_far_it_is(tmp_path: Path) -> None:
    for number in range(20):
        place(open_store(f"file://{tmp_path}"), f"run-{number}", {"latest": a_run()["latest"]})
    ours, theirs = pty.openpty()

    with os.fdopen(ours, "rb", buffering=0) as shown:
        done = subprocess.run(
            [sys.executable, "-m", "raycheck", "runs", str(tmp_path)],
            stdout=subprocess.PIPE,
            stderr=theirs,
            env=os.environ | {"TERM": "xterm"},
            check=True,
            timeout=60,
        )
        os.close(theirs)
        said = b""
        try:
            while data := shown.read(65536):
                said += data
        except OSError:  # how a terminal says that its other end is closed
            pass

    assert b"20 runs in 21 folders" in said
    assert b"20 runs, " in done.stdout


@pytest.mark.parametrize(("name", "state"), [("lost", "lost"), ("deep/er/torn", "damaged"), ("newer", "newer")])
def test_ls_and_show_of_a_run_in_trouble_name_the_way_out(bucket: str, name: str, state: str) -> None:
    uri = join_uri(bucket, name)
    way_out = "Install a newer raycheck" if state == "newer" else "raycheck repair"

    for args in (("ls", uri), ("ls", uri, "--json"), ("show", uri)):
        done = raycheck(*args)
        assert (done.returncode, done.stdout) == (2, "")
        assert way_out in done.stderr
    told = raycheck("show", uri, "--json")
    assert told.returncode == 2
    assert way_out in told.stderr
    facts = json.loads(told.stdout)
    assert (facts["run"], facts["state"]) == (uri, state)
    assert way_out in facts["state_text"]


def test_ls_of_a_folder_of_runs_names_the_command_that_lists_them(bucket: str) -> None:
    done = raycheck("ls", join_uri(bucket, "ann"))

    assert done.returncode == 2
    assert f"raycheck runs '{shown_uri(join_uri(bucket, 'ann'))}'" in done.stderr
