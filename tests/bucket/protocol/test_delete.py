"""Tests deletes on request: what is being deleted is not listed or restored, and a crash never leaves half a run."""

from collections.abc import Iterator

import pytest

import raycheck
from raycheck.bucket.format import object_keys
from raycheck.bucket.protocol.pin_and_evict import pin
from raycheck.bucket.protocol.removal.delete import delete_checkpoint, delete_run, mark_lost
from raycheck.bucket.protocol.removal.prune_and_sweep import prune
from raycheck.bucket.protocol.sharing.fork import fork
from raycheck.bucket.protocol.swap import Register
from raycheck.bucket.reading import read_latest
from raycheck.bucket.store import Store, open_store
from raycheck.errors import ConfigError, ConflictError, FencedError, NotFoundError, StoreError
from tests.support.histories.crash_enumeration import claim, run
from tests.support.histories.invariants import assert_invariants
from tests.support.histories.stepped_processes import Clock, simulated
from tests.support.histories.two_runs import HOME, Placed
from tests.support.samples.sample_checkpoints import Driver, everything, write_checkpoint
from tests.support.servers.fault_injection import Wire, World

SOURCE = "runs/source"


@pytest.fixture(autouse=True)
def clock() -> Iterator[Clock]:
    with simulated() as clock:
        yield clock


def trained(store: Store) -> Driver:
    driver = Driver(store)
    claim(driver, "g1")
    for save in (1, 2, 3):
        driver.save(1, save)
    return driver


def test_a_pinned_checkpoint_is_deleted_and_the_training_goes_on(store: Store) -> None:
    driver = trained(store)
    first = driver.look().live[0].key
    pin(driver.register, first)

    delete_checkpoint(Register(store), first)
    delete_checkpoint(Register(store), first)
    driver.save(1, 4)
    prune(driver.register, grace_s=0.0)

    assert driver.look().entry(first) is None
    assert not [key for key in everything(store) if first in key]
    assert_invariants(store)


def test_the_head_and_what_was_never_there_are_not_deleted(store: Store) -> None:
    driver = trained(store)
    before = driver.look()

    with pytest.raises(ConfigError, match="rewind"):
        delete_checkpoint(driver.register, str(before.head))
    with pytest.raises(NotFoundError):
        delete_checkpoint(driver.register, "step-000000001-a7-s7")

    assert assert_invariants(store) == before


def test_a_run_with_another_one_anywhere_in_its_folder_is_not_deleted() -> None:
    world = World()
    outer, inner = (Placed(world.open(), f"runs/outer{path}") for path in ("", "/evals/again/inner"))
    driver = trained(outer)
    trained(inner)
    before = dict.fromkeys(everything(inner))

    with pytest.raises(ConfigError, match="evals/again/inner"):
        delete_run(driver.register)

    assert dict.fromkeys(everything(inner)) == before
    assert assert_invariants(outer) is not None


def test_a_run_that_was_written_since_it_was_judged_is_not_deleted(store: Store) -> None:
    driver = trained(store)
    judged = driver.look().counter
    driver.save(1, 4)

    with pytest.raises(ConflictError, match="has just changed"):
        delete_run(Register(store), only_at=judged)

    assert assert_invariants(store) == driver.look()


def test_a_deleted_run_is_gone_and_its_training_is_fenced(store: Store) -> None:
    driver = trained(store)
    store.put("exports/x/model.safetensors", b"w")
    pending = write_checkpoint(store, attempt=1, save=4)

    done = delete_run(Register(store), keeps_exports=True)

    assert done.is_gone
    assert list(everything(store)) == ["exports/x/model.safetensors"]
    with pytest.raises(Exception, match=r"latest|attempt|driver"):
        driver.commit(pending)


def test_another_run_inside_the_folder_is_not_deleted_with_it(store: Store) -> None:
    trained(store)
    store.put("inner/checkpoints/step-000000001-a1-s1/manifest.json", b"{}")
    before = everything(store)

    with pytest.raises(ConfigError, match="inner"):
        delete_run(Register(store))

    assert everything(store) == before


def two_runs() -> World:
    world = World()
    trained(Placed(world.open(), SOURCE))
    fork(Placed(world.open(), SOURCE), Placed(world.open(), HOME), run_id="forked")
    return world


def test_what_another_run_uses_stays_until_that_run_is_deleted() -> None:
    world = two_runs()
    source, forked = (Placed(world.open(), place) for place in (SOURCE, HOME))
    with pytest.raises(ConfigError, match=r"\.\./fork"):
        delete_run(Register(source))

    assert not delete_run(Register(source), keeps_shared=True).is_gone
    assert_invariants(forked)
    with pytest.raises(ConfigError, match="was deleted"):
        Driver(source, "new").claim("g9")

    assert delete_run(Register(forked)).is_gone
    assert delete_run(Register(source)).is_gone
    assert everything(world.inner) == {}


def deletes(wire: Wire) -> tuple[str, ...]:
    delete_run(Register(Placed(wire, HOME)))
    return ()


@pytest.mark.enumeration
def test_a_fault_at_any_call_of_a_delete_leaves_nothing_that_is_restored_and_a_repetition_goes_on() -> None:
    calls = run(two_runs(), deletes).calls
    count = 0
    for number, call in enumerate(calls):
        for mode in (None, *call.modes[1:]):
            end = run(two_runs(), deletes, fault=(number, mode), dies_at=number + 1)
            while end.world.late:
                end.world.land()
            home = Placed(end.world.open(), HOME)
            try:
                body = read_latest(home)
            except NotFoundError:
                body = None
            if body is not None:
                assert_invariants(home)
                if body.deleted_at is not None:
                    assert (body.head, body.live) == (None, ())
                    with pytest.raises((ConfigError, FencedError)):
                        Driver(home, "new").claim("g9")
                assert delete_run(Register(home)).is_gone
            assert {key for key in everything(home) if not key.startswith("elsewhere/")} <= set(), call
            assert_invariants(Placed(end.world.open(), SOURCE))
            assert read_latest(Placed(end.world.open(), SOURCE)).holds == (), call
            count += 1
    assert count >= 60


def test_a_store_that_fails_leaves_the_run_marked_and_not_begun_anew(store: Store) -> None:
    trained(store)

    class Failing:
        def __getattr__(self, name: str):
            if name == "delete":
                raise StoreError("no")
            return getattr(store, name)

    with pytest.raises(StoreError):
        delete_run(Register(Failing()))

    assert read_latest(store).deleted_at is not None
    assert delete_run(Register(store)).is_gone


def test_what_is_left_of_a_run_without_latest_is_deleted_only_when_asked_to(tmp_path) -> None:
    uri = f"{tmp_path}/run"
    store = open_store(uri)
    trained(store)
    store.delete(object_keys.LATEST_KEY)
    before = everything(store)
    with pytest.raises(NotFoundError, match="raycheck repair"):
        raycheck.catalog.delete_run(uri)
    assert everything(store) == before

    assert raycheck.catalog.delete_run(uri, lost=True).is_gone

    assert everything(store) == {}
    with pytest.raises(NotFoundError, match="no run here"):
        raycheck.catalog.delete_run(uri, lost=True)


def test_what_is_left_of_a_run_that_others_use_is_not_deleted() -> None:
    world = two_runs()
    source = Placed(world.open(), SOURCE)
    source.delete(object_keys.LATEST_KEY)
    before = everything(source)

    with pytest.raises(ConfigError, match=r"other runs may use.*raycheck repair"):
        mark_lost(Register(source))

    assert everything(source) == before


def test_a_delete_of_what_is_left_that_dies_goes_on_and_lets_nobody_begin_there(store: Store) -> None:
    trained(store)
    store.delete(object_keys.LATEST_KEY)

    mark_lost(Register(store))
    with pytest.raises(ConfigError, match="was deleted"):
        Driver(store, "new").claim("g9")
    mark_lost(Register(store))

    assert delete_run(Register(store)).is_gone
    assert everything(store) == {}
