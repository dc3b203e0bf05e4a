"""What obstore writes: the bytes, what a fault leaves behind, and that the caller's buffer is free when it is over.

The server is a real one behind a proxy that makes the faults. A bytearray that is still exported somewhere refuses to
change its size: so a test sees whether any thread can still read it.
"""

import gc
import random
import struct
import threading
from collections.abc import Iterator
from uuid import uuid4

import pytest

from raycheck.bucket.store import engines, open_store
from raycheck.bucket.store.lending import CUTS, Cut, Loan
from raycheck.bucket.store.s3_fast import FastS3Store
from raycheck.bucket.store.uri import join_uri
from raycheck.errors import ConfigError, NotFoundError, StoreError
from tests.faultproxy import FaultProxy, fault_proxy

PART = 5 * 1024 * 1024
SIZE = 3 * PART + 5
WAIT_S = 60.0
CREATE, COMPLETE = "[?]uploads", "[?]uploadId"


class SourceError(Exception):
    """What a generator of parts may raise; the store knows nothing of it."""


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CUTS, "s3", Cut(part_bytes=PART, in_flight=2))


@pytest.fixture
def wire(s3: str) -> Iterator[FaultProxy]:
    with fault_proxy(s3) as proxy:
        yield proxy


@pytest.fixture
def store(wire: FaultProxy) -> FastS3Store:
    store = open_store(join_uri(wire.uri, uuid4().hex))
    assert isinstance(store, FastS3Store)
    return store


@pytest.fixture
def buffer() -> bytearray:
    return bytearray(random.Random(1).randbytes(SIZE))


def parts_of(buffer: bytearray) -> Iterator[memoryview]:
    return (memoryview(buffer)[at : at + PART] for at in range(0, len(buffer), PART))


def assert_nothing_remains(store: FastS3Store, buffer: bytearray) -> None:
    gc.collect()  # frames of tracebacks hold parts, and read none
    buffer.append(0)
    assert list(store.list_objects("")) == []
    assert list(store.list_uploads("")) == []


def test_the_parts_arrive_whole_and_s3fs_is_not_asked(store, buffer, wire):
    store.put_parts("a/b", parts_of(buffer), SIZE)

    assert "through_s3fs" not in store.__dict__
    assert store.get("a/b").data == buffer
    assert sum("partNumber" in line for line in wire.requests) == 4
    assert list(store.list_uploads("")) == []


def test_an_object_of_one_part_is_one_request(store, wire):
    store.put_parts("a", iter([memoryview(b"bytes")]), 5)

    assert [line.split("?")[0].split("/")[0] for line in wire.requests] == ["PUT "]
    assert store.get("a").data == b"bytes"


@pytest.mark.parametrize("kind", ["reset", "lose_answer", "busy"])
@pytest.mark.parametrize(("method", "key"), [("POST", CREATE), ("PUT", "partNumber=2"), ("POST", COMPLETE)])
def test_an_upload_goes_on_after_a_fault_in_any_request(store, buffer, wire, kind, method, key):
    """Also when the lost answer was the last one, which said that the object is there."""
    wire.rule(kind, method, key)

    store.put_parts("a", parts_of(buffer), SIZE)

    assert store.get("a").data == buffer
    assert "through_s3fs" not in store.__dict__
    buffer.append(0)


def test_a_part_whose_connection_broke_halfway_is_sent_again(store, buffer, wire):
    rule = wire.rule("cut", "PUT", "partNumber=3", times=2)

    store.put_parts("a", parts_of(buffer), SIZE)

    assert len(rule.seen) == 2
    assert store.get("a").data == buffer


@pytest.mark.parametrize("kind", ["cut", "busy"])
def test_a_part_that_fails_for_good_leaves_nothing_and_names_the_object(store, buffer, wire, kind):
    wire.rule(kind, "PUT", "partNumber=2", times=99)

    with pytest.raises(StoreError, match="a/b: upload of parts") as caught:
        store.put_parts("a/b", parts_of(buffer), SIZE)

    assert "Credential" not in str(caught.value)
    assert not caught.value.is_denied
    assert_nothing_remains(store, buffer)


def test_a_stalled_part_ends_by_its_time_out(store, buffer, wire, monkeypatch):
    monkeypatch.setattr(engines, "TIMEOUT_S", 1)
    wire.rule("hold", "PUT", "partNumber=2", times=99)

    with pytest.raises(StoreError, match="upload of parts"):
        store.put_parts("a", parts_of(buffer), SIZE)

    assert_nothing_remains(store, buffer)


def test_nothing_reads_the_buffer_any_more_when_the_source_has_failed(store, buffer, wire):
    """It fails while the server takes in nothing of the first part."""
    rule = wire.rule("hold", "PUT", "partNumber=1")

    def parts() -> Iterator[memoryview]:
        yield memoryview(buffer)[:PART]
        rule.wait(WAIT_S)
        raise SourceError

    with pytest.raises(SourceError):
        store.put_parts("a", parts(), SIZE)

    assert_nothing_remains(store, buffer)


@pytest.mark.parametrize("error", [OSError("mine"), NotFoundError("mine"), StoreError("mine")])
def test_an_error_of_the_source_comes_out_as_it_is(store, buffer, error):
    def parts() -> Iterator[memoryview]:
        yield memoryview(buffer)[:PART]
        raise error

    with pytest.raises(type(error)) as caught:
        store.put_parts("a", parts(), SIZE)

    assert caught.value is error
    del caught
    error.__traceback__ = None
    assert_nothing_remains(store, buffer)


def test_who_may_not_write_is_told_which_permission_is_needed(store, buffer, wire):
    wire.rule("deny", "POST", CREATE, times=99)

    with pytest.raises(StoreError, match="s3:PutObject") as caught:
        store.put_parts("a", parts_of(buffer), SIZE)

    assert caught.value.is_denied
    assert not any("partNumber" in line for line in wire.requests)


def test_a_permission_that_is_lost_on_the_way_is_told_as_one(store, buffer, wire):
    wire.rule("deny", "PUT", "partNumber=2")

    with pytest.raises(StoreError, match="s3:PutObject") as caught:
        store.put_parts("a", parts_of(buffer), SIZE)

    assert caught.value.is_denied
    assert_nothing_remains(store, buffer)


@pytest.mark.parametrize("size", [5, SIZE])
def test_a_bucket_that_is_not_there_is_a_mistake_in_the_settings(s3, buffer, size):
    store = open_store(s3.replace("//raycheck", f"//{uuid4().hex}"))

    with pytest.raises(ConfigError, match="no such bucket"):
        store.put_parts("a", parts_of(buffer[:size]), size)


def test_what_obstore_cannot_begin_is_written_through_s3fs(store, buffer, wire):
    wire.rule("deny", "POST", CREATE, times=1)
    wire.rule("deny", "PUT", "/small", times=1)

    store.put_parts("large", parts_of(buffer), SIZE)
    store.put("small", b"bytes")

    assert store.get("large").data == buffer
    assert store.get("small").data == b"bytes"


def test_an_upload_that_is_aborted_from_elsewhere_is_not_found(store, buffer, wire, s3):
    other = open_store(store.uri.replace(str(wire.port), s3.partition("127.0.0.1:")[2].partition("&")[0]))
    rule = wire.rule("hold", "PUT", "partNumber=4")

    def abort() -> None:
        rule.wait(WAIT_S)
        for upload in other.list_uploads(""):
            other.abort_upload(upload)
        rule.release()

    thread = threading.Thread(target=abort)
    thread.start()
    with pytest.raises(NotFoundError, match="aborted"):
        store.put_parts("a", parts_of(buffer), SIZE)
    thread.join()

    assert_nothing_remains(store, buffer)


def test_a_loan_is_back_when_nothing_holds_a_view_of_it():
    loan, buffer = Loan(sleep=lambda _: None), bytearray(10)
    held = struct.iter_unpack("B", loan.lend(buffer))

    assert not loan.is_back(timeout_s=0.01)
    del held

    assert loan.is_back()
    buffer.append(1)
