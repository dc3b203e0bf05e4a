"""Tests that a damaged checkpoint costs only a few steps: all ranks return to the same earlier checkpoint, and the run
reports it."""

from pathlib import Path
from uuid import uuid4

import pytest
import torch

import raycheck
from raycheck.bucket.format import object_keys
from raycheck.bucket.reading import read_latest
from raycheck.bucket.store import Store, open_store
from raycheck.bucket.store.address import join_uri
from raycheck.group.coordinator.messages import RankRestore
from tests.on_ray.test_resume import losses
from tests.support.histories.invariants import assert_invariants
from tests.support.processes.background_call import InThread, on_all, start_on_all
from tests.support.processes.coordinator_in_thread import CoordinatorThread, group_of
from tests.support.processes.ray_jobs import BATCH, SAMPLES, story
from tests.support.processes.replicated_rank import Holder
from tests.support.servers.http_fault_proxy import fault_proxy

OWN = "number.rank1.kept"
"""A tensor of rank 1 alone, which no other rank reads."""


def pair_of(uri: str, owner: str) -> list[Holder]:
    return [Holder(place) for place in group_of(uri, world_size=2, owner=owner)]


def trained(uri: str, steps: int = 6) -> None:
    """Save at each second step."""
    pair = pair_of(uri, "ann")
    on_all(pair, "restore")
    for rank, holder in enumerate(pair):
        holder.set_number(torch.ones(8) + rank)
    on_all(pair, "train", steps)
    on_all(pair, "close")


def damage(store: Store, step: int, tensor: str) -> str:
    """Flip a bit of a tensor. Returns the checkpoint's name."""
    checkpoint = raycheck.open_run(store.uri).at(step)
    manifest, index = checkpoint._read()
    chunk = next(chunk for chunk in index.chunks if index.tensors[chunk.tensor].name == tensor and chunk.payload_size)
    key = manifest.prefixes()[chunk.component] + object_keys.shard_file(chunk.rank)
    data = bytearray(store.get(key).data)
    data[chunk.payload_offset] ^= 1
    store.put(key, bytes(data))
    return checkpoint.key


def test_damage_that_one_rank_finds_takes_all_ranks_to_the_one_before(uri: str) -> None:
    trained(uri)
    store = open_store(uri)
    bad = damage(store, 6, OWN)
    before = read_latest(open_store(uri))

    pair = pair_of(uri, "bob")
    at = on_all(pair, "restore")
    weights = on_all(pair, "weights")
    after = read_latest(open_store(uri))
    on_all(pair, "train", 4)
    on_all(pair, "close")

    assert [place.step for place in at] == [4, 4]
    assert torch.equal(*weights)
    for place in at:
        (line,) = place.report.refused
        assert line.startswith(f"{bad} (rank 1: shard of rank 1, component train: tensor {OWN}, sub-block 0 ")
    assert after.counter > before.counter
    assert after.head == after.attempt.restore_key == at[0].checkpoint
    assert OWN in after.entry(bad).damaged
    assert after.entry(bad).pinned
    body = assert_invariants(store)
    assert [(entry.step, bool(entry.damaged)) for entry in body.live] == [
        (2, False),
        (4, False),
        (6, True),
        (6, False),
        (8, False),
    ]


def test_a_user_who_asked_for_it_gets_the_error_and_an_untouched_run(uri: str) -> None:
    trained(uri, steps=4)
    damage(open_store(uri), 4, OWN)

    restores = start_on_all(pair_of(uri, "bob"), "restore", on_corrupt="raise")

    for restore in restores:
        with pytest.raises(raycheck.errors.DamagedError, match=OWN):
            restore.join()
    assert [(entry.step, entry.damaged) for entry in read_latest(open_store(uri)).live] == [(2, None), (4, None)]


def test_with_nothing_whole_left_it_is_an_error_and_never_step_0(uri: str) -> None:
    trained(uri, steps=4)
    store = open_store(uri)
    for step in (2, 4):
        damage(store, step, "model.weight")

    for owner in ("bob", "eve"):
        pair = pair_of(uri, owner)
        for restore in start_on_all(pair, "restore"):
            with pytest.raises(raycheck.errors.DamagedError, match="no earlier checkpoint"):
                restore.join()
        on_all(pair, "fail")

    live = read_latest(open_store(uri)).live
    assert [(entry.step, bool(entry.damaged)) for entry in live] == [(2, False), (4, True)]


def test_a_rank_that_cannot_restore_does_not_leave_the_others_waiting(uri: str) -> None:
    trained(uri, steps=2)

    well, wrong = pair_of(uri, "bob")
    restores = InThread(well.restore), InThread(lambda: wrong.restore(only=["modle"]))

    with pytest.raises(raycheck.errors.ConfigError, match="modle"):
        restores[1].join()
    with pytest.raises(raycheck.errors.ConfigError, match=r"rank 1: restore of step-.*modle"):
        restores[0].join()


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["busy", "deny", "reset"])
def test_a_store_that_cannot_be_read_is_no_damage(s3: str, fault: str) -> None:
    name = uuid4().hex
    trained(join_uri(s3, name), steps=4)
    with fault_proxy(s3) as proxy:
        proxy.rule(fault, "GET", "distcp", times=999)
        restores = start_on_all(pair_of(join_uri(proxy.uri, name), "bob"), "restore")

        for restore in restores:
            with pytest.raises(raycheck.errors.StoreError):
                restore.join()

    body = assert_invariants(open_store(join_uri(s3, name)))
    assert [(entry.step, entry.damaged) for entry in body.live] == [(2, None), (4, None)]
    assert body.entry(body.head).step == 4


def test_a_coordinator_that_was_started_again_meanwhile_ends_the_attempt(uri: str) -> None:
    """It no longer knows what it has told each rank, so no rank may continue beside one that was told otherwise."""
    trained(uri, steps=4)
    first = CoordinatorThread(uri, "bob")
    claim = first.call("claim", "second", 2).result(60)
    again = CoordinatorThread(uri, "bob")
    well = RankRestore(group="second", rank=0, world_size=2, key=claim.restore.key)
    bad = RankRestore(group="second", rank=1, world_size=2, key=claim.restore.key, damage="a proof")

    assert first.call("restored", bad).result(60).claim.restore.step == 2
    for verdict in (well, bad, well):
        with pytest.raises(raycheck.errors.SupersededError, match="start the workers again"):
            again.call("restored", verdict).result(60)
    late = again.call("claim", "second", 2).result(60)  # of a rank that had not claimed yet
    of_late = RankRestore(group="second", rank=1, world_size=2, key=late.restore.key)
    with pytest.raises(raycheck.errors.SupersededError):
        again.call("restored", of_late).result(60)

    assert again.call("claim", "third", 2).result(60).restore.step == 2
    assert assert_invariants(open_store(uri)).live[-1].damaged == "rank 1: a proof"


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Ray itself warns
def test_a_run_under_ray_train_goes_on_before_the_damage_and_comes_to_the_same(job, s3: str, tmp_path: Path) -> None:
    """Two ranks with a process group, so that what they share is read by one of them."""
    storage = join_uri(s3, uuid4().hex)
    uri = join_uri(storage, "damaged")
    raycheck.fit(job(storage, "damaged", mode="ddp", epochs=1))
    damage(open_store(uri), SAMPLES // BATCH, "model.0.weight")

    raycheck.fit(job(storage, "damaged", mode="ddp", epochs=2))

    assert [event["at"] for event in story(tmp_path, "start")] == [0, 8]
    for rank in range(2):
        assert len(losses(tmp_path, rank)) == 2 * SAMPLES // BATCH
    body = assert_invariants(open_store(uri))
    assert [entry.step for entry in body.live if entry.damaged] == [12]
    assert body.entry(body.head).step == 2 * SAMPLES // BATCH
