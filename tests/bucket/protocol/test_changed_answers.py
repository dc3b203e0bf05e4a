"""Tests what happens when a byte of a response changes in transit.

The object in the bucket is intact. The run therefore continues, and the wrong bytes are not believed, not written back,
and not reported as damage. When every response is wrong, the error names the object.
"""

import json
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from uuid import uuid4

import pytest

from raycheck.bucket.attempt_records import (
    AttemptRecord,
    ResumeRecord,
    load_record,
    load_resume,
    read_resumes,
    record_end,
)
from raycheck.bucket.format import object_keys
from raycheck.bucket.format.document import FORMAT_VERSION, Document, dump
from raycheck.bucket.format.latest import load_latest
from raycheck.bucket.format.manifest import load_manifest
from raycheck.bucket.format.ray_pointer import Pointer, load_pointer
from raycheck.bucket.protocol import pin_and_evict
from raycheck.bucket.protocol.object_copy import Job, copy_objects
from raycheck.bucket.protocol.removal.prune_and_sweep import plan_sweep, prune, sweep
from raycheck.bucket.protocol.repair import repair
from raycheck.bucket.protocol.rewind import rewind
from raycheck.bucket.protocol.sharing.fork import fork
from raycheck.bucket.protocol.swap import Register
from raycheck.bucket.reading import Checkpoint, read_latest
from raycheck.bucket.store import Got, Listed, Store, open_store, retry
from raycheck.bucket.store.address import join_uri
from raycheck.bucket.store.interface import MAX_WHOLE_BYTES
from raycheck.bucket.store.s3.s3fs_store import S3Store
from raycheck.errors import ConfigError, CorruptError, DamagedError, StoreError
from raycheck.settings import Retention
from tests.bucket.format.test_documents import a_latest, a_manifest
from tests.support.histories.invariants import assert_invariants
from tests.support.samples.hostile_documents import TWO
from tests.support.samples.sample_checkpoints import Around, Driver, everything, latest_tree, put_latest_tree
from tests.support.servers.http_fault_proxy import FaultProxy, Head, fault_proxy
from tests.support.servers.memory_store import DictStore


def a_record() -> AttemptRecord:
    return AttemptRecord(attempt=a_latest().attempt, ended_by_attempt=2, ended_at=1.5, cause="why")


def a_resume() -> ResumeRecord:
    return ResumeRecord(
        attempt=2,
        after=1,
        cause="why",
        restored=None,
        step=3,
        world_size_before=4,
        world_size=3,
        lost_steps=None,
        lost_s=0.5,
        since_commit_s=None,
        restore_s=0.25,
        restore_bytes=9,
        what="model",
    )


BODIES: list[tuple[Document, Callable[..., Document]]] = [
    (a_latest(), load_latest),
    (a_manifest(), load_manifest),
    (a_record(), load_record),
    (a_resume(), load_resume),
    (Pointer(uri="s3://bucket/runs/mine", key=TWO), load_pointer),
]
bodies = pytest.mark.parametrize(("document", "load"), BODIES, ids=[type(item[0]).__name__ for item in BODIES])


# --- a document's own checksum ---


@pytest.mark.enumeration
@bodies
def test_no_bit_of_a_document_changes_unseen(document: Document, load: Callable[..., Document]) -> None:
    data = dump(document)
    assert load(data, what="x") == document

    for at in range(len(data)):
        for bit in range(8):
            with pytest.raises(CorruptError):
                load(data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :], what="x")


@bodies
def test_a_document_says_its_checksum_last_and_needs_it(document: Document, load: Callable[..., Document]) -> None:
    tree = json.loads(dump(document))
    assert list(tree)[-1] == "crc32"

    for left in ({name: value for name, value in tree.items() if name != "crc32"}, {"crc32": tree["crc32"]} | tree):
        with pytest.raises(CorruptError, match="does not end with its checksum"):
            load(json.dumps(left).encode(), what="x")


@bodies
def test_a_document_of_format_version_1_has_no_checksum_and_is_read(
    document: Document, load: Callable[..., Document]
) -> None:
    tree = json.loads(dump(document))
    del tree["crc32"]

    assert load(json.dumps(tree | {"format_version": 1}).encode(), what="x") == document


def test_a_pointer_of_format_version_1_did_not_even_say_so() -> None:
    data = json.dumps({"uri": "s3://bucket/run", "key": TWO}).encode()

    assert load_pointer(data, what="x") == Pointer(uri="s3://bucket/run", key=TWO)
    with pytest.raises(CorruptError, match="not a checkpoint's name"):
        load_pointer(data.replace(TWO.encode(), b"../x"), what="x")


def test_the_next_swap_writes_a_body_of_format_version_1_as_the_newest(store: Store) -> None:
    ann = Driver(store)
    ann.claim("g1")
    ann.save(1, 1)
    tree = latest_tree(store)
    del tree["crc32"]
    store.put(object_keys.LATEST_KEY, json.dumps(tree | {"format_version": 1}).encode())

    ann.save(1, 2)

    assert latest_tree(store)["format_version"] == FORMAT_VERSION
    data = store.get(object_keys.LATEST_KEY).data
    with pytest.raises(CorruptError, match="was changed"):
        load_latest(data.replace(b'"counter": ', b'"counter": 1'), what="x")
    assert_invariants(store)


def test_who_edits_latest_by_hand_is_told_what_to_write(store: Store) -> None:
    ann = Driver(store)
    ann.claim("g1")
    ann.save(1, 1)
    edited = store.get(object_keys.LATEST_KEY).data.replace(b'"pinned": false', b'"pinned": true')
    store.put(object_keys.LATEST_KEY, edited)
    with pytest.raises(CorruptError, match="edited it by hand") as told:
        read_latest(store)
    said = str(told.value).partition('last field "crc32": "')[2][:8]

    store.put(object_keys.LATEST_KEY, edited.replace(json.loads(edited)["crc32"].encode(), said.encode()))

    assert read_latest(store).live[0].pinned
    assert_invariants(store)


def test_a_document_that_another_tool_has_written_anew_may_have_other_white_space() -> None:
    text = json.dumps(json.loads(dump(a_latest())), indent=4)
    with pytest.raises(CorruptError, match="edited it by hand") as told:
        load_latest(text.encode(), what="x")
    said = str(told.value).partition('last field "crc32": "')[2][:8]

    again = load_latest(f'{text[: text.rindex("crc32")]}crc32": "{said}"\n}}\n\n'.encode(), what="x")

    assert again == a_latest()


# --- one changed answer ---


class Flips(Around):
    """A store that changes the first `times` responses to each read of an object or a listing."""

    def __init__(self, inner: Store, *, key: str = "", times: int = 1, at: float = 0.5) -> None:
        super().__init__(inner)
        self._key = key
        self._times = times
        self._at = at
        self.seen: dict[object, int] = {}

    def get(self, key: str, max_bytes: int = MAX_WHOLE_BYTES) -> Got:
        got = self.inner.get(key, max_bytes)
        data = self._flipped(key, got.data)
        return got if data is got.data else Got(data, got.version, got.at)

    def get_range(self, key: str, start: int, stop: int) -> bytes:
        return self._flipped((key, start), bytes(self.inner.get_range(key, start, stop)))

    def head(self, key: str) -> int:
        return self.inner.head(key) ^ self._is_due(("head", key))

    def list_names(self, prefix: str) -> list[str]:
        names = self.inner.list_names(prefix)
        return [f"{name[:-4]}9{name[-3:]}" for name in names] if self._is_due(("names", prefix)) else names

    def list_objects(self, prefix: str) -> Iterator[Listed]:
        return self.inner.list_objects(prefix)

    def _flipped(self, what: object, data: bytes) -> bytes:
        if not data or not self._is_due(what):
            return data
        at = int(self._at * len(data)) if self._at < 1 else len(data) - 1
        return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]

    def _is_due(self, what: object) -> bool:
        if self._key not in str(what):
            return False
        self.seen[what] = self.seen.get(what, 0) + 1
        return self.seen[what] <= self._times


def go_through(flips: Callable[[], Store], store: Store) -> None:
    """Do with a run what drivers, readers and people do, each with a separate store."""
    ann = Driver(flips())
    attempt, _ = ann.claim("g1")
    first = ann.save(attempt.number, 1)
    ann.save(attempt.number, 2, step=30, base=first)
    other = Driver(flips(), "bob")
    attempt, entry = other.claim("h1")
    assert entry is not None
    assert entry.step == 30
    assert record_end(flips(), attempt, by=attempt, cause="a test")
    again = Driver(flips(), "bob", "c2")
    again.take_over("h1")
    again.save(attempt.number, 1, step=40)
    body = read_latest(flips())
    for item in body.live:
        checkpoint = Checkpoint(flips(), item)
        checkpoint.read_index(checkpoint.read_manifest())
        assert [finding.problem for finding in checkpoint.verify() if finding.problem] == []
    pin_and_evict.pin(Register(flips()), body.live[0].key)
    assert plan_sweep(flips()) == ()
    assert sweep(flips()) == ()
    prune(Register(flips()), Retention(keep_last=3), grace_s=0)
    with pytest.raises(ConfigError, match="nothing to repair"):
        repair(flips())
    rewind(Register(flips()), body.live[1].key)
    assert len(read_latest(store).live) == 3


@pytest.mark.parametrize("at", [0.0, 0.5, 1.0])
def test_one_changed_answer_to_each_read_disturbs_nobody(store: Store, at: float) -> None:
    go_through(lambda: Flips(store, at=at), store)

    assert_invariants(store)


def test_a_fork_and_a_copy_read_again_what_was_changed_on_its_way(store: Store) -> None:
    ann = Driver(store)
    ann.claim("g1")
    saved = ann.save(1, 1)
    target = DictStore()

    fork(Flips(store), Flips(target), run_id="forked")

    assert read_latest(target).live[0].step == saved.step
    assert_invariants(target)
    key, record = next(iter(saved.objects()))
    with pytest.raises(CorruptError, match="checksum"):
        copy_objects(Flips(store, times=99), target, saved.key, [Job(key=key, new_key="copy", record=record)])


def test_a_repair_rebuilds_the_same_from_changed_answers(store: Store) -> None:
    ann = Driver(store)
    ann.claim("g1")
    for save in (1, 2, 3):
        ann.save(1, save)
    listed = [entry.manifest_crc32 for entry in ann.look().live]
    store.delete(object_keys.LATEST_KEY)

    done = repair(Flips(store))

    assert [entry.manifest_crc32 for entry in done.latest.live] == listed
    assert done.left_out == () or all("no manifest" in why for _, why in done.left_out)
    assert_invariants(store)


def test_an_attempts_document_is_read_again_too(store: Store) -> None:
    data = dump(a_resume())
    store.put(object_keys.resume_key(2), data)

    assert read_resumes(Flips(store), [2]) == {2: a_resume()}
    assert read_resumes(Flips(store, times=99), [2]) == {}


def test_of_answers_that_are_always_changed_the_error_names_the_object_and_nothing_is_written(store: Store) -> None:
    ann = Driver(store)
    ann.claim("g1")
    saved = ann.save(1, 1)
    before = everything(store)
    entry = ann.look().live[0]
    bad = Flips(store, times=10**6)

    for call in (
        lambda: read_latest(bad),
        lambda: Driver(bad, "bob").claim("h1"),
        lambda: pin_and_evict.pin(Register(bad), saved.key),
        lambda: sweep(bad),
        lambda: prune(Register(bad)),
        lambda: rewind(Register(bad), saved.key),
    ):
        with pytest.raises(CorruptError, match="latest"):
            call()
    with pytest.raises(DamagedError, match=r"manifest\.json"):
        Checkpoint(bad, entry).read_manifest()
    with pytest.raises(DamagedError, match="/index"):
        Checkpoint(bad, entry).read_index(saved)

    assert everything(store) == before


def test_a_committer_never_writes_back_what_it_read_wrong(store: Store) -> None:
    """The byte is part of a checkpoint's checksum: written back, it would make that checkpoint count as damaged."""
    ann = Driver(store)
    ann.claim("g1")
    first = ann.save(1, 1)
    right = ann.look().live[0].manifest_crc32
    body = store.get(object_keys.LATEST_KEY).data
    place = (body.index(b'"manifest_crc32": ') + 18) / len(body) + 1e-9
    flipping = Driver(Flips(store, key="latest", at=place))
    flipping.claim("g1")

    flipping.save(1, 2)

    assert ann.look().live[0].manifest_crc32 == right
    Checkpoint(store, ann.look().live[0]).read_manifest()
    assert [entry.step for entry in ann.look().live] == [first.step, 20]


# --- what the store itself says of its bytes ---


@pytest.fixture
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "CHANCE", SimpleNamespace(uniform=lambda *_: 0.0))


@pytest.fixture(params=["s3 by s3fs", "s3 by obstore", "gs"])
def proxied(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, no_pauses: None):
    """Yield the URI of an empty run behind a proxy, and that proxy."""
    if request.param == "gs":
        endpoint = request.getfixturevalue("gcs")
        with fault_proxy(f"gs://raycheck?endpoint_override={endpoint.removeprefix('http://')}") as proxy:
            monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{proxy.port}")
            yield f"gs://raycheck/{uuid4().hex}", proxy
        return
    if request.param == "s3 by s3fs":
        monkeypatch.setitem(sys.modules, "obstore", None)
    with fault_proxy(request.getfixturevalue("s3")) as proxy:
        yield join_uri(proxy.uri, uuid4().hex), proxy


def flip(at: float) -> Callable[[Head, bytes], bytes]:
    def edit(head: Head, body: bytes) -> bytes:
        del head
        place = min(int(at * len(body)), len(body) - 1)
        return body[:place] + bytes([body[place] ^ 1]) + body[place + 1 :]

    return edit


OBJECT = {"latest": "latest(?!=)", "manifest": "manifest.json", "index": "index", "start": "start.json"}


@pytest.mark.parametrize("at", [0.0, 0.5, 1.0])
def test_one_changed_answer_of_a_real_server_disturbs_nobody(proxied: tuple[str, FaultProxy], at: float) -> None:
    uri, proxy = proxied
    ann = Driver(open_store(uri))
    ann.claim("g1")
    saved = ann.save(1, 1)
    ann.store.put(object_keys.resume_key(1), dump(a_resume()))
    rules = [proxy.rule("edit", "GET", key, edit=flip(at)) for key in OBJECT.values()]

    reader = open_store(uri)
    checkpoint = Checkpoint(reader, read_latest(reader).live[0])
    checkpoint.read_index(checkpoint.read_manifest())
    assert read_resumes(reader, [1]) == {1: a_resume()}

    assert [rule.times for rule in rules] == [0, 0, 0, 0], "all four were changed once"
    proxy.rule("edit", "GET", OBJECT["latest"], edit=flip(at))
    ann.save(1, 2)
    assert [entry.step for entry in assert_invariants(ann.store).live] == [saved.step, 20]


def test_always_changed_answers_of_a_real_server_are_an_error_that_names_the_object(
    proxied: tuple[str, FaultProxy],
) -> None:
    uri, proxy = proxied
    ann = Driver(open_store(uri))
    ann.claim("g1")
    ann.save(1, 1)
    before = ann.store.get(object_keys.LATEST_KEY).data
    rule = proxy.rule("edit", "GET", OBJECT["latest"], times=10**6, edit=flip(0.5))

    with pytest.raises((CorruptError, StoreError), match=r"latest.*changed"):
        read_latest(open_store(uri))

    rule.times = 0
    assert ann.store.get(object_keys.LATEST_KEY).data == before


@pytest.mark.parametrize("proxied", ["s3 by s3fs", "gs"], indirect=True)
def test_bytes_without_a_checksum_of_ours_are_held_to_the_stores(proxied: tuple[str, FaultProxy]) -> None:
    uri, proxy = proxied
    store = open_store(uri)
    store.put("plain", b"0123456789" * 100)
    if isinstance(store, S3Store):  # moto keeps a checksum only when it is told by which algorithm
        at = store._at("plain")
        store._run("plain", lambda client: client.put_object(**at, Body=b"0123456789" * 100, ChecksumAlgorithm="CRC32"))
    rule = proxy.rule("edit", "GET", "plain", edit=flip(0.5))

    assert store.get("plain").data == b"0123456789" * 100

    assert rule.times == 0
    always = proxy.rule("edit", "GET", "plain", times=100, edit=flip(0.5))
    with pytest.raises(StoreError, match=r"plain.*they were changed on the way"):
        store.get("plain")
    assert len(always.seen) > 2


def test_what_is_put_has_the_checksum_that_the_store_says_on_every_cloud(cloud_uri: str) -> None:
    store = open_store(cloud_uri)

    store.put_if_absent("a", b"one")
    store.put_if_match("a", b"two", store.get("a").version)
    store.put("b", bytes(100))

    assert (store.get("a").data, store.get("b").data) == (b"two", bytes(100))


def test_helpers_seal_what_they_edit(store: Store) -> None:
    ann = Driver(store)
    ann.claim("g1")

    put_latest_tree(store, latest_tree(store) | {"counter": 70})

    assert ann.look().counter == 70
