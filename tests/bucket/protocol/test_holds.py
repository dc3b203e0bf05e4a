"""Tests that a fork within one bucket copies no tensor, and that shared directories survive every crash (step 30)."""

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest

from raycheck.bucket.format import object_keys
from raycheck.bucket.protocol.removal.prune_and_sweep import GRACE_S, plan_sweep, prune, sweep
from raycheck.bucket.protocol.repair import repair
from raycheck.bucket.protocol.sharing.base_run import reserve
from raycheck.bucket.protocol.sharing.fork import fork
from raycheck.bucket.protocol.sharing.holds import HOLD_GRACE_S, borrow, drop_orphans
from raycheck.bucket.protocol.swap import Register
from raycheck.bucket.reading import Checkpoint, list_directories, read_latest
from raycheck.bucket.store import Got
from raycheck.bucket.store.interface import MAX_WHOLE_BYTES, Written
from raycheck.errors import DeniedError, NotFoundError, RaycheckError, StoreError
from tests.support.histories.crash_enumeration import Work, claim, restore, run, state_of
from tests.support.histories.invariants import assert_invariants
from tests.support.histories.order_enumeration import Orders
from tests.support.histories.stepped_processes import Clock, simulated
from tests.support.histories.two_runs import HOME, Placed
from tests.support.samples.sample_checkpoints import Driver, everything, write_checkpoint
from tests.support.servers.fault_injection import Wire, World, Write

SOURCE, THIRD = "runs/source", "teams/x/third"


@pytest.fixture(autouse=True)
def clock() -> Iterator[Clock]:
    with simulated() as clock:
        yield clock


def at(world: World, place: str) -> Placed:
    return Placed(world.open(), place)


_started = itertools.count()


def trains(store: Placed, owner: str, *, base: bool = False) -> str:
    """Claim, restore by reading all bytes, save in full or with the restored directories, keep one, prune and sweep."""
    driver = Driver(store, f"{owner}-{next(_started)}", "c")
    attempt, entry = claim(driver, f"{driver.me.owner}-group")
    manifest = restore(Checkpoint(store, entry)) if entry else None
    saved = driver.save(attempt.number, 1, keep_last=1, base=manifest if base else None)
    prune(driver.register, grace_s=0.0)
    sweep(store, also_whole=True)
    return saved.key


def source_world() -> World:
    """Make a bucket with one run, at SOURCE, which has saved twice and keeps both."""
    world = World()
    driver = Driver(at(world, SOURCE), "sue", "c")
    attempt, _ = claim(driver, "g1")
    for save in (1, 2):
        driver.save(attempt.number, save)
    return world


def forked_world() -> World:
    world = source_world()
    forks(world.open())
    return world


def forks(wire: Wire, run_id: str = "forked") -> tuple[str, ...]:
    fork(Placed(wire, SOURCE), Placed(wire, HOME), run_id=run_id)
    return ()


def read_head(store: Placed) -> None:
    body = read_latest(store)
    restore(Checkpoint(store, body.entry(body.head)))


def assert_shared_and_given_back(world: World) -> None:
    """Assert that both runs continue whatever happened before, nothing shared is lost, and everything is returned."""
    trains(at(world, SOURCE), "sam")
    if at(world, HOME).list_names("checkpoints/"):
        # A fork whose `latest` was never written, or was lost, keeps what it may need.
        assert not world.objects.get("latest") or read_head(at(world, HOME)) is None
    forks(world.open(), "again")
    trains(at(world, SOURCE), "sue2")
    read_head(at(world, HOME))
    assert_invariants(at(world, HOME))

    trains(at(world, HOME), "tom")  # in full: nothing of the source is needed any more
    world.inner.at += HOLD_GRACE_S + 1
    trains(at(world, SOURCE), "una")

    for place in (HOME, SOURCE):
        body = assert_invariants(at(world, place))
        assert (body.holds, body.loans) == ((), ()), place
        assert {str(name) for name in list_directories(at(world, place))} <= body.held(), place
    assert not list(at(world, SOURCE).list_objects(object_keys.HOLDS_PREFIX))


def test_a_fork_in_one_bucket_moves_no_tensor_and_lists_what_it_borrows() -> None:
    world = source_world()
    before = dict(world.objects)

    done = fork(at(world, SOURCE), at(world, HOME), run_id="forked")

    new = set(world.objects) - set(before)
    head = read_latest(at(world, SOURCE)).head
    assert not [key for key in new if key.endswith((".distcp", ".metadata"))]
    assert (done.source, done.borrowed_bytes) == (head, 64 + len(f"metadata of {head}"))
    body = read_latest(at(world, HOME))
    assert body.entry(body.head).refs == (f"../source/{head}",)
    assert [(loan.source, loan.directories) for loan in body.loans] == [("../source", (head,))]
    (hold,) = read_latest(at(world, SOURCE)).holds
    assert (hold.holder, hold.run_id, hold.directories, hold.is_confirmed) == ("../fork", "forked", (head,), True)
    assert_shared_and_given_back(world)


class Counting(Placed):
    """A store that counts how often `latest` of each place was read and written."""

    calls: list[tuple[str, str]]

    def __init__(self, inner: Wire, place: str, calls: list[tuple[str, str]]) -> None:
        super().__init__(inner, place)
        self.calls = calls

    def _rerooted(self, way: str, uri: str) -> Placed:
        return Counting(self.inner, super()._rerooted(way, uri).place, self.calls)

    def get(self, key: str, max_bytes: int = MAX_WHOLE_BYTES) -> Got:
        self._note("GET", key)
        return super().get(key, max_bytes)

    def put_if_match(self, key: str, data: bytes, version: str) -> Written:
        self._note("PUT", key)
        return super().put_if_match(key, data, version)

    def _note(self, verb: str, key: str) -> None:
        if key == object_keys.LATEST_KEY:
            self.calls.append((verb, self.place))


def test_a_fork_reads_the_latest_of_each_lender_once_and_swaps_what_it_has_read() -> None:
    world, calls = source_world(), list[tuple[str, str]]()
    key = str(read_latest(at(world, SOURCE)).live[0].key)

    fork(
        Counting(world.open(), SOURCE, calls),
        Counting(world.open(), HOME, calls),
        run_id="forked",
        key=lambda body: body.live[0].key,
    )

    assert [call for call in calls if call[1] == SOURCE] == [("GET", SOURCE), ("PUT", SOURCE), ("PUT", SOURCE)]
    assert read_latest(at(world, HOME)).live[0].refs == (f"../source/{key}",)
    calls.clear()
    fork(Counting(world.open(), HOME, calls), Counting(world.open(), THIRD, calls), run_id="third")
    for place in (SOURCE, HOME):  # the fork of a fork holds what it uses in both, and confirms what its loans name
        reads = [call for call in calls if call == ("GET", place)]
        assert len(reads) == 1, place
    assert_invariants(at(world, THIRD))


def test_a_fork_whose_lender_is_swapped_meanwhile_reads_it_again_and_loses_nothing() -> None:
    world, calls = source_world(), list[tuple[str, str]]()

    class Overtaken(Counting):
        """Has the source prune and sweep itself between the fork's reading and its first swap."""

        def _rerooted(self, way: str, uri: str) -> Placed:
            return Overtaken(self.inner, super()._rerooted(way, uri).place, self.calls)

        def put_if_match(self, key: str, data: bytes, version: str) -> Written:
            if not any(verb == "PUT" for verb, _ in self.calls):
                self._note("PUT", key)
                Register(at(world, SOURCE)).edit(lambda body, _: replace(body, counter=body.counter), what="another")
            return super().put_if_match(key, data, version)

    fork(Placed(world.open(), SOURCE), Overtaken(world.open(), HOME, calls), run_id="forked")

    assert [verb for verb, place in calls if place == SOURCE].count("GET") == 2, "the first swap was refused"
    (hold,) = read_latest(at(world, SOURCE)).holds
    assert hold.is_confirmed
    assert_shared_and_given_back(world)


def test_the_source_s_retention_drops_the_checkpoint_and_keeps_the_borrowed_objects() -> None:
    world = forked_world()
    head = read_latest(at(world, SOURCE)).head

    trains(at(world, SOURCE), "sam")

    assert read_latest(at(world, SOURCE)).entry(head) is None
    assert at(world, SOURCE).full(object_keys.manifest_key(head)) not in world.objects
    read_head(at(world, HOME))
    assert_shared_and_given_back(world)


def test_a_fork_of_a_fork_holds_what_it_uses_where_it_lies() -> None:
    world = forked_world()

    fork(at(world, HOME), at(world, THIRD), run_id="third")

    body = read_latest(at(world, THIRD))
    assert [loan.source for loan in body.loans] == ["../../../runs/source"]
    assert [hold.holder for hold in read_latest(at(world, SOURCE)).holds] == ["../fork", "../../teams/x/third"]
    trains(at(world, HOME), "tom")  # the fork in between needs nothing of the source any more
    trains(at(world, SOURCE), "sam")
    read_head(at(world, THIRD))
    world.inner.at += HOLD_GRACE_S + 1
    drop_orphans(Register(at(world, HOME)))
    prune(Register(at(world, HOME)))
    assert read_latest(at(world, HOME)).holds == (), "what was held for a moment, while the third run was made"
    trains(at(world, THIRD), "uma")
    trains(at(world, SOURCE), "sue3")
    assert read_latest(at(world, SOURCE)).holds == ()


def test_a_checkpoint_that_goes_on_with_borrowed_directories_keeps_them() -> None:
    world = forked_world()

    trains(at(world, HOME), "tom", base=True)
    trains(at(world, SOURCE), "sam")

    assert read_latest(at(world, HOME)).loans
    read_head(at(world, HOME))
    assert_shared_and_given_back(world)


def test_a_source_whose_latest_is_lost_is_repaired_with_its_holds() -> None:
    world = forked_world()
    trains(at(world, SOURCE), "sam")
    world.apply(Write("delete", at(world, SOURCE).full("latest")))

    repair(at(world, SOURCE))

    trains(at(world, SOURCE), "sue2")
    read_head(at(world, HOME))
    assert_shared_and_given_back(world)


def test_a_fork_whose_latest_is_lost_is_repaired_with_its_loans() -> None:
    world = forked_world()
    world.apply(Write("delete", "latest"))
    world.inner.at += 10 * HOLD_GRACE_S
    trains(at(world, SOURCE), "sam")

    repair(at(world, HOME))

    trains(at(world, SOURCE), "sue2")
    read_head(at(world, HOME))
    assert [loan.source for loan in read_latest(at(world, HOME)).loans] == ["../source"]
    assert_shared_and_given_back(world)


def test_a_hold_without_a_run_is_dropped_after_a_day_and_not_before() -> None:
    world = dead_fork_world()
    register = Register(at(world, SOURCE))
    held = read_latest(register.store).holds
    assert len(held) == 1
    world.inner.at += HOLD_GRACE_S - 1
    assert drop_orphans(register) == ()

    world.inner.at += 2

    assert drop_orphans(register) == held
    assert read_latest(register.store).holds == ()


def test_a_run_that_cannot_be_read_keeps_its_hold() -> None:
    world = forked_world()
    world.inner.at += 10 * HOLD_GRACE_S
    for data in (b"torn", b""):
        world.inner.put("latest", data)
        assert drop_orphans(Register(at(world, SOURCE))) == ()


def test_a_run_that_may_not_be_read_keeps_its_hold_and_does_not_end_a_sweep() -> None:
    class Refused(Placed):
        def get(self, key: str, max_bytes: int = MAX_WHOLE_BYTES) -> Got:
            raise DeniedError(f"{self.uri}: {key} may not be read")

    class Source(Placed):
        def _rerooted(self, way: str, uri: str) -> Placed:
            return Refused(self.inner, super()._rerooted(way, uri).place)

    world = forked_world()
    world.inner.at += 10 * HOLD_GRACE_S
    source = Source(world.open(), SOURCE)

    assert sweep(source) == ()

    assert len(read_latest(source).holds) == 1


def test_a_fork_that_was_deleted_by_hand_gives_everything_back() -> None:
    world = forked_world()
    for key in [key for key in everything(world.inner) if not key.startswith("elsewhere/")]:
        world.inner.delete(key)

    (hold,) = drop_orphans(Register(at(world, SOURCE)))

    assert hold.holder == "../fork"
    trains(at(world, SOURCE), "sam")
    assert len(list_directories(at(world, SOURCE))) == 1


def test_a_dropped_checkpoint_cannot_be_borrowed() -> None:
    world = source_world()
    gone = list_directories(at(world, SOURCE))[0]
    trains(at(world, SOURCE), "sam")

    with pytest.raises(NotFoundError):
        fork(at(world, SOURCE), at(world, HOME), run_id="forked", key=str(gone))

    assert "latest" not in world.objects


def after_a_fault_at_any_call(begin: World, work: Work, clock: Clock) -> tuple[list[World], int]:
    """Run the work with every fault at every call, with the process dying there and with it going on; what is late
    arrives or never does. Returns one of each kind of buckets that this leaves, and of how many ends they are."""
    ends, kinds = 0, dict[object, World]()
    for number, call in enumerate(run(begin.copy(), work).calls):
        for mode in (None, *call.modes[1:]):
            for dies_at in (None, number + 1):
                clock.next_id = 1_000  # equal ends are equal to the byte
                end = run(begin.copy(), work, fault=(number, mode), dies_at=dies_at)
                for lands in (True, False) if end.world.late else (False,):
                    world = end.world.copy()
                    while lands and world.late:
                        world.land()
                    world.late.clear()
                    kinds.setdefault((state_of(world), world.inner.at), world)
                    ends += 1
    clock.next_id = 1_000_000
    return list(kinds.values()), ends


@pytest.mark.enumeration
def test_a_fault_at_any_call_of_a_fork_loses_nothing_of_either_run(clock: Clock) -> None:
    worlds, ends = after_a_fault_at_any_call(source_world(), forks, clock)
    for world in worlds:
        assert_shared_and_given_back(world)
    assert ends >= 130
    assert len(worlds) >= 10


def gives_back(wire: Wire) -> tuple[str, ...]:
    """Continue training in the fork without the borrowed directories, and return them."""
    store = Placed(wire, HOME)
    driver = Driver(store, "tom", "c")
    attempt, _ = claim(driver, "tom-group")
    driver.save(attempt.number, 1, keep_last=1)
    for _ in range(2):
        try:
            prune(driver.register, grace_s=0.0)
        except StoreError:
            continue
    return ()


@pytest.mark.enumeration
def test_a_fault_at_any_call_that_gives_back_loses_nothing_of_either_run(clock: Clock) -> None:
    worlds, ends = after_a_fault_at_any_call(forked_world(), gives_back, clock)
    for world in worlds:
        assert_shared_and_given_back(world)
    assert ends >= 100
    assert len(worlds) >= 10


def training_world() -> World:
    """Make a bucket in which the run at SOURCE has saved, and the run at HOME is claimed but has saved nothing."""
    world = source_world()
    claim(Driver(at(world, HOME), "tom", "c"), "tom-group")
    return world


def uses_base(wire: Wire, save: int = 1) -> tuple[str, ...]:
    """Hold and reserve the head's directory of the base, and commit a checkpoint that refers to it. Step 39."""
    store, base = Placed(wire, HOME), Placed(wire, SOURCE)
    driver = Driver(store, "tom", "c")
    body = read_latest(base)
    manifest = Checkpoint(base, body.entry(body.head)).read_manifest()
    loans = borrow(store, "../source", {body.head}, run_id=read_latest(store).run_id, renews=True)
    record = replace(manifest.components[0], checkpoint=f"../source/{body.head}")
    reserve(driver.register, driver.me, [record], loans)
    mine = write_checkpoint(store, attempt=1, save=save, base=replace(manifest, components=(record,)))
    assert driver.commit(mine, keep_last=1)
    return (mine.key,)


def assert_base_is_kept_or_not_needed(world: World) -> None:
    """Assert that whatever was committed can be read after everybody has pruned and swept, and all ends well."""
    for at_s in (0.0, HOLD_GRACE_S + 1):
        world.inner.at += at_s
        trains(at(world, SOURCE), "sam")
        if read_latest(at(world, HOME)).head is not None:
            read_head(at(world, HOME))
    trains(at(world, HOME), "uma")
    trains(at(world, HOME), "vic")
    assert_invariants(at(world, HOME))
    world.inner.at += HOLD_GRACE_S + 1
    for place in (HOME, SOURCE, HOME, SOURCE):
        sweep(at(world, place), also_whole=True)
        prune(Register(at(world, place)), grace_s=0.0)
    for place in (HOME, SOURCE):
        body = assert_invariants(at(world, place))
        assert (body.holds, body.loans) == ((), ()), place
    assert not list(at(world, SOURCE).list_objects(object_keys.HOLDS_PREFIX))


def test_a_run_that_is_trained_uses_a_directory_of_its_base() -> None:
    world = training_world()

    (name,) = uses_base(world.open())

    body = read_latest(at(world, HOME))
    assert (body.head, body.holds) == (name, ())
    assert [loan.source for loan in body.loans] == ["../source"]
    (hold,) = read_latest(at(world, SOURCE)).holds
    assert (hold.holder, hold.is_confirmed, hold.renewals) == ("../fork", False, 1)
    assert_base_is_kept_or_not_needed(world)


@pytest.mark.enumeration
def test_a_fault_at_any_call_of_a_run_that_uses_a_base_loses_nothing_of_either(clock: Clock) -> None:
    worlds, ends = after_a_fault_at_any_call(training_world(), uses_base, clock)
    for world in worlds:
        assert_base_is_kept_or_not_needed(world)
    assert ends >= 100
    assert len(worlds) >= 10


def returning_world() -> World:
    """Make a bucket whose run at HOME has used the base, no longer needs it, and has not returned it."""
    world = training_world()
    uses_base(world.open())
    driver = Driver(at(world, HOME), "tom", "c")
    driver.save(1, 2, keep_last=1)
    world.inner.at += 10 * GRACE_S
    return world


def uses_base_again(wire: Wire) -> tuple[str, ...]:
    return uses_base(wire, save=3)


def gives_back_what_it_has(wire: Wire) -> tuple[str, ...]:
    prune(Register(Placed(wire, HOME)))
    return ()


@pytest.mark.enumeration
@pytest.mark.parametrize(
    "other", ["its own prune", pytest.param("retention", marks=pytest.mark.slow), "sweep of orphans"]
)
def test_a_run_that_uses_a_base_beside_anybody_in_any_order_loses_nothing(clock: Clock, other: str) -> None:
    world, mine, theirs = {
        "its own prune": (returning_world, uses_base_again, gives_back_what_it_has),
        "retention": (training_world, uses_base, source_trains),
        "sweep of orphans": (training_world, uses_base, orphans_are_dropped),
    }[other]
    orders, kinds = Orders(world, (mine, theirs), clock, max_switches=2), dict[object, World]()
    for after, outcomes in orders.all():
        assert all(not isinstance(it, BaseException) or isinstance(it, RaycheckError) for it in outcomes), outcomes
        kinds.setdefault((state_of(after), after.inner.at), after)
    for after in kinds.values():
        assert_base_is_kept_or_not_needed(after)
    assert orders.count >= 3


def source_trains(wire: Wire) -> tuple[str, ...]:
    """Drop the checkpoint that is being forked, and delete it."""
    trains(Placed(wire, SOURCE), "sam")
    return ()


def orphans_are_dropped(wire: Wire) -> tuple[str, ...]:
    drop_orphans(Register(Placed(wire, SOURCE)))
    return ()


@pytest.mark.enumeration
@pytest.mark.parametrize(
    "other",
    [
        pytest.param(source_trains, marks=pytest.mark.slow, id="retention"),
        pytest.param(orphans_are_dropped, id="sweep of orphans"),
    ],
)
def test_a_fork_beside_its_source_s_retention_in_any_order_loses_nothing(clock: Clock, other) -> None:
    orders = Orders(aged_world if other is orphans_are_dropped else source_world, (forks, other), clock, max_switches=2)
    kinds = dict[object, World]()
    for world, outcomes in orders.all():
        assert all(not isinstance(outcome, BaseException) or isinstance(outcome, RaycheckError) for outcome in outcomes)
        if "latest" in world.objects and not isinstance(outcomes[0], RaycheckError):
            read_head(at(world, HOME))
        kinds.setdefault((state_of(world), world.inner.at), world)
    for world in kinds.values():
        assert_shared_and_given_back(world)
    assert orders.count >= 3


def dead_fork_world() -> World:
    """Make a source that holds something for a fork that died before it wrote anything."""
    calls = run(source_world(), forks).calls
    first = next(number for number, call in enumerate(calls) if call.is_write and not call.key.startswith("elsewhere/"))
    return run(source_world(), lambda wire: forks(wire, "dead"), fault=(first, None)).world


def aged_world() -> World:
    """Make a bucket whose fork died long ago. Somebody may fork to the same place again."""
    world = dead_fork_world()
    world.inner.at += 2 * HOLD_GRACE_S
    return world


def test_nothing_else_is_swept_of_a_source() -> None:
    world = forked_world()

    assert plan_sweep(at(world, SOURCE)) == ()
