"""Copies beside what else people do with runs: forks, names, scores and deletes, of the source and of the mirror."""

from pathlib import Path

import pytest

from raycheck import open_run
from raycheck.bucket.format.label import Label
from raycheck.bucket.format.latest import Latest
from raycheck.bucket.protocol import name_and_score
from raycheck.bucket.protocol.removal.delete import delete_checkpoint
from raycheck.bucket.protocol.removal.prune_and_sweep import prune, sweep
from raycheck.bucket.protocol.swap import Register
from raycheck.bucket.reading import read_latest
from raycheck.bucket.store import open_store
from raycheck.catalog import copy_run, delete_run, fork_run
from raycheck.errors import ConfigError
from tests.support.histories.invariants import assert_invariants
from tests.support.samples.sample_checkpoints import Driver, everything

FIRST, SECOND, HEAD = "step-000000010-a1-s1", "step-000000020-a1-s2", "step-000000030-a1-s3"


@pytest.fixture
def bucket(tmp_path: Path) -> str:
    return f"file://{tmp_path}"


@pytest.fixture
def source(bucket: str) -> Driver:
    driver = Driver(open_store(f"{bucket}/runs/source"))
    driver.claim("group")
    for save in (1, 2, 3):
        driver.save(1, save)
    return driver


def assert_whole(uri: str) -> Latest:
    """Assert that every checkpoint of a run has all its bytes."""
    run = open_run(uri)
    assert not [found for it in run.checkpoints for found in it.verify() if found.problem]
    return run._latest


def test_a_run_that_borrows_from_another_one_is_refused_before_anything_is_written(bucket: str, source: Driver) -> None:
    fork, target = f"{bucket}/runs/fork", f"{bucket}/copy"
    key = fork_run(source.store.uri, fork).key

    for dry_run in (True, False):
        with pytest.raises(ConfigError, match=f"raycheck cp --at {key}"):
            copy_run(fork, target, dry_run=dry_run)
    assert everything(open_store(target)) == {}


def test_one_checkpoint_of_a_fork_is_copied_with_all_that_it_borrows(bucket: str, source: Driver) -> None:
    fork, target = f"{bucket}/runs/fork", f"{bucket}/copy"
    key = fork_run(source.store.uri, fork).key
    assert copy_run(fork, target, at=key, dry_run=True).copied

    done = copy_run(fork, target, at=key)

    body = assert_whole(target)
    assert (body.head, body.live[0].refs, body.loans) == (done.head, (), ())
    assert assert_invariants(open_store(target)) is not None
    copy_run(target, f"{bucket}/again")
    assert assert_whole(f"{bucket}/again").head == done.head


def test_a_mirror_keeps_what_was_forked_from_it_and_takes_over_no_holds(bucket: str, source: Driver) -> None:
    target, fork = f"{bucket}/mirrors/source", f"{bucket}/mirrors/fork"
    fork_run(source.store.uri, f"{bucket}/runs/other")
    copy_run(source.store.uri, target)
    assert source.look().holds
    assert (read_latest(open_store(target)).holds, read_latest(open_store(target)).loans) == ((), ())
    fork_run(target, fork, SECOND)
    held = read_latest(open_store(target)).holds
    source.save(1, 4, keep_last=1)

    copy_run(source.store.uri, target)
    gone = prune(Register(open_store(target)), grace_s=0.0)
    sweep(open_store(target), also_whole=True)

    body = read_latest(open_store(target))
    assert (body.holds, set(gone)) == (held, {FIRST, HEAD})
    assert SECOND in {item.key for item in body.evicted}
    assert assert_whole(fork).live
    assert delete_run(fork).is_gone
    assert prune(Register(open_store(target)), grace_s=0.0) == (SECOND,)
    assert not [key for key in everything(open_store(target)) if SECOND in key]
    assert_whole(target)


def test_a_mirror_that_was_claimed_still_keeps_what_was_forked_from_it(bucket: str, source: Driver) -> None:
    target, fork = f"{bucket}/mirrors/source", f"{bucket}/mirrors/fork"
    copy_run(source.store.uri, target)
    fork_run(target, fork, SECOND)
    zoe = Driver(open_store(target), "zoe")

    attempt, _ = zoe.claim("there")
    zoe.save(attempt.number, 1, step=50, keep_last=1)
    prune(zoe.register, grace_s=0.0)
    sweep(zoe.store, also_whole=True)

    assert assert_whole(fork).live
    assert assert_invariants(zoe.store).holds


def test_names_and_scores_are_mirrored_and_not_changed_in_the_mirror(bucket: str, source: Driver) -> None:
    target = f"{bucket}/copy"
    name_and_score.name(source.register, SECOND, Label(name="reference"))
    name_and_score.score(source.register, SECOND, {"quality": 0.5})
    copy_run(source.store.uri, target)
    name_and_score.rename(source.register, "reference", "good")

    copy_run(source.store.uri, target)

    store, before = open_store(target), everything(open_store(target))
    entry = read_latest(store).named("good")
    assert entry == source.look().named("good")
    assert entry is not None
    assert entry.scores == {"quality": 0.5}
    register = Register(store)
    for change in (
        lambda: name_and_score.name(register, FIRST, Label(name="other")),
        lambda: name_and_score.rename(register, "good", "other"),
        lambda: name_and_score.unname(register, "good"),
        lambda: name_and_score.score(register, FIRST, {"quality": 1.0}),
        lambda: delete_checkpoint(register, FIRST),
    ):
        with pytest.raises(ConfigError, match=f"a mirror keeps what its source keeps.*{source.store.uri}"):
            change()
    assert everything(store) == before


def test_one_checkpoint_is_copied_by_its_name_which_stays_behind(bucket: str, source: Driver) -> None:
    name_and_score.name(source.register, SECOND, Label(name="reference", expire_after_s=3600.0))

    done = copy_run(source.store.uri, f"{bucket}/copy", at="reference")

    (entry,) = assert_whole(f"{bucket}/copy").live
    assert (entry.key, entry.step, entry.name, entry.expires_at) == (done.head, 20, None, None)


def test_a_mirror_is_deleted_and_copied_anew(bucket: str, source: Driver) -> None:
    target = f"{bucket}/copy"
    copy_run(source.store.uri, target)

    assert delete_run(target).is_gone
    assert everything(open_store(target)) == {}
    copy_run(source.store.uri, target)

    assert assert_whole(target).live == source.look().live


def test_a_mirror_that_was_deleted_and_is_still_used_is_no_place_for_a_copy(bucket: str, source: Driver) -> None:
    target, fork = f"{bucket}/mirrors/source", f"{bucket}/mirrors/fork"
    copy_run(source.store.uri, target)
    fork_run(target, fork)

    assert not delete_run(target, keep_shared=True).is_gone

    with pytest.raises(ConfigError, match="it was deleted"):
        copy_run(source.store.uri, target)
    assert not read_latest(open_store(target)).is_mirror
    assert assert_whole(fork).live


def test_a_run_that_was_deleted_is_no_source(bucket: str, source: Driver) -> None:
    target = f"{bucket}/copy"
    copy_run(source.store.uri, target)
    fork_run(source.store.uri, f"{bucket}/runs/fork")
    before = everything(open_store(target))

    assert not delete_run(source.store.uri, keep_shared=True, live=True).is_gone

    for place, step in ((target, None), (f"{bucket}/new", None), (f"{bucket}/new", HEAD)):
        with pytest.raises(ConfigError, match="was deleted"):
            copy_run(source.store.uri, place, at=step)
    assert everything(open_store(target)) == before
    assert everything(open_store(f"{bucket}/new")) == {}
