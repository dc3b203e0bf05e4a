"""Tests what every store must do.

The protocol needs nothing but these verbs, so a new store is finished when it passes this file.
"""

import random
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import parse_qs, urlsplit
from uuid import uuid4

import fsspec
import pytest

from raycheck.bucket.store import Store, Upload, open_store
from raycheck.bucket.store.address import join_uri
from raycheck.bucket.store.interface import MAX_CONDITIONAL_BYTES
from raycheck.bucket.store.moved_bytes import MovedBytes, counting
from raycheck.bucket.store.s3.s3fs_store import S3Store
from raycheck.demo.server import s3_server
from raycheck.errors import ConfigError, ConflictError, CorruptError, NotFoundError, RaycheckError, StoreError
from tests.bucket.conftest import share, share_cloud
from tests.conftest import GOOGLES, new_root

WAIT_S = 60.0
# aiohttp warns of every body over 1 MiB that is bytes: parts are views of the staging buffer, and stay so.
large_bodies = pytest.mark.filterwarnings("ignore:Sending a large body directly:ResourceWarning")


S3_SERVERS = {
    "s3 by s3fs": "s3",
    "s3 by obstore": "s3",
    "ministack": "ministack",
    "ceph by s3fs": "ceph",
    "ceph by obstore": "ceph",
}
S3 = [name if server == "s3" else pytest.param(name, marks=pytest.mark.slow) for name, server in S3_SERVERS.items()]
on_s3 = pytest.mark.parametrize("uri", S3, indirect=True)


@pytest.fixture(
    params=["memory", "file", "folder of a store", *GOOGLES, pytest.param("az", marks=pytest.mark.slow), *S3]
)
def uri(request: pytest.FixtureRequest, tmp_path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return a root on each backend: S3 with both engines, and on further servers. The protocol's tests run on fewer."""
    if request.param == "folder of a store":
        return f"file://{tmp_path}/bucket/run"
    if request.param not in S3_SERVERS:
        return new_root(request, tmp_path)
    if not request.param.endswith("by obstore"):
        monkeypatch.setitem(sys.modules, "obstore", None)  # as where it is not installed
    server = S3_SERVERS[request.param]
    share(monkeypatch, request.getfixturevalue(f"{server}_client"))
    return join_uri(request.getfixturevalue(server), uuid4().hex)


@pytest.fixture
def store(uri: str, request: pytest.FixtureRequest) -> Store:
    if request.node.callspec.params.get("uri") == "folder of a store":
        above, _, name = uri.rpartition("/")
        return open_store(above).below(name)
    store = open_store(uri)
    share_cloud(store, request)
    return store


def keys(store: Store, prefix: str) -> list[str]:
    return sorted(item.key for item in store.list_objects(prefix))


# --- whole objects ---


def test_get_returns_exactly_the_bytes_that_were_put(store):
    data = random.Random(1).randbytes(100_000)

    store.put("a/b/c.bin", data)

    assert store.get("a/b/c.bin").data == data
    assert type(store.get("a/b/c.bin").data) is bytes
    assert store.get_data("a/b/c.bin", len(data)) == data
    assert type(store.get_data("a/b/c.bin")) is bytes
    assert store.head("a/b/c.bin") == len(data)


def test_a_signed_address_is_read_without_credentials_and_for_a_time(store):
    store.put("a/b c+é.bin", b"0123456789")
    if not isinstance(store, S3Store):
        with pytest.raises(ConfigError, match="only s3:// with credentials signs addresses"):
            store.signed_address("a/b c+é.bin", 60)
        return

    address = store.signed_address("a/b c+é.bin", 60)

    with urllib.request.urlopen(address, timeout=WAIT_S) as answer:
        assert answer.read() == b"0123456789"
    asked = parse_qs(urlsplit(address).query)
    assert asked["X-Amz-Expires"] == ["60"]
    assert asked["X-Amz-Algorithm"] == ["AWS4-HMAC-SHA256"]


@pytest.mark.parametrize("kind", [bytes, bytearray, lambda data: memoryview(data)[1:-1]])
def test_any_buffer_can_be_put(store, kind):
    body = kind(b"0123456789")

    store.put("a", body)

    assert store.get("a").data == bytes(body)


def test_an_empty_object_is_an_object(store):
    store.put("empty", b"")

    assert store.get("empty").data == b""
    assert store.head("empty") == 0
    assert [(item.key, item.size_bytes) for item in store.list_objects("")] == [("empty", 0)]


def test_an_object_that_no_reader_has_memory_for_is_corrupt_and_not_read(store):
    store.put("index", bytes(11))
    assert store.get("index", 11).data == bytes(11)

    with pytest.raises(CorruptError, match="index has 11 bytes, more than the 10 that it may have"):
        store.get("index", 10)

    assert store.get_range("index", 0, 11) == bytes(11), "the connection is good for more"


def test_put_replaces_and_changes_the_version(store):
    store.put("a", b"old")
    old = store.get("a")

    store.put("a", b"newer")

    assert store.get("a").data == b"newer"
    assert store.get("a").version != old.version
    assert keys(store, "") == ["a"]


def test_a_reader_sees_old_or_new_bytes_and_never_a_mixture(store):
    bodies = [bytes([letter]) * 200_000 for letter in b"ab"]
    store.put("a", bodies[0])
    done = threading.Event()

    def write() -> None:
        for i in range(20):
            store.put("a", bodies[i % 2])
        done.set()

    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(write)
        seen = {store.get("a").data}
        while not done.is_set() and not writing.done():
            seen.add(store.get("a").data)
        writing.result(WAIT_S)

    assert seen <= set(bodies)


def test_the_answer_to_a_get_carries_the_stores_clock(store):
    store.put("a", b"1")

    assert abs(store.get("a").at - time.time()) < 60


def test_a_missing_object_is_not_found_by_any_read(store):
    store.put("other", b"1")

    for read in (store.get, store.head, lambda key: store.get_range(key, 0, 1)):
        with pytest.raises(NotFoundError, match="no/such"):
            read("no/such")


def test_what_is_only_a_prefix_is_not_an_object(store):
    store.put("a/b", b"1")

    for read in (store.get, store.head, lambda key: store.get_range(key, 0, 1)):
        with pytest.raises(NotFoundError):
            read("a")


def test_delete_removes_one_object_and_leaves_its_neighbours(store):
    store.put("a/b", b"1")
    store.put("a/c", b"2")

    store.delete("a/b")

    with pytest.raises(NotFoundError):
        store.get("a/b")
    assert keys(store, "a/") == ["a/c"]


def test_deleting_what_is_not_there_is_fine(store):
    store.delete("never")
    store.delete("never/even/deeper")
    store.put("a/b", b"1")
    store.delete("a/b")

    store.delete("a/b")

    assert keys(store, "") == []


def test_deleting_a_mere_prefix_deletes_nothing(store):
    store.put("a/b", b"1")

    store.delete("a")

    assert keys(store, "") == ["a/b"]


# --- ranges ---


@pytest.mark.parametrize(("start", "stop"), [(0, 10), (0, 1), (9, 10), (3, 7), (4, 4)])
def test_a_range_is_exactly_its_bytes(store, start, stop):
    store.put("a", b"0123456789")

    assert store.get_range("a", start, stop) == b"0123456789"[start:stop]


@pytest.mark.parametrize(("start", "stop"), [(0, 11), (9, 12), (10, 11), (50, 60)])
def test_a_range_past_the_end_is_corrupt_and_never_a_short_answer(store, start, stop):
    store.put("a", b"0123456789")

    with pytest.raises(CorruptError, match="a"):
        store.get_range("a", start, stop)


def test_fsspec_reads_what_is_in_memory_under_the_same_uri():
    uri = f"memory://{uuid4().hex}/deep"
    store = open_store(uri)

    store.put("a/b", b"bytes")

    assert fsspec.filesystem("memory").cat_file(f"{uri}/a/b") == b"bytes"
    assert [item.key for item in open_store(uri).list_objects("a/")] == ["a/b"]


# --- parts ---


@pytest.mark.parametrize("root", ["memory", "file"])
def test_many_small_parts_make_one_object(root, tmp_path):
    store = open_store("memory://parts" if root == "memory" else f"file://{tmp_path}")
    data = random.Random(2).randbytes(1001)
    parts = [memoryview(data)[at : at + 100] for at in range(0, len(data), 100)]

    moved = MovedBytes()
    with counting(moved):
        store.put_parts("a/b", iter(parts), len(data))

    assert store.get("a/b").data == data
    assert moved.done == (0 if root == "memory" else len(data)), "the memory takes it whole"


@large_bodies
@on_s3
def test_an_object_of_several_parts_arrives_whole_on_s3(store):
    data = random.Random(3).randbytes(33 * 1024 * 1024 + 5)
    part = store.part_bytes(len(data))
    parts = (memoryview(data)[at : at + part] for at in range(0, len(data), part))

    moved = MovedBytes()
    with counting(moved):
        store.put_parts("a/b", parts, len(data))

    assert moved.done == len(data)
    assert len(data) > 2 * part
    assert store.head("a/b") == len(data)
    assert store.get("a/b").data == data
    assert store.get_range("a/b", part - 10, part + 10) == data[part - 10 : part + 10]


def test_an_object_of_one_part_arrives_whole(store):
    data = random.Random(4).randbytes(1000)

    store.put_parts("a", iter([memoryview(data)]), len(data))
    store.put_parts("empty", iter([]), 0)

    assert store.get("a").data == data
    assert store.get("empty").data == b""


class SourceError(Exception):
    """An error that a generator of parts raises; the store does not know this class."""


@large_bodies
def test_parts_that_fail_midway_leave_no_object_and_raise_their_own_error(store):
    part = store.part_bytes(0)

    def parts():
        yield memoryview(bytes(part))
        raise SourceError

    with pytest.raises(SourceError):
        store.put_parts("a/b", parts(), 3 * part)

    with pytest.raises(NotFoundError):
        store.head("a/b")
    assert keys(store, "") == []


@large_bodies
def test_parts_that_fail_midway_leave_no_name_in_a_listing(store):
    part = store.part_bytes(0)

    def parts():
        yield memoryview(bytes(part))
        raise SourceError

    with pytest.raises(SourceError):
        store.put_parts("a/b/c", parts(), 3 * part)

    assert store.list_names("a/") == []


@large_bodies
@on_s3
def test_parts_that_fail_midway_leave_no_upload_open_on_s3(store):
    part = store.part_bytes(0)

    def parts():
        yield memoryview(bytes(part))
        raise SourceError

    with pytest.raises(SourceError):
        store.put_parts("a", parts(), 3 * part)

    assert list(store.list_uploads("")) == []


# --- unfinished uploads ---


def begin_upload(store: Store, *keys: str) -> list[Upload]:
    """Leave what a writer leaves that is killed in the middle of `put_parts`."""
    begin = [(key, lambda client, key=key: client.create_multipart_upload(**store._at(key))) for key in keys]
    return [Upload(key, store._run(key, call)["UploadId"]) for key, call in begin]


def uploads(store: Store, prefix: str) -> list[Upload]:
    return sorted(store.list_uploads(prefix), key=lambda upload: (upload.key, upload.id))


def test_a_store_without_unfinished_uploads_lists_none(store):
    store.put("a/b", b"1")

    assert uploads(store, "") == []


@large_bodies
@on_s3
def test_an_unfinished_upload_is_listed_and_aborted(store):
    data = random.Random(5).randbytes(store.part_bytes(0) + 1)
    store.put_parts("a/finished", (memoryview(data)[at:][: len(data) - 1] for at in (0, len(data) - 1)), len(data))
    one, other = begin_upload(store, "a/b", "a/c")

    assert uploads(store, "a/") == [one, other]
    store.abort_upload(one)

    assert uploads(store, "a/") == [other]
    assert keys(store, "") == ["a/finished"]


@large_bodies
@on_s3
def test_an_unfinished_upload_says_how_many_bytes_it_holds(store):
    (upload,) = begin_upload(store, "a/b")
    where = store._at(upload.key) | {"UploadId": upload.id}
    for number in (1, 2):
        store._run("a/b", lambda client, n=number: client.upload_part(**where, PartNumber=n, Body=b"x" * 1000 * n))

    before = store.upload_bytes(upload)
    store.abort_upload(upload)

    assert before == 3000
    assert store.upload_bytes(upload) == 0


@on_s3
def test_two_unfinished_uploads_of_one_key_are_two(store):
    both = begin_upload(store, "a/b", "a/b")

    assert uploads(store, "") == sorted(both, key=lambda upload: upload.id)
    store.abort_upload(both[0])

    assert uploads(store, "") == [both[1]]


@on_s3
def test_aborting_an_upload_that_is_gone_is_fine(store):
    (upload,) = begin_upload(store, "a/b")

    store.abort_upload(upload)
    store.abort_upload(upload)

    assert uploads(store, "") == []


@on_s3
def test_unfinished_uploads_of_prefixes_that_begin_alike_are_not_mixed(uri):
    one, other = open_store(join_uri(uri, "my-run")), open_store(join_uri(uri, "my-run-2"))
    found = [*begin_upload(one, "a/x", "ab/x"), *begin_upload(other, "a/x")]

    assert uploads(one, "a/") == found[:1]
    assert uploads(one, "") == found[:2]
    assert uploads(other, "") == found[2:]


class TwoPerPage:
    """A client that asks for two uploads at a time. moto has no pages: from its answer they are cut here."""

    def __init__(self, inner) -> None:
        self.inner = inner

    def __getattr__(self, name: str):
        return getattr(self.inner, name)

    async def list_multipart_uploads(self, *, KeyMarker="", UploadIdMarker="", **where):  # noqa: N803
        more = {"KeyMarker": KeyMarker, "UploadIdMarker": UploadIdMarker} if KeyMarker else {}
        page = await self.inner.list_multipart_uploads(**where, **more, MaxUploads=2)
        if len(page.get("Uploads", [])) <= 2:
            return page
        found = sorted((item["Key"], item["UploadId"]) for item in page["Uploads"])
        left = [item for item in found if item > (KeyMarker, UploadIdMarker)]
        listed = [{"Key": key, "UploadId": upload_id} for key, upload_id in left[:2]]
        last = {"NextKeyMarker": left[:2][-1][0], "NextUploadIdMarker": left[:2][-1][1]}
        return {"Uploads": listed, "IsTruncated": len(left) > 2, **last}


@on_s3
def test_unfinished_uploads_of_several_pages_are_all_listed(store, monkeypatch):
    found = begin_upload(store, "a/1", "a/2", "a/3", "a/3", "a/3", "a/4", "a/5")
    begin_upload(store, "b/1")
    client = TwoPerPage(store._run("", s3_client_of))
    monkeypatch.setattr(store, "_client", answers(client))

    assert uploads(store, "a/") == sorted(found, key=lambda upload: (upload.key, upload.id))


async def s3_client_of(client):
    return client


def answers(value):
    async def answer():
        return value

    return answer


def test_what_a_killed_writer_leaves_in_a_folder_is_listed_and_aborted(tmp_path):
    store = open_store(f"file://{tmp_path}/run")
    for name in ("x", "x-2"):
        killed = subprocess.run(
            [sys.executable, "-c", _DIE_WRITING, store.uri, f"a/{name}/b"], timeout=WAIT_S, check=False
        )
        assert killed.returncode == -signal.SIGKILL
    store.put_if_absent("a/c", b"1")
    store.put_if_match("a/c", b"2", store.get("a/c").version)  # leaves its lock in the root

    (upload,) = uploads(store, "a/x/")
    assert upload.key.startswith("a/x/.raycheck-")
    assert len(uploads(store, "")) == 2
    store.abort_upload(upload)
    store.abort_upload(upload)

    assert uploads(store, "a/x/") == []
    assert len(uploads(store, "")) == 1
    assert keys(store, "") == ["a/c"]
    assert not (tmp_path / "run/a/x").exists()
    assert store.get("a/c").data == b"2"


_DIE_WRITING = """
import os, signal, sys
from raycheck.bucket.store import open_store

def parts():
    yield memoryview(b"1")
    os.kill(os.getpid(), signal.SIGKILL)

open_store(sys.argv[1]).put_parts(sys.argv[2], parts(), 2)
"""


# --- listings ---


def test_a_listing_names_every_object_below_its_prefix_with_its_size(store):
    for key in ("a/x", "a/b/x", "a/b/c/.metadata"):
        store.put(key, key.encode())

    assert {item.key: item.size_bytes for item in store.list_objects("a/")} == {
        "a/x": 3,
        "a/b/x": 5,
        "a/b/c/.metadata": 15,
    }
    assert keys(store, "nothing/") == []


def test_prefixes_that_begin_alike_are_not_mixed(store):
    for key in ("a/x", "ab/x", "ab/c/x", "abc"):
        store.put(key, b"1")

    assert keys(store, "a/") == ["a/x"]
    assert keys(store, "ab/") == ["ab/c/x", "ab/x"]
    assert store.list_names("ab/") == ["c"]


def test_roots_that_begin_alike_are_not_mixed(uri):
    one, other = open_store(join_uri(uri, "run")), open_store(join_uri(uri, "run2"))
    one.put("a/b/c", b"1")
    other.put("a/d/e", b"2")

    assert keys(one, "") == ["a/b/c"]
    assert one.list_names("a/") == ["b"]
    assert keys(other, "a/") == ["a/d/e"]


def test_names_are_those_that_have_objects_below_them(store):
    for key in ("a/one/x", "a/one/y", "a/two/deep/x", "a/object"):
        store.put(key, b"1")

    assert sorted(store.list_names("a/")) == ["one", "two"]
    assert store.list_names("nothing/") == []
    assert sorted(store.list_folders("a/")) == ["one", "two"]
    assert list(store.list_folders("nothing/")) == []


def test_the_cheap_reading_refuses_what_the_usual_one_refuses(store):
    store.put("large", b"12345")
    store.put("odd name%41?/\u202ex", b"odd")

    with pytest.raises(CorruptError, match="5 bytes"):
        store.get_data("large", 4)
    for key in ("none", "none/at all", "large/x"):
        with pytest.raises(NotFoundError):
            store.get_data(key)
    assert store.get_data("odd name%41?/\u202ex") == b"odd"


def test_a_name_goes_with_its_last_object(store):
    store.put("a/one/x", b"1")
    store.put("a/two/x", b"1")

    store.delete("a/one/x")

    assert store.list_names("a/") == ["two"]


def test_a_listing_of_several_pages_is_complete(monkeypatch):
    monkeypatch.setenv("MOTO_S3_DEFAULT_MAX_KEYS", "3")
    names = [f"name-{i}" for i in range(8)]

    with s3_server() as root:
        store = open_store(join_uri(root, "pages"))
        for name in names:
            store.put(f"a/{name}/x", b"1")

        assert keys(store, "a/") == [f"a/{name}/x" for name in names]
        assert sorted(store.list_names("a/")) == names


# --- conditions ---


def test_the_second_create_is_refused_and_changes_nothing(store):
    store.put_if_absent("a", b"first")

    with pytest.raises(ConflictError):
        store.put_if_absent("a", b"second")

    assert store.get("a").data == b"first"


def test_a_create_after_a_delete_is_accepted(store):
    store.put_if_absent("a", b"first")
    store.delete("a")

    store.put_if_absent("a", b"second")

    assert store.get("a").data == b"second"


def test_a_swap_of_the_right_version_replaces(store):
    store.put_if_absent("a", b"one")

    store.put_if_match("a", b"two", store.get("a").version)
    store.put_if_match("a", b"three", store.get("a").version)

    assert store.get("a").data == b"three"


def test_a_conditional_write_says_which_version_it_has_made_and_when(store):
    made = store.put_if_absent("a", b"one")
    read = store.get("a")
    swapped = store.put_if_match("a", b"two", made.version)
    store.put_if_match("a", b"three", swapped.version)

    assert read.version == made.version
    assert made.at - 1 <= read.at  # a Date has whole seconds
    assert made.at <= swapped.at
    with pytest.raises(ConflictError):
        store.put_if_match("a", b"four", swapped.version)
    assert store.get("a").data == b"three"


def test_calls_that_are_made_together_are_all_answered_in_order_and_the_first_error_is_raised(store):
    store.put("a", b"one")
    store.put("b", b"two")

    assert store.together(lambda: store.get("a").data, lambda: store.get("b").data) == [b"one", b"two"]
    assert store.both(lambda: store.head("a"), lambda: store.list_names("x/")) == (3, [])
    with pytest.raises(NotFoundError, match="missing"):
        store.together(lambda: store.head("a"), lambda: store.get("missing"), lambda: store.get("also missing"))


def test_a_stale_swap_is_refused_and_changes_nothing(store):
    store.put("a", b"one")
    stale = store.get("a").version
    store.put("a", b"two")

    with pytest.raises(ConflictError):
        store.put_if_match("a", b"three", stale)

    assert store.get("a").data == b"two"


def test_a_swap_of_a_missing_object_is_refused_and_creates_nothing(store):
    store.put("a", b"one")
    version = store.get("a").version
    store.delete("a")

    with pytest.raises(ConflictError):
        store.put_if_match("a", b"two", version)

    assert keys(store, "") == []


def test_a_conditional_body_may_have_a_mebibyte_and_no_byte_more(store):
    largest = bytes(MAX_CONDITIONAL_BYTES)

    store.put_if_absent("a", largest)
    store.put_if_match("a", b"1" + largest[1:], store.get("a").version)

    with pytest.raises(ConfigError):
        store.put_if_absent("b", largest + b"1")
    with pytest.raises(ConfigError):
        store.put_if_match("a", largest + b"1", store.get("a").version)
    assert keys(store, "") == ["a"]
    assert store.head("a") == MAX_CONDITIONAL_BYTES


def wins(store: Store, write) -> int:
    try:
        write()
    except ConflictError:
        return 0
    except StoreError as error:
        # Ceph RGW says this, and not 412, to a swap that was overtaken while it was under way.
        if "500 UnknownError" not in str(error):
            raise
        return 0
    return 1


def test_of_racing_threads_exactly_one_creates_and_exactly_one_swaps(store):
    racers = 8

    def race(write) -> int:
        barrier = threading.Barrier(racers)

        def run(racer: int) -> int:
            barrier.wait(WAIT_S)
            return wins(store, lambda: write(str(racer).encode()))

        return sum(pool.map(run, range(racers), timeout=WAIT_S))

    with ThreadPoolExecutor(racers) as pool:
        for i in range(10):
            key = f"race/{i}"

            created = race(lambda body, key=key: store.put_if_absent(key, body))
            version = store.get(key).version
            swapped = race(lambda body, key=key, version=version: store.put_if_match(key, b"new" + body, version))

            assert (created, swapped) == (1, 1)
            assert store.get(key).data.startswith(b"new")


def test_writes_and_deletes_in_one_folder_do_not_disturb_each_other(store):
    """The probes of several claims do this: each on its own object, all under one prefix."""
    racers = 4
    rounds = 300 if store.uri.startswith(("memory", "file")) else 10
    barrier = threading.Barrier(racers)

    def run(racer: int) -> None:
        barrier.wait(WAIT_S)
        for _ in range(rounds):
            store.put_if_absent(f"probes/{racer}", b"1")
            store.delete(f"probes/{racer}")

    with ThreadPoolExecutor(racers) as pool:
        for future in [pool.submit(run, racer) for racer in range(racers)]:
            future.result(WAIT_S)

    assert keys(store, "") == []


# --- addresses ---


@pytest.mark.parametrize(
    "uri",
    [
        "",
        "runs/my-run",
        "ftp://host/run",
        "s3:///run",
        "s3://bucket/run?no_such_setting=1",
        "s3://bucket/run?endpoint_override",
        "s3://[bucket/run",
        "memory://run?region=x",
        "file:///run?region=x",
        "file://host/run",
    ],
)
def test_an_address_that_cannot_work_is_a_configuration_error(uri):
    with pytest.raises(ConfigError) as caught:
        open_store(uri)

    assert str(caught.value)


def test_an_unknown_setting_is_named_together_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"no_such_setting.*endpoint_override"):
        open_store("s3://bucket/run?no_such_setting=1")


@pytest.mark.parametrize(
    "uri",
    [
        "s3://AKIAXX:hush-hush@bucket/run",
        "gopher://me:hush-hush@host/run",
        "file://me:hush-hush@host/run",
        "s3://bucket/run?secret_key=hush-hush",
        "s3://bucket/run?access_key=AKIAXX&secret_key=hush-hush&region=us-east-1",
        "memory://run?secret_key=hush-hush",
    ],
)
def test_credentials_in_an_address_are_refused_and_not_repeated(uri):
    with pytest.raises(ConfigError) as caught:
        open_store(uri)

    assert "hush-hush" not in str(caught.value)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("file://{0}/run#1", "file://{0}/run#2"),
        ("{0}/run#1", "{0}/run#2"),
        ("{0}/run 1", "{0}/run%201"),
    ],
)
def test_different_addresses_are_different_runs_or_refused(tmp_path, one, other):
    try:
        stores = [open_store(uri.format(tmp_path)) for uri in (one, other)]
    except ConfigError:
        return

    stores[0].put("a", b"1")

    with pytest.raises(NotFoundError):
        stores[1].get("a")


def test_a_plain_absolute_path_is_a_folder(tmp_path):
    open_store(f"{tmp_path}/run").put("a/b", b"1")

    assert (tmp_path / "run/a/b").read_bytes() == b"1"
    assert open_store(f"file://{tmp_path}/run").get("a/b").data == b"1"


def test_a_missing_bucket_is_a_configuration_error_that_names_it(s3):
    store = open_store(join_uri(s3.replace("s3://raycheck", "s3://no-such-bucket"), "run"))

    for call in (
        lambda: store.get("a"),
        lambda: store.put("a", b"1"),
        lambda: store.put_if_absent("a", b"1"),
        lambda: list(store.list_objects("a/")),
    ):
        with pytest.raises(ConfigError, match="no-such-bucket"):
            call()


@pytest.mark.parametrize("kind", [NotFoundError, ConflictError, CorruptError, ConfigError])
def test_errors_survive_the_way_between_processes(kind):
    import pickle

    error: RaycheckError = kind("s3://bucket: what, and what to do")

    again = pickle.loads(pickle.dumps(error))

    assert (type(again), str(again)) == (kind, str(error))
