"""Tests two processes on one run in every order of their store calls, with a restart from every state in between."""

from collections.abc import Iterator
from contextlib import nullcontext

import pytest

from raycheck.bucket.protocol.pin_and_evict import pin
from raycheck.bucket.protocol.removal.prune_and_sweep import prune, sweep
from raycheck.bucket.protocol.rewind import rewind
from raycheck.bucket.protocol.swap import Register
from raycheck.bucket.reading import Checkpoint, read_latest
from raycheck.errors import FencedError, NotFoundError, RaycheckError, SaveFailedError, SupersededError
from raycheck.settings import Retention
from tests.support.histories.crash_enumeration import Scenario, Tally, assert_kept, claim, only_train, restarts
from tests.support.histories.invariants import assert_invariants
from tests.support.histories.order_enumeration import Orders
from tests.support.histories.small_pages import small_pages
from tests.support.histories.stepped_processes import Clock, simulated
from tests.support.samples.sample_checkpoints import Driver, write_checkpoint
from tests.support.samples.sample_runs import B, F, current, old
from tests.support.servers.fault_injection import Wire

pytestmark = pytest.mark.enumeration


@pytest.fixture(autouse=True, params=["", pytest.param("pages", marks=pytest.mark.slow)])
def clock(request: pytest.FixtureRequest) -> Iterator[Clock]:
    """Simulate time. "pages": all but one of the checkpoints are in pages."""
    with simulated() as clock, small_pages() if request.param else nullcontext():
        yield clock


def commits(wire: Wire):
    """Commit as the live attempt's coordinator, which keeps one checkpoint."""
    driver = current(wire)
    manifest = write_checkpoint(wire, attempt=2, save=3)
    assert driver.commit(manifest, keep_last=1)
    return (manifest.key,)


def commits_with_a_reference(wire: Wire):
    driver = current(wire)
    pinned = driver.look().entry(B)
    if pinned is None:
        return ()
    base = only_train(Checkpoint(wire, pinned).read_manifest())
    manifest = write_checkpoint(wire, attempt=2, save=3, base=base)
    assert driver.commit(manifest, keep_last=1)
    return (manifest.key,)


def commits_and_prunes(wire: Wire):
    driver = current(wire)
    manifest = write_checkpoint(wire, attempt=2, save=3)
    assert driver.commit(manifest, keep_last=1)
    prune(driver.register, grace_s=0.0)
    return (manifest.key,)


def bob_claims(wire: Wire):
    claim(Driver(wire, "bob"), "h1")
    return ()


def bob_claims_and_saves(wire: Wire):
    driver = Driver(wire, "bob")
    attempt, _ = claim(driver, "h1")
    manifest = write_checkpoint(wire, attempt=attempt.number, save=1)
    assert driver.commit(manifest, keep_last=1)
    return (manifest.key,)


def cyd_claims(wire: Wire):
    claim(Driver(wire, "cyd"), "i1")
    return ()


def next_group_claims(wire: Wire):
    claim(Driver(wire), "g3")
    return ()


def restarted_coordinator_takes_over(wire: Wire):
    driver = Driver(wire, coordinator="c2")
    driver.take_over("g2")
    manifest = write_checkpoint(wire, attempt=2, save=3)
    assert driver.commit(manifest, keep_last=1)
    return (manifest.key,)


def restarted_coordinator_commits_the_next_save(wire: Wire):
    driver = Driver(wire, coordinator="c2")
    driver.take_over("g2")
    manifest = write_checkpoint(wire, attempt=2, save=4)
    assert driver.commit(manifest, keep_last=1)
    return (manifest.key,)


def a_save_comes_late(wire: Wire):
    """Repeat a save's reports to a coordinator that may have committed the next save."""
    driver = Driver(wire, coordinator="c2")
    driver.take_over("g2")
    manifest = write_checkpoint(wire, attempt=2, save=3)
    return (manifest.key,) if driver.commit(manifest, keep_last=1) else ()


def prunes(wire: Wire):
    prune(Register(wire), grace_s=0.0)
    return ()


def unpins_and_prunes(wire: Wire):
    register = Register(wire)
    pin(register, B, pinned=False)
    prune(register, Retention(keep_last=1), grace_s=0.0)
    return ()


def sweeps(wire: Wire):
    sweep(wire, also_whole=True)
    return ()


def pins_the_head(wire: Wire):
    pin(Register(wire), F)
    return ()


def finishes(wire: Wire):
    current(wire).finish("g2")
    return ()


def rewinds(wire: Wire):
    rewind(Register(wire), B)
    return ()


def reads_the_head(wire: Wire):
    body = read_latest(wire)
    checkpoint = Checkpoint(wire, body.entry(body.head))
    checkpoint.read_index(checkpoint.read_manifest())
    assert not [call for call in wire.calls if call.is_write], "I8"
    return ()


def reads_the_pinned(wire: Wire):
    body = read_latest(wire)
    checkpoint = Checkpoint(wire, body.entry(B) or body.live[-1])
    checkpoint.read_index(checkpoint.read_manifest())
    return ()


ENDED = (FencedError, SupersededError)
PAIRS = {
    "commit and another driver's claim": (commits, bob_claims, ENDED),
    "commit and another driver's claim and save": (commits, bob_claims_and_saves, ENDED),
    "commit and the next group's claim": (commits, next_group_claims, ENDED),
    "commit and take-over": (commits, restarted_coordinator_takes_over, ENDED),
    "a save and the one before it": (restarted_coordinator_commits_the_next_save, a_save_comes_late, ()),
    "finish and another driver's claim": (finishes, bob_claims, ENDED),
    "finish and the next group's claim": (finishes, next_group_claims, ENDED),
    "finish and take-over": (finishes, restarted_coordinator_takes_over, ENDED),
    "finish and prune": (finishes, unpins_and_prunes, ()),
    "finish and rewind": (finishes, rewinds, ENDED),
    "commit and prune": (commits, prunes, ()),
    "commit with prune and prune": (commits_and_prunes, prunes, ()),
    "commit with a reference and its eviction": (
        commits_with_a_reference,
        unpins_and_prunes,
        (SaveFailedError, NotFoundError),
    ),
    "commit and sweep": (commits, sweeps, ()),
    "claim and save and sweep": (bob_claims_and_saves, sweeps, ()),
    "claim and prune": (bob_claims, unpins_and_prunes, ()),
    "claim and claim": (bob_claims, cyd_claims, ENDED),
    "two claims of one driver": (next_group_claims, restarted_coordinator_takes_over, ENDED),
    "prune and prune": (prunes, prunes, ()),
    "prune and eviction": (prunes, unpins_and_prunes, ()),
    "sweep and sweep": (sweeps, sweeps, ()),
    "sweep and prune": (sweeps, unpins_and_prunes, ()),
    "pin and commit": (pins_the_head, commits, NotFoundError),
    "rewind and commit": (rewinds, commits, ENDED),
    "rewind and eviction": (rewinds, unpins_and_prunes, NotFoundError),
    "rewind and claim and save": (rewinds, bob_claims_and_saves, (*ENDED, NotFoundError)),
    "rewind and sweep": (rewinds, sweeps, ()),
    "read and commit with prune": (reads_the_head, commits_and_prunes, NotFoundError),
    "read and eviction": (reads_the_pinned, unpins_and_prunes, NotFoundError),
}


MANY = {"commit with prune and prune", "claim and prune", "prune and eviction", "sweep and sweep"}
"""Of these only the orders with at most two switches are tried, or with --all three: they reach the same buckets."""
ORDERS_AT_LEAST = 4


LONG = {
    "claim and claim",
    "commit with prune and prune",
    "prune and eviction",
    "rewind and claim and save",
    "rewind and eviction",
    "sweep and sweep",
    "two claims of one driver",
}


@pytest.mark.parametrize("name", [pytest.param(it, marks=[pytest.mark.slow] * (it in LONG)) for it in PAIRS])
def test_two_processes_in_any_order_leave_a_restorable_run(name, clock, record_property):
    orders = Orders(old, PAIRS[name][:2], clock, max_switches=2 if name in MANY else 0)

    num_restarts = assert_all(orders, PAIRS[name][2])

    record_property("enumerated", f"{orders.count} orders, {len(orders.reached)} buckets, {num_restarts} restarts")
    assert orders.count >= ORDERS_AT_LEAST


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(MANY))
def test_two_processes_in_many_more_orders_leave_a_restorable_run(name, clock):
    orders = Orders(old, PAIRS[name][:2], clock, max_switches=3)

    assert_all(orders, PAIRS[name][2])

    assert orders.count > 200


def assert_all(orders: Orders, errors) -> int:
    """Assert that every end is sound, losers got one of `errors`, and a run restarts from every bucket in between."""
    for world, outcomes in orders.all():
        assert_invariants(world.inner)
        for outcome in outcomes:
            if isinstance(outcome, RaycheckError):
                assert isinstance(outcome, errors), repr(outcome)
            else:
                assert_kept(world, outcome)
    tally = Tally()
    for world in orders.reached.values():
        list(restarts(Scenario(world=old, work=commits), world, "zoe", tally))
    return tally.restarts
