"""Tests the return to an earlier checkpoint when a restore finds damage (step 26), and who respects the mark."""

from dataclasses import replace

import pytest

from raycheck.bucket.format import object_keys
from raycheck.bucket.format.latest import Entry, Latest, load_latest
from raycheck.bucket.protocol.damage import ancestors, go_back
from raycheck.bucket.protocol.pin_and_evict import pin
from raycheck.bucket.protocol.repair import repair
from raycheck.bucket.protocol.rewind import rewind
from raycheck.bucket.protocol.swap import Register
from raycheck.bucket.reading import read_latest
from raycheck.bucket.store import Store, open_store
from raycheck.bucket.store.interface import Written
from raycheck.errors import (
    ConfigError,
    CorruptError,
    DamagedError,
    FencedError,
    StoreError,
    SupersededError,
)
from tests.support.histories.invariants import assert_invariants
from tests.support.samples.sample_checkpoints import Around, Driver, everything, latest_tree, put_latest_tree

PROBLEM = "rank 3: tensor model.w, sub-block 0"


def run_of(store: Store, saves: int) -> Driver:
    ann = Driver(store)
    ann.claim("g1")
    for save in range(1, saves + 1):
        ann.save(1, save)
    return ann


def restarted(store: Store, saves: int = 3) -> tuple[Driver, str]:
    """Make a run whose second group has claimed. Returns it with the entry that the group restores."""
    ann = run_of(store, saves)
    _, entry = ann.claim("g2")
    assert entry is not None
    return ann, entry.key


def back(driver: Driver, key: str, group: str = "g2") -> Entry:
    return go_back(driver.register, driver.me, group=group, key=key, problem=PROBLEM)


def steps(body: Latest) -> list[int]:
    return [entry.step for entry in body.live]


def test_the_group_goes_back_by_one_and_the_damaged_one_is_marked_and_kept(store: Store) -> None:
    ann, damaged = restarted(store)
    before = read_latest(store)

    entry = back(ann, damaged)

    body = assert_invariants(store, before)
    assert (entry.step, body.head, body.attempt.restore_key) == (20, entry.key, entry.key)
    marked = body.entry(damaged)
    assert (marked.damaged, marked.pinned) == (PROBLEM, True)
    assert [item.damaged for item in body.live[:2]] == [None, None]
    assert ann.claim("g2")[1] == entry, "the same group gets the same answer"
    assert ann.claim("g3")[1] == entry, "and so does the next one"


def test_training_goes_on_from_there_and_retention_does_not_count_the_damaged_one(store: Store) -> None:
    ann, damaged = restarted(store)
    back(ann, damaged)

    ann.save(2, 1, step=30, keep_last=2)

    body = assert_invariants(store)
    assert [entry.key for entry in body.live] == ["step-000000020-a1-s2", damaged, "step-000000030-a2-s1"]
    pin(Register(store), damaged, pinned=False)
    ann.save(2, 2, step=40, keep_last=2)
    assert steps(assert_invariants(store)) == [30, 40], "unpinned, it is dropped like any other"


def test_one_after_another_down_to_the_last_which_is_an_error_and_changes_nothing(store: Store) -> None:
    ann, key = restarted(store)
    for _ in range(2):
        key = back(ann, key).key
    before = everything(store)

    with pytest.raises(DamagedError, match="no earlier checkpoint"):
        back(ann, key)

    assert everything(store) == before
    assert ann.claim("g3")[1].key == key, "never from zero"


def test_a_repeated_verdict_goes_back_once(store: Store) -> None:
    ann, damaged = restarted(store)

    assert back(ann, damaged) == back(ann, damaged)

    assert sum(bool(entry.damaged) for entry in read_latest(store).live) == 1


@pytest.mark.parametrize("is_applied", [True, False])
def test_a_lost_answer_goes_back_once(is_applied: bool) -> None:
    store = open_store(f"memory://lost-answer-{is_applied}")
    ann, damaged = restarted(store)

    class LosesAnAnswer(Around):
        failures = 1

        def put_if_match(self, key: str, data: bytes, version: str) -> Written:
            if self.failures and is_applied:
                written = self.inner.put_if_match(key, data, version)
            self.failures -= 1
            if self.failures == 0:
                raise StoreError("no answer")
            if not is_applied or self.failures < 0:
                written = self.inner.put_if_match(key, data, version)
            return written

    entry = go_back(Register(LosesAnAnswer(store)), ann.me, group="g2", key=damaged, problem=PROBLEM)

    body = assert_invariants(store)
    assert entry.step == 20
    assert [item.step for item in body.live if item.damaged] == [30]


def test_what_was_rewound_past_is_not_taken(store: Store) -> None:
    """10, 20, 30; back to 10; 20', 30' damaged: 20', then 10. Never 30, nor the 20 of before."""
    run_of(store, 3)
    rewind(Register(store), read_latest(store).live[0].key)
    bob = Driver(store, "bob")
    attempt, _ = bob.claim("b1")
    for save, step in ((1, 20), (2, 30)):
        bob.save(attempt.number, save, step=step)
    _, entry = bob.claim("b2")

    first = back(bob, entry.key, "b2")
    second = back(bob, first.key, "b2")

    assert (first.key, second.key) == (f"step-000000020-a{attempt.number}-s1", "step-000000010-a1-s1")
    with pytest.raises(DamagedError):
        back(bob, second.key, "b2")


def test_the_line_goes_through_attempts_that_committed_nothing_and_ones_that_are_no_longer_listed(store: Store) -> None:
    ann = run_of(store, 2)
    for number in range(2, 5):
        ann.claim(f"g{number}")
    ann.save(4, 1, step=30)
    body = read_latest(store)
    head = body.head

    assert [entry.step for entry in ancestors(body, head)] == [20, 10]
    short = replace(body, attempts=body.attempts[-1:])
    assert [entry.step for entry in ancestors(short, head)] == [20, 10]
    assert [entry.step for entry in ancestors(short, "step-000000020-a1-s2")] == [10]


def test_whoever_is_fenced_superseded_or_late_marks_nothing(store: Store) -> None:
    ann, damaged = restarted(store)
    with pytest.raises(SupersededError):
        back(ann, damaged, "g1")
    with pytest.raises(SupersededError):
        back(Driver(store, "ann", "c2"), damaged)
    ann.save(2, 1, step=40)
    with pytest.raises(SupersededError):
        back(ann, damaged)
    Driver(store, "bob").claim("b1")
    with pytest.raises(FencedError):
        back(ann, damaged)

    assert not any(entry.damaged for entry in assert_invariants(store).live)


def test_a_damaged_checkpoint_is_not_resumed_from_by_its_step(store: Store) -> None:
    ann, damaged = restarted(store)
    back(ann, damaged)
    before = everything(store)

    with pytest.raises(ConfigError, match=r"10, 20, 30 \(damaged\)"):
        Driver(store, "bob").claim("b1", resume=30)

    assert everything(store) == before
    ann.save(2, 1, step=30)
    _, entry = Driver(store, "bob").claim("b1", resume=30)
    assert entry.key == "step-000000030-a2-s1"


def test_a_rewind_to_it_is_refused_until_its_bytes_are_right_again(store: Store) -> None:
    ann, damaged = restarted(store)
    shard = object_keys.shard_key(damaged, "train", 0)
    right = store.get(shard).data
    store.put(shard, right[:-1] + b"?")
    back(ann, damaged)

    with pytest.raises(DamagedError, match=shard):
        rewind(Register(store), damaged)
    store.put(shard, right)
    rewind(Register(store), damaged)

    body = assert_invariants(store)
    assert (body.head, body.entry(damaged).damaged) == (damaged, None)
    assert Driver(store, "bob").claim("b1")[1].key == damaged


def test_a_rewind_does_not_take_off_a_mark_that_it_has_not_read(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mark is made after the rewind has read the checkpoint, and before its swap."""
    ann, damaged = restarted(store)
    register = Register(store)
    edit = register.edit

    def late_edit(*arguments, **more):
        back(ann, damaged)
        return edit(*arguments, **more)

    monkeypatch.setattr(register, "edit", late_edit)

    with pytest.raises(DamagedError, match="just now"):
        rewind(register, damaged)

    assert read_latest(store).entry(damaged).damaged == PROBLEM


def test_a_repair_does_not_go_back_to_what_is_marked(store: Store) -> None:
    """The run was rewound to a checkpoint that was then found damaged."""
    run_of(store, 3)
    marked = "step-000000020-a1-s2"
    rewind(Register(store), marked)
    bob = Driver(store, "bob")
    _, entry = bob.claim("b1")
    assert entry.key == marked
    back(bob, marked, "b1")
    put_latest_tree(store, latest_tree(store) | {"proven": 0})  # as after a roll-back, so that there is something to do

    done = repair(store)

    assert done.latest.head == "step-000000030-a1-s3"
    assert done.latest.entry(marked).damaged == PROBLEM


def test_a_latest_whose_head_is_damaged_is_refused(store: Store) -> None:
    run_of(store, 2)
    tree = latest_tree(store)
    tree["newest"][-1]["damaged"] = "somebody says so"
    put_latest_tree(store, tree)

    with pytest.raises(CorruptError, match="damaged"):
        load_latest(store.get("latest").data, what="latest")
