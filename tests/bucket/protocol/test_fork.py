"""Tests a new run that begins with a checkpoint of another run: it is copied whole and once, and never starts from zero."""

from pathlib import Path
from uuid import uuid4

import pytest
import torch

import raycheck
from raycheck.bucket.format import object_keys
from raycheck.bucket.protocol.claim import Identity, claim
from raycheck.bucket.protocol.resume import AUTO
from raycheck.bucket.protocol.sharing.fork import fork
from raycheck.bucket.protocol.swap import Register
from raycheck.bucket.reading import read_latest
from raycheck.bucket.store import Store, open_store
from raycheck.errors import ConfigError, CorruptError, NotFoundError
from tests.support.histories.invariants import assert_invariants
from tests.support.processes.save_without_ray import save_state

ME = Identity(owner="me", coordinator="one")


@pytest.fixture
def old() -> Store:
    store = open_store(f"memory://{uuid4().hex}")
    save_state(store, {"model": torch.nn.Linear(30, 20)}, step=7)
    return store


def claimed(store: Store):
    found = claim(Register(store), ME, group="group", world_size=1, resume=AUTO, run_id="run")
    return found.attempt, found.entry


def test_a_fork_holds_a_copy_and_the_first_attempt_restores_it(old: Store, store: Store) -> None:
    fork(old, store, run_id="new")
    before = assert_invariants(store)
    fork(old, store, run_id="another")

    attempt, entry = claimed(store)

    assert (attempt.number, entry.step, entry.key) == (1, 7, "step-000000007-a0-s1")
    assert before.run_id == read_latest(store).run_id == "new"
    model = torch.nn.Linear(30, 20)
    assert raycheck.Run(store, read_latest(store)).restore(into={"model": model}) == 7
    assert_invariants(store, before)


def test_a_run_that_began_without_a_checkpoint_is_no_place_for_a_fork(old: Store, store: Store) -> None:
    """A fork into such a run would silently start from zero."""
    claimed(store)

    with pytest.raises(ConfigError, match="has already started"):
        fork(old, store, run_id="new")

    assert_invariants(store)


def test_a_fork_whose_latest_is_lost_does_not_start_from_zero(old: Store, store: Store) -> None:
    fork(old, store, run_id="new")
    store.delete(object_keys.LATEST_KEY)

    for _ in range(2):
        with pytest.raises(CorruptError, match="latest"):
            claimed(store)

    assert assert_invariants(store) is None


def test_a_fork_that_broke_off_is_made_again_under_another_name(old: Store, store: Store) -> None:
    store.put(object_keys.shard_key("step-000000007-a0-s1", "train", 0), b"half")

    fork(old, store, run_id="new")

    assert assert_invariants(store).head == "step-000000007-a0-s2"


def test_a_damaged_source_is_not_copied(old: Store, store: Store) -> None:
    key = object_keys.shard_key(read_latest(old).head, "train", 0)
    data = bytearray(old.get(key).data)
    data[100] ^= 1
    old.put(key, data)

    with pytest.raises(CorruptError, match="checksum"):
        fork(old, store, run_id="new", copies=True)

    assert assert_invariants(store) is None


def test_a_source_without_a_run_is_refused(store: Store) -> None:
    with pytest.raises(NotFoundError):
        fork(open_store(f"memory://{uuid4().hex}"), store, run_id="new")

    assert assert_invariants(store) is None


def test_a_pointer_to_another_place_is_refused(tmp_path: Path) -> None:
    import ray.train

    folder = tmp_path / "runs" / "mine" / "ray" / "step-000000007-a1-s1"
    folder.mkdir(parents=True)
    (folder / "pointer.json").write_text('{"uri": "s3://evil/run", "key": "step-000000007-a1-s1", "step": 7}')

    with pytest.raises(ConfigError, match="not the run that contains it"):
        raycheck.open_checkpoint(ray.train.Checkpoint(str(folder)))
