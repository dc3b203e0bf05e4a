"""A copy, also one that follows, that dies at any call of either store, into a mirror from which others have forked.

A fork uses the mirror's directories. At every moment it reads all of its bytes, whatever the source has dropped and
whatever arrives late; and when it has given them back, the next copy deletes them.
"""

import itertools
from collections.abc import Callable
from contextlib import suppress
from threading import Event

import pytest

from raycheck.bucket.format import object_keys
from raycheck.bucket.protocol.removal.prune_and_sweep import prune
from raycheck.bucket.protocol.sharing.fork import fork
from raycheck.bucket.reading import Checkpoint, list_directories, read_latest
from raycheck.catalog.copier import MirrorCopier
from raycheck.catalog.follow import Follower
from raycheck.errors import NotFoundError, RaycheckError
from tests.catalog.test_copy_crashes import faults, in_order
from tests.support.histories.crash_enumeration import restore
from tests.support.histories.invariants import assert_invariants, assert_write, load
from tests.support.histories.two_runs import HOME, Placed
from tests.support.samples.sample_checkpoints import Driver
from tests.support.servers.fault_injection import Call, Crashed, Mode, Wire, World, Write

pytestmark = pytest.mark.enumeration
__all__ = ["in_order"]  # for every test here: one object at a time, so that the calls have an order

FORK = "runs/its-fork"
Ask = Callable[[Call], Mode]


def at(world: World, place: str, ask: Ask = lambda _: Mode.APPLY) -> Placed:
    """Return the run at a place of the mirror's bucket, by a wire of its own. The mirror is at HOME."""
    placed = Placed(Wire(world, ask), place)
    placed.uri = f"memory://target/{place}"
    return placed


def source_world() -> World:
    world = World()
    driver = Driver(world.open())
    driver.claim("group")
    driver.save(1, 1)
    base = Checkpoint(driver.store, driver.look().live[0]).read_manifest()
    driver.save(1, 2, base=base, keep_last=1)
    return world


def trains_on(source: World) -> None:
    """Have the source commit twice more, and drop all that was there before."""
    eve = Driver(source.open(), "eve")
    eve.claim("next")
    eve.save(2, 1, step=40, keep_last=1)
    eve.save(2, 2, step=50, keep_last=1)


def target_world() -> World:
    world = World()

    def check(world: World, write: Write) -> None:
        if not write.key.startswith(("elsewhere/", object_keys.HOLDS_PREFIX)):
            assert_write(world, write)
        name = object_keys.checkpoint_of(write.key)
        if write.verb == "delete" and name and write.key != object_keys.manifest_key(str(name)):
            held = {directory for hold in load(world.bodies[-1]).holds for directory in hold.directories}
            assert str(name) not in held, f"{write.key} is held for the fork"

    world.checks.append(check)
    return world


class Process:
    """Runs one process that meets `fault` at its n-th call; None crashes it there, and so does the call after any other
    fault if it `dies`. before: called before each call, with its number. Remembers its calls."""

    def __init__(
        self,
        fault: tuple[int, Mode | None] | None = None,
        *,
        dies: bool = True,
        before: Callable[[int], None] = lambda _: None,
    ) -> None:
        self.calls: list[Call] = []
        self._fault, self._dies, self._before = fault, dies, before

    def ask(self, call: Call) -> Mode:
        number = len(self.calls)
        self.calls.append(call)
        self._before(number)
        if self._fault is None or number < self._fault[0]:
            return Mode.APPLY
        if number == self._fault[0] and self._fault[1] is not None:
            return self._fault[1]
        if self._dies or self._fault[1] is None:
            raise Crashed
        return Mode.APPLY

    def copier(self, source: World, target: World) -> MirrorCopier:
        one = Wire(source, self.ask)
        one.uri = "memory://source"
        return MirrorCopier(one, at(target, HOME, self.ask), stop=Event())

    def copy(self, source: World, target: World) -> list[Call]:
        copier = self.copier(source, target)
        copier.run()
        copier.delete_dropped(grace_s=0.0)
        return self.calls

    def follow(self, source: World, target: World) -> list[Call]:
        """Look, have the source train on, and look again until the mirror shows it, as `raycheck cp --follow` does."""
        seconds = itertools.count(step=1000.0)  # each look deletes what was dropped
        copier = self.copier(source, target)
        follower = Follower(
            copier,
            every_s=0.001,
            until_finished=False,
            news=lambda _: None,
            stop=Event(),
            grace_s=0.0,
            monotonic=lambda: next(seconds),
        )
        for has_moved in (False, True):
            if has_moved:
                trains_on(source)
            for _ in range(3):
                try:
                    follower.look()
                    break
                except RaycheckError:  # the next look begins the round anew
                    continue
        return self.calls


def forked_mirror() -> tuple[World, World]:
    """Make a source, its mirror, and a fork of the mirror's head, which uses directories of two checkpoints there."""
    source, target = source_world(), target_world()
    Process().copy(source, target)
    fork(at(target, HOME), at(target, FORK), run_id="forked")
    return source, target


def dropped_in_the_source() -> tuple[World, World]:
    source, target = forked_mirror()
    trains_on(source)
    return source, target


def assert_fork_whole(target: World) -> None:
    """Assert that the fork has every byte of its head, and that the mirror holds what it uses."""
    store = at(target, FORK)
    body = read_latest(store)
    restore(Checkpoint(store, body.entry(body.head)))
    (loan,) = body.loans
    assert set(loan.directories) <= read_latest(at(target, HOME)).held()


def assert_good(source: World, target: World) -> None:
    """Assert that a repeat makes the mirror whole beside the fork, and that all is deleted once the fork is done."""
    assert_fork_whole(target)
    Process().copy(source, target)
    while target.late:
        target.land()
        assert_fork_whole(target)
    Process().copy(source, target)
    there, here = read_latest(source.inner), assert_invariants(at(target, HOME))
    assert here is not None
    assert (here.head, here.live) == (there.head, there.live)
    assert_fork_whole(target)

    tom = Driver(at(target, FORK), "tom")
    attempt, _ = tom.claim("tom")
    tom.save(attempt.number, 1, step=90, keep_last=1)
    prune(tom.register, grace_s=0.0)
    Process().copy(source, target)
    body = read_latest(at(target, HOME))
    assert body.holds == ()
    assert {str(name) for name in list_directories(at(target, HOME))} == body.held()


def explore(begin: Callable[[], tuple[World, World]], verb: str, *, crashes_only: bool) -> int:
    """Try every fault of the operation. Returns how many there were."""
    calls = getattr(Process(), verb)(*begin())
    count = 0
    for number, mode, dies in faults(calls):
        if crashes_only and mode is not None:
            continue
        source, target = begin()
        with suppress(Crashed, RaycheckError):  # whatever it came to, the bucket is what is looked at
            getattr(Process((number, mode), dies=dies), verb)(source, target)
        if not read_latest(source.inner).head.startswith("step-000000050"):
            trains_on(source)
        assert_good(source, target)
        count += 1
    return count


@pytest.mark.parametrize(
    "crashes_only", [pytest.param(True, id="crashes"), pytest.param(False, id="all faults", marks=pytest.mark.slow)]
)
def test_a_copy_that_fails_anywhere_loses_nothing_that_a_fork_of_the_mirror_uses(crashes_only: bool) -> None:
    assert explore(dropped_in_the_source, "copy", crashes_only=crashes_only) >= 29


@pytest.mark.slow
def test_a_follow_that_fails_anywhere_loses_nothing_that_a_fork_of_the_mirror_uses() -> None:
    assert explore(forked_mirror, "follow", crashes_only=False) > 200


@pytest.mark.parametrize("dies", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_fork_that_begins_at_any_moment_of_a_copy_loses_nothing(dies: bool) -> None:
    """It uses what the copy is about to delete, or is refused. The copy goes on, or `dies` two calls later."""

    def begin() -> tuple[World, World]:
        source, target = source_world(), target_world()
        Process().copy(source, target)
        trains_on(source)
        return source, target

    calls = Process().copy(*begin())
    outcomes = set()
    for moment in range(len(calls)):
        source, target = begin()

        def before(number: int, moment: int = moment, target: World = target) -> None:
            if number == moment:
                with suppress(NotFoundError):
                    fork(at(target, HOME), at(target, FORK), run_id="forked")

        fault = (moment + 2, None) if dies else None
        with suppress(Crashed):
            Process(fault, before=before).copy(source, target)
        if f"elsewhere/{FORK}/latest" in target.objects:
            outcomes.add(read_latest(at(target, FORK)).live[0].step)
            assert_good(source, target)
    assert outcomes >= {20, 50}, "of what the source had dropped, and of what has come"


def test_damage_in_the_mirror_is_found_by_the_fork() -> None:
    """So that the tests above can fail."""
    _, target = dropped_in_the_source()
    shards = [key for key in target.objects if key.endswith("distcp") and not key.startswith("elsewhere/")]
    for key in shards:
        target.inner.delete(key)

    with pytest.raises(NotFoundError, match="no object"):
        assert_fork_whole(target)
