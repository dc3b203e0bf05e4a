"""A damaged checkpoint costs some steps and no more: all ranks go back to the same earlier one, and the run says so."""

from pathlib import Path
from uuid import uuid4

import pytest
import ray
import torch

import raycheck
from raycheck.bucket.format import object_keys
from raycheck.bucket.store import Store, open_store
from raycheck.bucket.store.address import join_uri
from raycheck.train.coordinator.messages import RankRestore
from tests.support.http_fault_proxy import fault_proxy
from tests.support.invariants import assert_invariants
from tests.support.ray_jobs import BATCH, SAMPLES, story
from tests.train.test_resume import losses
from tests.train.worker.test_checkpointer import Holder

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore")]  # Ray itself warns
OWN = "number.rank1.kept"
"""A tensor of rank 1 alone, which no other rank reads."""


def pair_of(uri: str, group: str, owner: str) -> list:
    coordinator = raycheck.start_coordinator(uri, owner=owner)
    return [Holder.remote(rank, 2, group, uri, coordinator) for rank in range(2)]


def trained(uri: str, steps: int = 6) -> None:
    """Saves at each second step."""
    pair = pair_of(uri, "first", "ann")
    ray.get([holder.restore.remote() for holder in pair])
    ray.get([holder.set_number.remote(torch.ones(8) + rank) for rank, holder in enumerate(pair)])
    ray.get([holder.train.remote(steps) for holder in pair])
    ray.get([holder.close.remote() for holder in pair])


def damage(store: Store, step: int, tensor: str) -> str:
    """Flip a bit of a tensor. Returns the checkpoint's name."""
    checkpoint = raycheck.open_run(store.uri).at_step(step)
    manifest = checkpoint.read_manifest()
    index = checkpoint.read_index(manifest)
    chunk = next(chunk for chunk in index.chunks if index.tensors[chunk.tensor].name == tensor and chunk.payload_size)
    key = manifest.prefixes()[chunk.component] + object_keys.shard_file(chunk.rank)
    data = bytearray(store.get(key).data)
    data[chunk.payload_offset] ^= 1
    store.put(key, bytes(data))
    return checkpoint.entry.key


def test_damage_that_one_rank_finds_takes_all_ranks_to_the_one_before(cluster: None, s3: str) -> None:
    uri = join_uri(s3, uuid4().hex)
    trained(uri)
    store = open_store(uri)
    bad = damage(store, 6, OWN)
    before = raycheck.open_run(uri).latest

    pair = pair_of(uri, "second", "bob")
    at = ray.get([holder.restore.remote() for holder in pair])
    weights = ray.get([holder.weights.remote() for holder in pair])
    after = raycheck.open_run(uri).latest
    ray.get([holder.train.remote(4) for holder in pair])
    ray.get([holder.close.remote() for holder in pair])

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


@pytest.mark.slow
def test_a_user_who_asked_for_it_gets_the_error_and_an_untouched_run(cluster: None, s3: str) -> None:
    uri = join_uri(s3, uuid4().hex)
    trained(uri, steps=4)
    damage(open_store(uri), 4, OWN)

    pair = pair_of(uri, "second", "bob")
    restores = [holder.restore.remote(on_corrupt="raise") for holder in pair]

    for restore in restores:
        with pytest.raises(raycheck.DamagedError, match=OWN):
            ray.get(restore)
    assert [(entry.step, entry.damaged) for entry in raycheck.open_run(uri).latest.live] == [(2, None), (4, None)]


@pytest.mark.slow
def test_with_nothing_whole_left_it_is_an_error_and_never_step_0(cluster: None, s3: str) -> None:
    uri = join_uri(s3, uuid4().hex)
    trained(uri, steps=4)
    store = open_store(uri)
    for step in (2, 4):
        damage(store, step, "model.weight")

    for group, owner in (("second", "bob"), ("third", "eve")):
        for restore in [holder.restore.remote() for holder in pair_of(uri, group, owner)]:
            with pytest.raises(raycheck.DamagedError, match="no earlier checkpoint"):
                ray.get(restore)

    live = raycheck.open_run(uri).latest.live
    assert [(entry.step, bool(entry.damaged)) for entry in live] == [(2, False), (4, True)]


@pytest.mark.slow
def test_a_rank_that_cannot_restore_does_not_leave_the_others_waiting(cluster: None, s3: str) -> None:
    uri = join_uri(s3, uuid4().hex)
    trained(uri, steps=2)

    well, wrong = pair_of(uri, "second", "bob")
    restores = well.restore.remote(), wrong.restore.remote(only=["modle"])

    with pytest.raises(raycheck.ConfigError, match="modle"):
        ray.get(restores[1])
    with pytest.raises(raycheck.ConfigError, match=r"rank 1: restore of step-.*modle"):
        ray.get(restores[0])


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["busy", "deny", "reset"])
def test_a_store_that_cannot_be_read_is_no_damage(cluster: None, s3: str, fault: str) -> None:
    name = uuid4().hex
    trained(join_uri(s3, name), steps=4)
    with fault_proxy(s3) as proxy:
        proxy.rule(fault, "GET", "distcp", times=999)
        restores = [holder.restore.remote() for holder in pair_of(join_uri(proxy.uri, name), "second", "bob")]

        for restore in restores:
            with pytest.raises(raycheck.StoreError):
                ray.get(restore)

    body = assert_invariants(open_store(join_uri(s3, name)))
    assert [(entry.step, entry.damaged) for entry in body.live] == [(2, None), (4, None)]
    assert body.entry(body.head).step == 4


@pytest.mark.slow
def test_a_coordinator_that_was_started_again_meanwhile_ends_the_attempt(cluster: None, s3: str) -> None:
    """It no longer knows what it has told each rank, so no rank may train on beside one that was told otherwise."""
    uri = join_uri(s3, uuid4().hex)
    trained(uri, steps=4)
    first = raycheck.start_coordinator(uri, owner="bob")
    claim = ray.get(first.claim.remote("second", 2))
    again = raycheck.start_coordinator(uri, owner="bob", suffix=":again")
    well = RankRestore(group="second", rank=0, world_size=2, key=claim.restore.key)
    bad = RankRestore(group="second", rank=1, world_size=2, key=claim.restore.key, damage="a proof")

    assert ray.get(first.restored.remote(bad)).claim.restore.step == 2
    for verdict in (well, bad, well):
        with pytest.raises(raycheck.SupersededError, match="start the workers again"):
            ray.get(again.restored.remote(verdict))
    late = ray.get(again.claim.remote("second", 2))  # of a rank that had not claimed yet
    with pytest.raises(raycheck.SupersededError):
        ray.get(again.restored.remote(RankRestore(group="second", rank=1, world_size=2, key=late.restore.key)))

    assert ray.get(again.claim.remote("third", 2)).restore.step == 2
    assert assert_invariants(open_store(uri)).live[-1].damaged == "rank 1: a proof"


@pytest.mark.slow
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
