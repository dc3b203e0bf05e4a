"""Retention, pins, prune and sweep: what stays, what goes, and that nothing goes which anybody may still need."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raycheck.bucket import layout
from raycheck.bucket.edits import pin
from raycheck.bucket.latest import Attempt, Entry, Latest
from raycheck.bucket.layout import CheckpointName
from raycheck.bucket.register import Register
from raycheck.bucket.retention import dropped
from raycheck.bucket.store import Got, Store
from raycheck.bucket.sweep import GRACE_S, prune
from raycheck.errors import StoreError, SupersededError
from raycheck.settings import Retention
from tests.bucket.helpers import Around, Driver, everything
from tests.invariants import assert_invariants


def keys(entries) -> list[str]:
    return [entry.key for entry in entries]


def body_of(live: list[Entry], head: str) -> Latest:
    attempt = Attempt(
        number=1, owner="ann", coordinator="c", group="g", world_size=1, restore_key=None, last_save=99, claimed_at=0.0
    )
    return Latest(run_id="r", counter=1, owners=("ann",), attempts=(attempt,), head=head, live=tuple(live))


# --- retention ---


def test_retention_evicts_by_order_of_commit_and_not_of_step(store):
    ann = Driver(store)
    ann.claim("g1")
    saved = [ann.save(1, save, step=step, keep_last=2) for save, step in ((1, 30), (2, 10), (3, 20))]

    body = assert_invariants(store)

    assert keys(body.live) == [saved[1].key, saved[2].key]
    assert keys(body.evicted) == [saved[0].key]
    assert body.head == saved[2].key


def test_a_pinned_checkpoint_is_never_evicted(store):
    ann = Driver(store)
    ann.claim("g1")
    pinned = ann.save(1, 1)
    pin(ann.register, pinned.key)

    newest = [ann.save(1, save, keep_last=1) for save in (2, 3)][-1]

    assert keys(assert_invariants(store).live) == [pinned.key, newest.key]


def test_the_restore_source_of_a_rewind_stays_until_the_first_commit_of_the_attempt(store):
    ann, bob = Driver(store), Driver(store, "bob")
    ann.claim("g1")
    source, _, _ = (ann.save(1, save) for save in (1, 2, 3))
    bob.claim("h1", resume=source.step)
    before = assert_invariants(store)
    assert before.entry(source.key)

    bob.claim("h2")
    assert assert_invariants(store, before).head == source.key
    newest = bob.save(3, 1, keep_last=1)

    assert keys(assert_invariants(store, before).live) == [newest.key]


def test_an_evicted_checkpoint_never_comes_back(store):
    ann = Driver(store)
    ann.claim("g1")
    evicted = ann.save(1, 1)
    ann.save(1, 2, keep_last=1)
    before = assert_invariants(store)

    assert ann.commit(evicted) is False
    ann.claim("g2")
    with pytest.raises(SupersededError):
        ann.commit(evicted)

    after = assert_invariants(store, before)
    assert keys(after.evicted) == [evicted.key]


entries = st.lists(st.tuples(st.integers(0, 99), st.booleans()), min_size=1, max_size=12).map(
    lambda items: [
        Entry(
            key=str(CheckpointName(attempt=1, save=save, step=step)),
            step=step,
            committed_at=0.0,
            size_bytes=0,
            metrics={},
            manifest_crc32=0,
            pinned=pinned,
        )
        for save, (step, pinned) in enumerate(items)
    ]
)


@settings(max_examples=100, deadline=None)
@given(entries, st.integers(1, 12), st.data())
def test_retention_keeps_the_head_the_pinned_and_the_newest_and_drops_the_rest(live, keep_last, data):
    head = data.draw(st.sampled_from(live)).key

    gone = set(dropped(body_of(live, head), Retention(keep_last=keep_last), now=0.0))

    kept = {entry.key for entry in live if entry.pinned or entry.key == head} | set(keys(live[-keep_last:]))
    assert gone == set(keys(live)) - kept


# --- prune ---


class Ages(Around):
    """The bucket's clock, set forward; and every key that was deleted, in order."""

    def __init__(self, inner: Store, seconds: float) -> None:
        super().__init__(inner)
        self.seconds = seconds
        self.deleted: list[str] = []

    def get(self, key: str) -> Got:
        got = self.inner.get(key)
        return replace(got, at=got.at + self.seconds)

    def delete(self, key: str) -> None:
        self.deleted.append(key)
        self.inner.delete(key)


def aged(driver: Driver, seconds: float = GRACE_S + 60) -> Register:
    return Register(Ages(driver.store, seconds))


def test_prune_waits_for_the_grace_by_the_buckets_clock(store):
    ann = Driver(store)
    ann.claim("g1")
    gone, kept = ann.save(1, 1), ann.save(1, 2, keep_last=1)
    before = everything(store)

    assert prune(ann.register) == ()
    assert prune(aged(ann, GRACE_S - 120)) == ()
    assert everything(store) == before

    assert prune(aged(ann)) == (gone.key,)

    left = {name.split("/")[1] for name in everything(store) if name.startswith("checkpoints/")}
    assert left == {kept.key}
    assert assert_invariants(store).evicted == ()


def test_prune_deletes_the_manifest_first(store):
    ann = Driver(store)
    ann.claim("g1")
    gone = ann.save(1, 1)
    ann.save(1, 2, keep_last=1)
    register = aged(ann)

    prune(register)

    deleted = register.store.deleted
    assert deleted[0] == layout.manifest_key(gone.key)
    assert set(deleted) >= {key for key, _ in gone.objects()}
    assert_invariants(store)


def test_prune_leaves_a_directory_that_a_live_checkpoint_refers_to(store):
    ann = Driver(store)
    ann.claim("g1")
    base = ann.save(1, 1)
    user = ann.save(1, 2, base=base, keep_last=1)

    gone = prune(aged(ann))

    body = assert_invariants(store)
    assert keys(body.live) == [user.key]
    assert keys(body.evicted) == [base.key]
    assert layout.shard_key(base.key, "train", 0) in everything(store)
    assert gone == ()


def test_prune_deletes_a_referenced_directory_once_nobody_refers_to_it(store):
    ann = Driver(store)
    ann.claim("g1")
    base = ann.save(1, 1)
    user = ann.save(1, 2, base=base, keep_last=1)
    prune(aged(ann))
    last = ann.save(1, 3, keep_last=1)

    gone = prune(aged(ann))

    assert set(gone) == {base.key, user.key}
    assert assert_invariants(store).evicted == ()
    left = {name.split("/")[1] for name in everything(store) if name.startswith("checkpoints/")}
    assert left == {last.key}


def test_a_prune_that_died_half_way_is_finished_by_the_next_driver(store):
    class Dies(Ages):
        def delete(self, key: str) -> None:
            if len(self.deleted) == 2:
                raise StoreError("the process is gone")
            super().delete(key)

    ann, bob = Driver(store), Driver(store, "bob")
    ann.claim("g1")
    gone, _ = ann.save(1, 1), ann.save(1, 2, keep_last=1)
    with pytest.raises(StoreError):
        prune(Register(Dies(store, GRACE_S + 60)))
    assert keys(assert_invariants(store).evicted) == [gone.key]
    bob.claim("h1")

    assert prune(aged(bob)) == (gone.key,)

    assert assert_invariants(store).evicted == ()
    assert not [name for name in everything(store) if gone.key in name]


def test_a_prune_that_nobody_needs_writes_nothing(store):
    ann = Driver(store)
    ann.claim("g1")
    ann.save(1, 1)
    before = everything(store)

    assert prune(aged(ann)) == ()
    assert prune(Driver(store).register) == ()

    assert everything(store) == before
    assert_invariants(store)
