"""The tools that the tests of crashes and of histories stand on: each fault is what it says, and a bug is seen."""

from pathlib import Path

import pytest

from raycheck.bucket.store.interface import Buffer, Written
from raycheck.errors import ConflictError, StoreError
from tests.support.histories.invariants import assert_write
from tests.support.histories.order_enumeration import Orders
from tests.support.histories.stepped_processes import Task, play, simulated
from tests.support.processes.virtual_environments import prepare_venv
from tests.support.samples.sample_checkpoints import Driver
from tests.support.servers.fault_injection import Call, Crashed, Mode, Wire, World
from tests.support.servers.memory_store import DictStore


def puts_and_tidies(wire: Wire) -> str:
    try:
        wire.put("a", b"12345678")
        return "done"
    finally:
        wire.delete("a")


def test_nothing_of_a_crashed_process_reaches_the_store():
    world = World()

    outcome = play(world, puts_and_tidies, lambda number, _: None if number == 1 else Mode.APPLY)

    assert isinstance(outcome, Crashed)
    assert world.objects == {"a": b"12345678"}
    assert world.deleted == []


@pytest.mark.parametrize(
    ("mode", "there", "late"),
    [
        (Mode.FAIL_BEFORE, {}, 0),
        (Mode.LOSE_ANSWER, {"a": b"12345678"}, 0),
        (Mode.APPLY_LATE, {}, 1),
        (Mode.TRUNCATE, {"a": b"1234"}, 0),
    ],
)
def test_a_write_that_fails_leaves_what_its_mode_says(mode, there, late):
    world = World()

    outcome = play(world, lambda wire: wire.put("a", b"12345678"), lambda *_: mode)

    assert isinstance(outcome, StoreError)
    assert (world.objects, len(world.late)) == (there, late)


def test_a_late_write_carries_its_condition():
    world = World()
    play(world, lambda wire: wire.put_if_absent("a", b"late"), lambda *_: Mode.APPLY_LATE)
    world.open().put_if_absent("a", b"now")

    assert not world.land()

    assert world.objects == {"a": b"now"}


def test_a_repeated_write_is_answered_and_comes_once_more():
    world = World()
    play(world, lambda wire: wire.put("a", b"1"), lambda *_: Mode.APPLY_TWICE)
    world.open().delete("a")

    assert world.land()

    assert world.objects == {"a": b"1"}


def test_a_stale_listing_misses_the_last_writes():
    world = World()
    for name in "abcd":
        world.open().put(f"x/{name}/1", b"")
    world.open().delete("x/a/1")

    now = play(world, lambda wire: wire.list_names("x/"), lambda *_: Mode.APPLY)
    stale = play(world, lambda wire: wire.list_names("x/"), lambda *_: Mode.STALE_LISTING)

    assert (now, stale) == (["b", "c", "d"], ["a", "b"])


def test_tasks_take_turns_as_they_are_told():
    world = World()

    def creates(wire: Wire) -> str:
        wire.put_if_absent("a", b"")
        return "won"

    with Task(world, creates) as first, Task(world, creates) as second:
        assert first.pending == second.pending == Call("put_if_absent", "a")
        won, lost = second.finish(), first.finish()

    assert won == "won"
    assert isinstance(lost, ConflictError)


def test_every_order_of_two_claims_finds_a_store_that_swaps_blindly():
    class Blind(DictStore):
        def put_if_match(self, key: str, data: Buffer, version: str) -> Written:
            self.put(key, data)

    def claimed() -> World:
        world = World(Blind())
        world.checks.append(assert_write)
        Driver(world.open()).claim("g1")
        return world

    works = tuple(lambda wire, owner=owner: Driver(wire, owner).claim("h1") for owner in ("bob", "cyd"))
    with simulated() as clock, pytest.raises(AssertionError):
        list(Orders(claimed, works, clock).all())


@pytest.mark.slow
def test_an_environment_that_a_link_leads_to_is_never_emptied(tmp_path: Path) -> None:
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    (theirs / "bin").mkdir(parents=True)
    (theirs / "older-stamp").touch()
    ours.symlink_to(theirs)

    prepare_venv(ours, "stamp", "--help", finds_ours=True)  # pip installs nothing

    assert (theirs / "older-stamp").exists()
    assert not ours.is_symlink()
    assert (ours / "stamp").exists()
