"""Copies of runs and checkpoints: whole, verified, repeatable, and never in the way of a training."""

import tracemalloc
import urllib.request
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from threading import Event
from uuid import uuid4

import pytest
import torch

import raycheck
from raycheck import StorageSettings
from raycheck.bucket.format import object_keys
from raycheck.bucket.format.checksum import crc32
from raycheck.bucket.format.latest import Latest
from raycheck.bucket.format.object_keys import CheckpointName
from raycheck.bucket.protocol.pin_and_evict import pin
from raycheck.bucket.protocol.removal.prune_and_sweep import prune, sweep
from raycheck.bucket.protocol.rewind import rewind
from raycheck.bucket.protocol.swap import Register
from raycheck.bucket.protocol.write_once import write_manifest
from raycheck.bucket.reading import Checkpoint, read_latest
from raycheck.bucket.store import Store, open_store
from raycheck.bucket.store.address import join_uri, parse_uri
from raycheck.bucket.store.part_sizes import MIN_PART_BYTES, PART_SIZES, PartSizes
from raycheck.catalog import copy_run
from raycheck.demo.server import s3_server
from raycheck.errors import ConfigError, CorruptError, DamagedError, NotFoundError, StoppedError
from raycheck.settings import Retention
from tests.support.histories.invariants import assert_invariants
from tests.support.processes.save_without_ray import save_state
from tests.support.samples.sample_checkpoints import Driver, everything, write_checkpoint
from tests.support.servers.copied_part_proofs import prover
from tests.support.servers.gcs_server import BUCKET
from tests.support.servers.http_fault_proxy import FaultProxy, fault_proxy

MIB = 1024 * 1024


def place() -> str:
    return f"memory://{uuid4().hex}"


def trained(uri: str, saves: int = 4, **rules: int) -> Driver:
    driver = Driver(open_store(uri))
    driver.claim("group")
    for save in range(1, saves + 1):
        driver.save(1, save, **rules)
    return driver


def assert_copy(source: Store, target: Store) -> Latest:
    """Assert that the target lists what the source lists, byte for byte."""
    there, body = read_latest(source), assert_invariants(target)
    assert body is not None
    assert (body.run_id, body.head, body.live) == (there.run_id, there.head, there.live)
    for entry in body.live:
        manifest = Checkpoint(source, entry).read_manifest()
        for key in (object_keys.manifest_key(entry.key), *(key for key, _ in manifest.objects())):
            assert target.get(key).data == source.get(key).data, key
    return body


def test_a_copy_is_the_same_run_elsewhere() -> None:
    source, target = place(), place()
    driver = trained(source)
    pin(driver.register, "step-000000020-a1-s2")

    done = copy_run(source, target)

    body = assert_copy(open_store(source), open_store(target))
    assert body.entry("step-000000020-a1-s2").pinned
    assert body.attempts[:-1] == read_latest(open_store(source)).attempts
    assert len(done.copied) == 4
    assert done.sent_bytes == sum(entry.size_bytes for entry in body.live)


def test_a_copy_restores_with_torch() -> None:
    source, target = place(), place()
    model = torch.nn.Linear(30, 20)
    save_state(open_store(source), {"model": model}, step=7)

    copy_run(source, target)

    other = torch.nn.Linear(30, 20)
    assert raycheck.open_run(target).restore(into={"model": other}) == 7
    assert torch.equal(model.weight, other.weight)
    assert_invariants(open_store(target))


def test_a_repeated_copy_moves_only_what_is_new_and_evicts_what_was_dropped() -> None:
    source, target = place(), place()
    driver = trained(source)
    copy_run(source, target)
    before = read_latest(open_store(target))
    driver.save(1, 5, keep_last=2)

    done = copy_run(source, target)

    body = assert_copy(open_store(source), open_store(target))
    assert list(done.copied) == ["step-000000050-a1-s5"]
    assert {item.key for item in body.evicted} == {entry.key for entry in before.live[:3]}
    assert prune(Register(open_store(target)), grace_s=0.0) == tuple(entry.key for entry in before.live[:3])
    assert_copy(open_store(source), open_store(target))


def test_directories_that_others_refer_to_are_copied_and_deleted_with_the_last_reference() -> None:
    source, target = place(), place()
    driver = trained(source, saves=1)
    base = Checkpoint(driver.store, driver.look().live[0]).read_manifest()
    driver.save(1, 2, base=base, keep_last=1)
    prune(driver.register, grace_s=0.0)

    copy_run(source, target)
    body = assert_copy(open_store(source), open_store(target))
    assert prune(Register(open_store(target)), grace_s=0.0) == ()
    assert_copy(open_store(source), open_store(target))
    driver.save(1, 3, keep_last=1)
    copy_run(source, target)

    gone = prune(Register(open_store(target)), grace_s=0.0)
    assert set(gone) == {"step-000000010-a1-s1", "step-000000020-a1-s2"}
    body = assert_copy(open_store(source), open_store(target))
    assert not any("s1/" in key or "s2/" in key for key in everything(open_store(target)))
    assert body.evicted == ()


def test_a_mirror_is_copied_in_its_turn() -> None:
    source, middle, target = place(), place(), place()
    driver = trained(source)
    copy_run(source, middle)
    copy_run(middle, target)
    driver.save(1, 5)

    copy_run(source, target)

    assert_copy(open_store(source), open_store(target))
    with pytest.raises(CorruptError, match="is behind"):
        copy_run(middle, target)


def claim(uri: str) -> None:
    Driver(open_store(uri), "zoe").claim("there")


def rewound(uri: str) -> None:
    rewind(Register(open_store(uri)), "step-000000010-a1-s1")


@pytest.mark.parametrize("takes", [claim, rewound])
def test_a_copy_that_was_trained_on_is_a_run_of_its_own(takes: Callable[[str], None]) -> None:
    source, target = place(), place()
    driver = trained(source)
    copy_run(source, target)
    takes(target)
    before = everything(open_store(target))
    driver.save(1, 5)

    with pytest.raises(ConfigError, match="a separate run"):
        copy_run(source, target)

    assert everything(open_store(target)) == before
    assert read_latest(open_store(target)).mirror is None
    assert_invariants(open_store(target))


def test_training_on_the_copy_restores_its_head_and_uses_no_name_of_the_source() -> None:
    source, target = place(), place()
    trained(source)
    copy_run(source, target)
    zoe = Driver(open_store(target), "zoe")

    attempt, entry = zoe.claim("there")
    saved = zoe.save(attempt.number, 1, step=50)
    second = Driver(open_store(source), "eve").claim("again")[0]

    assert entry is not None
    assert entry.key == "step-000000040-a1-s4"
    assert (attempt.number, second.number) == (3, 2)
    assert assert_invariants(open_store(target)).head == saved.key


def test_a_driver_of_the_source_is_fenced_on_the_copy() -> None:
    source, target = place(), place()
    trained(source)
    copy_run(source, target)

    with pytest.raises(raycheck.errors.FencedError):
        Driver(open_store(target)).claim("group")


def test_a_mirror_of_another_line_is_refused() -> None:
    """Both lines use the names of attempt 4, with other bytes."""
    source, other, target = place(), place(), place()
    trained(source)
    copy_run(source, other)
    copy_run(source, target)
    Driver(open_store(source), "eve").claim("new")
    copy_run(source, target)
    Driver(open_store(other), "zoe").claim("new")

    with pytest.raises(ConfigError, match="another branch"):
        copy_run(other, target)

    assert_copy(open_store(source), open_store(target))


def test_a_copy_without_a_checkpoint_cannot_be_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = place(), place()
    trained(source)
    monkeypatch.setattr("raycheck.catalog.copier.MirrorCopier._copy_round", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        copy_run(source, target)

    with pytest.raises(ConfigError, match="no checkpoint is whole here yet"):
        claim(target)

    assert read_latest(open_store(target)).live == ()


def test_what_people_do_beside_a_mirror_takes_nothing_from_it() -> None:
    """A sweep would delete what is on its way; a pin would be lost; a rule would drop what comes again."""
    source, target = place(), place()
    trained(source)
    copy_run(source, target)
    store = open_store(target)
    key = object_keys.shard_key("step-000000050-a1-s5", "train", 0)
    store.put(key, b"on its way")

    assert sweep(store, also_whole=True) == ()
    assert prune(Register(store), Retention(keep_last=1), grace_s=0.0) == ()
    with pytest.raises(ConfigError, match="pin the checkpoint in memory"):
        pin(Register(store), "step-000000010-a1-s1")

    assert store.get(key).data == b"on its way"
    assert_copy(open_store(source), store)


def test_what_a_broken_copy_left_of_a_dropped_checkpoint_is_deleted() -> None:
    source, target = place(), place()
    driver = trained(source)
    copy_run(source, target)
    name = "step-000000030-a1-s9"  # as if it had been live in between
    open_store(target).put(object_keys.shard_key(name, "train", 0), b"half")
    driver.save(1, 10)

    copy_run(source, target)

    assert prune(Register(open_store(target)), grace_s=0.0) == (name,)
    assert_copy(open_store(source), open_store(target))


def test_a_damaged_checkpoint_is_refused_and_named_and_the_others_are_copied() -> None:
    source, target = place(), place()
    store = trained(source).store
    key = object_keys.shard_key("step-000000020-a1-s2", "train", 0)
    store.put(key, b"x" + store.get(key).data[1:])

    with pytest.raises(DamagedError, match=key):
        copy_run(source, target)

    body = assert_invariants(open_store(target))
    assert [entry.step for entry in body.live] == [10, 30, 40]
    with pytest.raises(NotFoundError):
        open_store(target).get(key)


def test_a_damaged_head_moves_nothing() -> None:
    source, target = place(), place()
    store = trained(source, saves=1).store
    key = object_keys.shard_key("step-000000010-a1-s1", "train", 0)
    store.put(key, b"short")

    with pytest.raises(DamagedError, match=key):
        copy_run(source, target)

    assert read_latest(open_store(target)).live == ()


@pytest.mark.parametrize("inner", ["", "/checkpoints", "/../run", "/../../runs"])
def test_a_place_that_overlaps_the_source_is_refused(tmp_path: Path, inner: str) -> None:
    source = f"file://{tmp_path}/runs/run"
    trained(source)

    with pytest.raises(ConfigError, match="is inside the other"):
        copy_run(source, source + inner)


def test_another_run_is_not_overwritten() -> None:
    source, target = place(), place()
    trained(source)
    save_state(open_store(target), {"model": torch.nn.Linear(3, 2)})
    before = everything(open_store(target))

    for step in (None, 20):
        with pytest.raises(ConfigError, match="another run"):
            copy_run(source, target, at=step)

    assert everything(open_store(target)) == before


def test_a_source_without_a_checkpoint_is_refused() -> None:
    with pytest.raises(NotFoundError):
        copy_run(place(), place())


def test_one_checkpoint_becomes_a_new_run_and_a_repeat_does_nothing() -> None:
    source, target = place(), place()
    trained(source)

    done = copy_run(source, target, at=20)
    again = copy_run(source, target, at="step-000000020-a1-s2")

    body = assert_invariants(open_store(target))
    assert done.run_id == again.run_id == body.run_id != read_latest(open_store(source)).run_id
    assert (again.copied, again.present) == ({}, tuple(done.copied))
    assert [entry.step for entry in body.live] == [20]
    assert Driver(open_store(target), "zoe").claim("there")[1].step == 20


def test_what_an_earlier_try_left_of_a_checkpoint_is_used_when_it_is_right() -> None:
    source, target = place(), place()
    store = trained(source).store
    shard = store.get(object_keys.shard_key("step-000000020-a1-s2", "train", 0)).data
    key = object_keys.shard_key("step-000000020-a0-s1", "train", 0)
    stop = Event()
    with pytest.raises(StoppedError):
        copy_run(source, target, at=20, progress=lambda *_: stop.set(), stop=stop)  # it has reserved the name
    origin = open_store(target).get(mark := object_keys.origin_key("step-000000020-a0-s1")).data
    open_store(target).put(key, shard)

    done = copy_run(source, target, at=20)

    assert done.found_bytes >= len(shard)
    assert done.head == "step-000000020-a0-s1"
    for data, mine in ((bytes(len(shard)), origin), (shard, None), (shard, b"another's")):
        open_store(other := place()).put(key, data)
        if mine is not None:
            open_store(other).put(mark, mine)
        assert copy_run(source, other, at=20).head == "step-000000020-a0-s2"
        assert_invariants(open_store(other))


def test_a_plan_writes_nothing() -> None:
    source, target = place(), place()
    trained(source)

    plan = copy_run(source, target, dry_run=True)

    assert list(plan.copied) == [f"step-0000000{step}-a1-s{step // 10}" for step in (40, 30, 20, 10)]
    assert everything(open_store(target)) == {}
    key = "step-000000020-a1-s2"
    assert copy_run(source, target, at=20, dry_run=True).copied == {key: plan.copied[key]}


# --- stores ---


def large(store: Store, sizes: list[int]) -> None:
    """Commit a checkpoint whose shards have these sizes."""
    driver = Driver(store)
    driver.claim("group", world_size=len(sizes))
    manifest = write_checkpoint(store, attempt=1, save=1, world_size=len(sizes))
    (component,) = manifest.components
    shards = []
    for shard, size in zip(component.shards, sizes, strict=True):
        data = torch.randint(0, 255, (size,), dtype=torch.uint8).numpy().tobytes()
        store.put(object_keys.shard_key(manifest.key, "train", shard.rank), data)
        shards.append(replace(shard, size_bytes=size, crc32=crc32(data)))
    name = CheckpointName(step=20, attempt=1, save=2)
    new = replace(manifest, key=str(name), save=2, step=20)
    new = replace(new, components=(replace(component, checkpoint=str(name), shards=tuple(shards)),))
    for (old_key, _), (key, _) in zip(manifest.objects(), new.objects(), strict=True):
        store.put(key, store.get(old_key).data)
    write_manifest(store, new)
    assert driver.commit(new)


def another_bucket(uri: str) -> str:
    """Make a bucket beside that of `uri`, with the same settings."""
    at, name = parse_uri(uri), f"bucket-{uuid4().hex}"
    request = urllib.request.Request(f"{at.settings.endpoint}/{name}", method="PUT")
    with urllib.request.urlopen(request, timeout=30):
        return uri.replace(f"//{at.bucket}", f"//{name}", 1)


@pytest.mark.parametrize("proof", ["right", "wrong", "none", "denied"])
def test_between_two_buckets_that_are_reached_in_one_way_the_store_copies_if_it_may(
    s3: str, wire: FaultProxy, monkeypatch: pytest.MonkeyPatch, proof: str
) -> None:
    monkeypatch.setitem(PART_SIZES, "s3", PartSizes(part_bytes=MIN_PART_BYTES))
    one = uuid4().hex
    large(open_store(join_uri(s3, one)), [12 * MIB, 100])
    dest = another_bucket(s3)
    there = wire.uri.replace(f"//{parse_uri(s3).bucket}", f"//{parse_uri(dest).bucket}", 1)
    if proof == "denied":
        wire.rule("deny", "PUT", ".*partNumber", times=1)
    elif proof != "none":
        wrong = int(proof == "wrong")
        edit = prover(open_store(join_uri(s3, one)), lambda data: zlib.crc32(data) ^ wrong)
        wire.rule("edit", "PUT", ".*partNumber", times=99, edit=edit)

    done = copy_run(join_uri(wire.uri, one), join_uri(there, one))

    assert done.in_store_bytes == (12 * MIB if proof == "right" else 0)
    assert any("x-amz-copy-source" in head.headers for head in wire.heads)
    assert_copy(open_store(join_uri(s3, one)), open_store(join_uri(dest, one)))
    assert list(open_store(join_uri(dest, one)).list_uploads("")) == []


@pytest.mark.parametrize("proof", ["right", "wrong", "none"])
def test_within_one_bucket_the_store_copies_and_is_believed_only_with_proof(
    s3: str, wire: FaultProxy, monkeypatch: pytest.MonkeyPatch, proof: str
) -> None:
    monkeypatch.setattr("raycheck.bucket.protocol.object_copy.MAX_COPIED_BYTES", MIN_PART_BYTES)
    monkeypatch.setitem(PART_SIZES, "s3", PartSizes(part_bytes=MIN_PART_BYTES))
    one, other = uuid4().hex, uuid4().hex
    large(open_store(join_uri(s3, one)), [12 * MIB, 100])
    if proof != "none":
        wrong = int(proof == "wrong")
        edit = prover(open_store(join_uri(s3, one)), lambda data: zlib.crc32(data) ^ wrong)
        wire.rule("edit", "PUT", ".*partNumber", times=99, edit=edit)

    done = copy_run(join_uri(wire.uri, one), join_uri(wire.uri, other), at=20)

    assert done.in_store_bytes == (12 * MIB if proof == "right" else 0)
    assert done.in_store_bytes + done.sent_bytes == read_latest(open_store(join_uri(s3, other))).live[0].size_bytes
    assert_invariants(open_store(join_uri(s3, other)))
    assert list(open_store(join_uri(s3, other)).list_uploads("")) == []


def test_between_two_servers_with_two_credentials(
    s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gcs: str
) -> None:
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    (tmp_path / "credentials").write_text(
        "".join(f"[{name}]\naws_access_key_id = {name}\naws_secret_access_key = hush\n" for name in ("here", "there"))
    )
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    name = uuid4().hex
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", "x")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "x")
        with s3_server() as second:
            for key in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
                patch.delenv(key)
            with fault_proxy(s3) as one, fault_proxy(second) as other:
                here, there = StorageSettings(profile="here"), StorageSettings(profile="there")
                run, copy = join_uri(one.uri, name), join_uri(other.uri, name)
                large(open_store(run, here), [20 * MIB, 3])

                copy_run(run, copy, from_storage=here, to_storage=there)
                assert_copy(open_store(run, here), open_store(copy, there))
                assert {head.key_id for head in one.heads} == {"here"}
                assert {head.key_id for head in other.heads} == {"there"}

                google, folder = f"gs://{BUCKET}/{name}", f"file://{tmp_path}/copy"
                copy_run(copy, google, from_storage=there)
                copy_run(google, folder)
                assert_copy(open_store(run, here), open_store(google))
                assert_copy(open_store(run, here), open_store(folder))
                back = join_uri(other.uri, f"{name}-back")
                copy_run(folder, back, to_storage=there)
                assert_copy(open_store(run, here), open_store(back, there))


def test_a_copy_takes_bounded_memory(tmp_path: Path) -> None:
    """Eight shards of 40 MiB, of which four are copied at a time, in parts of 16 MiB."""
    source, target = f"file://{tmp_path}/one", f"file://{tmp_path}/two"
    large(open_store(source), [40 * MIB] * 8)

    tracemalloc.start()
    try:
        copy_run(source, target, at=20)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert peak < 4 * 2 * 16 * MIB + 16 * MIB
    assert_invariants(open_store(target))
