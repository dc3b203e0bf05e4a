"""Tests symbolic links in the folder of a run: no verb follows one, so nothing outside the folder is read, written,
listed or deleted. The root itself may be a link."""

import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from raycheck.bucket.format import object_keys
from raycheck.bucket.protocol.removal.prune_and_sweep import plan_sweep, prune, sweep
from raycheck.bucket.protocol.repair import repair
from raycheck.bucket.protocol.sharing.fork import fork
from raycheck.bucket.store import Store, open_store
from raycheck.errors import ConfigError, ConflictError, CorruptError
from tests.support.histories.invariants import assert_invariants
from tests.support.samples.sample_checkpoints import Driver, everything, write_checkpoint

RACE_S = 1.5


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "my-run"


@pytest.fixture
def store(root: Path) -> Store:
    return open_store(f"file://{root}")


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """Somebody else's folder, which looks like an incomplete save."""
    folder = tmp_path / "outside"
    for name in ("manifest.json", "index", "train/__0_0.distcp", ".raycheck-0123"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"precious")
    return folder


def precious(outside: Path) -> dict[str, bytes]:
    return {str(path.relative_to(outside)): path.read_bytes() for path in outside.rglob("*") if path.is_file()}


def moved_behind_a_link(folder: Path, to: Path) -> None:
    folder.rename(to)
    folder.symlink_to(to)


# --- what deletes ---


def test_the_sweep_after_a_start_deletes_nothing_behind_a_linked_checkpoint(store, root, outside):
    before = precious(outside)
    ann = Driver(store)
    ann.claim("g1")
    ann.save(1, 1)
    torn = write_checkpoint(store, attempt=1, save=2)
    store.delete(object_keys.manifest_key(torn.key))
    (root / "checkpoints" / "step-000000030-a1-s3").symlink_to(outside)
    (root / object_keys.checkpoint_prefix(torn.key) / "link").symlink_to(outside)
    Driver(store, coordinator="c2").claim("g2")

    planned = plan_sweep(store, also_whole=True)
    swept = sweep(store, also_whole=True)

    assert precious(outside) == before
    assert [item.name for item in swept] == [item.name for item in planned] == [torn.key]
    assert_invariants(store)


def test_a_prune_deletes_nothing_behind_a_linked_checkpoint_and_goes_on_with_the_others(store, root, tmp_path):
    ann = Driver(store)
    ann.claim("g1")
    saved = [ann.save(1, number, keep_last=1) for number in (1, 2, 3)]
    moved_behind_a_link(root / "checkpoints" / saved[0].key, tmp_path / "moved")
    before = precious(tmp_path / "moved")

    with pytest.raises(CorruptError, match=f"{saved[0].key} is a symbolic link"):
        prune(ann.register, grace_s=0)

    assert precious(tmp_path / "moved") == before
    assert not (root / "checkpoints" / saved[1].key).exists()


def test_a_delete_of_a_link_deletes_the_link(store, root, outside):
    before = precious(outside)
    store.put("a/b", b"1")
    (root / "a" / "file").symlink_to(outside / "index")
    (root / "a" / "folder").symlink_to(outside)
    (root / "a" / "nowhere").symlink_to(outside / "none")

    for name in ("file", "folder", "nowhere"):
        store.delete(f"a/{name}")

    assert [path.name for path in (root / "a").iterdir()] == ["b"]
    assert precious(outside) == before


def test_a_folder_that_becomes_a_link_while_it_is_deleted_from_leads_nowhere(store, root, outside):
    """It may become one between any two calls of the delete, since each call is about a folder that is open already."""
    folder, hidden = root / "checkpoints" / "x", root / "checkpoints" / "y"
    folder.mkdir(parents=True)
    before = precious(outside)
    ends_at, is_over = time.monotonic() + RACE_S, threading.Event()
    swaps = 0

    def swap() -> None:
        nonlocal swaps
        while not is_over.is_set():
            folder.rename(hidden)
            folder.symlink_to(outside)
            folder.unlink()
            hidden.rename(folder)
            swaps += 1

    thread = threading.Thread(target=swap)
    thread.start()
    tries = 0
    while time.monotonic() < ends_at or not (tries and swaps):
        assert time.monotonic() < ends_at + 60, "it met no link"
        for name in ("index", "manifest.json", "train/__0_0.distcp"):
            try:
                store.delete(f"checkpoints/x/{name}")
            except CorruptError:
                tries += 1
    is_over.set()
    thread.join()

    assert precious(outside) == before


# --- what reads, lists and writes ---


@pytest.fixture(params=["folder", "nested", "file", "dangling"])
def key(request: pytest.FixtureRequest, store: Store, root: Path, outside: Path) -> str:
    """An object that is, or lies behind, a link."""
    store.put("a/b/own", b"1")
    link, to, key = {
        "folder": ("a/link", outside, "a/link/index"),
        "nested": ("a/b/train", outside / "train", "a/b/train/__0_0.distcp"),
        "file": ("a/b/file", outside / "index", "a/b/file"),
        "dangling": ("a/b/none", outside / "none", "a/b/none"),
    }[request.param]
    (root / link).symlink_to(to)
    return key


def test_what_lies_behind_a_link_is_not_read(store, key):
    for read in (store.get, store.head, lambda key: store.get_range(key, 0, 1)):
        with pytest.raises(CorruptError, match="symbolic link"):
            read(key)


def test_what_lies_behind_a_link_is_not_listed(store, key):
    assert [item.key for item in store.list_objects("")] == ["a/b/own"]
    assert store.list_names("a/") == ["b"]
    assert list(store.list_uploads("")) == []


def test_nothing_behind_a_link_is_written(store, key, outside):
    before = precious(outside)
    version = "0" * 128

    for write in (
        lambda: store.put(key, b"2"),
        lambda: store.put_if_absent(key, b"2"),
        lambda: store.put_if_match(key, b"2", version),
    ):
        with suppress(CorruptError, ConflictError):  # a put replaces a link by the object
            write()

    assert precious(outside) == before


def test_a_linked_folder_of_checkpoints_is_no_fresh_run(store, root, tmp_path):
    ann = Driver(store)
    ann.claim("g1")
    ann.save(1, 1)
    moved_behind_a_link(root / "checkpoints", tmp_path / "moved")
    store.delete("latest")

    for call in (
        lambda: Driver(store, coordinator="c2").claim("g2"),
        lambda: repair(store),
        lambda: list(store.list_objects("checkpoints/")),
        lambda: list(store.list_uploads("checkpoints/")),
    ):
        with pytest.raises(CorruptError, match="checkpoints is a symbolic link"):
            call()


def test_the_lock_is_no_way_to_empty_a_file(store, root, outside):
    before = precious(outside)
    store.put("a", b"1")
    (root / ".raycheck-lock").symlink_to(outside / "index")

    with pytest.raises(CorruptError, match="symbolic link"):
        store.put_if_match("a", b"2", store.get("a").version)

    assert precious(outside) == before


def test_a_fork_copies_nothing_from_behind_a_link(store, root, outside, tmp_path):
    ann = Driver(store)
    ann.claim("g1")
    saved = ann.save(1, 1)
    shard = root / object_keys.shard_key(saved.key, "train", 0)
    shard.unlink()
    shard.symlink_to(outside / "train/__0_0.distcp")
    other = open_store(f"file://{tmp_path}/other")

    with pytest.raises(CorruptError, match="symbolic link"):
        fork(store, other, run_id="r", copies=True)

    assert b"precious" not in everything(other).values()


@pytest.mark.parametrize("key", ["../outside/index", "a/../../outside/index", "a/./b", "/etc/hosts", "a//b", "a/", ""])
def test_a_key_that_leads_elsewhere_is_none(store, outside, key):
    before = precious(outside)
    for verb in (store.get, store.head, store.delete, lambda key: store.put(key, b"1")):
        with pytest.raises(ConfigError, match="is not a key"):
            verb(key)

    assert precious(outside) == before


# --- the root ---


@pytest.mark.parametrize("above", [False, True], ids=["the run's folder", "a folder above it"])
def test_the_root_may_be_a_link(tmp_path, above):
    (tmp_path / "disk" / "my-run").mkdir(parents=True)
    link = tmp_path / "runs"
    if above:
        link.symlink_to(tmp_path / "disk")
    else:
        link.mkdir()
        (link / "my-run").symlink_to(tmp_path / "disk" / "my-run")
    store = open_store(f"file://{link}/my-run")

    ann = Driver(store)
    ann.claim("g1")
    for number in (1, 2):
        ann.save(1, number, keep_last=1)
    prune(ann.register, grace_s=0)

    assert len(assert_invariants(store).live) == 1
    assert (tmp_path / "disk" / "my-run" / "latest").is_file()
