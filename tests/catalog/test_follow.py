"""A mirror that follows a training with retention: restorable at every moment, and gone on with after any failure."""

import random
import threading
import time
from collections.abc import Iterable
from threading import Event
from uuid import uuid4

import pytest

from raycheck.bucket.attempt_records import record_failure
from raycheck.bucket.format import object_keys
from raycheck.bucket.protocol.removal.prune_and_sweep import prune
from raycheck.bucket.protocol.swap import Register
from raycheck.bucket.reading import Checkpoint, read_latest
from raycheck.bucket.store import Store, open_store
from raycheck.bucket.store.interface import Buffer
from raycheck.catalog.copier import MirrorCopier
from raycheck.catalog.follow import Follower, FollowNews, follow_run
from raycheck.errors import ConfigError, CorruptError, NotFoundError, StoreError
from tests.support.histories.invariants import assert_invariants
from tests.support.samples.sample_checkpoints import Around, Driver, everything, write_checkpoint

DEADLINE_S = 60.0


@pytest.fixture
def source() -> Driver:
    driver = Driver(open_store(f"memory://{uuid4().hex}"))
    driver.claim("group")
    driver.save(1, 1)
    return driver


@pytest.fixture
def target() -> str:
    return f"memory://{uuid4().hex}"


def follower(source: Store, target: Store, news: list[FollowNews], stop: Event, **more: bool) -> Follower:
    copier = MirrorCopier(source, target, stop=stop)
    return Follower(copier, every_s=0.01, news=news.append, stop=stop, grace_s=0.0, until_finished=False, **more)


class Dropping(Around):
    """Is a source whose training commits, and drops what was committed before, in the middle of a read of a shard."""

    def __init__(self, driver: Driver, saves: range) -> None:
        super().__init__(driver.store)
        self.driver, self.saves = driver, iter(saves)

    def get_range(self, key: str, start: int, stop: int) -> Buffer:
        save = next(self.saves, None) if key.endswith(".distcp") else None
        if save is not None:
            self.driver.save(1, save, keep_last=1)
            prune(self.driver.register, grace_s=0.0)
        return self.inner.get_range(key, start, stop)


def test_what_the_source_drops_while_it_is_copied_is_skipped(source: Driver, target: str) -> None:
    copier = MirrorCopier(Dropping(source, range(2, 5)), open_store(target), stop=Event())

    body = copier.run()

    assert copier.report.dropped == [f"step-0000000{step}-a1-s{step // 10}" for step in (10, 20, 30)]
    assert [entry.step for entry in body.live] == [40]
    copier.delete_dropped(grace_s=0.0)
    body = assert_invariants(open_store(target))
    assert body.evicted == ()
    assert not any("a1-s1" in key for key in everything(open_store(target)))


def test_a_mirror_follows_a_training_and_can_be_restored_at_any_moment(source: Driver, target: str) -> None:
    """The training commits and drops at once, the mirror's readers get no grace either, and restore all the time."""
    done: list[BaseException | None] = []
    stop, chance = Event(), random.Random(1)

    def follow() -> None:
        try:
            follow_run(source.store.uri, target, every_s=0.002, until_finished=True, stop=stop, grace_s=0.0)
            done.append(None)
        except BaseException as error:
            done.append(error)

    thread = threading.Thread(target=follow)
    thread.start()
    restored, body, until = 0, None, time.monotonic() + DEADLINE_S
    for save in range(2, 40):
        source.save(1, save, keep_last=chance.randint(1, 4))
        prune(source.register, grace_s=0.0)
        time.sleep(chance.uniform(0, 0.01))
        restored += restores(open_store(target))
        while save % 6 == 0 and not restores(open_store(target)):
            assert time.monotonic() < until, done
            time.sleep(0.001)
        restored += save % 6 == 0
    source.finish("group")
    until = time.monotonic() + DEADLINE_S
    while thread.is_alive() and time.monotonic() < until:
        restored += restores(open_store(target))
    stop.set()
    thread.join(DEADLINE_S)

    assert done == [None]
    assert restored > 5
    body = assert_invariants(open_store(target))
    assert (body.head, body.live) == (source.look().head, source.look().live)
    assert body.is_finished


def restores(store: Store) -> int:
    """Read the whole head as a restore does, when there is one. Returns 1 when it was read: what is dropped meanwhile is
    read no further, as with any run."""
    try:
        body = read_latest(store)
    except NotFoundError:
        return 0
    if body.head is None:
        return 0
    findings = list(Checkpoint(store, body.entry(body.head)).verify())
    bad = [item for item in findings if item.problem]
    if bad and read_latest(store).entry(body.head) is None:
        return 0
    assert not bad
    return 1


class Failing(Around):
    """Is a store whose next calls of one verb fail."""

    def __init__(self, inner: Store, verb: str, times: int) -> None:
        super().__init__(inner)
        self.left = times
        call = getattr(inner, verb)

        def fail(*args: object) -> object:
            self.left -= 1
            if self.left >= 0:
                raise StoreError(f"{verb}: out of order")
            return call(*args)

        setattr(self, verb, fail)


@pytest.mark.parametrize(("side", "verb"), [("source", "get"), ("source", "get_range"), ("target", "put_parts")])
def test_a_store_that_fails_for_a_while_ends_nothing(source: Driver, target: str, side: str, verb: str) -> None:
    news: list[FollowNews] = []
    stop = Event()
    stores = {"source": source.store, "target": open_store(target)}
    stores[side] = Failing(stores[side], verb, 3)
    follows = follower(stores["source"], stores["target"], news, stop)
    thread = threading.Thread(target=follows.run)

    thread.start()
    until = time.monotonic() + DEADLINE_S
    while not any(item.step == 10 for item in news) and time.monotonic() < until:
        time.sleep(0.01)
    stop.set()
    thread.join(DEADLINE_S)

    assert [item.is_trouble for item in news] == [*[True] * (len(news) - 1), False]
    assert len(news) > 1
    assert "out of order; trying again" in news[0].text
    assert news[-1].lag_s is not None
    assert_invariants(open_store(target))


def test_training_on_the_mirror_ends_the_follow(source: Driver, target: str) -> None:
    follows = follower(source.store, open_store(target), [], Event())
    follows.look()
    Driver(open_store(target), "zoe").claim("there")
    source.save(1, 2)
    before = everything(open_store(target))

    for follow in (follows, follower(source.store, open_store(target), [], Event())):
        with pytest.raises(ConfigError, match="a separate run"):
            follow.run()

    assert everything(open_store(target)) == before
    assert_invariants(open_store(target))


def test_a_claim_in_the_middle_of_a_round_is_not_overwritten(source: Driver, target: str) -> None:
    store = open_store(target)
    MirrorCopier(source.store, store, stop=Event()).run()
    source.save(1, 2)
    zoe = Driver(store, "zoe")

    class Claimed(Around):
        def get_range(self, key: str, start: int, stop: int) -> Buffer:
            if zoe.look().is_mirror:
                zoe.claim("there")
            return self.inner.get_range(key, start, stop)

    with pytest.raises(ConfigError, match="a separate run"):
        MirrorCopier(Claimed(source.store), store, stop=Event()).run()

    assert assert_invariants(store).head == "step-000000010-a1-s1"


def test_a_new_attempt_is_let_in_before_its_objects(source: Driver, target: str) -> None:
    """Else a claim on the mirror would take them for those of a lost latest, or use their names."""
    store = open_store(target)
    MirrorCopier(source.store, store, stop=Event()).run()
    eve = Driver(source.store, "eve")
    eve.claim("next")
    eve.save(2, 1, step=20)
    seen = []

    class Looking(Around):
        def put_parts(self, key: str, parts: object, size_bytes: int) -> None:
            body = read_latest(store)
            seen.append((body.attempt.number, body.has_answered(object_keys.checkpoint_of(key))))
            self.inner.put_parts(key, parts, size_bytes)

    MirrorCopier(source.store, Looking(store), stop=Event()).run()

    assert set(seen) == {(3, True)}
    assert assert_invariants(store).head == "step-000000020-a2-s1"


def test_a_source_that_was_rolled_back_is_not_followed(source: Driver, target: str) -> None:
    store = open_store(target)
    old = source.store.get(object_keys.LATEST_KEY).data
    source.save(1, 2)
    MirrorCopier(source.store, store, stop=Event()).run()
    source.store.put(object_keys.LATEST_KEY, old)

    with pytest.raises(CorruptError, match="rolled back"):
        follower(source.store, store, [], Event()).run()

    assert assert_invariants(store).head == "step-000000020-a1-s2"


def test_records_of_attempts_are_copied(source: Driver, target: str) -> None:
    store = open_store(target)
    record_failure(source.store, source.look().attempt, at=1.0, cause="a test", is_final=True)

    MirrorCopier(source.store, store, stop=Event()).run()

    key = object_keys.attempt_key(1)
    assert store.get(key).data == source.store.get(key).data
    assert_invariants(store)


def test_two_copiers_at_once_leave_a_whole_mirror(source: Driver, target: str) -> None:
    """The slower one has read an older state, and neither takes the mirror back nor deletes from it."""
    store = open_store(target)

    class Overtaken(Around):
        is_first = True

        def put_parts(self, key: str, parts: object, size_bytes: int) -> None:
            if self.is_first:
                self.is_first = False
                source.save(1, 2, keep_last=1)
                other = MirrorCopier(source.store, store, stop=Event())
                other.run()
                other.delete_dropped(grace_s=0.0)
            self.inner.put_parts(key, parts, size_bytes)

    MirrorCopier(source.store, Overtaken(store), stop=Event()).run()

    assert assert_invariants(store).head == "step-000000020-a1-s2"
    assert Register(store).read() is not None


def test_what_another_copier_has_begun_of_a_later_commit_is_not_evicted(source: Driver, target: str) -> None:
    store = open_store(target)
    MirrorCopier(source.store, store, stop=Event()).run()
    manifest = write_checkpoint(source.store, attempt=1, save=3)
    key = object_keys.shard_key(manifest.key, "train", 0)
    source.save(1, 2)  # the state that this copier reads; the other one has read the next
    store.put(key, source.store.get(key).data)

    MirrorCopier(source.store, store, stop=Event()).run()

    assert read_latest(store).evicted == ()
    assert source.commit(manifest)
    assert MirrorCopier(source.store, store, stop=Event()).run().head == manifest.key
    assert_invariants(store)


def test_bytes_that_change_on_their_way_to_the_target_are_not_believed(source: Driver, target: str) -> None:
    store = open_store(target)

    class Changing(Around):
        is_first = True

        def put_parts(self, key: str, parts: Iterable[memoryview], size_bytes: int) -> None:
            data = bytearray(b"".join(parts))
            if key.endswith(".distcp") and self.is_first:
                self.is_first, data[3] = False, data[3] ^ 1
            self.inner.put_parts(key, [memoryview(data)], size_bytes)

    changing = Changing(store)
    with pytest.raises(StoreError, match="does not have the bytes"):
        MirrorCopier(source.store, changing, stop=Event()).run()
    assert read_latest(store).live == ()

    MirrorCopier(source.store, changing, stop=Event()).run()

    assert assert_invariants(store).head == "step-000000010-a1-s1"
