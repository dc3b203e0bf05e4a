"""Tests all clients with one table: the error for each response, its text, and how often the request is sent.

The responses are those that the services document. A proxy gives them in front of a real server.
"""

import math
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest

from raycheck.bucket.store import Store, open_store, retry
from raycheck.bucket.store.address import join_uri
from raycheck.bucket.store.part_sizes import PART_SIZES, PartSizes
from raycheck.bucket.store.retry import ATTEMPTS, ends_by
from raycheck.errors import ConfigError, ConflictError, CorruptError, DeniedError, NotFoundError, StoreError
from tests.support.servers.http_fault_proxy import Answer, FaultProxy, fault_proxy, of_s3
from tests.support.servers.s3_engines import by_s3fs_alone

PART = 5 * 1024 * 1024
SECRET = "c2VjcmV0LW9mLXRoZS1iYXRjaA=="  # base64, as Azure's keys are


def of_gs(status: str, reason: str, message: str) -> Answer:
    text = f'{{"error": {{"message": "{message}", "errors": [{{"reason": "{reason}"}}]}}}}'
    return Answer(status, text, ("Content-Type", "application/json"))


def of_az(status: str, code: str) -> Answer:
    return Answer(status, f"<?xml version='1.0'?><Error><Code>{code}</Code></Error>", ("x-ms-error-code", code))


ANSWERS = {
    "s3": {
        "busy": of_s3("503 Slow Down", "SlowDown"),
        "too many": of_s3("429 Too Many Requests", "TooManyRequests"),
        "broken": of_s3("500 Internal Server Error", "InternalError"),
        "expired": of_s3("400 Bad Request", "ExpiredToken"),
        "checksum": of_s3("400 Bad Request", "BadDigest"),
        "denied": of_s3("403 Forbidden", "AccessDenied"),
    },
    "gs": {
        "busy": of_gs("503 Service Unavailable", "backendError", "We encountered an internal error"),
        "too many": of_gs("429 Too Many Requests", "rateLimitExceeded", "The object exceeded the rate limit"),
        "broken": of_gs("500 Internal Server Error", "internalError", "Unknown Error"),
        "expired": of_gs("401 Unauthorized", "authError", "Invalid Credentials"),
        "checksum": of_gs("400 Bad Request", "invalid", "The checksum is another"),
        "denied": of_gs("403 Forbidden", "forbidden", "me does not have storage.objects.create access"),
    },
    "az": {
        "busy": of_az("503 Server Busy", "ServerBusy"),
        "too many": of_az("429 Too Many Requests", "TooManyRequests"),
        "broken": of_az("500 Internal Server Error", "InternalError"),
        "expired": of_az("401 Unauthorized", "InvalidAuthenticationInfo"),
        "denied": of_az("403 Forbidden", "AuthorizationPermissionMismatch"),
    },
}
VERBS: dict[str, Callable[[Store], object]] = {
    "get": lambda store: store.get("a"),
    "get_range": lambda store: store.get_range("a", 0, 1),
    "head": lambda store: store.head("a"),
    "list_objects": lambda store: list(store.list_objects("")),
    "list_names": lambda store: store.list_names(""),
    "put": lambda store: store.put("b", b"1"),
    "put_if_absent": lambda store: store.put_if_absent("b", b"1"),
    "delete": lambda store: store.delete("a"),
}
CONDITIONAL = ("put_if_absent",)


@contextmanager
def before(engine: str, request: pytest.FixtureRequest, patch: pytest.MonkeyPatch) -> Iterator[tuple[FaultProxy, str]]:
    """A proxy before that engine's server, and the URI of a run behind it."""
    if engine == "gs":
        endpoint = request.getfixturevalue("gcs").removeprefix("http://")
        with fault_proxy(f"gs://raycheck?endpoint_override={endpoint}") as proxy:
            query = f"endpoint_override=127.0.0.1:{proxy.port}&scheme=http&anonymous=true"
            yield proxy, f"gs://raycheck/{uuid4().hex}?{query}"
    elif engine == "az":
        connection = request.getfixturevalue("azure")
        address = connection.partition("BlobEndpoint=http://")[2].partition("/")[0]
        with fault_proxy(f"az://raycheck?endpoint_override={address}") as proxy:
            patch.setenv("AZURE_STORAGE_CONNECTION_STRING", connection.replace(address, f"127.0.0.1:{proxy.port}"))
            yield proxy, f"az://raycheck/{uuid4().hex}?account_name=devstoreaccount1"
    else:
        with fault_proxy(request.getfixturevalue("s3")) as proxy:
            patch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
            patch.setenv("AWS_SESSION_TOKEN", SECRET[::-1])
            yield proxy, join_uri(proxy.uri, uuid4().hex)


@pytest.fixture(params=["s3fs", *(pytest.param(name, marks=pytest.mark.slow) for name in ("obstore", "gs", "az"))])
def engine(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def service(engine: str) -> str:
    return engine if engine in ANSWERS else "s3"


@pytest.fixture
def wire_and_store(
    engine: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[FaultProxy, Store]]:
    """The store holds one object, `a`."""
    monkeypatch.setattr(retry, "CHANCE", SimpleNamespace(uniform=lambda *_: 0.0))  # no pauses between attempts
    with before(engine, request, monkeypatch) as (proxy, uri):
        store = open_store(uri)
        if engine == "s3fs":
            store = by_s3fs_alone(store)
        store.put("a", b"bytes")
        proxy.heads.clear()
        yield proxy, store


@pytest.fixture
def wire(wire_and_store: tuple[FaultProxy, Store]) -> FaultProxy:
    return wire_and_store[0]


@pytest.fixture
def store(wire_and_store: tuple[FaultProxy, Store]) -> Store:
    return wire_and_store[1]


def raised(kind: type[Exception] | tuple[type[Exception], ...], store: Store, verb: str) -> Exception:
    """Return what the verb raises, after checking that it and its causes show no secret."""
    with pytest.raises(kind) as caught:
        VERBS[verb](store)
    shown = "".join(traceback.format_exception(caught.value))
    assert SECRET not in shown
    assert SECRET[::-1] not in shown
    assert "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1" not in shown, "Azurite's key"
    return caught.value


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("fault", ["busy", "too many", "broken"])
def test_a_store_that_is_busy_is_asked_a_bounded_number_of_times_without_a_deadline(
    wire, store, service, engine, fault, verb
):
    wire.rule("answer", ".*", ".", times=1000, answer=ANSWERS[service][fault])

    error = raised(StoreError, store, verb)

    is_turned_away = fault == "too many" and service in ("gs", "az")
    attempts = 1 if verb in CONDITIONAL and not is_turned_away else ATTEMPTS
    tried_by_obstore = engine == "obstore" and verb in ("get_range", "put")
    assert len(wire.heads) == attempts + tried_by_obstore
    assert not isinstance(error, DeniedError)


@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb not in CONDITIONAL])
def test_refusals_do_not_count_where_there_is_a_deadline(wire, store, service, verb):
    wire.rule("answer", ".*", ".", times=3 * ATTEMPTS, answer=ANSWERS[service]["busy"])
    broken = wire.rule("answer", ".*", ".", times=ATTEMPTS - 1, answer=ANSWERS[service]["broken"])

    with ends_by(time.monotonic() + 60):
        VERBS[verb](store)

    assert len(broken.seen) == ATTEMPTS - 1
    assert len(wire.heads) == 3 * ATTEMPTS + ATTEMPTS


def test_a_store_that_refuses_every_request_is_asked_until_the_deadline(wire, store, service):
    wire.rule("answer", ".*", ".", times=10**6, answer=ANSWERS[service]["busy"])
    until = time.monotonic() + 2

    with ends_by(until):
        error = raised(StoreError, store, "head")

    assert len(wire.heads) > ATTEMPTS
    assert "503" in str(error)


def test_a_store_that_is_broken_is_not_asked_until_the_deadline(wire, store, service, engine):
    wire.rule("answer", ".*", ".", times=1000, answer=ANSWERS[service]["broken"])

    with ends_by(time.monotonic() + 60):
        raised(StoreError, store, "head")

    assert len(wire.heads) == ATTEMPTS


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("fault", ["busy", "broken"])
def test_a_store_that_is_busy_for_a_moment_is_asked_again(wire, store, service, fault, verb):
    wire.rule("answer", ".*", ".", times=1, answer=ANSWERS[service][fault])

    if verb in CONDITIONAL:
        raised(StoreError, store, verb)
        store.put_if_absent("b", b"1")
    else:
        VERBS[verb](store)

    assert len(wire.heads) == 2


@pytest.mark.parametrize(
    "engine", ["s3fs", *(pytest.param(name, marks=pytest.mark.slow) for name in ("obstore", "gs"))], indirect=True
)
def test_bytes_that_a_store_refuses_by_their_checksum_are_sent_again(wire, store, service):
    wire.rule("answer", "PUT|POST", ".", answer=ANSWERS[service]["checksum"])

    store.put("b", b"1")

    assert store.get("b").data == b"1"


@pytest.mark.parametrize("body", ["", "<?xml version='1.0'?><Error><Code>AccessDenied</Code><Message/></Error>"])
@pytest.mark.parametrize("status", ["403 Forbidden", "400 Bad Request", "412 Precondition Failed", "500 Broken"])
def test_a_refusal_without_code_or_message_shows_no_none(wire, store, service, refused_verb, status, body):
    wire.rule("answer", ".*", ".", times=1000, answer=Answer(status, body if service == "s3" else ""))

    error = raised((StoreError, ConflictError), store, refused_verb)

    assert "None" not in str(error)


@pytest.fixture(params=["get", "put", "put_if_absent"])
def refused_verb(request: pytest.FixtureRequest) -> str:
    return request.param


class PlainHTTPServer(ThreadingHTTPServer):
    """A server without TLS, which counts the connections that it accepts."""

    daemon_threads = True
    accepted = 0

    def get_request(self) -> tuple[socket.socket, Any]:
        self.accepted += 1
        return super().get_request()


@pytest.fixture
def plain_http() -> Iterator[PlainHTTPServer]:
    with PlainHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        serving = threading.Thread(target=server.serve_forever, args=(0.01,))
        serving.start()
        yield server
        server.shutdown()
        serving.join(timeout=30)


@pytest.mark.parametrize("verb", VERBS)
def test_https_to_a_port_that_speaks_http_is_said_at_once(engine, service, verb, plain_http, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    settings = {"s3": "region=us-east-1", "gs": "anonymous=true", "az": "account_name=me&anonymous=true"}[service]
    endpoint = f"endpoint_override=127.0.0.1:{plain_http.server_port}&scheme=https"
    store = open_store(f"{service}://raycheck/x?{endpoint}&{settings}")

    with pytest.raises(StoreError, match="plain HTTP"):
        VERBS[verb](by_s3fs_alone(store) if engine == "s3fs" else store)

    assert plain_http.accepted <= 1 + (engine == "obstore"), "it was repeated"


@pytest.mark.parametrize("verb", VERBS)
def test_credentials_that_have_expired_are_a_configuration_error(wire, store, service, engine, verb):
    wire.rule("answer", ".*", ".", times=1000, answer=ANSWERS[service]["expired"])
    is_bare = service == "s3" and verb == "head"  # no more than 400; botocore looks whether the region is another

    raised(StoreError if is_bare else ConfigError, store, verb)

    attempts = ATTEMPTS if service == "gs" else 1  # gcsfs may renew its token by the next one
    assert len(wire.heads) <= attempts + (engine == "obstore") + is_bare


@pytest.mark.parametrize("verb", VERBS)
def test_what_the_credentials_do_not_allow_is_denied_at_once(wire, store, service, engine, verb):
    wire.rule("answer", ".*", ".", times=1000, answer=ANSWERS[service]["denied"])

    assert isinstance(raised(StoreError, store, verb), DeniedError)

    assert len(wire.heads) <= 1 + (engine == "obstore")


@pytest.mark.parametrize("verb", VERBS)
def test_a_connection_that_always_breaks_is_an_error_of_the_store(wire, store, verb):
    wire.rule("reset", ".*", ".", times=1000)

    assert not isinstance(raised(StoreError, store, verb), DeniedError)


@pytest.mark.parametrize(
    "engine", ["s3fs", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gs", "az"))], indirect=True
)
@pytest.mark.parametrize("verb", VERBS)
def test_a_server_that_does_not_answer_is_given_up(wire, store, verb, monkeypatch):
    monkeypatch.setattr(retry, "REQUEST_TIMEOUT_S", 0.3)
    monkeypatch.setattr(retry, "CONDITIONAL_TIMEOUT_S", 0.3)
    wire.rule("hold", ".*", ".", times=1000)

    assert "no answer in time" in str(raised(StoreError, store, verb))
    assert wire.heads


def test_the_rest_of_the_contract_is_typed_alike(store):
    version = store.get("a").version

    for kind, call in (
        (NotFoundError, lambda: store.get("none")),
        (NotFoundError, lambda: store.get_range("none", 0, 1)),
        (NotFoundError, lambda: store.head("none")),
        (CorruptError, lambda: store.get_range("a", 0, 6)),
        (CorruptError, lambda: store.get_range("a", 7, 9)),
        (ConflictError, lambda: store.put_if_absent("a", b"2")),
        (ConflictError, lambda: store.put_if_match("none", b"2", version)),
    ):
        with pytest.raises(kind):
            call()


# --- what a verb costs ---


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_is_one_request(wire, store, verb):
    VERBS[verb](store)

    assert len(wire.heads) == 1


def test_a_swap_is_one_request(wire, store):
    version = store.get("a").version
    wire.heads.clear()

    store.put_if_match("a", b"2", version)

    assert len(wire.heads) == 1


@pytest.mark.parametrize("size", [PART, 2 * PART, 2 * PART + 1])
def test_an_upload_is_a_request_for_each_part_and_those_that_open_and_close_it(wire, store, service, size, monkeypatch):
    monkeypatch.setitem(PART_SIZES, service, PartSizes(part_bytes=PART, in_flight=2))
    body = memoryview(bytes(size))

    store.put_parts("large", (body[at : at + PART] for at in range(0, size, PART)), size)

    parts = math.ceil(size / PART)
    besides = {"s3": 2, "gs": 1, "az": 1}[service]
    assert len(wire.heads) == (1 if parts == 1 else parts + besides)
