"""Tests gs:// and az:// beyond the conformance suite: large objects, faults in transit, and the texts of errors.

The faults are real: a server that answers 429 or keeps half a chunk, and a proxy that resets connections or loses
responses.
"""

import gzip
import random
import sys
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from azure.core.exceptions import HttpResponseError

from raycheck.bucket.protocol.preflight import probe_node
from raycheck.bucket.protocol.removal.prune_and_sweep import prune
from raycheck.bucket.store import Store, open_store, retry
from raycheck.bucket.store.address import join_uri
from raycheck.bucket.store.gcs.store import GsStore
from raycheck.bucket.store.moved_bytes import MovedBytes, counting
from raycheck.bucket.store.request_window import RequestWindow
from raycheck.bucket.store.retry import ATTEMPTS
from raycheck.bucket.store.send_each import send_each
from raycheck.errors import ConfigError, ConflictError, CorruptError, DeniedError, NotFoundError, StoreError
from raycheck.storage_settings import StorageSettings
from tests.support.histories.invariants import assert_invariants
from tests.support.samples.sample_checkpoints import Driver, everything
from tests.support.servers.gcs_server import gcs_server, inject
from tests.support.servers.http_fault_proxy import FaultProxy, fault_proxy

WAIT_S = 60.0
PART = 16 * 1024 * 1024


@pytest.fixture
def uri(cloud_uri: str) -> str:
    return cloud_uri


@pytest.fixture
def gs(gcs: str, gs_client, request) -> Store:
    store = open_store(f"gs://raycheck/{request.node.name}")
    store._api = gs_client
    return store


def parts_of(data: bytes, part: int):
    return (memoryview(data)[at : at + part] for at in range(0, len(data), part))


class SourceError(Exception):
    """An error that a generator of parts raises; the store does not know this class."""


# --- a whole run ---


def test_a_run_claims_commits_evicts_and_prunes(store):
    driver = Driver(store)
    attempt, restore = driver.claim("g1")
    first = driver.save(attempt.number, 1, keep_last=2)
    second = driver.save(attempt.number, 2, keep_last=2)
    third = driver.save(attempt.number, 3, keep_last=2)

    gone = prune(driver.register, grace_s=0)

    body = assert_invariants(store)
    assert restore is None
    assert gone == (first.key,)
    assert [entry.key for entry in body.live] == [second.key, third.key]
    assert not [key for key in everything(store) if first.key in key]
    again, restore = Driver(store, coordinator="c2").claim("g2")
    assert (again.number, restore.key) == (attempt.number + 1, third.key)
    assert_invariants(store, before=body)


# --- large objects ---


def test_an_object_of_several_parts_arrives_whole(store):
    data = random.Random(3).randbytes(2 * PART + 5)
    part = store.part_bytes(len(data))

    moved = MovedBytes()
    with counting(moved):
        store.put_parts("a/b", parts_of(data, part), len(data))

    assert moved.done == len(data)
    assert part == PART
    assert store.head("a/b") == len(data)
    assert store.get("a/b").data == data
    assert store.get_range("a/b", part - 10, part + 10) == data[part - 10 : part + 10]


def test_an_object_of_exactly_two_parts_arrives_whole(store):
    data = random.Random(4).randbytes(2 * PART)

    store.put_parts("a", parts_of(data, PART), len(data))

    assert store.get("a").data == data


def test_a_put_larger_than_a_part_arrives_whole(store):
    data = random.Random(5).randbytes(PART + 7)

    store.put("a", memoryview(data))

    assert store.get("a").data == data


def test_a_source_that_fails_after_its_last_part_leaves_no_object(store):
    """Such a source finds out at the end that its bytes are not what they should be."""
    data = bytes(PART + 1)

    def parts():
        yield from parts_of(data, PART)
        raise SourceError

    with pytest.raises(SourceError):
        store.put_parts("a", parts(), len(data))

    assert list(store.list_objects("")) == []


def test_parts_that_fail_midway_leave_no_upload_open_on_gs(gs, gcs):
    def parts():
        yield memoryview(bytes(PART))
        yield memoryview(bytes(PART))
        raise SourceError

    with pytest.raises(SourceError):
        gs.put_parts("half", parts(), 3 * PART)

    with urllib.request.urlopen(f"{gcs}/_uploads", timeout=WAIT_S) as answer:
        assert b"half" not in answer.read()


def test_a_source_that_ends_too_early_is_an_error_and_no_object(gs):
    with pytest.raises(StoreError, match="end at byte"):
        gs.put_parts("a", iter([memoryview(bytes(PART))]), 2 * PART)

    with pytest.raises(NotFoundError):
        gs.head("a")


def test_a_chunk_that_was_kept_in_part_is_sent_on_from_there(gs, gcs):
    data = random.Random(6).randbytes(2 * PART + 5)
    inject(gcs, "PUT", "upload_id", status=308, keep=3 * 256 * 1024)

    gs.put_parts("a", parts_of(data, PART), len(data))

    assert gs.get("a").data == data


def test_a_chunk_that_the_server_failed_is_sent_again(gs, gcs):
    data = random.Random(7).randbytes(2 * PART + 5)
    inject(gcs, "PUT", "upload_id", status=503, times=2)

    gs.put_parts("a", parts_of(data, PART), len(data))

    assert gs.get("a").data == data


@pytest.mark.parametrize("status", [400, 403, 410])
def test_an_upload_that_is_refused_midway_leaves_no_object_and_stops_pulling(gs, gcs, status):
    data, pulled = bytes(PART), []

    def parts():
        for i in range(6):
            pulled.append(i)
            yield memoryview(data)

    inject(gcs, "PUT", "upload_id", status=status)

    with pytest.raises(StoreError):
        gs.put_parts("a", parts(), 6 * PART)

    assert len(pulled) <= 3
    with pytest.raises(NotFoundError):
        gs.head("a")


def test_bytes_that_change_while_they_are_sent_make_no_object(gs):
    """The last chunk carries the checksum of what the parts held when they were pulled."""
    data = bytearray(2 * PART)

    def parts():
        yield memoryview(data)[:PART]
        yield memoryview(data)[PART:]
        data[PART + 1000] ^= 1

    with pytest.raises(StoreError, match="crc32c"):
        gs.put_parts("a", parts(), len(data))

    with pytest.raises(NotFoundError):
        gs.head("a")


# --- refused checksums ---


def in_transit(proxy: FaultProxy, times: int = 1) -> None:
    """The last byte of the next objects' data changes in transit. Only the end mark of the body follows it."""
    proxy.rule("flip", "POST", "uploadType=multipart", times=times, back=len(f"\r\n--{'0' * 32}--\r\n"))


@pytest.mark.parametrize("condition", ["none", "absent", "match"])
def test_bytes_that_change_on_their_way_are_refused_and_sent_again(proxied, condition):
    proxy, store = proxied
    if condition == "match":
        store.put("a", b"before")
        version = store.get("a").version
    proxy.heads.clear()
    in_transit(proxy, times=2)

    {
        "none": lambda: store.put("a", b"bytes"),
        "absent": lambda: store.put_if_absent("a", b"bytes"),
        "match": lambda: store.put_if_match("a", b"bytes", version),
    }[condition]()

    assert store.get("a").data == b"bytes"
    assert posts(proxy) == 3 + (condition == "match")


def test_bytes_that_always_change_on_their_way_are_an_error_of_the_store(proxied, monkeypatch):
    proxy, store = proxied
    monkeypatch.setattr(retry, "CHANCE", SimpleNamespace(uniform=lambda *_: 0.0))  # no pauses between attempts
    in_transit(proxy, times=99)

    for write in (store.put, store.put_if_absent):
        with pytest.raises(StoreError, match="crc32c"):
            write("a", b"bytes")

    assert posts(proxy) == 2 * ATTEMPTS
    with pytest.raises(NotFoundError):
        store.get("a")


def test_a_refused_checksum_as_google_documents_it_is_repeated_too(gs, gcs):
    """Google documents a 400 with the reason "invalid"."""
    inject(gcs, "POST", "uploadType=multipart", status=400, reason="invalid")
    gs.put("a", b"1")
    inject(gcs, "POST", "uploadType=multipart", status=400, reason="invalid")

    gs.put_if_match("a", b"2", gs.get("a").version)

    assert gs.get("a").data == b"2"


def test_a_refused_condition_without_a_reason_is_known_by_what_stands_there(gs, gcs):
    gs.put("a", b"1")
    stale = gs.get("a").version
    gs.put("a", b"2")
    inject(gcs, "POST", "uploadType=multipart", status=412, times=2, reason=None)

    with pytest.raises(ConflictError):
        gs.put_if_match("a", b"3", stale)
    with pytest.raises(ConflictError):
        gs.put_if_absent("a", b"3")

    assert gs.get("a").data == b"2"


# --- faults between us and the store ---


@pytest.fixture
def proxied(gcs: str, request):
    """A proxy before the server, and a store that goes through it."""
    with fault_proxy(f"gs://raycheck?endpoint_override={gcs.removeprefix('http://')}") as proxy:
        settings = StorageSettings(endpoint=f"http://127.0.0.1:{proxy.port}", anonymous=True)
        yield proxy, GsStore("gs://raycheck/p", bucket="raycheck", prefix=request.node.name, settings=settings)


def test_a_conditional_write_whose_answer_was_lost_is_sent_once(proxied):
    proxy, store = proxied
    proxy.rule("lose_answer", "POST", "uploadType=multipart")

    with pytest.raises(StoreError):
        store.put_if_absent("a", b"mine")

    assert store.get("a").data == b"mine"
    assert posts(proxy) == 1


@pytest.mark.parametrize("kind", ["reset", "lose_answer"])
def test_a_put_is_repeated_after_a_broken_connection(proxied, kind):
    proxy, store = proxied
    proxy.rule(kind, "POST", "uploadType=multipart", times=2)

    store.put("a", b"bytes")

    assert store.get("a").data == b"bytes"
    assert posts(proxy) == 3


@pytest.mark.parametrize("kind", ["reset", "lose_answer"])
@pytest.mark.parametrize("nth", [0, 1, 2])
def test_an_upload_goes_on_after_a_broken_connection_at_any_chunk(proxied, kind, nth):
    """It goes on even when the lost answer was the last one, which said that the object is there."""
    proxy, store = proxied
    data = random.Random(nth).randbytes(2 * PART + 5)

    def parts():
        for number, part in enumerate(parts_of(data, PART)):
            if number == nth:
                proxy.rule(kind, "PUT", "upload_id")
            yield part

    store.put_parts("a", parts(), len(data))

    assert store.get("a").data == data


def test_nothing_reads_the_buffer_any_more_when_an_upload_has_failed(proxied):
    """The source fails while a chunk is held up half-way; the error must wait for that request's end."""
    proxy, store = proxied
    data = random.Random(8).randbytes(3 * PART)
    rule = proxy.rule("hold", "PUT", "upload_id")

    def parts():
        yield memoryview(data)[:PART]
        yield memoryview(data)[PART : 2 * PART]
        rule.wait(WAIT_S)
        threading.Timer(0.5, rule.release).start()
        raise SourceError

    with pytest.raises(SourceError):
        store.put_parts("a", parts(), len(data))

    assert rule.released.is_set(), "put_parts came back while a request still read the first part"
    assert [line.split()[0] for line in proxy.requests] == ["POST", "PUT", "DELETE"]


@pytest.fixture
def proxied_az(azure: str, request, monkeypatch):
    """Puts a fault proxy before Azurite, whose signatures do not cover the port."""
    address = azure.partition("BlobEndpoint=http://")[2].partition("/")[0]
    with fault_proxy(f"az://raycheck?endpoint_override={address}") as proxy:
        monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", azure.replace(address, f"127.0.0.1:{proxy.port}"))
        yield proxy, open_store(f"az://raycheck/{request.node.name}?account_name=devstoreaccount1")


@pytest.mark.slow
def test_a_conditional_write_to_azure_whose_answer_was_lost_is_never_reported_as_done(proxied_az):
    """aiohttp itself sends a PUT once more on a broken connection, so that it may be refused by its own first try."""
    proxy, store = proxied_az
    proxy.rule("lose_answer", "PUT", ".")

    with pytest.raises((StoreError, ConflictError)):
        store.put_if_absent("a", b"mine")

    assert store.get("a").data == b"mine"
    assert sum(line.startswith("PUT") for line in proxy.requests) <= 2


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["reset", "lose_answer"])
@pytest.mark.parametrize("what", ["comp=block&", "comp=blocklist"])
def test_an_upload_to_azure_goes_on_after_a_broken_connection(proxied_az, kind, what):
    """It goes on even when the lost answer was that of the commit: the repeated commit finds its blocks committed."""
    proxy, store = proxied_az
    data = random.Random(9).randbytes(2 * PART + 5)
    proxy.rule(kind, "PUT", what)

    store.put_parts("a", parts_of(data, PART), len(data))

    assert store.get("a").data == data
    assert sum("?comp=block" in line for line in proxy.requests) == 3 + 1 + 1


@pytest.mark.slow
def test_a_store_that_cannot_be_reached_is_given_up_after_its_attempts(proxied):
    proxy, store = proxied
    proxy.rule("reset", "POST", "uploadType=multipart", times=99)

    with pytest.raises(StoreError):
        store.put("a", b"1")

    assert posts(proxy) == ATTEMPTS


def posts(proxy: FaultProxy) -> int:
    return sum(line.startswith("POST") and "multipart" in line for line in proxy.requests)


# --- answers of the store ---


def test_too_many_writes_of_one_object_are_paced_and_then_accepted(gs, gcs):
    """429 says that the write was not applied, so a conditional one is repeated too."""
    gs.put_if_absent("latest", b"1")
    version = gs.get("latest").version
    inject(gcs, "POST", "ifGenerationMatch", status=429, times=2)

    gs.put_if_match("latest", b"2", version)

    assert gs.get("latest").data == b"2"


def test_a_conditional_write_is_not_repeated_after_a_server_error(gs, gcs):
    inject(gcs, "POST", "ifGenerationMatch", status=503)

    with pytest.raises(StoreError, match="503"):
        gs.put_if_absent("a", b"1")

    with pytest.raises(NotFoundError):
        gs.get("a")


def test_an_unconditional_write_is_repeated_after_a_server_error(gs, gcs):
    inject(gcs, "POST", "uploadType=multipart", status=503, times=2)

    gs.put("a", b"1")

    assert gs.get("a").data == b"1"


@pytest.mark.parametrize(
    ("permission", "method", "call"),
    [
        ("storage.objects.get", "GET", lambda store: store.get("a")),
        ("storage.objects.get", "GET", lambda store: store.head("a")),
        ("storage.objects.list", "GET", lambda store: list(store.list_objects(""))),
        ("storage.objects.create", "POST", lambda store: store.put("a", b"1")),
        ("storage.objects.create", "POST", lambda store: store.put_if_absent("a", b"1")),
        ("storage.objects.delete", "DELETE", lambda store: store.delete("a")),
    ],
)
@pytest.mark.parametrize("status", [401, 403])
def test_a_refusal_names_the_permission_that_is_missing(gs, gcs, permission, method, call, status):
    inject(gcs, method, ".", status=status)

    with pytest.raises(StoreError, match=permission) as caught:
        call(gs)

    assert isinstance(caught.value, DeniedError)


def test_a_token_that_cannot_be_renewed_is_a_configuration_error(gs, monkeypatch):
    """gcsfs says so by an error of its own."""
    from gcsfs.retry import HttpError

    def refused(*_):
        raise HttpError({"code": 401, "message": "Invalid Credentials"})

    monkeypatch.setattr(retry, "CHANCE", SimpleNamespace(uniform=lambda *_: 0.0))  # no pauses between attempts
    gs.put("a", b"1")
    monkeypatch.setattr(gs._api._fs.credentials, "maybe_refresh", refused)

    for call in (lambda: gs.get("a"), lambda: gs.put("a", b"2")):
        with pytest.raises(ConfigError, match="renew or correct"):
            call()


def test_an_object_that_unpacks_to_more_than_it_says_is_not_read_whole(gs, gcs):
    """A hostile bucket may hold such an object: aiohttp unpacks what is marked as packed."""
    packed = gzip.compress(bytes(1 << 20))
    request = urllib.request.Request(
        f"{gcs}/upload/storage/v1/b/raycheck/o?uploadType=media&name=bomb/latest&contentEncoding=gzip",
        packed,
        method="POST",
    )
    urllib.request.urlopen(request, timeout=WAIT_S).close()
    store = open_store("gs://raycheck/bomb")

    with pytest.raises(CorruptError, match="that it may have"):
        store.get("latest", 1 << 19)


def test_a_missing_bucket_is_a_configuration_error_that_names_it(store):
    missing = open_store(store.uri.replace("//raycheck/", "//no-such-bucket/"))

    for call in (
        lambda: missing.get("a"),
        lambda: missing.head("a"),
        lambda: missing.put("a", b"1"),
        lambda: missing.put_if_absent("a", b"1"),
        lambda: list(missing.list_objects("a/")),
        lambda: missing.list_names("a/"),
        lambda: missing.delete("a"),
    ):
        with pytest.raises(ConfigError, match="no-such-bucket"):
            call()


def test_a_missing_object_is_told_from_a_missing_bucket_by_one_more_request_and_only_once(gcs):
    with fault_proxy(f"gs://raycheck?endpoint_override={gcs.removeprefix('http://')}") as proxy:
        store = open_store(f"gs://raycheck/none?endpoint_override=127.0.0.1:{proxy.port}&scheme=http&anonymous=true")
        counts = []
        for read in (store.get, store.head, store.delete):
            try:
                read("a")
            except NotFoundError:
                counts.append(len(proxy.requests))

    assert counts == [2, 3]
    assert len(proxy.requests) == 4


def test_a_listing_of_several_pages_is_complete_on_gs(monkeypatch):
    names = [f"name-{i}" for i in range(8)]

    with gcs_server(PAGE="3") as endpoint:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", endpoint)
        store = open_store("gs://raycheck/pages")
        for name in names:
            store.put(f"a/{name}/x", b"1")

        assert [item.key for item in store.list_objects("a/")] == [f"a/{name}/x" for name in names]
        assert store.list_names("a/") == names


@pytest.mark.slow
def test_a_listing_of_several_pages_is_complete_on_az(azure):
    names = [f"name-{i}" for i in range(8)]
    store = open_store("az://raycheck/pages?account_name=devstoreaccount1")
    for name in names:
        store.put(f"a/{name}/x", b"1")

    store._options = {**store._options, "results_per_page": 3}

    assert [item.key for item in store.list_objects("a/")] == [f"a/{name}/x" for name in names]
    assert store.list_names("a/") == names


def test_a_root_may_hold_any_character(store, uri):
    for name in ("a%20b", "a%23b", "a%3Fb", "a%25b", "a+b&c=d", "%C3%BC"):
        odd = open_store(join_uri(uri, name))

        odd.put_if_absent("x/y", name.encode())

        assert odd.get("x/y").data == name.encode()
        assert [item.key for item in odd.list_objects("x/")] == ["x/y"]
        assert odd.list_names("") == ["x"]


@pytest.mark.slow
def test_a_folder_of_a_hierarchical_namespace_is_not_an_object(azure):
    """Azure shows such a folder as an empty blob with this mark, and keeps it when its last object has gone."""
    from azure.storage.blob import ContainerClient

    store = open_store("az://raycheck/folders?account_name=devstoreaccount1")
    store.put("a/full/x", b"1")
    with ContainerClient.from_connection_string(azure, "raycheck") as container:
        for name in ("a", "a/full", "a/empty", "a/empty/deeper"):
            container.upload_blob(f"folders/{name}", b"", metadata={"hdi_isfolder": "true"})

    assert [item.key for item in store.list_objects("")] == ["a/full/x"]
    assert store.list_names("a/") == ["full"]
    for read in (store.head, store.get):
        with pytest.raises(NotFoundError):
            read("a/full")


# --- addresses and credentials ---


def test_a_generation_is_the_version_and_the_clock_is_the_servers(gs):
    gs.put("a", b"1")

    got = gs.get("a")

    assert int(got.version) > 0
    assert abs(got.at - time.time()) < 60


def test_a_missing_package_is_named_with_the_way_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "gcsfs.core", None)
    monkeypatch.setitem(sys.modules, "adlfs", None)

    with pytest.raises(ConfigError, match=r"pip install 'raycheck\[gs\]'"):
        open_store("gs://bucket/run")
    with pytest.raises(ConfigError, match=r"pip install 'raycheck\[az\]'"):
        open_store("az://container/run?account_name=someone")


def test_no_google_credentials_is_a_configuration_error_that_says_what_to_set(monkeypatch, tmp_path):
    monkeypatch.delenv("STORAGE_EMULATOR_HOST", raising=False)
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS", raising=False)

    with pytest.raises(ConfigError, match="GOOGLE_APPLICATION_CREDENTIALS"):
        open_store("gs://bucket/run").get("a")


def test_an_azure_address_without_an_account_is_a_configuration_error(monkeypatch):
    for name in ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_CONNECTION_STRING"):
        monkeypatch.delenv(name, raising=False)

    with pytest.raises(ConfigError, match="account_name"):
        open_store("az://container/run")


def test_a_connection_string_of_another_account_is_refused(monkeypatch):
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", "AccountName=other;AccountKey=aGk=")

    with pytest.raises(ConfigError, match="other"):
        open_store("abfss://container@mine.dfs.core.windows.net/run")


@pytest.mark.slow
def test_an_endpoint_and_a_key_reach_the_account_without_a_connection_string(azure, monkeypatch):
    from raycheck.bucket.store.azure.store import AzStore

    facts = dict(item.partition("=")[::2] for item in azure.split(";") if item)
    monkeypatch.delenv("AZURE_STORAGE_CONNECTION_STRING")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", facts["AccountKey"])
    settings = StorageSettings(endpoint=facts["BlobEndpoint"])
    account = facts["AccountName"]
    store = AzStore("az://raycheck/keyed", container="raycheck", account=account, prefix="keyed", settings=settings)

    store.put("a", b"1")

    assert store.get("a").data == b"1"


@pytest.mark.parametrize("status", [401, 403])
def test_a_node_that_azure_denies_is_a_configuration_error(monkeypatch, status):
    for name in ("AZURE_STORAGE_CONNECTION_STRING", "AZURE_STORAGE_ACCOUNT_KEY"):
        monkeypatch.delenv(name, raising=False)
    store = open_store("az://container/run?account_name=me&anonymous=true")
    refused = HttpResponseError(response=SimpleNamespace(status_code=status, reason="no", headers={}, text=str))

    class Refusing:
        def get_blob_client(self, key: str):
            raise refused

    async def client():
        return Refusing()

    monkeypatch.setattr(store, "_client", client)

    with pytest.raises(ConfigError, match="node n: put"):
        probe_node(store, node="n")


@pytest.mark.slow
def test_a_wrong_azure_key_is_an_access_error_and_not_repeated(azure, monkeypatch):
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", azure.replace("AccountKey=", "AccountKey=AAAA"))
    store = open_store("az://raycheck/denied?account_name=devstoreaccount1")

    began = time.monotonic()
    with pytest.raises(StoreError, match="Storage Blob Data Contributor") as caught:
        store.put("a", b"1")

    assert isinstance(caught.value, DeniedError)

    assert time.monotonic() - began < 5


# --- the sender of parts ---


def test_no_more_parts_fly_than_allowed_and_all_have_ended_when_it_raises():
    flying, most, lock, failed = set(), [], threading.Lock(), threading.Event()

    def send(number: int) -> int:
        with lock:
            flying.add(number)
            most.append(len(flying))
        if number > 7:
            assert failed.wait(60)
            time.sleep(0.1)  # it flies on for a while
        with lock:
            flying.discard(number)
        if number == 7:
            failed.set()
            raise SourceError
        return number

    with ThreadPoolExecutor(16) as pool:
        with pytest.raises(SourceError):
            send_each(
                (memoryview(b"x") for _ in range(100)),
                lambda number, part: pool.submit(send, number),
                window=RequestWindow(least=4, most=4),
            )
        still_flying = set(flying)

    assert failed.is_set()
    assert still_flying == set()
    assert max(most) <= 4
    assert len(most) < 7 + 2 * 4
