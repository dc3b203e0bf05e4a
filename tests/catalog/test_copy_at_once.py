"""Several checkpoints of a run are copied at a time: in bounded memory, and no object twice."""

from collections import Counter
from collections.abc import Iterable
from threading import Barrier, Event, Lock

import pytest

from raycheck.bucket.reading import Checkpoint
from raycheck.catalog.copier import MirrorCopier
from raycheck.errors import StoreError
from tests.support.histories.invariants import assert_invariants
from tests.support.samples.sample_checkpoints import Driver
from tests.support.servers.memory_store import DictStore

SHARD = "/__0_0.distcp"


class Watched(DictStore):
    """Knows how many bytes are being written to it at a time, and how often each object is. meets: what the shards of
    several checkpoints wait for while they are written."""

    def __init__(self) -> None:
        super().__init__()
        self.uri = "memory://target"
        self.meets: Barrier | None = None
        self.writes: Counter[str] = Counter()
        self.at_once = self.most = 0
        self._lock = Lock()

    def put_parts(self, key: str, parts: Iterable[memoryview], size_bytes: int) -> None:
        with self._lock:
            self.writes[key] += 1
            self.at_once += size_bytes
            self.most = max(self.most, self.at_once)
        try:
            if self.meets is not None and key.endswith(SHARD):
                self.meets.wait(30.0)
            super().put_parts(key, parts, size_bytes)
        finally:
            with self._lock:
                self.at_once -= size_bytes


def source(*, shares: bool = False) -> DictStore:
    """A run of a head and six other checkpoints; shares: those have what they freeze in common, and the head has not."""
    store = DictStore()
    store.uri = "memory://source"
    driver = Driver(store)
    driver.claim("group")
    driver.save(1, 1)
    base = Checkpoint(store, driver.look().live[0]).read_manifest() if shares else None
    for save in range(2, 7):
        driver.save(1, save, base=base)
    driver.save(1, 7)
    return store


def test_the_checkpoints_beside_the_head_are_copied_at_a_time() -> None:
    target = Watched()
    copier = MirrorCopier(source(), target, stop=Event())
    head, *others = [entry.key for entry in copier.missing()[1]]
    written = target.put_parts

    def head_first(key: str, parts: Iterable[memoryview], size_bytes: int) -> None:
        target.meets = None if head in key else barrier
        written(key, parts, size_bytes)

    barrier = Barrier(3)
    target.put_parts = head_first  # type: ignore[method-assign]

    copier.run()

    assert not barrier.broken
    assert len(others) == 6
    assert assert_invariants(target).head == head


def test_what_several_checkpoints_have_in_common_is_copied_once() -> None:
    target = Watched()

    MirrorCopier(source(shares=True), target, stop=Event()).run()

    assert len(assert_invariants(target).live) == 7
    assert set(target.writes.values()) == {1}


def test_all_objects_that_are_copied_at_a_time_share_one_bound_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    store, target = source(), Watched()
    largest = max(item.size_bytes for item in store.list_objects(""))
    monkeypatch.setattr("raycheck.bucket.protocol.object_copy.ROOM_BYTES", 2 * largest)

    MirrorCopier(store, target, stop=Event()).run()

    assert 0 < target.most <= 2 * largest
    assert len(assert_invariants(target).live) == 7


def test_a_store_that_fails_for_one_checkpoint_ends_the_copy_which_a_repeat_makes_whole() -> None:
    store, target = source(), Watched()
    copier = MirrorCopier(store, target, stop=Event())
    bad = copier.missing()[1][3].key
    written = target.put_parts

    def fails(key: str, parts: Iterable[memoryview], size_bytes: int) -> None:
        if bad in key:
            raise StoreError("gone")
        written(key, parts, size_bytes)

    target.put_parts = fails  # type: ignore[method-assign]
    with pytest.raises(StoreError, match="gone"):
        copier.run()
    assert_invariants(target)
    target.put_parts = written  # type: ignore[method-assign]

    copier.run()

    assert len(assert_invariants(target).live) == 7
