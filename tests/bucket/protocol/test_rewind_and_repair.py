"""Tests rewind, which moves the head back on purpose, and repair, which rebuilds a lost `latest` from the manifests."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from raycheck.bucket.attempt_records import read_record, record_end
from raycheck.bucket.format import object_keys
from raycheck.bucket.format.document import FORMAT_VERSION
from raycheck.bucket.format.latest import dump_latest
from raycheck.bucket.history.attempt_facts import facts_of
from raycheck.bucket.history.facts import CommitRecord, Facts
from raycheck.bucket.history.segments import record_facts
from raycheck.bucket.protocol.pin_and_evict import pin
from raycheck.bucket.protocol.removal.prune_and_sweep import prune
from raycheck.bucket.protocol.repair import repair
from raycheck.bucket.protocol.retention import dropped
from raycheck.bucket.protocol.rewind import rewind
from raycheck.bucket.protocol.swap import Register
from raycheck.bucket.reading import read_latest, read_newest
from raycheck.bucket.store import Got, Store, open_store
from raycheck.bucket.store.interface import MAX_WHOLE_BYTES, Written
from raycheck.errors import (
    ConfigError,
    ConflictError,
    CorruptError,
    FencedError,
    NotFoundError,
    StoreError,
    SupersededError,
)
from raycheck.settings import Retention
from tests.support.histories.invariants import assert_invariants
from tests.support.samples.sample_checkpoints import (
    Around,
    Driver,
    everything,
    latest_tree,
    put_latest_tree,
    write_checkpoint,
)


def run_of(store: Store, *, saves: int = 3) -> Driver:
    ann = Driver(store)
    ann.claim("g1")
    for save in range(1, saves + 1):
        ann.save(1, save)
    return ann


# --- rewind ---


def test_a_rewind_moves_head_and_keeps_the_branch_that_is_left(store: Store) -> None:
    run_of(store)
    before = read_latest(store)
    keys = [entry.key for entry in before.live]

    rewind(Register(store), keys[0])

    body = assert_invariants(store, before)
    assert body is not None
    assert body.head == keys[0]
    assert [entry.key for entry in body.live] == keys
    assert body.attempt.restore_key == keys[0]
    assert body.attempt.world_size == 0


def test_the_next_driver_restores_what_was_rewound_to_and_commits_after_it(store: Store) -> None:
    run_of(store)
    first = read_latest(store).live[0].key
    rewind(Register(store), first)

    bob = Driver(store, "bob")
    attempt, entry = bob.claim("g2")
    bob.save(attempt.number, 1, step=15)

    body = assert_invariants(store)
    assert body is not None
    assert (attempt.number, entry.key) == (3, first)
    assert [item.step for item in body.live] == [10, 20, 30, 15]
    assert body.head == body.live[-1].key


def test_a_driver_that_still_runs_is_fenced_by_a_rewind(store: Store) -> None:
    ann = run_of(store)
    late = write_checkpoint(store, attempt=1, save=4)
    rewind(Register(store), read_latest(store).live[0].key)

    with pytest.raises(FencedError, match="rewind-"):
        ann.commit(late)
    with pytest.raises(FencedError):
        ann.claim("g2")

    assert read_latest(store).head == read_latest(store).live[0].key
    assert_invariants(store)


def test_retention_takes_the_abandoned_branch_in_the_order_of_commits(store: Store) -> None:
    run_of(store)
    first = read_latest(store).live[0].key
    rewind(Register(store), first)
    bob = Driver(store, "bob")
    attempt, _ = bob.claim("g2")

    bob.save(attempt.number, 1, step=15, keep_last=2)
    bob.save(attempt.number, 2, step=25, keep_last=2)

    body = assert_invariants(store)
    assert body is not None
    assert [item.step for item in body.live] == [15, 25]
    prune(bob.register, grace_s=0)
    assert store.list_names(object_keys.CHECKPOINTS_PREFIX) == sorted(item.key for item in body.live)


def test_a_rewind_whose_answer_is_lost_leaves_the_driver_alone_that_came_after_it(store: Store) -> None:
    run_of(store)

    class Loses(Around):
        is_done = False

        def put_if_match(self, key: str, data: bytes, version: str) -> Written:
            written = self.inner.put_if_match(key, data, version)
            if not self.is_done:
                self.is_done = True
                attempt, _ = bob.claim("h1")
                bob.save(attempt.number, 1, step=40)
                raise StoreError("the answer was lost")
            return written

    bob = Driver(store, "bob")

    body = rewind(Register(Loses(store)), "step-000000010-a1-s1")

    assert (body.attempt.owner, body.head) == ("bob", "step-000000040-a3-s1")
    assert [attempt.world_size for attempt in body.attempts] == [1, 0, 1]
    assert bob.save(3, 2)
    assert_invariants(store)


def test_a_rewind_to_what_is_no_longer_live_changes_nothing(store: Store) -> None:
    run_of(store)
    before = everything(store)

    with pytest.raises(NotFoundError, match="step-000000099-a1-s9"):
        rewind(Register(store), "step-000000099-a1-s9")

    assert everything(store) == before


def test_a_rewind_of_nothing_says_that_there_is_no_run(store: Store) -> None:
    with pytest.raises(NotFoundError, match="no run here"):
        rewind(Register(store), "step-000000001-a1-s1")

    assert everything(store) == {}


def test_a_lost_answer_does_not_rewind_twice(store: Store) -> None:
    run_of(store)
    first = read_latest(store).live[0].key

    class LosesOneAnswer(Around):
        is_lost = False

        def put_if_match(self, key: str, data: bytes, version: str) -> Written:
            written = self.inner.put_if_match(key, data, version)
            if not self.is_lost:
                self.is_lost = True
                raise StoreError("the answer is lost")
            return written

    rewind(Register(LosesOneAnswer(store)), first)

    assert read_latest(store).attempt.number == 2
    assert_invariants(store)


# --- repair ---


def test_a_lost_latest_is_rebuilt_from_the_manifests(store: Store) -> None:
    run_of(store)
    before = read_latest(store)
    store.delete(object_keys.LATEST_KEY)

    done = repair(store)

    body = assert_invariants(store)
    assert body == done.latest
    assert [(e.key, e.step, e.size_bytes, e.metrics) for e in body.live] == [
        (e.key, e.step, e.size_bytes, e.metrics) for e in before.live
    ]
    assert body.head == before.head
    assert body.attempt.number == 2
    assert done.left_out == ()


def facts_of_run(store: Store, *, run_id: str, counter: int = 5) -> None:
    """Write a segment as a coordinator of the run `run_id` does after each commit."""
    body = replace(read_latest(store), counter=counter)
    record_facts(store, facts_of(body), run_id=run_id, counter=counter)


def test_a_repair_without_a_body_keeps_the_run_of_the_history_its_owners_and_its_times(store: Store) -> None:
    ann = run_of(store)
    before = read_latest(store)
    facts_of_run(store, run_id=before.run_id)
    store.delete(object_keys.LATEST_KEY)

    body = repair(store).latest

    assert body.run_id == before.run_id
    assert [entry.committed_at for entry in body.live] == [entry.committed_at for entry in before.live]
    with pytest.raises(FencedError):
        Driver(store, ann.me.owner).claim("g9")
    assert_invariants(store)


def test_a_repair_takes_no_id_of_a_run_that_was_here_before(store: Store) -> None:
    Driver(store).claim("g1")
    Driver(store).claim("g2")
    write_checkpoint(store, attempt=2, save=1)
    another = CommitRecord(key="step-000000010-a2-s1", counter=9, at=1.0, size_bytes=1)
    record_facts(store, Facts(commits={another.key: another}), run_id="another", counter=9)
    store.delete(object_keys.LATEST_KEY)

    body = repair(store).latest

    assert body.run_id != "another"
    assert body.live[0].committed_at != 1.0
    assert body.attempt.number == 3


def test_of_two_ids_a_repair_keeps_the_one_that_was_used_last(store: Store) -> None:
    run_of(store)
    facts_of_run(store, run_id="older", counter=5)
    facts_of_run(store, run_id="newer", counter=6)
    store.delete(object_keys.LATEST_KEY)

    assert repair(store).latest.run_id == "newer"


def test_a_repair_records_the_attempt_that_it_ends_and_that_it_had_finished(store: Store) -> None:
    ann = run_of(store)
    ann.finish("g1")
    body = read_latest(store)
    write_checkpoint(store, attempt=2, save=1)

    repair(store)

    record = read_record(store, 1)
    assert record is not None
    assert body.finished is not None
    assert (record.cause, record.ended_at) == ("it had finished; the run was repaired", body.finished.at)
    assert record.attempt.owner == ann.me.owner


def test_a_rewind_of_a_finished_run_records_when_it_had_finished(store: Store) -> None:
    ann = run_of(store)
    finished = ann.finish("g1").finished
    assert finished is not None

    rewind(Register(store), read_latest(store).live[0].key)

    record = read_record(store, 1)
    assert record is not None
    assert (record.cause[:16], record.ended_at) == ("it had finished;", finished.at)


def test_training_goes_on_from_a_repaired_run(store: Store) -> None:
    run_of(store)
    store.delete(object_keys.LATEST_KEY)
    with pytest.raises(CorruptError, match="raycheck repair"):
        Driver(store, "bob").claim("g2")
    head = repair(store).latest.head

    bob = Driver(store, "bob")
    attempt, entry = bob.claim("g2")
    bob.save(attempt.number, 1, step=40)

    assert (attempt.number, entry.key) == (3, head)
    assert_invariants(store)


def test_an_owner_that_left_a_record_stays_fenced_after_a_repair(store: Store) -> None:
    ann = run_of(store)
    ended = ann.look().attempt
    assert record_end(store, ended, by=ended, cause="a test")
    store.put(object_keys.attempt_key(7), b"no record")
    store.delete(object_keys.LATEST_KEY)

    repair(store)

    with pytest.raises(FencedError):
        Driver(store, ann.me.owner).claim("g9")
    assert_invariants(store)


def test_a_store_that_is_away_ends_a_repair_and_drops_nothing(store: Store) -> None:
    run_of(store)
    newest = read_latest(store).head
    store.delete(object_keys.LATEST_KEY)

    class Away(Around):
        def get(self, key: str, max_bytes: int = MAX_WHOLE_BYTES) -> Got:
            if key == object_keys.manifest_key(newest):
                raise StoreError("503")
            return self.inner.get(key, max_bytes)

    with pytest.raises(StoreError, match="503"):
        repair(Away(store))

    assert repair(store).latest.head == newest
    assert_invariants(store)


def test_a_repair_goes_to_where_the_run_was_rewound_and_keeps_its_driver_out(store: Store) -> None:
    ann = run_of(store)
    first = read_latest(store).live[0].key
    rewind(Register(store), first)
    store.delete(object_keys.LATEST_KEY)

    done = repair(store)

    assert done.latest.head == first
    with pytest.raises(FencedError):
        Driver(store, ann.me.owner).claim("g9")
    assert_invariants(store)


def test_a_run_of_more_checkpoints_than_latest_lists_itself_is_repaired_with_all_of_them() -> None:
    store = open_store("memory://a-long-run")
    Driver(store).claim("g1")
    for save in range(1, 1031):
        write_checkpoint(store, attempt=1, save=save)
    store.delete(object_keys.LATEST_KEY)

    done = repair(store)

    assert done.latest.head == "step-000010300-a1-s1030"
    assert not done.left_out
    assert read_newest(store).pages
    assert [entry.step for entry in read_latest(store).live] == [10 * save for save in range(1, 1031)]
    attempt, entry = Driver(store, "bob").claim("h1")
    assert entry.key == done.latest.head
    assert Driver(store, "bob").commit(write_checkpoint(store, attempt=attempt.number, save=1))


def test_a_latest_put_back_to_a_state_whose_head_is_gone_is_repaired(store: Store) -> None:
    ann = Driver(store)
    ann.claim("g1")
    ann.save(1, 1)
    old = store.get(object_keys.LATEST_KEY).data
    newest = [ann.save(1, save, keep_last=1) for save in (2, 3)][-1]
    prune(ann.register, grace_s=0)
    store.put(object_keys.LATEST_KEY, old)

    assert repair(store).latest.head == newest.key
    assert_invariants(store)


def test_a_repair_keeps_the_pins_that_an_old_body_still_knows(store: Store) -> None:
    driver = run_of(store)
    first = driver.look().live[0]
    pin(driver.register, first.key)
    rolled_back = store.get(object_keys.LATEST_KEY).data
    Driver(store).claim("g2")
    write_checkpoint(store, attempt=2, save=1)
    store.put(object_keys.LATEST_KEY, rolled_back)

    repaired = repair(store).latest

    assert [entry.pinned for entry in repaired.live] == [True, False, False, False]
    assert_invariants(store)


def test_a_repair_leaves_one_checkpoint_per_hour_to_a_run_that_keeps_one_per_hour(store: Store) -> None:
    """If all of them got the time of the repair, the next commit would drop all but one."""
    ann, rule = Driver(store), Retention(keep_every_s=3600.0)
    ann.claim("g1")
    for save in (1, 2, 3):
        ann.commit(write_checkpoint(store, attempt=1, save=save, began_at=7200.0, trained_s=3600.0 * save))
    store.delete(object_keys.LATEST_KEY)

    body = repair(store).latest

    assert [entry.committed_at for entry in body.live] == [10800.0, 14400.0, 18000.0]
    assert dropped(body, rule, now=store.get(object_keys.LATEST_KEY).at) == {}
    assert body.attempt.claimed_at > 18000.0, "by the store's clock"
    assert_invariants(store)


def test_a_repair_keeps_the_commit_times_that_an_old_body_still_knows(store: Store) -> None:
    before = run_of(store).look()
    Driver(store).claim("g2")
    write_checkpoint(store, attempt=2, save=1)
    rolled_back = before.with_entry(replace(before.live[0], committed_at=77.5))
    store.put(object_keys.LATEST_KEY, dump_latest(rolled_back))

    assert repair(store).latest.live[0].committed_at == 77.5


@pytest.mark.parametrize("damage", [b"", b"{", b'{"format_version": 1}', b"\xff" * 100])
def test_a_damaged_latest_is_replaced(store: Store, damage: bytes) -> None:
    run_of(store)
    store.put(object_keys.LATEST_KEY, damage)
    with pytest.raises(CorruptError, match="raycheck repair"):
        read_latest(store)

    repair(store)

    body = assert_invariants(store)
    assert body is not None
    assert len(body.live) == 3


def test_a_rolled_back_latest_keeps_its_owners_and_what_was_evicted(store: Store) -> None:
    ann = run_of(store)
    ann.save(1, 4, keep_last=3)
    old = latest_tree(store)
    bob = Driver(store, "bob")
    attempt, _ = bob.claim("g2")
    bob.save(attempt.number, 1, step=50)
    put_latest_tree(store, old)

    done = repair(store)

    body = assert_invariants(store)
    assert body is not None
    assert [entry.step for entry in body.live] == [20, 30, 40, 50]
    assert "step-000000010-a1-s1" in {item.key for item in body.evicted}
    assert ann.me.owner in body.owners
    assert body.attempt.number == 3
    assert body.run_id == old["run_id"]
    assert done.latest.counter > old["counter"]


def test_what_is_not_whole_is_left_out_with_its_reason(store: Store) -> None:
    run_of(store, saves=5)
    names = [entry.key for entry in read_latest(store).live]
    store.delete(object_keys.manifest_key(names[0]))
    store.delete(object_keys.shard_key(names[1], "train", 0))
    store.put(object_keys.shard_key(names[2], "train", 0), b"short")
    flipped = bytearray(store.get(object_keys.shard_key(names[4], "train", 0)).data)
    flipped[3] ^= 1
    store.put(object_keys.shard_key(names[4], "train", 0), flipped)
    store.delete(object_keys.LATEST_KEY)

    done = repair(store)

    assert [entry.key for entry in done.latest.live] == [names[3]]
    reasons = dict(done.left_out)
    assert "no manifest" in reasons[names[0]]
    assert "missing" in reasons[names[1]]
    assert "bytes, the manifest says" in reasons[names[2]]
    assert "checksum" in reasons[names[4]]
    assert_invariants(store)


def test_a_sound_latest_is_not_repaired(store: Store) -> None:
    run_of(store)
    write_checkpoint(store, attempt=1, save=9)  # of a save that never became a checkpoint
    before = everything(store)

    with pytest.raises(ConfigError, match="nothing to repair"):
        repair(store)

    assert everything(store) == before


def test_a_newer_format_is_not_written_over(store: Store) -> None:
    run_of(store)
    put_latest_tree(store, latest_tree(store) | {"format_version": FORMAT_VERSION + 1})
    before = everything(store)

    with pytest.raises(CorruptError, match=f"format version {FORMAT_VERSION + 1}"):
        repair(store)

    assert everything(store) == before


def test_an_empty_bucket_has_nothing_to_repair(store: Store) -> None:
    with pytest.raises(NotFoundError, match="no whole checkpoint"):
        repair(store)

    assert everything(store) == {}


def test_of_two_repairs_at_once_one_writes(store: Store) -> None:
    run_of(store)
    store.delete(object_keys.LATEST_KEY)

    def attempt(_: int) -> str:
        try:
            repair(store)
        except (ConflictError, ConfigError) as error:
            return type(error).__name__
        return "repaired"

    with ThreadPoolExecutor(4) as pool:
        outcomes = list(pool.map(attempt, range(4)))

    assert outcomes.count("repaired") == 1
    assert_invariants(store)


def test_an_old_coordinator_cannot_commit_over_a_repair(store: Store) -> None:
    ann = run_of(store)
    store.delete(object_keys.LATEST_KEY)
    repair(store)
    late = write_checkpoint(store, attempt=1, save=4)

    with pytest.raises(CorruptError, match="that of another run"):
        ann.commit(late)
    with pytest.raises(SupersededError):
        Driver(store).commit(late)

    body = assert_invariants(store)
    assert body is not None
    assert body.entry(late.key) is None
