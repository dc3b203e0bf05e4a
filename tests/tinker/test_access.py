"""Who may call: not a page of another site, not under a foreign name, and nobody without the key that was printed."""

import socket
import sqlite3
import stat
from contextlib import closing
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit
from uuid import uuid4

import pytest
import tinker

from raycheck.http_server import HttpLimits
from tests.support.frameworks.tinker_client import ask, new_model, train
from tests.support.servers.tinker_server import RunningServer, tinker_server

JSON = {"Content-Type": "application/json"}
SIMPLE = ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x")
"""What a page of another site may send without asking the server first."""


@pytest.fixture(scope="module")
def secured(base, tmp_path_factory):
    """A server as `raycheck tinker` starts it: with a key that it has made."""
    state = tmp_path_factory.mktemp("secured") / "s.sqlite"
    with tinker_server(base, f"memory://{uuid4().hex}", state, key=None) as running:
        yield running


def test_the_sdk_trains_with_the_key_that_is_printed(secured: RunningServer, connect, base) -> None:
    assert secured.key.startswith("tml-")
    assert len(secured.key) > 30

    assert train(new_model(connect(secured, key=secured.key), base), range(1))


def test_the_sdk_is_told_what_to_set_when_it_has_another_key(secured: RunningServer, connect, base) -> None:
    with pytest.raises(tinker.APIStatusError, match="TINKER_API_KEY") as caught:
        new_model(connect(secured, key="tml-another-key-than-the-one-here"), base)

    assert caught.value.status_code == 401


@pytest.mark.parametrize(
    ("path", "method"),
    [
        ("create_session", "POST"),
        ("sessions", "GET"),
        ("checkpoints", "GET"),
        ("unload_model", "POST"),
        ("training_runs/s:train:0/checkpoints/weights/x", "DELETE"),
        ("training_runs/s:train:0/checkpoints/weights/x/publish", "POST"),
    ],
)
def test_nothing_is_done_without_the_key(secured: RunningServer, path: str, method: str) -> None:
    body = {} if method == "POST" else None
    for shown in ({}, {"x-api-key": "tml-another-key"}, {"x-api-key": "tml-\xe9"}):
        assert ask(secured.url, path, body, method=method, headers=shown)[0] == 401
    assert ask(secured.url, "healthz")[0] == 200


def test_the_key_stays_with_the_state_file_which_others_cannot_read(base, connect, tmp_path: Path) -> None:
    state, bucket = tmp_path / "s.sqlite", f"memory://{uuid4().hex}"
    with tinker_server(base, bucket, state, key="") as unkeyed:
        assert unkeyed.key == ""
    state.chmod(0o644)  # as an older server has made it
    found = []
    for _ in range(2):
        with tinker_server(base, bucket, state, key=None) as running:
            found.append(running.key)
            modes = {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}

    assert found[0] == found[1]
    assert modes == {0o600}
    with closing(sqlite3.connect(state)) as db:
        assert db.execute("SELECT key FROM keys").fetchall() == [(found[0],)]


def test_two_servers_have_two_keys(base, secured: RunningServer, tmp_path: Path) -> None:
    with tinker_server(base, f"memory://{uuid4().hex}", tmp_path / "s.sqlite", key=None) as other:
        assert other.key != secured.key


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "192.0.2.1", "[", "\xe9"]
)
@pytest.mark.parametrize("kind", ["server", "secured"])
def test_another_host_name_is_refused(request, kind: str, host: str) -> None:
    """As DNS rebinding sends it, also to a server without a key."""
    found: RunningServer = request.getfixturevalue(kind)
    for path in ("sessions", "create_session"):
        status, answer = ask(
            found.url, path, {} if path == "create_session" else None, headers={"Host": host, "x-api-key": found.key}
        )
        assert (status, "--allow-host" in answer["detail"]) == (403, True)


def test_a_name_that_was_allowed_is_answered(base, tmp_path: Path) -> None:
    state = tmp_path / "s.sqlite"
    with tinker_server(base, f"memory://{uuid4().hex}", state, allow_hosts=["Tinker.Example"]) as server:
        assert ask(server.url, "sessions", headers={"Host": "tinker.example:8000"})[0] == 200
        assert ask(server.url, "sessions", headers={"Host": "other.example:8000"})[0] == 403


def sessions_of(server: RunningServer) -> list[str]:
    return ask(server.url, "sessions?limit=1000", headers={"x-api-key": server.key})[1]["sessions"]


@pytest.mark.parametrize("content", SIMPLE)
def test_no_simple_post_works_even_without_a_key(server: RunningServer, content: str) -> None:
    before = sessions_of(server)

    status, answer = ask(server.url, "create_session", b"{}", headers={"Content-Type": content})

    assert (status, "application/json" in answer["detail"]) == (415, True)
    assert sessions_of(server) == before


@pytest.mark.parametrize(
    "sent",
    [
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://localhost:1"},
        {"Origin": "http://["},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    ],
    ids=str,
)
@pytest.mark.parametrize(("path", "method"), [("create_session", "POST"), ("sessions", "GET"), ("x/publish", "POST")])
def test_what_a_page_of_another_site_sends_is_refused(server, sent: dict[str, str], path: str, method: str) -> None:
    before = sessions_of(server)

    assert ask(server.url, path, b"" if method == "POST" else None, method=method, headers=sent)[0] == 403
    if method == "POST":
        assert ask(server.url, path, {}, method=method, headers={**JSON, **sent})[0] == 403
    assert sessions_of(server) == before


def test_a_preflight_is_not_allowed(server: RunningServer) -> None:
    asked = {"Origin": "https://evil.example", "Access-Control-Request-Method": "DELETE"}

    assert ask(server.url, "sessions", method="OPTIONS", headers=asked)[0] == 403


def test_a_client_that_sends_half_a_request_is_let_go(base, tmp_path: Path) -> None:
    """Of headers, of a body, and nothing at all."""
    limits = HttpLimits(head_s=1.0, body_s=1.0, connections=8)
    halves = [b"", b"POST /api/v1/create_session HTTP/1.1\r\nHost: 127.0.0.1\r\n"]
    halves.append(halves[1] + b"Content-Type: application/json\r\nContent-Length: 10\r\n\r\n{")
    with tinker_server(base, f"memory://{uuid4().hex}", tmp_path / "s.sqlite", limits=limits) as server:
        address = urlsplit(server.url)
        clients = [socket.create_connection((address.hostname, address.port), timeout=30) for _ in halves]
        for client, half in zip(clients, halves, strict=True):
            client.sendall(half)
        answers = []
        for client in clients:
            with client:
                answers.append(b"".join(iter(partial(client.recv, 65536), b"")))

        assert answers[0] == b""
        assert all(answer.startswith(b"HTTP/1.1 408") for answer in answers[1:])
        assert ask(server.url, "healthz")[0] == 200
