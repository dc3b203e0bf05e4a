"""Tests large objects with both clients: the bytes, what a fault leaves, and that the caller's buffer is free in the
end.

The server is a real one behind a proxy that causes the faults. A bytearray that any thread can still read refuses to
change its size, and that is how a test notices such a thread.
"""

import asyncio
import gc
import os
import random
import signal
import struct
import threading
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from uuid import uuid4

import pytest

from raycheck.bucket.store import Store, client_options, open_store, request_window, retry, upload_parts
from raycheck.bucket.store.address import join_uri
from raycheck.bucket.store.part_sizes import PART_SIZES, PartSizes
from raycheck.bucket.store.request_window import window_of
from raycheck.bucket.store.retry import ends_by, noting_refusals
from raycheck.bucket.store.s3 import obstore_store
from raycheck.bucket.store.s3.buffer_loan import BufferLoan
from raycheck.bucket.store.s3.obstore_store import FastS3Store
from raycheck.bucket.store.send_each import send_each
from raycheck.bucket.store.upload_parts import RequestBody
from raycheck.errors import ConfigError, DeniedError, NotFoundError, StoreError
from tests.support.servers.http_fault_proxy import FaultProxy
from tests.support.servers.s3_engines import by_s3fs_alone, forbid_s3fs_bytes

PART = 5 * 1024 * 1024
SIZE = 3 * PART + 5
WAIT_S = 60.0
CREATE, COMPLETE = "[?]uploads", "[?]uploadId"


class SourceError(Exception):
    """An error that a generator of parts raises; the store does not know this class."""


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PART_SIZES, "s3", PartSizes(part_bytes=PART, in_flight=2))


@pytest.fixture
def fast(wire: FaultProxy, monkeypatch: pytest.MonkeyPatch) -> FastS3Store:
    monkeypatch.setattr(retry, "CHANCE", SimpleNamespace(uniform=lambda *_: 0.0))  # no pauses between attempts
    store = open_store(join_uri(wire.uri, uuid4().hex))
    assert isinstance(store, FastS3Store)
    return store


@pytest.fixture(params=["obstore", "s3fs"])
def store(request: pytest.FixtureRequest, fast: FastS3Store) -> Store:
    return fast if request.param == "obstore" else by_s3fs_alone(fast)


@pytest.fixture(autouse=True, scope="module")
def little_garbage() -> None:
    """These tests collect garbage on purpose, which is quick where there is little to look through."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def random_bytes() -> bytes:
    return random.Random(1).randbytes(SIZE)


@pytest.fixture
def buffer(random_bytes) -> bytearray:
    return bytearray(random_bytes)


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(obstore_store, "MAX_RETRIES", 2)
    monkeypatch.setattr(client_options, "TIMEOUT_S", 1)
    monkeypatch.setattr(retry, "REQUEST_TIMEOUT_S", 1.0)


def _submitted(pool: ThreadPoolExecutor, store: Store, _: int, key: str) -> "Future[object]":
    return pool.submit(copy_context().run, store.get_range, key, 0, 1)


def parts_of(buffer: bytearray) -> Iterator[memoryview]:
    return (memoryview(buffer)[at : at + PART] for at in range(0, len(buffer), PART))


def error_of(kind: type[Exception], store: Store, parts: Iterator[memoryview], size: int = SIZE) -> Exception:
    """Return what an upload raises, without the frames that hold its parts, which no longer read them."""
    with pytest.raises(kind) as caught:
        store.put_parts("a/b", parts, size)
    return caught.value.with_traceback(None)


def assert_nothing_remains(store: Store, buffer: bytearray) -> None:
    gc.collect()
    buffer.append(0)
    assert list(store.list_objects("")) == []
    assert list(store.list_uploads("")) == []


def test_the_parts_arrive_whole(store, buffer, wire):
    store.put_parts("a/b", parts_of(buffer), SIZE)

    assert store.get("a/b").data == buffer
    assert sum("partNumber" in line for line in wire.requests) == 4
    assert list(store.list_uploads("")) == []


def test_a_store_that_refuses_a_part_gets_fewer_at_a_time(fast, buffer, wire, monkeypatch):
    monkeypatch.setattr(request_window, "UNANSWERED_S", 60.0)
    store = by_s3fs_alone(fast)
    window = window_of(store.bucket_id, "uploads", least=2)
    wire.rule("busy", "PUT", "partNumber=2")

    store.put_parts("a", parts_of(buffer), SIZE)

    assert window.size == 1


def test_a_read_that_is_refused_counts_as_such(store, wire):
    store.put("a", b"bytes")
    wire.rule("busy", "GET", "/a$")
    refusals = []

    def refused() -> bool:
        refusals.append("a")
        return True

    with noting_refusals(refused):
        assert store.get_range("a", 0, 5) == b"bytes"

    assert refusals == ["a"]


@pytest.mark.parametrize("kind", ["flip", "deny"])
def test_an_upload_ends_all_its_flights_however_it_ends(store, buffer, wire, kind):
    wire.rule(kind, "PUT", "partNumber=3")
    with suppress(StoreError):
        store.put_parts("a", parts_of(buffer), SIZE)

    assert window_of(store.bucket_id, "uploads", least=2).flying == 0


def test_an_object_of_one_part_is_one_request(store, wire):
    store.put_parts("a", iter([memoryview(b"bytes")]), 5)

    assert [line.split("?")[0].split("/")[0] for line in wire.requests] == ["PUT "]
    assert store.get("a").data == b"bytes"


@pytest.mark.parametrize("kind", ["reset", "lose_answer", "busy"])
@pytest.mark.parametrize(("method", "key"), [("POST", CREATE), ("PUT", "partNumber=2"), ("POST", COMPLETE)])
def test_an_upload_goes_on_after_a_fault_in_any_request(store, buffer, wire, kind, method, key):
    """It goes on even when the lost answer was the last one, which said that the object is there."""
    wire.rule(kind, method, key)

    store.put_parts("a", parts_of(buffer), SIZE)

    assert store.get("a").data == buffer
    gc.collect()
    buffer.append(0)


def test_obstore_alone_writes_what_it_can(fast, buffer, wire, monkeypatch):
    forbid_s3fs_bytes(monkeypatch)
    wire.rule("busy", "PUT", "partNumber=2")

    fast.put_parts("a", parts_of(buffer), SIZE)
    fast.put("b", b"bytes")

    assert fast.head("a") == SIZE
    assert fast.head("b") == 5


def test_a_part_whose_connection_broke_halfway_is_sent_again(store, buffer, wire):
    rule = wire.rule("cut", "PUT", "partNumber=3", times=2)

    store.put_parts("a", parts_of(buffer), SIZE)

    assert len(rule.seen) == 2
    assert store.get("a").data == buffer


def test_a_body_gives_its_buffer_back_while_something_still_iterates(buffer):
    async def begun() -> AsyncIterator[bytes]:
        with RequestBody(buffer) as body:
            pieces = aiter(body)
            assert await anext(pieces) == buffer[: upload_parts.PIECE_BYTES]
        return pieces

    pieces = asyncio.run(begun())

    buffer.append(0)
    del pieces


def test_obstore_sends_a_part_again_that_was_refused_a_dozen_times(fast, buffer, wire, monkeypatch):
    forbid_s3fs_bytes(monkeypatch)
    monkeypatch.setattr(obstore_store, "MAX_PAUSE", timedelta(milliseconds=100))
    refused = wire.rule("busy", "PUT", "partNumber=2", times=12)

    fast.put_parts("a", parts_of(buffer), SIZE)

    assert len(refused.seen) == 12
    assert fast.head("a") == SIZE


@pytest.mark.parametrize("kind", ["cut", "busy"])
def test_a_part_that_fails_for_good_leaves_nothing_and_names_the_object(store, buffer, wire, kind, monkeypatch):
    monkeypatch.setattr(obstore_store, "MAX_RETRIES", 2)
    wire.rule(kind, "PUT", "partNumber=2", times=99)

    error = error_of(StoreError, store, parts_of(buffer))

    assert "a/b: " in str(error)
    assert "Credential" not in str(error)
    assert not isinstance(error, DeniedError)
    del error
    assert_nothing_remains(store, buffer)


def test_an_upload_fails_while_the_store_still_refuses_another_part(fast, buffer, wire):
    store = by_s3fs_alone(fast)
    wire.rule("busy", "PUT", "partNumber=1", times=10**6)
    wire.rule("deny", "PUT", "partNumber=2")
    until = time.monotonic() + 100

    with ends_by(until):
        assert error_of(DeniedError, store, parts_of(buffer))

    assert time.monotonic() < until - 80
    assert_nothing_remains(store, buffer)


def test_a_read_fails_while_the_store_still_refuses_another_one(fast, wire):
    store = by_s3fs_alone(fast)
    for key in ("a", "b"):
        store.put(key, b"bytes")
    wire.rule("busy", "GET", "/a$", times=10**6)
    wire.rule("deny", "GET", "/b$")
    until = time.monotonic() + 100

    with ThreadPoolExecutor(2) as pool, ends_by(until), pytest.raises(DeniedError):
        send_each(["a", "b"], partial(_submitted, pool, store), window=store.reads, may_repeat=True)

    assert time.monotonic() < until - 80


def test_a_stalled_part_ends_by_its_time_out(hasty, store, buffer, wire):
    wire.rule("hold", "PUT", "partNumber=2", times=99)

    assert error_of(StoreError, store, parts_of(buffer))

    assert_nothing_remains(store, buffer)


@pytest.mark.parametrize(
    ("method", "key"),
    [("PUT", "partNumber=2"), *(pytest.param("POST", key, marks=pytest.mark.slow) for key in (CREATE, COMPLETE))],
)
def test_a_stalled_upload_ends_by_its_deadline_and_is_aborted(store, buffer, wire, method, key):
    wire.rule("hold", method, key, times=99)
    with ends_by(time.monotonic() + 2):
        assert "no answer in time" in str(error_of(StoreError, store, parts_of(buffer)))

    assert_nothing_remains(store, buffer)


def test_an_interrupted_upload_makes_no_object(fast, buffer, wire):
    """Ctrl-C in an export: what was sent by then must not pass for the complete object."""
    rule = wire.rule("hold", "PUT", "partNumber=3")

    def interrupt() -> None:
        rule.wait(WAIT_S)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    error_of(KeyboardInterrupt, fast, parts_of(buffer))
    thread.join()
    rule.release()

    assert_nothing_remains(fast, buffer)


def test_an_upload_that_is_over_is_not_ended_as_if_it_were_whole():
    loan = BufferLoan()
    pulled = loan.lend_each([memoryview(b"one"), memoryview(b"two")])
    next(pulled).release()

    assert loan.take_back()

    with pytest.raises(StoreError, match="over"):
        next(pulled)


def test_a_stalled_object_of_one_part_ends_by_its_deadline(store, buffer, wire):
    wire.rule("hold", "PUT", "a/b", times=99)

    with ends_by(time.monotonic() + 1):
        assert "no answer in time" in str(error_of(StoreError, store, iter([memoryview(buffer)[:PART]]), PART))

    assert_nothing_remains(store, buffer)


def test_a_slow_source_is_not_waited_for_beyond_the_deadline(store, buffer):
    ends = time.monotonic() + 0.5

    def slow() -> Iterator[memoryview]:
        for part in parts_of(buffer):
            yield part
            time.sleep(max(0.0, ends + 0.1 - time.monotonic()))  # until the deadline is over

    with ends_by(ends):
        assert error_of(StoreError, store, slow())

    assert_nothing_remains(store, buffer)


def test_nothing_reads_the_buffer_any_more_when_the_source_has_failed(hasty, store, buffer, wire):
    """The source fails while the server accepts nothing of the first part."""
    rule = wire.rule("hold", "PUT", "partNumber=1")

    def parts() -> Iterator[memoryview]:
        yield memoryview(buffer)[:PART]
        rule.wait(WAIT_S)
        raise SourceError

    assert error_of(SourceError, store, parts())

    assert_nothing_remains(store, buffer)


@pytest.mark.parametrize("error", [OSError("mine"), NotFoundError("mine"), StoreError("mine")])
def test_an_error_of_the_source_comes_out_as_it_is(store, buffer, error):
    def parts() -> Iterator[memoryview]:
        yield memoryview(buffer)[:PART]
        raise error

    assert error_of(type(error), store, parts()) is error
    assert_nothing_remains(store, buffer)


def test_who_may_not_write_is_told_which_permission_is_needed(store, buffer, wire):
    wire.rule("deny", "POST", CREATE, times=99)

    error = error_of(StoreError, store, parts_of(buffer))

    assert isinstance(error, DeniedError)
    assert "s3:PutObject" in str(error)
    assert not any("partNumber" in line for line in wire.requests)


def test_a_permission_that_is_lost_on_the_way_is_told_as_one(store, buffer, wire):
    wire.rule("deny", "PUT", "partNumber=2")

    error = error_of(StoreError, store, parts_of(buffer))

    assert isinstance(error, DeniedError)
    assert "s3:PutObject" in str(error)
    del error
    assert_nothing_remains(store, buffer)


@pytest.mark.parametrize("size", [5, SIZE])
def test_a_bucket_that_is_not_there_is_a_mistake_in_the_settings(s3, buffer, size):
    store = open_store(s3.replace("//raycheck", f"//{uuid4().hex}"))

    error = error_of(ConfigError, store, parts_of(buffer[:size]), size)

    assert "no such bucket" in str(error)


def test_what_obstore_cannot_begin_is_written_through_s3fs(fast, buffer, wire):
    wire.rule("deny", "POST", CREATE, times=1)
    wire.rule("deny", "PUT", "/small", times=1)

    fast.put_parts("large", parts_of(buffer), SIZE)
    fast.put("small", b"bytes")

    assert fast.get("large").data == buffer
    assert fast.get("small").data == b"bytes"


def test_an_upload_that_is_aborted_from_elsewhere_is_not_found(fast, buffer, wire, s3, monkeypatch):
    monkeypatch.setattr(obstore_store, "MAX_RETRIES", 2)
    other = open_store(fast.uri.replace(str(wire.port), s3.partition("127.0.0.1:")[2].partition("&")[0]))
    rule = wire.rule("hold", "PUT", "partNumber=4")

    def abort() -> None:
        rule.wait(WAIT_S)
        for upload in other.list_uploads(""):
            other.abort_upload(upload)
        rule.release()

    thread = threading.Thread(target=abort)
    thread.start()
    error = error_of(NotFoundError, fast, parts_of(buffer))
    thread.join()

    assert "aborted" in str(error)
    del error
    assert_nothing_remains(fast, buffer)


def test_a_loan_is_back_when_nothing_holds_a_view_of_it():
    loan, buffer = BufferLoan(sleep=lambda _: None), bytearray(10)
    held = struct.iter_unpack("B", loan.lend(buffer))

    assert not loan.take_back(timeout_s=0.01)
    del held

    assert loan.take_back()
    buffer.append(1)
