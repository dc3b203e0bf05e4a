"""The Checkpointer without Ray Train: in any group of Ray actors, with a place given by hand."""

from uuid import uuid4

import pytest
import ray
import torch

import raycheck
from raycheck.bucket.store import open_store
from raycheck.bucket.store.uri import join_uri
from tests.invariants import assert_invariants

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore")]  # Ray itself warns


@ray.remote(num_cpus=0)
class Holder:
    """One rank that holds a replicated model."""

    def __init__(self, rank: int, world_size: int, group: str, uri: str, coordinator) -> None:
        torch.manual_seed(rank)  # each rank begins elsewhere, so that only a restore makes them equal
        self.model = torch.nn.Linear(600, 500)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        place = raycheck.Group(id=group, uri=uri, rank=rank, world_size=world_size, coordinator=coordinator)
        settings = raycheck.SaveSettings(every_steps=2)
        self.ckpt = raycheck.Checkpointer({"model": self.model, "optimizer": self.optimizer}, settings, group=place)

    def restore(self):
        return self.ckpt.restore()

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.model(torch.ones(2, 600)).square().mean().backward()
            self.optimizer.step()
            self.ckpt.end_step({"loss": float("nan"), "step": 1})

    def train_and_save(self, steps: int) -> None:
        self.train(steps)
        self.ckpt.save()

    def weights(self):
        return self.model.weight.detach()

    def close(self) -> None:
        self.ckpt.close()


def test_a_group_of_plain_actors_saves_and_another_world_size_restores(cluster: None, s3: str) -> None:
    uri = join_uri(s3, uuid4().hex)
    coordinator = raycheck.start_coordinator(uri, owner="me")
    pair = [Holder.remote(rank, 2, "pair", uri, coordinator) for rank in range(2)]
    ray.get([holder.restore.remote() for holder in pair])
    # Replicated parameters are taken as equal; make them so.
    ray.get([holder.train.remote(3) for holder in pair])
    ray.get([holder.close.remote() for holder in pair])

    three = [Holder.remote(rank, 3, "three", uri, coordinator) for rank in range(3)]
    at = ray.get([holder.restore.remote() for holder in three])

    weights = ray.get([holder.weights.remote() for holder in three])
    assert {place.step for place in at} == {3}
    assert {place.attempt for place in at} == {2}
    assert all(torch.equal(weights[0], other) for other in weights)
    assert at[2].rng.startswith("derived")
    body = assert_invariants(open_store(uri))
    assert [entry.step for entry in body.live] == [2, 3]
    assert dict(body.live[0].metrics) == {"step": 1.0}, "a diverged run is saved all the same"


def test_a_replaced_group_is_told_that_its_attempt_is_over(cluster: None, s3: str) -> None:
    uri = join_uri(s3, uuid4().hex)
    coordinator = raycheck.start_coordinator(uri, owner="me")
    old = Holder.remote(0, 1, "old", uri, coordinator)
    ray.get(old.restore.remote())
    new = Holder.remote(0, 1, "new", uri, coordinator)
    ray.get(new.restore.remote())

    with pytest.raises(raycheck.SupersededError):
        ray.get([old.train.remote(2), old.close.remote()])
    ray.get([new.train.remote(2), new.close.remote()])

    body = assert_invariants(open_store(uri))
    assert [entry.key for entry in body.live] == ["step-000000002-a2-s1"]


def test_steps_before_restore_are_refused(cluster: None, s3: str) -> None:
    uri = join_uri(s3, uuid4().hex)
    holder = Holder.remote(0, 1, "group", uri, raycheck.start_coordinator(uri, owner="me"))

    with pytest.raises(raycheck.ConfigError, match="restore"):
        ray.get(holder.train.remote(1))

    assert_invariants(open_store(uri))


def test_a_rank_that_saves_alone_fails_that_save_and_mixes_nothing(cluster: None, s3: str) -> None:
    uri = join_uri(s3, uuid4().hex)
    coordinator = raycheck.start_coordinator(uri, owner="me")
    pair = [Holder.remote(rank, 2, "pair", uri, coordinator) for rank in range(2)]
    ray.get([holder.restore.remote() for holder in pair])

    ray.get(pair[0].train_and_save.remote(1))  # step 1 on rank 0 alone; rank 1's first save is of step 2
    ray.get([pair[0].train.remote(1), pair[1].train.remote(2)])
    with pytest.raises(raycheck.SaveFailedError, match="every rank must call"):
        ray.get([holder.close.remote() for holder in pair])

    assert assert_invariants(open_store(uri)).live == ()
