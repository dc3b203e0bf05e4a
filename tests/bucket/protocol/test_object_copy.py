"""Tests how forks and commits copy objects: several at a time, and each of them verified."""

from collections.abc import Iterable
from threading import Barrier
from uuid import uuid4

import pytest

from raycheck.bucket.format import object_keys
from raycheck.bucket.protocol.object_copy import AT_ONCE
from raycheck.bucket.protocol.sharing.fork import fork
from raycheck.bucket.store import open_store
from raycheck.errors import DamagedError, StoreError
from tests.support.histories.invariants import assert_invariants
from tests.support.samples.sample_checkpoints import Around, Driver, everything


@pytest.fixture
def source() -> Driver:
    driver = Driver(open_store(f"memory://{uuid4().hex}"))
    driver.claim("group", world_size=AT_ONCE)
    driver.save(1, 1, world_size=AT_ONCE)
    return driver


class Meeting(Around):
    """A store in which each shard is written only when AT_ONCE of them are being written."""

    barrier = Barrier(AT_ONCE)

    def put_parts(self, key: str, parts: Iterable[memoryview], size_bytes: int) -> None:
        if key.endswith(".distcp"):
            self.barrier.wait(30.0)
        self.inner.put_parts(key, parts, size_bytes)


def test_a_fork_that_copies_writes_several_objects_at_a_time(source: Driver) -> None:
    target = open_store(f"memory://{uuid4().hex}")

    # The index and `.metadata` are copied first, and leave all threads to the shards.
    made = fork(source.store, Meeting(target), run_id="new", copies=True)

    assert made.copied_bytes == source.look().live[0].size_bytes
    assert assert_invariants(target) is not None


def test_a_fork_of_a_damaged_checkpoint_begins_no_run(source: Driver) -> None:
    key = object_keys.shard_key(source.look().live[0].key, "train", 2)
    source.store.put(key, b"x" + source.store.get(key).data[1:])
    target = open_store(f"memory://{uuid4().hex}")

    with pytest.raises(DamagedError, match=key):
        fork(source.store, target, run_id="new", copies=True)

    assert object_keys.LATEST_KEY not in everything(target)


def test_bytes_that_change_on_their_way_to_the_new_run_are_not_believed(source: Driver) -> None:
    class Changing(Around):
        def put_parts(self, key: str, parts: Iterable[memoryview], size_bytes: int) -> None:
            data = bytearray(b"".join(parts))
            data[3] ^= 1
            self.inner.put_parts(key, [memoryview(data)], size_bytes)

    target = open_store(f"memory://{uuid4().hex}")

    with pytest.raises(StoreError, match="does not have the bytes"):
        fork(source.store, Changing(target), run_id="new", copies=True)

    assert object_keys.LATEST_KEY not in everything(target)
