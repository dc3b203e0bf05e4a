"""Tests a crash, and every other fault, at every store call of every operation, each followed by a restart (I5).

crash_enumeration.py says what is enumerated and what a restart must find. The lower bounds in the tests notice when an
enumeration becomes smaller.
"""

from collections.abc import Iterator
from contextlib import nullcontext, suppress
from uuid import uuid4

import pytest

from raycheck.bucket.format.label import Label
from raycheck.bucket.format.object_keys import CheckpointName
from raycheck.bucket.protocol import name_and_score
from raycheck.bucket.protocol.damage import go_back
from raycheck.bucket.protocol.pin_and_evict import pin
from raycheck.bucket.protocol.removal.prune_and_sweep import prune, sweep
from raycheck.bucket.protocol.repair import repair
from raycheck.bucket.protocol.rewind import rewind
from raycheck.bucket.protocol.sharing.fork import fork
from raycheck.bucket.protocol.swap import Register
from raycheck.bucket.reading import Checkpoint, read_latest
from raycheck.bucket.store import open_store
from raycheck.bucket.store.address import join_uri
from raycheck.errors import ConfigError, ConflictError, SaveFailedError, StoreError
from tests.bucket.conftest import share
from tests.support.histories.crash_enumeration import (
    Restarted,
    Scenario,
    claim,
    explore,
    only_train,
    restarting,
    restore,
    run,
)
from tests.support.histories.invariants import assert_invariants, assert_write
from tests.support.histories.small_pages import small_pages
from tests.support.histories.stepped_processes import Clock, simulated
from tests.support.samples.sample_checkpoints import Driver, write_checkpoint
from tests.support.samples.sample_runs import (
    GRACE_S,
    TORN,
    WHOLE,
    B,
    F,
    current,
    damaged,
    finished,
    lost,
    new,
    old,
    rolled_back,
)
from tests.support.servers.fault_injection import Mode, Wire, World

pytestmark = pytest.mark.enumeration


@pytest.fixture(autouse=True, params=["", pytest.param("pages", marks=pytest.mark.slow)])
def clock(request: pytest.FixtureRequest) -> Iterator[Clock]:
    """Simulate time. "pages": all but one of the checkpoints are in pages."""
    with simulated() as clock, small_pages() if request.param else nullcontext():
        yield clock


# --- what is done ---


def twice(work):
    """Repeat an operation in this process after the store has failed, as ranks and Ray do."""
    try:
        return work()
    except StoreError:
        return work()


def claims(owner: str = "ann", group: str = "g3"):
    def work(wire: Wire) -> tuple[str, ...]:
        driver = Driver(wire, owner, "c2")
        twice(lambda: claim(driver, group))
        return ()

    return work


def takes_over(wire: Wire) -> tuple[str, ...]:
    driver = Driver(wire, coordinator="c2")
    twice(lambda: driver.take_over("g2"))
    return saves(2, driver)


def saves(number: int, driver: Driver, *, base=None, **rules) -> tuple[str, ...]:
    """Make two saves. A save that fails does not keep the next one from being made (I10)."""
    done = []
    for save in (number + 1, number + 2):
        try:
            manifest = write_checkpoint(driver.store, attempt=2, save=save, base=base, world_size=2)
            assert driver.commit(manifest, **rules), "nothing was saved after it"
            done.append(manifest.key)
        except (StoreError, SaveFailedError):
            continue
    return tuple(done)


def saves_in_full(wire: Wire) -> tuple[str, ...]:
    return saves(2, current(wire), keep_last=1)


def saves_with_a_reference(wire: Wire) -> tuple[str, ...]:
    driver = current(wire)
    head = driver.look().entry(F)
    base = only_train(Checkpoint(driver.store, head).read_manifest())
    return saves(2, driver, base=base, keep_last=1)


def prunes(wire: Wire) -> tuple[str, ...]:
    register = Register(wire)
    twice(lambda: prune(register, grace_s=GRACE_S))
    return ()


def sweeps(wire: Wire) -> tuple[str, ...]:
    twice(lambda: sweep(wire, also_whole=True))
    return ()


def rewinds(wire: Wire) -> tuple[str, ...]:
    rewind(Register(wire), B)
    return ()


def goes_back(wire: Wire) -> tuple[str, ...]:
    """Let a group find the head damaged, restore an earlier checkpoint, and continue training."""
    driver = Driver(wire, "ann", "c2")
    attempt, entry = twice(lambda: claim(driver, "g3"))
    instead = twice(lambda: go_back(driver.register, driver.me, group="g3", key=entry.key, problem="a proof"))
    assert CheckpointName.parse(instead.key) < CheckpointName.parse(entry.key)
    manifest = write_checkpoint(
        wire, attempt=attempt.number, save=1, base=only_train(restore(Checkpoint(wire, instead)))
    )
    assert driver.commit(manifest, keep_last=1)
    return (manifest.key,)


def finishes(wire: Wire) -> tuple[str, ...]:
    """Finish the live group, whose coordinator was started again on the way."""
    twice(lambda: current(wire).finish("g2"))
    driver = Driver(wire, coordinator="c2")
    twice(lambda: driver.take_over("g2"))
    twice(lambda: driver.finish("g2"))
    return ()


def pins(wire: Wire) -> tuple[str, ...]:
    pin(Register(wire), F)
    pin(Register(wire), B, pinned=False)
    return ()


def names_and_scores(wire: Wire) -> tuple[str, ...]:
    """Name, rename, move and take names, and score: each swap by a process that has seen nothing before."""
    name_and_score.name(Register(wire), B, Label(name="first", expire_after_s=1e6))
    name_and_score.rename(Register(wire), "first", "second")
    name_and_score.name(Register(wire), F, Label(name="second"))  # of the same step, so it moves
    name_and_score.score(Register(wire), B, {"mmlu": 0.5})
    name_and_score.unname(Register(wire), "second")
    assert not any(entry.name for entry in read_latest(wire).live)
    return ()


def saves_by_name(wire: Wire) -> tuple[str, ...]:
    """Commit one step twice under the same name, and another step that requests the name and does not get it."""
    driver, done = current(wire), []
    for save, step in ((3, 30), (4, 30), (5, 50)):
        manifest = write_checkpoint(wire, attempt=2, save=save, step=step, name="kept", world_size=2)
        with suppress(StoreError, SaveFailedError):
            entry = driver.commit(manifest, keep_last=1)
            assert entry is not None
            assert (entry.name, entry.pinned) == (("kept", False) if step == 30 else (entry.name, entry.name is None))
            done.append(manifest.key)
    return tuple(done)


def reads(wire: Wire) -> tuple[str, ...]:
    body = read_latest(wire)
    try:
        restore(Checkpoint(wire, body.entry(body.head)))
    finally:
        assert not [call for call in wire.calls if call.is_write], "I8: readers never write"
    return ()


def lives(wire: Wire) -> tuple[str, ...]:
    """Play the whole life of a driver's coordinator: claim, restore, two saves, prune and sweep."""
    bob = Driver(wire, "bob")
    attempt, entry = claim(bob, "h1")
    base = only_train(restore(Checkpoint(wire, entry))) if entry else None
    done = []
    for save in (1, 2):
        manifest = write_checkpoint(wire, attempt=attempt.number, save=save, base=base)
        assert bob.commit(manifest, keep_last=1), "nothing was saved after it"
        done.append(manifest.key)
        with suppress(StoreError):
            prune(bob.register, grace_s=0.0)
    with suppress(StoreError):
        sweep(wire, also_whole=True)
    return tuple(done)


def repairs(wire: Wire) -> tuple[str, ...]:
    repair(wire)
    return ()


def repairs_until_sound(wire: Wire) -> None:
    for _ in range(3):
        try:
            repair(wire)
        except ConfigError:
            return
        except ConflictError:
            continue


def forks(wire: Wire) -> tuple[str, ...]:
    fork(Wire(old(), wire._ask), wire, run_id="a-forked-run")
    return ()


OPERATIONS = {
    "first claim": (Scenario(world=new, work=claims("ann", "g1"), is_new=True), 30),
    "first life": (Scenario(world=new, work=lives, owners=("bob", "zoe"), is_new=True), 600),
    "next group": (Scenario(world=old, work=claims(), head=F), 30),
    "other driver": (Scenario(world=old, work=claims("bob", "h1"), owners=("ann", "bob", "zoe")), 45),
    "take-over": (Scenario(world=old, work=takes_over), 350),
    "save": (Scenario(world=old, work=saves_in_full), 330),
    "save with a reference": (Scenario(world=old, work=saves_with_a_reference), 350),
    "prune": (Scenario(world=old, work=prunes, head=F), 100),
    "sweep": (Scenario(world=old, work=sweeps, head=F), 150),
    "rewind": (Scenario(world=old, work=rewinds), 80),
    "going back": (Scenario(world=old, work=goes_back), 220),
    "finish": (Scenario(world=old, work=finishes, head=F), 36),
    "finish of what goes on": (Scenario(world=finished, work=lives, owners=("ann", "bob", "zoe")), 1100),
    "rewind of what has finished": (Scenario(world=finished, work=rewinds), 80),
    "pin and unpin": (Scenario(world=old, work=pins, head=F), 35),
    "name and score": (Scenario(world=old, work=names_and_scores, head=F), 90),
    "save by name": (Scenario(world=old, work=saves_by_name), 400),
    "restore": (Scenario(world=old, work=reads, head=F), 2),
    "life": (Scenario(world=old, work=lives, owners=("ann", "bob", "zoe")), 1100),
    "repair of a lost latest": (Scenario(world=lost, work=repairs, again=repairs_until_sound, head=F), 30),
    "repair of a rolled back latest": (
        Scenario(world=rolled_back, work=repairs, again=repairs_until_sound, head=F),
        30,
    ),
    "repair of a damaged latest": (Scenario(world=damaged, work=repairs, again=repairs_until_sound, head=F), 30),
    "fork": (Scenario(world=new, work=forks, again=forks), 130),
}


SLOW = {"life", "first life", "finish of what goes on"}
"""What they consist of is enumerated by itself, and one of them on a real store."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in OPERATIONS]
)
def test_a_crash_or_a_fault_at_any_store_call_leaves_a_restorable_run(name, record_property):
    """I5. I1, I2, I3, I4 and I6 are asserted after every write."""
    scenario, floor = OPERATIONS[name]

    tally = explore(scenario)

    record_property("enumerated", str(tally))
    assert tally.restarts >= floor


@pytest.mark.parametrize(
    "work",
    [claims(), claims("zoe", "z1"), sweeps, rewinds, forks],
    ids=["claim", "new claim", "sweep", "rewind", "fork"],
)
@pytest.mark.parametrize("world", [lost, rolled_back, damaged])
def test_without_its_latest_a_run_is_neither_begun_anew_nor_swept(world, work):
    calls = run(world(), work).calls
    faults = [(number, mode) for number, call in enumerate(calls) for mode in call.modes]

    for fault in faults:
        end = run(world(), work, fault=fault)
        while end.world.late:
            end.world.land()

        assert end.world.bodies == []
        assert not [key for key in end.world.deleted if not key.startswith("probes/")]


def test_a_sweep_deletes_what_was_never_committed_and_leaves_the_evicted_their_grace():
    """I6: a sweep deletes nothing that can still be needed."""
    world = old()
    Driver(world.open()).claim("g3")  # from now on the attempt of E is over, too

    sweep(world.open(), also_whole=True)

    assert {key.split("/")[1] for key in world.deleted} == {TORN, WHOLE}
    assert world.inner.uploads == []


def test_a_repair_ends_with_the_error_of_a_store_that_failed_and_leaves_nothing_out():
    """If a repair left out a checkpoint that could not be read for a moment, the next sweep would delete it."""
    calls = run(lost(), repairs).calls

    for number, call in enumerate(calls):
        if call.verb == "put_if_absent" and call.key.startswith("pages/"):
            continue  # it is sent again
        end = run(lost(), repairs, fault=(number, Mode.FAIL_BEFORE))

        assert isinstance(end.outcome, StoreError), call
        assert end.world.bodies == []


# --- twice, and on real stores ---

TWICE = {name: operation for name, (operation, _) in OPERATIONS.items() if operation.work is not lives}


@pytest.mark.slow
@pytest.mark.parametrize("name", TWICE)
def test_a_crash_of_the_restart_after_a_crash_leaves_a_restorable_run(name, record_property):
    tally = explore(TWICE[name], depth=2)

    record_property("enumerated", str(tally))
    assert tally.restarts >= 30


@pytest.fixture(
    params=[pytest.param(item, marks=pytest.mark.slow) for item in (("file", 1), ("s3", 3))], ids=["file", "s3"]
)
def real(request, tmp_path, monkeypatch):
    """Return a function that makes a new empty store, and n: to save time, only every n-th fault is tried."""
    kind, every = request.param
    if kind == "file":
        return lambda: open_store(f"file://{tmp_path}/{uuid4().hex}"), every
    share(monkeypatch, request.getfixturevalue("s3_client"))
    bucket = request.getfixturevalue("s3")
    return lambda: open_store(join_uri(bucket, uuid4().hex)), every


def test_a_crash_or_a_fault_at_any_store_call_of_a_life_on_a_real_store_leaves_a_restorable_run(real):
    new_store, every = real

    def world() -> World:
        world = World(new_store())
        world.checks.append(assert_write)
        return world

    calls = run(world(), lives).calls
    faults = [(number, mode) for number, call in enumerate(calls) for mode in (None, *call.modes[1:])][::every]

    for fault in faults:
        end = run(world(), lives, fault=fault)
        restarted = run(end.world, restarting(Scenario(world=world, work=lives), "zoe", "r1"))
        while end.world.late:
            end.world.land()

        assert isinstance(restarted.outcome, Restarted), (fault, restarted.outcome)
        assert assert_invariants(end.world.inner).head == restarted.outcome.saved

    assert len(faults) >= 120 // every
