"""Tests a crash, and every other fault, at every store call of an unpacking; then a repeat, and a training (I5)."""

import io
from collections.abc import Iterator
from functools import cache
from uuid import uuid4

import pytest

from raycheck.bucket.protocol.swap import Register
from raycheck.bucket.store import open_store
from raycheck.catalog.archive.files import Place
from raycheck.catalog.archive.unpack import unpack_into
from raycheck.errors import ConfigError, StoreError
from tests.catalog.conftest import make_sample
from tests.support.histories.crash_enumeration import Scenario, explore, run
from tests.support.histories.stepped_processes import Clock, simulated
from tests.support.samples.sample_runs import new
from tests.support.servers.fault_injection import Mode, Wire

pytestmark = pytest.mark.enumeration


@pytest.fixture(autouse=True)
def clock() -> Iterator[Clock]:
    with simulated() as clock:
        yield clock


@cache
def archive() -> bytes:
    return make_sample(f"memory://{uuid4().hex}/run").pack()


def unpacks(wire: Wire) -> tuple[str, ...]:
    unpack_into(Register(wire), io.BytesIO(archive()), run_id=f"unpacked-{len(wire.world.wrote)}")
    return ()


def unpacks_if_need_be(wire: Wire) -> None:
    """What a user does after a crash: the same command again, until it says that there is a run."""
    for _ in range(3):
        try:
            unpacks(wire)
        except ConfigError:
            return
        except StoreError:
            continue


def test_a_crash_or_a_fault_at_any_store_call_of_an_unpacking_leaves_no_run_or_a_whole_one(record_property) -> None:
    tally = explore(Scenario(world=new, work=unpacks, again=unpacks_if_need_be))

    record_property("enumerated", str(tally))
    assert tally.restarts >= 60


def test_an_archive_in_a_bucket_that_fails_anywhere_ends_without_a_run_or_with_a_whole_one() -> None:
    file = Place(open_store(f"memory://{uuid4().hex}"), "a.tar")
    file.store.put("a.tar", archive())
    failing = [0]
    read = file.store.get_range

    def get_range(key: str, start: int, stop: int):
        failing[0] -= 1
        if not failing[0]:
            raise StoreError("gone")
        return read(key, start, stop)

    file.store.get_range = get_range
    failing[0] = 1
    end = run(new(), lambda wire: unpack_into(Register(wire), file, run_id="r"))
    assert isinstance(end.outcome, StoreError)
    assert end.world.bodies == []

    again = run(end.world, lambda wire: unpack_into(Register(wire), file, run_id="r2"))

    assert again.outcome.step == 9
    assert len(again.world.bodies) == 1


def test_what_is_enumerated_is_every_call() -> None:
    calls = run(new(), unpacks).calls

    assert [call.verb for call in calls if call.is_write] == [
        "put_if_absent",
        *["put_parts"] * 5,
        *["put_if_absent"] * 2,
    ]
    assert Mode.TRUNCATE in calls[4].modes
