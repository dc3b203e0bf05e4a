"""Tests reading: all damage is found and named, a dropped checkpoint is not damage, and nothing is written."""

import json
from collections.abc import Callable
from dataclasses import replace

import pytest

from raycheck.bucket.format import object_keys
from raycheck.bucket.format.checksum import crc32
from raycheck.bucket.format.document import dump
from raycheck.bucket.format.index_codec import MAGIC
from raycheck.bucket.format.manifest import Manifest
from raycheck.bucket.protocol.removal.prune_and_sweep import GRACE_S, prune
from raycheck.bucket.reading import Checkpoint, read_latest
from raycheck.bucket.store import Store, open_store
from raycheck.bucket.store.address import join_uri
from raycheck.bucket.store.interface import MAX_WHOLE_BYTES
from raycheck.bucket.verify import READ_BYTES, Finding
from raycheck.errors import ConfigError, CorruptError, NotFoundError
from raycheck.run import Run, open_run
from tests.support.histories.invariants import assert_invariants
from tests.support.samples.sample_checkpoints import (
    SHARD_BYTES,
    Around,
    Driver,
    everything,
    latest_tree,
    put_latest_tree,
    tiny_index,
    write_checkpoint,
)


@pytest.fixture
def saved(store) -> Manifest:
    """Make a run with two checkpoints, the newer one of two ranks. Returns the manifest of that one."""
    ann = Driver(store)
    ann.claim("g1", world_size=2)
    ann.save(1, 1, world_size=2)
    return ann.save(1, 2, world_size=2)


def head(store: Store) -> Checkpoint:
    checkpoint = Run(store, read_latest(store)).head
    assert checkpoint is not None
    return checkpoint._stored


def problems(store: Store) -> dict[str, str]:
    return {finding.key: finding.problem for finding in head(store).verify() if finding.problem}


# --- whole ---


def test_a_whole_checkpoint_has_one_finding_per_object_and_no_problem(store, saved):
    findings = list(head(store).verify())

    assert all(isinstance(finding, Finding) and not finding.problem for finding in findings)
    assert [finding.key for finding in findings] == [
        object_keys.manifest_key(saved.key),
        object_keys.index_key(saved.key),
        object_keys.metadata_key(saved.key, "train"),
        object_keys.shard_key(saved.key, "train", 0),
        object_keys.shard_key(saved.key, "train", 1),
    ]
    assert {finding.key: finding.size_bytes for finding in findings} == {
        finding.key: store.head(finding.key) for finding in findings
    }
    assert_invariants(store)


def test_a_checkpoint_is_read_as_it_was_written(store, saved):
    checkpoint = head(store)

    manifest = checkpoint.read_manifest()

    assert manifest == saved
    assert checkpoint.read_index(manifest) == tiny_index(world_size=2)
    assert_invariants(store)


def test_an_object_larger_than_one_read_is_verified_whole():
    store = open_store("memory://a-large-shard")
    ann = Driver(store)
    ann.claim("g1")
    manifest = write_checkpoint(store, attempt=1, save=1)
    key = object_keys.shard_key(manifest.key, "train", 0)
    data = bytearray(READ_BYTES + 5)
    store.put(key, data)
    (part,) = manifest.components
    record = replace(part.shards[0], size_bytes=len(data), crc32=crc32(data))
    large = replace(manifest, components=(replace(part, shards=(record,)),))
    store.put(object_keys.manifest_key(large.key), dump(large))
    assert ann.commit(large)
    assert_invariants(store)

    data[-1] ^= 1
    store.put(key, data)

    assert "checksum" in problems(store)[key]


# --- damage ---


def flipped(data: bytes) -> bytes:
    at = len(data) // 2
    return data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :]


OBJECTS: list[Callable[[Manifest], str]] = [
    lambda manifest: object_keys.shard_key(manifest.key, "train", 0),
    lambda manifest: object_keys.shard_key(manifest.key, "train", 1),
    lambda manifest: object_keys.metadata_key(manifest.key, "train"),
    lambda manifest: object_keys.index_key(manifest.key),
]
each_object = pytest.mark.parametrize("key_of", OBJECTS, ids=["shard-0", "shard-1", "metadata", "index"])


@each_object
def test_verify_names_the_object_with_a_flipped_bit(store, saved, key_of):
    key = key_of(saved)
    whole = store.get(key).data

    store.put(key, flipped(whole))

    assert set(problems(store)) == {key}
    assert "checksum" in problems(store)[key]
    store.put(key, whole)
    assert_invariants(store)


@each_object
def test_verify_names_the_object_that_was_cut_short(store, saved, key_of):
    key = key_of(saved)
    whole = store.get(key).data

    store.put(key, whole[:-1])

    assert set(problems(store)) == {key}
    assert f"has {len(whole) - 1} bytes, the manifest says {len(whole)}" in problems(store)[key]
    store.put(key, whole)
    assert_invariants(store)


@each_object
def test_verify_names_the_object_that_is_missing(store, saved, key_of):
    key = key_of(saved)
    whole = store.get(key).data

    store.delete(key)

    assert problems(store) == {key: "missing"}
    store.put(key, whole)
    assert_invariants(store)


def test_verify_names_both_of_two_swapped_shards(store, saved):
    one, other = (object_keys.shard_key(saved.key, "train", rank) for rank in (0, 1))
    bodies = [store.get(key).data for key in (one, other)]
    assert len(bodies[0]) == len(bodies[1]) == SHARD_BYTES

    store.put(one, bodies[1])
    store.put(other, bodies[0])

    assert set(problems(store)) == {one, other}
    store.put(one, bodies[0])
    store.put(other, bodies[1])
    assert_invariants(store)


def test_verify_names_a_shard_of_another_checkpoint(store, saved):
    older = read_latest(store).live[0].key
    key = object_keys.shard_key(saved.key, "train", 0)
    whole = store.get(key).data

    store.put(key, store.get(object_keys.shard_key(older, "train", 0)).data)

    assert set(problems(store)) == {key}
    store.put(key, whole)
    assert_invariants(store)


def test_an_edited_manifest_is_refused_by_its_checksum_in_latest(store, saved):
    key = object_keys.manifest_key(saved.key)
    whole = store.get(key).data

    store.put(key, dump(replace(saved, samples=saved.samples + 1)))

    with pytest.raises(CorruptError, match=r"manifest\.json has another checksum"):
        head(store).read_manifest()
    assert "checksum" in problems(store)[key]
    store.put(key, whole)
    assert_invariants(store)


def test_a_manifest_of_another_checkpoint_is_refused(store, saved):
    older = read_latest(store).live[0].key
    key = object_keys.manifest_key(saved.key)
    whole = store.get(key).data

    store.put(key, store.get(object_keys.manifest_key(older)).data)

    with pytest.raises(CorruptError):
        head(store).read_manifest()
    assert set(problems(store)) == {key}
    store.put(key, whole)
    assert_invariants(store)


def test_a_manifest_that_says_it_is_another_checkpoint_is_corrupt(store, saved):
    """It is refused even with the right checksum in latest: its keys are another checkpoint's."""
    older = read_latest(store).live[0]
    entry = {"manifest_crc32": older.manifest_crc32}

    with edited_latest(store, entry):
        store.put(object_keys.manifest_key(saved.key), store.get(object_keys.manifest_key(older.key)).data)

        with pytest.raises(CorruptError):
            head(store).read_manifest()
        assert set(problems(store)) == {object_keys.manifest_key(saved.key)}

        store.put(object_keys.manifest_key(saved.key), dump(saved))
    assert_invariants(store)


@pytest.mark.parametrize("name", ["../../../x", "step-1-a1-s1"])
def test_a_manifest_that_names_keys_outside_the_run_is_a_finding(store, saved, name):
    hostile = dump(replace(saved, components=(replace(saved.components[0], checkpoint=name),)))

    with edited_latest(store, {"manifest_crc32": crc32(hostile)}):
        store.put(object_keys.manifest_key(saved.key), hostile)

        assert object_keys.manifest_key(saved.key) in problems(store)

        store.put(object_keys.manifest_key(saved.key), dump(saved))
    assert_invariants(store)


@pytest.mark.parametrize("body", [b"", b"RCIX", MAGIC + b"x" * 30])
def test_an_index_that_is_none_is_corrupt(store, saved, body):
    key = object_keys.index_key(saved.key)
    whole = store.get(key).data
    store.put(key, body)

    with pytest.raises(CorruptError, match="index"):
        head(store).read_index(saved)
    with pytest.raises(CorruptError, match="index"):
        head(store).read_index(replace(saved, index=replace(saved.index, size_bytes=len(body), crc32=crc32(body))))

    store.put(key, whole)
    assert_invariants(store)


class edited_latest:  # noqa: N801  reads as a verb: with edited_latest(...)
    """Change fields of the newest entry in `latest`, and restore them afterwards."""

    def __init__(self, store: Store, entry: dict[str, object]) -> None:
        self.store = store
        self.entry = entry

    def __enter__(self) -> None:
        self.before = latest_tree(self.store)
        after = json.loads(json.dumps(self.before))
        after["newest"][-1].update(self.entry)
        put_latest_tree(self.store, after)

    def __exit__(self, *_: object) -> None:
        put_latest_tree(self.store, self.before)


# --- dropped, or damaged ---


class LongAgo(Around):
    """A store that moves the bucket's clock past the grace period."""

    def get(self, key: str, max_bytes: int = MAX_WHOLE_BYTES):
        got = self.inner.get(key, max_bytes)
        return replace(got, at=got.at + GRACE_S + 60)


def test_a_reader_of_a_pruned_checkpoint_is_told_that_it_was_dropped(store, saved):
    reading = head(store)
    manifest = reading.read_manifest()
    ann = Driver(store)
    ann.save(1, 3, keep_last=1)
    assert reading.read_manifest() == manifest, "evicted is not deleted: readers have a grace"
    pruner = Driver(LongAgo(store))

    prune(pruner.register)

    for read in (reading.read_manifest, lambda: reading.read_index(manifest)):
        with pytest.raises(NotFoundError, match=f"{saved.key} was dropped by retention"):
            read()
    (finding,) = reading.verify()
    assert "dropped by retention" in finding.problem
    assert_invariants(store)


@pytest.mark.parametrize("key_of", [object_keys.manifest_key, object_keys.index_key])
def test_a_missing_object_of_a_live_checkpoint_is_damage(store, saved, key_of):
    key = key_of(saved.key)
    whole = store.get(key).data
    reading = head(store)

    store.delete(key)

    with pytest.raises(CorruptError, match="missing although latest lists"):
        reading.read_index(reading.read_manifest())
    store.put(key, whole)
    assert_invariants(store)


# --- runs ---


def test_an_empty_prefix_is_no_run(uri):
    with pytest.raises(NotFoundError, match="no run here"):
        open_run(uri)

    with pytest.raises(FileNotFoundError):
        open_run(uri)


def test_other_files_are_no_run(uri):
    store = open_store(uri)
    store.put("experiment_state.json", b"{}")
    store.put(f"checkpoints/{object_keys.CheckpointName(attempt=1, save=1, step=1)}/train/.metadata", b"x")

    with pytest.raises(NotFoundError, match="no run here"):
        open_run(uri)

    assert_invariants(store)


@pytest.mark.parametrize("address", ["", "s3://", "no/scheme", "ftp://host/x"])
def test_an_address_that_cannot_work_is_told_from_a_missing_run(address):
    with pytest.raises(ConfigError):
        open_run(address)


def test_a_run_shows_its_head_and_its_checkpoints_oldest_first(uri):
    store = open_store(uri)
    ann = Driver(store)
    ann.claim("g1")
    assert (open_run(uri).head, open_run(uri).checkpoints) == (None, ())

    saved = [ann.save(1, save, step=step) for save, step in ((1, 30), (2, 10), (3, 10))]

    run = open_run(uri)
    assert [checkpoint.key for checkpoint in run.checkpoints] == [manifest.key for manifest in saved]
    assert run.head.key == saved[2].key
    assert run.at(10).key == saved[2].key
    assert run.at(30)._stored.read_manifest() == saved[0]
    assert run.at(saved[1].key)._stored.read_manifest() == saved[1]
    assert_invariants(store)


def test_a_checkpoint_that_is_not_there_is_refused_with_those_that_are(uri):
    store = open_store(uri)
    ann = Driver(store)
    ann.claim("g1")
    with pytest.raises(NotFoundError, match="step 10; there are: none"):
        open_run(uri).at(10)

    gone = ann.save(1, 1, step=10)
    ann.save(1, 2, step=20, keep_last=1)

    run = open_run(uri)
    with pytest.raises(NotFoundError, match="step 10; there are: 20"):
        run.at(10)
    with pytest.raises(NotFoundError, match=f"{gone.key} was dropped"):
        run.at(gone.key)
    assert_invariants(store)


def test_of_many_steps_the_error_for_an_unknown_one_names_the_nearest(uri):
    ann = Driver(open_store(uri))
    attempt, _ = ann.claim("g1")
    for save in range(1, 13):
        ann.save(attempt.number, save, step=100 * save, keep_last=None)

    with pytest.raises(NotFoundError, match=r"step 905; there are: 500, 600, .*, 1100, 1200 \(and 4 others\)$"):
        open_run(uri).at(905)
    with pytest.raises(ConfigError, match=r"there are: 500, 600, .*, 1100, 1200 \(and 4 others\)$"):
        Driver(open_store(uri), "bob").claim("h1", resume=905)


def test_of_many_names_the_error_for_an_unknown_one_names_the_most_similar(uri):
    ann = Driver(open_store(uri))
    attempt, _ = ann.claim("g1")
    for save in range(1, 13):
        ann.save(attempt.number, save, step=100 * save, name=f"eval-{save}" if save < 12 else "before-rlhf")

    similar = r"before-rlhf \(step 1200\), eval-.* \(and 4 others\)"
    with pytest.raises(NotFoundError, match=rf"'before_rlfh' .*Names in use: {similar}; keys"):
        open_run(uri).at("before_rlfh")
    with pytest.raises(ConfigError, match=rf"'before_rlfh', .*there are: {similar}. Other"):
        Driver(open_store(uri), "bob").claim("h1", resume="before_rlfh")


def test_a_damaged_latest_is_corrupt_and_not_a_missing_run(uri):
    store = open_store(uri)
    Driver(store).claim("g1")
    whole = store.get(object_keys.LATEST_KEY).data
    store.put(object_keys.LATEST_KEY, whole[:-5])

    with pytest.raises(CorruptError, match="latest"):
        open_run(uri)

    store.put(object_keys.LATEST_KEY, whole)
    assert_invariants(store)


def test_two_runs_in_one_bucket_do_not_see_each_other(uri):
    one, other = (open_store(join_uri(uri, name)) for name in ("run", "run-2"))
    ann = Driver(one)
    ann.claim("g1")
    ann.save(1, 1)

    with pytest.raises(NotFoundError):
        open_run(join_uri(uri, "run-2"))
    attempt, restore = Driver(other).claim("g1")

    assert (attempt.number, restore) == (1, None)
    assert_invariants(one)
    assert_invariants(other)


# --- no write ---


class ReadsOnly(Around):
    """A store that has only the verbs that read, and records which of them were used."""

    VERBS = ("get", "get_range", "head", "list_objects", "list_names")

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.used: set[str] = set()

    def __getattr__(self, name: str):
        assert name in (*self.VERBS, "uri"), f"a reader called {name}"
        self.used.add(name)
        return super().__getattr__(name)


def test_readers_issue_no_write(store, saved):
    before = everything(store)
    reader = ReadsOnly(store)

    run = Run(reader, read_latest(reader))
    for checkpoint in (run.head, *run.checkpoints, run.at(saved.step), run.at(saved.key)):
        assert checkpoint.details(values=True).epoch == 0
        assert not [finding for finding in checkpoint.verify() if finding.problem]
    with pytest.raises(NotFoundError):
        run.at(12345)

    assert reader.used - {"uri"} == {"get", "get_range", "head"}
    assert everything(store) == before
    assert_invariants(store)


def test_readers_of_damage_issue_no_write(store, saved):
    key = object_keys.shard_key(saved.key, "train", 0)
    whole = store.get(key).data
    store.delete(key)
    store.put(object_keys.index_key(saved.key) + ".tmp", b"left by somebody")
    before = everything(store)
    reader = ReadsOnly(store)

    findings = list(Run(reader, read_latest(reader)).head.verify())

    assert [finding.key for finding in findings if finding.problem] == [key]
    assert everything(store) == before
    store.put(key, whole)
    assert_invariants(store)


def test_opening_a_run_that_does_not_exist_creates_nothing(uri):
    with pytest.raises(NotFoundError):
        open_run(uri)

    assert everything(open_store(uri)) == {}
