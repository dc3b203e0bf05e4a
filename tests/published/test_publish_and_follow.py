"""Published versions and their readers: what arrives is what was trained, whatever happens on the way."""

import errno
import fcntl
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import pytest
import torch
from transformers import AutoModelForCausalLM

import raycheck
from raycheck.bucket.format.document import dump
from raycheck.bucket.store import open_store
from raycheck.bucket.store.address import join_uri
from raycheck.bucket.store.local import LocalStore
from raycheck.errors import ConfigError, ConflictError, CorruptError, StateMismatchError, StoreError
from raycheck.host import VersionCopies
from raycheck.published import follower as follower_module
from raycheck.published import publish as publish_module
from raycheck.published import version_folder
from raycheck.published.publish import publish
from raycheck.published.records import Reader, VersionFile, VersionRecord
from raycheck.published.series import Series, kept
from raycheck.settings import Publish
from tests.published.weights import Trained, assert_equal, assert_has, loaded
from tests.support.processes.background_call import InThread
from tests.support.samples import hf_models
from tests.support.servers.http_fault_proxy import FaultProxy


@pytest.fixture(autouse=True)
def without_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read the bucket only: Ray, to which another test may have connected this process, would have intact copies."""
    for module in (follower_module, publish_module):
        monkeypatch.setattr(module, "version_copies", lambda _: VersionCopies())


@pytest.fixture
def trained(uri: str, tmp_path: Path) -> Trained:
    return Trained(open_store(uri), tmp_path / "cache")


@pytest.fixture
def local(tmp_path: Path) -> Path:
    return tmp_path / "local"


def series_of(trained: Trained) -> Series:
    return Series(trained.store, "published/")


def names(trained: Trained) -> list[str]:
    return sorted(item.key for item in trained.store.list_objects("published/"))


def damage(trained: Trained, part: str) -> str:
    """Flip a byte of the newest object whose key contains `part`."""
    key = [key for key in names(trained) if part in key][-1]
    data = bytearray(trained.store.get(key).data)
    data[-1] ^= 1
    trained.store.put(key, bytes(data))
    return key


def test_a_reader_that_follows_fetches_what_has_changed(trained: Trained, local: Path):
    with raycheck.follow(trained.store.uri, local) as follower:
        assert follower.update() is None
        first = trained.publish()
        assert first.version.is_whole
        assert_has(follower.update(), trained)
        for _ in range(3):
            done = trained.publish(whole_every=100)
            assert (done.version.is_whole, done.bytes_written) == (False, done.version.patch_bytes)
            version = follower.update()
            assert_has(version, trained)
            assert version.bytes_fetched == done.version.patch_bytes < done.version.whole_bytes / 2
        assert follower.update() is None
        model = AutoModelForCausalLM.from_pretrained(local / "latest")
        assert_equal(model.state_dict(), trained.weights)


def test_a_reader_that_has_missed_versions_applies_all_their_patches(trained: Trained, local: Path):
    with raycheck.follow(trained.store.uri, local) as follower:
        trained.publish()
        follower.update()
        fetched = sum(trained.publish(whole_every=100, keep_last=10).version.patch_bytes for _ in range(4))
        version = follower.update()
        assert_has(version, trained)
        assert version.bytes_fetched == fetched
        assert version.changed is not None
        assert version.changed <= trained.weights.keys()


def test_a_new_reader_begins_with_the_newest_whole_version(trained: Trained, local: Path):
    done = [trained.publish(whole_every=3, keep_last=1) for _ in range(6)]

    assert [item.version.is_whole for item in done] == [True, False, False, True, False, False]
    with raycheck.follow(trained.store.uri, local) as follower:
        version = follower.update()
        assert_has(version, trained)
        assert version.changed is None
        assert version.bytes_fetched == done[3].version.whole_bytes + sum(item.version.patch_bytes for item in done[4:])
    assert [item.number for item in raycheck.open_run(trained.store.uri).published().versions] == [4, 5, 6]
    assert {key.split("/")[1] for key in names(trained)} == {
        "versions.json",
        *(item.version.directory for item in done[3:]),
    }


def test_a_whole_version_is_a_hugging_face_directory_in_the_bucket(tmp_path: Path):
    trained = Trained(open_store(f"file://{tmp_path}/run"), tmp_path / "cache")
    done = [trained.publish(whole_every=2) for _ in range(3)]

    assert done[2].version.is_whole
    path = tmp_path / "run/published" / done[2].version.directory
    assert_equal(AutoModelForCausalLM.from_pretrained(path).state_dict(), trained.weights)
    assert done[2].version.base == done[1].version.directory  # whoever follows fetches the patch


def test_other_tensors_make_a_version_whole(trained: Trained, local: Path):
    trained.publish()
    with raycheck.follow(trained.store.uri, local) as follower:
        follower.update()
        trained.model = hf_models.llama(num_hidden_layers=3)
        done = trained.publish()
        assert (done.version.is_whole, done.version.base) == (True, None)
        assert_has(follower.update(), trained)


def test_weights_that_all_change_are_not_sent_as_patches(trained: Trained, local: Path):
    trained.publish()
    trained.model = trained.model.float()
    trained.publish()
    for values in trained.model.parameters():
        bits = torch.randint(-(2**31), 2**31, values.shape, generator=torch.Generator().manual_seed(values.numel()))
        numbers = bits.to(torch.int32).view(torch.float32)
        values.data.copy_(torch.where(numbers.isfinite(), numbers, 0))
    done = trained.publish(trained.step(share=0))

    assert (done.version.is_whole, done.version.base) == (True, None)
    with raycheck.follow(trained.store.uri, local) as follower:
        assert_has(follower.update(), trained)


def test_a_checkpoint_is_published_once(trained: Trained):
    checkpoint = trained.step()
    trained.publish(checkpoint)

    assert publish(checkpoint, Publish(cache=str(trained.cache))) is None
    again = trained.publish(checkpoint, whole=True)
    assert (again.version.number, again.version.is_whole, again.version.base) == (2, True, None)


def test_a_task_publishes_nothing_older(trained: Trained):
    older = trained.step()
    trained.publish()

    with pytest.raises(ConflictError, match="step-000000002-a1-s2 is published, which is newer"):
        publish(older, Publish(cache=str(trained.cache)), by_training=True)
    assert trained.publish(older).version.step == 1  # a person may: samplers go back


def test_other_weights_of_the_run_are_refused(trained: Trained):
    trained.publish(dtype="bfloat16")

    with pytest.raises(ConfigError, match="dtype='bfloat16', and this one has 'float32'"):
        trained.publish(dtype="float32")
    with pytest.raises(ConfigError, match="entry=None, and this one has 'model'"):
        trained.publish(dtype="bfloat16", entry="model")


def test_another_place_with_versions_of_another_run_is_refused(trained: Trained, tmp_path: Path):
    place = f"file://{tmp_path}/models/mine"
    trained.publish(to=place)
    other = Trained(open_store(f"file://{tmp_path}/other"), tmp_path / "other-cache")
    with raycheck.follow(place, tmp_path / "there") as follower:
        assert_has(follower.update(), trained)

    path = tmp_path / "models/mine/versions.json"
    listed = Series(open_store(place), "").read()
    assert listed is not None
    path.write_bytes(dump(replace(listed[0], run_id="another")))

    with pytest.raises(ConfigError, match="of another run"):
        other.publish(to=place)


def test_a_run_takes_over_the_place_of_a_deleted_one(trained: Trained, local: Path):
    trained.publish()
    found = series_of(trained).read()
    assert found is not None
    trained.store.put("published/versions.json", dump(replace(found[0], run_id="deleted")))
    with raycheck.follow(trained.store.uri, local) as follower:
        follower.update()
        done = trained.publish()
        assert (done.version.number, done.version.is_whole, done.version.base) == (2, True, None)
        assert_has(follower.update(), trained)


def test_two_publishers_at_once_make_one_version(trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    trained.publish()
    first, second = trained.step(), trained.step()
    add, others = Series.add, iter([lambda: trained.publish(second, cache=str(tmp_path / "other"))])

    def slow(self: Series, *args: object) -> None:
        next(others, lambda: None)()
        add(self, *args)

    monkeypatch.setattr(Series, "add", slow)

    with pytest.raises(ConflictError, match="somebody else has published version 2"):
        trained.publish(first)
    assert [item.step for item in raycheck.open_run(trained.store.uri).published().versions] == [1, 3]
    assert trained.publish(whole_every=100).version.base is not None


@pytest.mark.parametrize("is_applied", [True, False])
def test_an_unclear_answer_is_judged_by_what_the_list_says(
    trained: Trained, monkeypatch: pytest.MonkeyPatch, is_applied: bool
):
    trained.publish()
    put, lost = type(trained.store).put_if_match, iter([True])

    def unclear(self: object, key: str, *args: object) -> object:
        if key == "published/versions.json" and next(lost, False):
            if is_applied:
                put(self, key, *args)
            raise StoreError("the connection was lost")
        return put(self, key, *args)

    monkeypatch.setattr(type(trained.store), "put_if_match", unclear)

    assert trained.publish().version.number == 2
    assert [item.number for item in raycheck.open_run(trained.store.uri).published().versions] == [1, 2]


@pytest.mark.parametrize("what", ["weights", "config", "folder", "record"])
def test_a_publisher_whose_folder_is_damaged_patches_nothing_wrong(trained: Trained, local: Path, what: str):
    trained.publish()
    here = trained.cache / "latest"
    if what == "weights":
        (file,) = here.glob("*.safetensors")
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
    elif what == "config":
        (here / "config.json").unlink()
    elif what == "record":
        (here / "raycheck-version.json").write_text("{}")
    else:
        shutil.rmtree(trained.cache)
    with raycheck.follow(trained.store.uri, local) as follower:
        follower.update()
        done = trained.publish(whole_every=100)
        assert done.version.base is not None  # what it has fetched again is the base
        assert_has(follower.update(), trained)


def test_an_export_that_the_disk_damages_fits_no_record(trained: Trained, local: Path, monkeypatch: pytest.MonkeyPatch):
    trained.publish()
    export = publish_module.export_hf

    def damaged(checkpoint: object, dest: LocalStore, *args: object, **options: object) -> None:
        export(checkpoint, dest, *args, **options)
        flip(next(Path(f"/{dest.root_path}").glob("*.safetensors")))

    with raycheck.follow(trained.store.uri, local) as follower:
        follower.update()
        with monkeypatch.context() as patch:
            patch.setattr(publish_module, "export_hf", damaged)
            trained.publish(whole_every=2)
        with pytest.raises(CorruptError, match="version 2 cannot be made"):
            follower.update()
        done = trained.publish()
        assert (done.version.is_whole, done.version.base) == (True, None)
        assert_has(follower.update(), trained)


DAMAGES = {
    "weights": lambda local: flip(next((local / "latest").glob("*.safetensors"))),
    "a file that is carried over": lambda local: (local / "latest/config.json").write_text(""),
    "weights that are gone": lambda local: next((local / "latest").glob("*.safetensors")).unlink(),
    "config that is gone": lambda local: (local / "latest/config.json").unlink(),
    "the record": lambda local: (local / "latest/raycheck-version.json").write_text("{}"),
    "the version": lambda local: shutil.rmtree((local / "latest").resolve()),
    "the link": lambda local: (local / "latest").unlink(),
}


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("name", DAMAGES)
def test_a_reader_whose_folder_is_damaged_fetches_a_whole_version(trained: Trained, local: Path, name: str):
    trained.publish()
    with raycheck.follow(trained.store.uri, local) as follower:
        follower.update()
    DAMAGES[name](local)
    trained.publish(whole_every=100)

    with raycheck.follow(trained.store.uri, local) as follower:
        version = follower.update()
        assert_has(version, trained)
        assert version.changed is None


@pytest.mark.parametrize("is_lost", [True, False])
def test_without_a_patch_the_reader_fetches_the_next_whole_version(trained: Trained, local: Path, is_lost: bool):
    trained.publish()
    with raycheck.follow(trained.store.uri, local) as follower:
        kept_weights = loaded(follower.update().path)
        trained.publish(whole_every=100)
        key = damage(trained, ".patch-")
        if is_lost:
            trained.store.delete(key)
        for _ in range(2):
            with pytest.raises(CorruptError, match="version 2 cannot be made"):
                follower.update()
        assert_equal(loaded(follower.current.path), kept_weights)
        trained.publish(whole_every=2)
        assert_has(follower.update(), trained)


def test_a_damaged_version_is_not_fetched_again_and_again(
    trained: Trained, local: Path, monkeypatch: pytest.MonkeyPatch
):
    trained.publish()
    damage(trained, ".safetensors")
    reads: list[str] = []
    get_range = type(trained.store).get_range
    monkeypatch.setattr(
        type(trained.store), "get_range", lambda self, key, *args: reads.append(key) or get_range(self, key, *args)
    )
    with raycheck.follow(trained.store.uri, local) as follower:
        for _ in range(2):
            with pytest.raises(CorruptError, match="raycheck publish --whole"):
                follower.update()
            number = len(reads)
        assert number == len(reads)
        trained.publish(trained.step(), whole=True)
        assert_has(follower.update(), trained)


def test_an_error_that_stays_is_logged_once(trained: Trained, local: Path, caplog: pytest.LogCaptureFixture):
    trained.publish()
    damage(trained, ".safetensors")
    with raycheck.follow(trained.store.uri, local, poll_s=0.01) as follower:
        assert follower.wait(timeout_s=0.5) is None
        assert [record.levelname for record in caplog.records if "cannot be had yet" in record.message] == ["WARNING"]
        trained.publish(whole=True)
        assert_has(follower.wait(timeout_s=60), trained)


def test_a_reader_keeps_what_it_needs(trained: Trained, local: Path):
    with raycheck.follow(trained.store.uri, local) as follower:
        trained.publish()
        follower.update()
        done = [trained.publish(whole_every=2, keep_last=1) for _ in range(6)]
        assert done[-1].dropped == ()
        version = follower.update()
        assert version.bytes_fetched == sum(item.version.patch_bytes for item in done)
        assert list(raycheck.open_run(trained.store.uri).published().readers.values()) == [done[-1].version.directory]
    assert raycheck.open_run(trained.store.uri).published().readers == {}
    assert len(trained.publish(whole_every=2, keep_last=1).dropped) == 6


def test_the_record_of_a_dead_reader_ends(trained: Trained):
    first = trained.publish()
    record = Reader(directory=first.version.directory, until=first.version.published_at - 3600)
    series_of(trained).lease("dead", record)

    trained.publish(whole_every=1, keep_last=1)

    assert not [key for key in names(trained) if "readers/" in key]
    assert len(raycheck.open_run(trained.store.uri).published().versions) == 1


def test_a_reader_without_the_right_to_write_goes_on(
    trained: Trained, local: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    trained.publish()

    def refused(*_: object) -> None:
        raise StoreError("access denied")

    monkeypatch.setattr(Series, "lease", refused)
    with raycheck.follow(trained.store.uri, local) as follower:
        assert_has(follower.update(), trained)


def test_versions_that_vanish_while_they_are_fetched(trained: Trained, local: Path, monkeypatch: pytest.MonkeyPatch):
    """Retention drops what a reader without a lease is fetching."""
    trained.publish()
    get_range, others = type(trained.store).get_range, iter([lambda: trained.publish(whole_every=1, keep_last=1)])

    def slow(self: object, key: str, *args: object) -> object:
        if ".safetensors" in key and threading.current_thread().name.startswith("raycheck-ahead"):
            next(others, lambda: None)()
        return get_range(self, key, *args)

    monkeypatch.setattr(type(trained.store), "get_range", slow)
    with raycheck.follow(trained.store.uri, local, lease=False) as follower:
        assert_has(follower.update(), trained)


def test_a_list_that_was_rolled_back_is_what_counts(trained: Trained, local: Path):
    """Two histories with equal numbers, as after a bucket was restored from a copy."""
    trained.publish()
    old = {key: trained.store.get(key).data for key in names(trained)}
    with raycheck.follow(trained.store.uri, local) as follower:
        trained.publish()
        trained.publish()
        assert follower.update().number == 3
        for key in names(trained):
            trained.store.delete(key)
        for key, data in old.items():
            trained.store.put(key, data)
        other = Trained(trained.store, local.parent / "other-cache")
        other.steps, other.model = trained.steps, hf_models.llama_bf16()
        other.publish()
        other.publish()
        version = follower.update()
        assert (version.number, version.changed) == (3, None)
        assert_has(version, other)
        trained.steps, trained.model = other.steps, other.model
        trained.publish(whole_every=100)  # by the publisher whose folder has the other version 3
        assert_has(follower.update(), trained)


def test_a_broken_chain_is_no_way(trained: Trained, local: Path):
    done = [trained.publish(whole_every=100, keep_last=100) for _ in range(4)]
    found = series_of(trained).read()
    assert found is not None
    listed = found[0].versions
    trained.store.put("published/versions.json", dump(replace(found[0], versions=(*listed[:2], listed[3]))))

    with (
        raycheck.follow(trained.store.uri, local) as follower,
        pytest.raises(CorruptError, match=f"version {done[3].version.number} cannot be made: no version is whole"),
    ):
        follower.update()


# Several readers in one folder


def test_processes_that_share_a_folder_fetch_once(trained: Trained, local: Path, monkeypatch: pytest.MonkeyPatch):
    trained.publish()
    with (
        raycheck.follow(trained.store.uri, local) as one,
        raycheck.follow(trained.store.uri, local) as other,
    ):
        first, same = one.update(), other.update()
        assert first.path == same.path
        assert (same.bytes_fetched, same.changed) == (0, None)
        trained.publish()
        assert other.update().path == one.update().path


def test_another_process_that_makes_a_version_is_waited_for_on_request(
    trained: Trained, local: Path, monkeypatch: pytest.MonkeyPatch
):
    trained.publish()
    with raycheck.follow(trained.store.uri, local) as follower:
        lock = os.open(local / ".raycheck-published", os.O_RDWR)
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert follower.update() is None
        monkeypatch.setattr(version_folder, "WAIT_S", 0.3)
        with pytest.raises(StoreError, match="another process has been making a version"):
            follower.update(wait=True)
        fcntl.flock(lock, fcntl.LOCK_UN)
        os.close(lock)
        assert_has(follower.update(wait=True), trained)


def test_a_child_that_was_forked_meanwhile_holds_no_lock(trained: Trained, local: Path):
    folder = version_folder.VersionFolder(local, keep=1)
    with folder.writing():
        reads, writes = os.pipe()
        if (child := os.fork()) == 0:
            os.read(reads, 1)
            os._exit(0)
    with folder.writing() as is_mine:
        assert is_mine
    os.write(writes, b"x")
    os.waitpid(child, 0)


def test_the_version_in_use_stays_and_older_ones_go(trained: Trained, local: Path):
    with raycheck.follow(trained.store.uri, local) as slow, raycheck.follow(trained.store.uri, local) as fast:
        trained.publish()
        held, weights = slow.update(), trained.weights
        for _ in range(4):
            trained.publish()
            fast.update()
        assert len([path for path in local.iterdir() if path.is_dir() and not path.is_symlink()]) == 3
        assert_equal(loaded(held.path), weights)


def test_a_folder_with_something_else_is_refused_and_left_alone(trained: Trained, local: Path):
    local.mkdir()
    (local / "mine").mkdir()
    with pytest.raises(ConfigError, match="is not empty"):
        raycheck.follow(trained.store.uri, local)
    (local / "mine").rmdir()
    with raycheck.follow(trained.store.uri, local, keep=1) as follower:
        (local / "my-engine").mkdir()
        for _ in range(3):
            trained.publish()
            follower.update()
        assert (local / "my-engine").is_dir()


def test_a_full_disk_is_an_error_of_the_store_and_leaves_the_version(
    trained: Trained, local: Path, monkeypatch: pytest.MonkeyPatch
):
    trained.publish()
    with raycheck.follow(trained.store.uri, local) as follower:
        version, weights = follower.update(), trained.weights
        trained.publish(whole_every=100)

        def full(*_: object) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", full)
            with pytest.raises(StoreError, match="No space left"):
                follower.update()
        assert_equal(loaded(version.path), weights)
        assert_has(follower.update(), trained)
        assert not list(local.glob(".building-*"))


# What a sampler does with it


def test_live_tensors_get_the_weights_between_two_forward_passes(trained: Trained, local: Path):
    model = hf_models.llama_bf16()
    paused: list[str] = []

    class Pause:
        def __enter__(self) -> None:
            paused.append("begins")

        def __exit__(self, *_: object) -> None:
            paused.append("ends")

    with raycheck.follow(trained.store.uri, local) as follower:
        for changed_only in (False, True, True):
            trained.publish()
            version = follower.update()
            count = version.load_into(model.state_dict(), pause=Pause, changed_only=changed_only)
            assert count == (len(version.changed) if changed_only else len(trained.weights))
            assert_equal(model.state_dict(), trained.weights)
    assert paused == ["begins", "ends"] * 3


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda live: live.pop("lm_head.weight"), "lm_head.weight is not there"),
        (lambda live: live.update(extra=torch.zeros(2)), "extra gets no weight"),
        (lambda live: live.update({"lm_head.weight": torch.zeros(2, 2)}), r"lm_head.weight is \[2, 2\] torch.float32"),
        (lambda live: live.update({"lm_head.weight": live["lm_head.weight"].float()}), "torch.float32, and"),
    ],
)
def test_weights_that_do_not_fit_change_nothing(
    trained: Trained, local: Path, change: Callable[[dict[str, torch.Tensor]], object], said: str
):
    trained.publish()
    live = {name: torch.zeros_like(values) for name, values in trained.weights.items()}
    change(live)
    before = {name: values.clone() for name, values in live.items()}
    with raycheck.follow(trained.store.uri, local) as follower:
        with pytest.raises(StateMismatchError, match=said):
            follower.update().load_into(live)
        assert_equal(live, before)


def test_tied_weights_are_loaded_once(tmp_path: Path):
    trained = Trained(open_store(f"file://{tmp_path}/run"), tmp_path / "cache")
    trained.model = hf_models.llama(tie_word_embeddings=True)
    trained.publish()
    live = hf_models.llama(seed=1, tie_word_embeddings=True)
    with raycheck.follow(trained.store.uri, tmp_path / "local") as follower:
        follower.update().load_into(live.state_dict())
    assert_equal(live.state_dict(), trained.weights)


def test_iterating_waits_for_each_version_until_it_is_closed(trained: Trained, local: Path):
    got: list[tuple[int, bool]] = []
    follower = raycheck.follow(trained.store.uri, local, poll_s=500)
    seen = threading.Event()

    def follow() -> None:
        for version in follower:
            got.append((version.step, version.path.is_dir()))
            seen.set()

    thread = threading.Thread(target=follow)
    thread.start()
    for _ in range(3):
        trained.publish()
        follower.wake()
        assert seen.wait(60)
        seen.clear()
    follower.close()
    thread.join(60)

    assert not thread.is_alive()
    assert got == [(1, True), (2, True), (3, True)]
    assert follower.wait() is None


def test_a_folder_of_its_own_is_removed(trained: Trained):
    trained.publish()
    with raycheck.follow(trained.store.uri) as follower:
        path = follower.update().path
        assert path.is_dir()
    assert not path.parent.exists()


@pytest.mark.parametrize(("name", "value"), [("poll_s", 0), ("poll_s", 1e9), ("keep", 0)])
def test_settings_that_cannot_work_are_refused(trained: Trained, local: Path, name: str, value: float):
    with pytest.raises(ConfigError, match=name):
        raycheck.follow(trained.store.uri, local, **{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("keep_last", 0),
        ("keep_last", None),
        ("whole_every", 257),
        ("cache", "here"),
        ("to", "models"),
        ("dtype", "int8"),
    ],
)
def test_options_that_cannot_work_are_refused(name: str, value: object):
    with pytest.raises(ConfigError, match=name):
        raycheck.AfterCommit.publish(every_steps=1, **{name: value})


# A hostile bucket


@pytest.mark.parametrize(
    "change",
    [
        {"files": {"../out": VersionFile(size_bytes=0, crc32=0, is_stored=True)}},
        {"files": {"raycheck-version.json": VersionFile(size_bytes=0, crc32=0, is_stored=True)}},
        {"directory": "version-000000001-00000000/.."},
    ],
)
def test_a_record_cannot_lead_out_of_its_folder(trained: Trained, change: dict[str, object]):
    trained.publish()
    key = next(key for key in names(trained) if key.endswith("version.json"))
    good = json.loads(trained.store.get(key).data)
    record = VersionRecord(directory=good["directory"], checkpoint=good["checkpoint"], step=1, base=None, files={})

    with pytest.raises(CorruptError):
        replace(record, **change)


def test_a_record_of_another_version_is_refused(trained: Trained, local: Path):
    """Its checksum is right, but it says that it is another version."""
    trained.publish()
    trained.publish()
    found = series_of(trained).read()
    assert found is not None
    first, second = found[0].versions
    lying = replace(second, record_crc32=first.record_crc32)
    data = trained.store.get(f"published/{first.directory}/version.json").data
    trained.store.put(f"published/{second.directory}/version.json", data)
    trained.store.put("published/versions.json", dump(replace(found[0], versions=(first, lying))))

    with raycheck.follow(trained.store.uri, local) as follower, pytest.raises(CorruptError, match="is not the record"):
        follower.update()


# Retention


@pytest.mark.parametrize(
    ("wholes", "keep_last", "leased", "stay"),
    [
        ("W....", 1, [], 5),
        ("W..W.", 1, [], 2),
        ("W..W.", 2, [], 2),
        ("W..W.", 3, [], 5),
        ("WWWWW", 2, [], 2),
        ("WWWWW", 1, [1], 4),
        ("W.W..", 1, [3], 3),
        ("W.W..", 1, [99], 3),
    ],
)
def test_what_stays(trained: Trained, wholes: str, keep_last: int, leased: list[int], stay: int):
    trained.publish()
    found = series_of(trained).read()
    assert found is not None
    one = found[0].newest
    listed = [
        replace(
            one,
            number=number,
            directory=f"version-{number:09d}-00000000",
            base=f"version-{number - 1:09d}-00000000" if number > 1 else None,
            is_whole=letter == "W",
        )
        for number, letter in enumerate(wholes, 1)
    ]
    versions = replace(found[0], versions=tuple(listed))

    left = kept(versions, keep_last=keep_last, leased=[f"version-{number + 1:09d}-00000000" for number in leased])

    assert left == tuple(listed[-stay:])
    assert left[0].is_whole


def test_a_reader_keeps_its_lease_while_it_fetches_a_large_version(
    wire: FaultProxy, s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    name = uuid4().hex
    trained = Trained(open_store(join_uri(s3, name)), tmp_path / "cache")
    trained.publish()
    monkeypatch.setattr(follower_module, "RENEW_S", 0.05)
    held = wire.rule("hold", "GET", r"\.safetensors")

    with raycheck.follow(join_uri(wire.uri, name), tmp_path / "local") as follower:
        fetching = InThread(follower.update)
        held.wait()
        (first,) = series_of(trained).readers().values()
        deadline = time.monotonic() + 60
        while (now := next(iter(series_of(trained).readers().values()))).until <= first.until:
            assert time.monotonic() < deadline, "the record was not renewed"
            time.sleep(0.05)
        held.release()
        assert_has(fetching.join(), trained)

    assert now.directory == first.directory
    assert not series_of(trained).readers()


def test_a_sampler_needs_no_more_of_ray_than_its_core_and_starts_none(tmp_path: Path):
    trained = Trained(open_store(f"file://{tmp_path}/run"), tmp_path / "cache")
    trained.publish()
    script = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "pyarrow") or name.startswith("ray.train"):
            raise ImportError(name)

sys.meta_path.insert(0, Blocked())
import ray, raycheck

with raycheck.follow(sys.argv[1], sys.argv[2]) as sampler:
    print(sampler.update().step, ray.is_initialized(), "raycheck.on_ray.ray_host" in sys.modules)
"""
    command = [sys.executable, "-c", script, trained.store.uri, str(tmp_path / "local")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.stdout.split() == ["1", "False", "False"], done.stderr
