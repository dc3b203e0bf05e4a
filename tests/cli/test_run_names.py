"""A run may have any name: each is trained, looked at, changed, moved and deleted by every command, and shown by the page.

A name is given to Ray as it is, so it is given to raycheck as it is; only its URI quotes what means something there.
"""

import html
import re
import threading
from http.client import HTTPConnection
from pathlib import Path
from queue import Queue
from urllib.parse import parse_qs, quote, urlsplit
from uuid import uuid4

import pytest
import torch

import raycheck as package
from raycheck.bucket.format.object_keys import LATEST_KEY
from raycheck.bucket.store import open_store
from raycheck.bucket.store.address import join_uri, parse_uri
from raycheck.errors import ConfigError
from raycheck.page.pages import PageScope
from raycheck.page.server import serve
from tests.support.histories.invariants import assert_invariants
from tests.support.processes.command_line import raycheck
from tests.support.processes.coordinator_in_thread import group_of

NAMES = {
    "unicode": "größe 学習 🚀 ",
    "uri": "50%25 a+b&c=d#e?f=g@h:8",
    "quotes": 'it\'s "new" `now` $HOME <b>[x]<b>{y} a\\b|c',
    "control": "a\tb\nc",
    "dash": "-rf",
    "dots": "...hidden",
    "long": "x" * 200,
}
JOINED = "unicode", "uri", "quotes"
CASES = [
    *(
        pytest.param(kind, NAMES[label], id=f"{kind}-{label}", marks=pytest.mark.slow)
        for kind in ("memory", "file")
        for label in JOINED
    ),
    *(pytest.param("memory", NAMES[label], id=f"memory-{label}") for label in NAMES if label not in JOINED),
    *(
        pytest.param(kind, "".join(NAMES[label] for label in JOINED), id=f"{kind}-all of these")
        for kind in ("file", "s3")
    ),
]
TOKEN = "a-token-of-this-test"


def place(kind: str, request: pytest.FixtureRequest, folder: Path) -> str:
    """A place for runs that is empty."""
    if kind == "memory":
        return f"memory://{uuid4().hex}"
    return f"file://{folder}/runs" if kind == "file" else join_uri(request.getfixturevalue("s3"), uuid4().hex)


def train(uri: str, steps: int) -> None:
    """One start of a training: it saves each of its steps."""
    (group,) = group_of(uri, owner=uuid4().hex)
    state = {"model": torch.nn.Linear(2, 1)}
    with package.Checkpointer(state, package.SaveSettings(every_steps=1), group=group) as ckpt:
        ckpt.restore()
        for _ in range(steps):
            ckpt.end_step({"loss": 1.0})
            ckpt.wait()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("kind", "name"), CASES)
def test_a_run_of_any_name_is_trained_and_served_by_every_command(
    kind: str, name: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    prefix = place(kind, request, tmp_path)
    uri, archive = join_uri(prefix, name), str(tmp_path / "run.tar")
    unpacked, fork, copy = (join_uri(prefix, f"{name}!-{made}") for made in ("unpacked", "fork", "copy"))
    policy = tmp_path / "policy.yaml"
    policy.write_text("rules: [{states: [finished], keep_last: 5}]\n")
    train(uri, 2)
    train(uri, 2)
    assert [run.name for run in package.list_runs(prefix)] == [name], "the folder has the name that was given"

    for command in (
        ["ls", uri],
        ["show", uri],
        ["show", uri, "--at", "3"],
        ["verify", uri],
        ["tensors", uri, "--at", "1"],
        ["diff", uri, "1", "2"],
        ["runs", prefix],
        ["pin", uri, "1"],
        ["unpin", uri, "1"],
        ["name", uri, "1", "first"],
        ["rename", uri, "first", "chosen"],
        ["score", uri, "chosen", "accuracy=0.5"],
        ["pack", uri, "2", archive],
        ["unpack", archive, unpacked],
        ["download", uri, "2", str(tmp_path / "folder")],
        ["fork", uri, fork, "--at", "chosen"],
        ["cp", uri, copy],
        ["rewind", uri, "2"],
        ["delete", uri, "1", "--yes"],
        ["prune", uri, "--keep-last", "1"],
        ["sweep", uri],
        ["prune-exports", uri, "--keep-last", "1"],
        ["prune-runs", prefix, "--policy", str(policy)],
        ["verify", copy],
    ):
        done = raycheck(*command)
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        assert "Traceback" not in done.stderr

    open_store(uri).delete(LATEST_KEY)
    assert raycheck("repair", uri).returncode == 0
    beside = {f"{name}!-{made}" for made in ("unpacked", "fork", "copy")}
    assert {run.name for run in package.list_runs(prefix)} == {name, *beside}
    for made in beside:
        train(join_uri(prefix, made), 1)  # each of them is a run that can be resumed
        assert_invariants(open_store(join_uri(prefix, made)))
    for gone in (fork, uri):
        assert raycheck("delete-run", gone, "--yes").returncode == 0
    assert {run.name for run in package.list_runs(prefix)} == beside - {f"{name}!-fork"}


@pytest.fixture(scope="module")
def runs() -> str:
    """The place in memory of one run of each name."""
    prefix = f"memory://{uuid4().hex}"
    for name in NAMES.values():
        train(join_uri(prefix, name), 1)
    return prefix


@pytest.fixture(scope="module")
def page(runs: str) -> int:
    """The port of a page over these runs. Its thread ends with the process."""
    addresses: Queue[str] = Queue()
    options = {"host": "127.0.0.1", "port": 0, "token": TOKEN, "on_start": addresses.put}
    threading.Thread(target=serve, args=(PageScope(prefix=runs),), kwargs=options, daemon=True).start()
    return urlsplit(addresses.get(timeout=60)).port or 0


def view(port: int, path: str) -> tuple[int, str]:
    link = HTTPConnection("127.0.0.1", port, timeout=60)
    link.request("GET", path, headers={"Cookie": f"raycheck-token-{port}={TOKEN}"})
    answer = link.getresponse()
    text = answer.read().decode()
    link.close()
    return answer.status, text


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
def test_the_page_shows_a_run_of_any_name(page: int, name: str) -> None:
    at = f"name={quote(name, safe='')}"
    key = "step-000000001-a1-s1"

    links = [html.unescape(found) for found in re.findall(r'href="run\?([^"]*)"', view(page, "/")[1])]
    assert [name] in [parse_qs(link).get("name") for link in links]
    for path in (f"/run?{at}", f"/checkpoint?{at}&at={key}", f"/tensor?{at}&at={key}&tensor=model.weight"):
        status, text = view(page, path)
        assert status == 200, text


@pytest.mark.parametrize("name", [".", ".."])
def test_a_name_that_would_be_another_folder_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="is not a name for a run: it would be another folder"):
        join_uri("s3://bucket/runs", name)


@pytest.mark.parametrize(("uri", "why"), [("s3://bucket/a\tb", "write the character"), ("s3://bucket/a%00b", "NUL")])
def test_an_address_that_would_name_another_place_is_refused(uri: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        parse_uri(uri)


def test_a_name_that_the_store_cannot_hold_is_refused_by_it_with_a_sentence(tmp_path: Path) -> None:
    done = raycheck("ls", f"file://{tmp_path}/{'x' * 300}")

    assert done.returncode == 2
    assert "File name too long" in done.stderr
    assert "Traceback" not in done.stderr
