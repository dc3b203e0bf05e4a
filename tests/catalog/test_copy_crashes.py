"""A copy that dies at any call of either store, with its last write lost, late or applied unanswered.

At every moment the target holds the invariants; a repeat makes it whole; and a training that begins on it instead is
disturbed by nothing that arrives late.
"""

from collections.abc import Iterator
from contextlib import suppress
from threading import Event

import pytest

from raycheck.bucket.reading import Checkpoint, read_latest
from raycheck.catalog.copier import MirrorCopier
from raycheck.errors import ConfigError, FencedError, RaycheckError
from tests.support.histories.invariants import assert_invariants, assert_write
from tests.support.histories.stepped_processes import simulated
from tests.support.samples.sample_checkpoints import Driver
from tests.support.servers.fault_injection import Call, Crashed, Mode, Wire, World

pytestmark = pytest.mark.enumeration


@pytest.fixture(autouse=True)
def in_order(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("raycheck.bucket.protocol.object_copy.AT_ONCE", 1)
    monkeypatch.setattr("raycheck.catalog.copier.CHECKPOINTS_AT_ONCE", 1)
    with simulated():
        yield


def source_world() -> tuple[World, Driver]:
    world = World()
    driver = Driver(world.open())
    driver.claim("group")
    driver.save(1, 1)
    base = Checkpoint(driver.store, driver.look().live[0]).read_manifest()
    driver.save(1, 2, base=base, keep_last=1)
    driver.save(1, 3, keep_last=2)
    return world, driver


def target_world() -> World:
    world = World()
    world.checks.append(assert_write)
    return world


def copy(
    source: World, target: World, *, fault: tuple[int, Mode | None] | None = None, dies: bool = True
) -> list[Call]:
    """Copy as one process, which meets `fault` at its n-th call; None crashes it there, and so does the call after any
    other fault if it `dies`. Returns its calls. Raises what the copy raises."""
    calls: list[Call] = []

    def ask(call: Call) -> Mode:
        number = len(calls)
        calls.append(call)
        if fault is None or number < fault[0]:
            return Mode.APPLY
        if number == fault[0] and fault[1] is not None:
            return fault[1]
        if dies or fault[1] is None:
            raise Crashed
        return Mode.APPLY

    one, other = Wire(source, ask), Wire(target, ask)
    one.uri, other.uri = "memory://source", "memory://target"
    copier = MirrorCopier(one, other, stop=Event())
    copier.run()
    copier.delete_dropped(grace_s=0.0)
    return calls


def assert_whole(source: World, target: World) -> None:
    there, here = read_latest(source.inner), assert_invariants(target.inner)
    assert here is not None
    assert (here.head, here.live) == (there.head, there.live)


def faults(calls: list[Call]) -> Iterator[tuple[int, Mode | None, bool]]:
    for number, call in enumerate(calls):
        yield number, None, True
        for mode in call.modes[1:]:
            if mode is not Mode.STALE_LISTING:
                yield from ((number, mode, dies) for dies in (True, False))


@pytest.mark.parametrize(
    "is_second", [pytest.param(False, id="first"), pytest.param(True, id="repeated", marks=pytest.mark.slow)]
)
def test_a_copy_that_dies_anywhere_is_made_whole_by_a_repeat(is_second: bool) -> None:
    def begin() -> tuple[World, World]:
        (source, driver), target = source_world(), target_world()
        if is_second:
            copy(source, target)
            Driver(source.open(), "eve").claim("next")
            eve = Driver(source.open(), "eve")
            eve.save(2, 1, step=40, keep_last=2)
        del driver
        return source, target

    calls = copy(*begin())
    assert len(calls) > 20
    count = 0
    for number, mode, dies in faults(calls):
        source, target = begin()
        with suppress(Crashed, RaycheckError):  # whatever it came to, the bucket is what is looked at
            copy(source, target, fault=(number, mode), dies=dies)
        taken = target.copy()

        copy(source, target)
        assert_whole(source, target)
        while target.late:
            target.land()
        copy(source, target)
        assert_whole(source, target)
        assert_trainable(taken)
        count += 1
    assert count > 50


def assert_trainable(target: World) -> None:
    """Claim the target, save, and let what the dead copy has sent arrive: nothing is disturbed."""
    shown = read_latest(target.inner) if target.bodies else None
    zoe = Driver(target.open(), "zoe")
    try:
        attempt, entry = zoe.claim("there")
    except ConfigError:
        assert shown is not None
        assert shown.head is None, "only an unfinished copy is refused"
        return
    assert (entry.key if entry else None) == (shown.head if shown else None), "I7"
    if entry is None:
        return
    zoe.save(attempt.number, 1, step=90)
    while target.late:
        target.land()
    assert assert_invariants(target.inner).head.startswith("step-000000090")
    with pytest.raises(FencedError):
        Driver(target.open(), "ann").claim("group")
