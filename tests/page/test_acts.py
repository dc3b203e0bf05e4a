"""What a page with --edit does: it asks first, does what the command line does, and only for requests of its own."""

import json
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

import pytest
import torch

import raycheck
from raycheck.bucket.format.object_keys import HISTORY_PREFIX
from raycheck.bucket.store import open_store
from raycheck.bucket.store.address import folder_uri, path_uri
from raycheck.page.rendering import without_settings
from tests.page.test_page import Browser
from tests.support.histories.invariants import assert_invariants
from tests.support.processes.save_without_ray import save_state
from tests.support.servers.page_server import page_server

DEADLINE_S = 60.0


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with checkpoints of steps 10, 20 and 30."""
    model = torch.nn.Linear(8, 4)
    for number in (1, 2, 3):
        save_state(open_store(f"{tmp_path}/runs/real"), {"model": model}, save_number=number, step=10 * number)
    return tmp_path / "runs/real"


class Editor(Browser):
    """Asks a page with --edit as its script does."""

    def act(
        self, kind: str, at: str = "", *, value: str = "", name: str = "real", **headers: str
    ) -> tuple[int, dict[str, Any]]:
        body = urlencode({"name": name, "kind": kind, "at": at, "value": value})
        given = {
            "Host": self.host,
            "Cookie": self.cookie,
            "Origin": f"http://{self.host}",
            "X-Raycheck-Act": "1",
            "Content-Type": "application/x-www-form-urlencoded",
        } | {key.replace("_", "-"): text for key, text in headers.items()}
        link = HTTPConnection("127.0.0.1", self.port, timeout=60)
        link.request("POST", "/act", body=body, headers={key: text for key, text in given.items() if text})
        answer = link.getresponse()
        text = answer.read().decode()
        link.close()
        return answer.status, json.loads(text) if text.startswith("{") else {"error": text}

    def done(self, kind: str, at: str = "") -> dict[str, Any]:
        """Do a long act, and wait until it has ended."""
        status, found = self.act(kind, at)
        assert status == 200, found
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            told: dict[str, Any] = json.loads(self.ask(f"/progress?id={found['id']}")[1])
            if told["is_done"]:
                return told
            time.sleep(0.1)
        raise AssertionError(f"{kind} did not end: {told}")

    def question(self, kind: str, at: str = "") -> str:
        return self.view("/act?" + urlencode({"name": "real", "kind": kind, "at": at}))


@contextmanager
def serve(prefix: str, *options: str) -> Iterator[Editor]:
    with page_server(prefix, *options) as address:
        yield Editor(int(address.rstrip("/").rpartition(":")[2]))


@pytest.fixture
def editor(run: Path) -> Iterator[Editor]:
    with serve(str(run.parent), "--edit") as editor:
        yield editor


def keys(run: Path) -> list[str]:
    return [item.key for item in raycheck.open_run(str(run)).checkpoints]


def test_a_page_without_edit_offers_nothing_and_does_nothing(run: Path) -> None:
    first, *_ = keys(run)
    before = raycheck.open_run(str(run))._latest
    with serve(str(run.parent)) as reader:
        view = reader.view(f"/checkpoint?name=real&at={first}")
        assert "act?" not in view
        assert "read-only" in view
        assert reader.act("pin", first)[0] in (404, 405)
        assert reader.ask(f"/act?name=real&kind=pin&at={first}")[0].status == 404

    assert raycheck.open_run(str(run))._latest == before


def test_each_act_asks_first_with_its_command_line_and_changes_nothing_by_that(run: Path, editor: Editor) -> None:
    first, *_ = keys(run)
    before = raycheck.open_run(str(run))._latest

    view = editor.view(f"/checkpoint?name=real&at={first}")

    offered = set(re.findall(r"kind=([a-z]+)", view))
    assert offered == {"pin", "name", "rewind", "verify", "export", "delete"}
    for kind in offered:
        text = editor.question(kind, first)
        assert first in text
        assert f"raycheck {'export-hf' if kind == 'export' else kind} file://{run}" in text
    assert "Nothing is dropped or expired" in editor.question("prune")
    assert "nothing would be deleted" in editor.question("sweep")
    assert "2 checkpoints of later steps" in editor.question("rewind", first)
    assert raycheck.open_run(str(run))._latest == before


def test_acts_do_what_the_commands_do(run: Path, editor: Editor) -> None:
    first, second, third = keys(run)

    assert editor.act("pin", first) == (200, {"text": f"{first} is pinned."})
    assert raycheck.open_run(str(run)).at(first).is_pinned
    assert "kind=unpin" in editor.view(f"/checkpoint?name=real&at={first}")
    assert editor.act("unpin", first)[0] == 200
    assert editor.act("name", second, value="before-rlhf")[0] == 200
    assert raycheck.open_run(str(run)).at("before-rlhf").key == second
    assert editor.done("rewind", second)["text"] == f"The head is {second}."
    assert editor.act("delete", third)[0] == 200
    assert "1 of them would be deleted now" not in editor.question("prune"), "readers of it have ten minutes"

    assert keys(run) == [first, second]
    assert raycheck.open_run(str(run)).head.key == second
    assert_invariants(open_store(str(run)))


def test_long_acts_go_on_in_the_background_and_say_what_came_of_them(run: Path, editor: Editor) -> None:
    first, second, _ = keys(run)
    shard = next((run / "checkpoints" / second).rglob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")

    assert re.fullmatch(rf"All \d+ objects of {first} are intact \(.*\)\.", editor.done("verify", first)["text"])
    assert "DAMAGED, 1 of" in editor.done("verify", second)["text"]
    assert editor.done("prune") == {"text": "0 checkpoints were deleted.", "is_done": True, "has_failed": False}
    assert editor.done("sweep")["text"] == "0 interrupted saves and uploads were deleted, 0 B."
    failed = editor.done("export", first)
    assert failed["has_failed"], "the model has no configuration"
    assert "config" in failed["text"]
    assert editor.ask("/progress?id=99")[0].status == 404


def test_what_is_deleted_on_the_page_stays_in_the_history_with_who_and_why(editor: Editor, run: Path) -> None:
    (first, *_) = keys(run)

    assert editor.act("delete", first)[0] == 200

    (commit,) = (item for item in raycheck.open_run(str(run)).history().commits if item.key == first)
    assert commit.state == "dropped"
    assert commit.why.startswith("dropped by hand by ")
    assert list(open_store(str(run)).list_objects(HISTORY_PREFIX))


def test_a_refusal_is_a_sentence_and_changes_nothing(run: Path, editor: Editor) -> None:
    first, _, third = keys(run)
    before = raycheck.open_run(str(run))._latest

    for kind, at, value, sentence in (
        ("delete", third, "", "rewind"),
        ("name", first, "40", "name"),
        ("name", first, "", "name"),
        ("pin", "step-000000099-a1-s1", "", "99"),
        ("burn", first, "", "is not an action of this page"),
    ):
        status, found = editor.act(kind, at, value=value)
        assert status >= 400
        assert sentence in found["error"], found
        assert "Traceback" not in found["error"]
    assert editor.act("pin", first, Origin="http://evil.example")[0] == 403
    assert editor.act("pin", first, Origin="")[0] == 403
    assert editor.act("pin", first, X_Raycheck_Act="")[0] == 403
    assert editor.act("pin", first, Cookie=f"raycheck-token-{editor.port}=wrong")[0] == 401
    assert editor.act("pin", first, Host="evil.example")[0] == 403
    assert raycheck.open_run(str(run))._latest == before


def test_a_page_that_asks_for_no_token_takes_a_browser_that_has_one_of_another_page(run: Path) -> None:
    first, *_ = keys(run)
    with serve(str(run.parent), "--edit", "--token", "") as open_to_all:  # a cookie is sent to every port of a host
        assert open_to_all.ask("/")[0].status == 200
        assert open_to_all.act("pin", first)[0] == 200
        assert open_to_all.act("unpin", first, Origin="http://evil.example")[0] == 403
        assert open_to_all.ask("/", Host="evil.example")[0].status == 403


def test_no_act_and_no_view_leads_out_of_the_prefix(run: Path, editor: Editor) -> None:
    outside = run.parents[1] / "other"
    shutil.copytree(run, outside)
    first, *_ = keys(outside)
    before = raycheck.open_run(str(outside))._latest

    for name in ("../other", "real/../../other", "%2e%2e/other", "%2E%2E%2Fother", "real\0"):
        for kind in ("pin", "delete", "rewind"):
            status, found = editor.act(kind, first, name=name)
            assert status == 404, (name, kind, found)
        assert editor.ask("/run?" + urlencode({"name": name}))[0].status == 404, name

    assert raycheck.open_run(str(outside))._latest == before


def test_a_run_is_changed_whatever_its_name_would_mean_in_an_address(run: Path, editor: Editor) -> None:
    name = "a b?region=eu#1 50%25"
    shutil.copytree(run, run.parent / name)
    first, *_ = keys(run)

    assert editor.act("pin", first, name=name) == (200, {"text": f"{first} is pinned."})

    assert raycheck.open_run(path_uri(str(run.parent / name))).at(first).is_pinned
    assert f"kind=pin&amp;at={first}" in editor.view(f"/checkpoint?name=real&at={first}"), "another run was pinned"
    answer, _ = editor.ask("/of?" + urlencode({"run": folder_uri(run.parent.as_uri(), name)}))
    assert parse_qs(urlsplit(answer.headers["Location"]).query) == {"name": [name]}


def test_no_error_shows_the_settings_in_the_prefix() -> None:
    with serve("s3://bucket/runs?region=eu-hidden-1", "--edit") as reader:
        text = reader.ask("/run?name=../other")[1] + reader.ask("/act?name=../other&kind=pin&at=1")[1]

    assert text.count("is not a run under s3://bucket/runs") == 2
    assert "hidden" not in text


@pytest.mark.parametrize(("said", "shown"), [
    ("s3://b/runs/real?endpoint_override=10.0.0.1:9&scheme=http: latest: no answer", "s3://b/runs/real: latest: no answer"),
    ("az://c/r?account_name=me, az://c/s?account_name=me.", "az://c/r, az://c/s."),
    ("'gs://b/r?x=1' (see file:///a/b)", "'gs://b/r' (see file:///a/b)"),
    ("s3://b/r?region=eu", "s3://b/r"),
    ("is this one? s3://b/r: no", "is this one? s3://b/r: no"),
])  # fmt: skip
def test_an_address_in_an_error_is_shown_without_its_settings(said: str, shown: str) -> None:
    assert without_settings(said) == shown
