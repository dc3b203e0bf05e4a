"""Tests a run over several restarts, without Ray: the ranks and their coordinator are in this process."""

from collections.abc import Sequence
from typing import Any
from uuid import uuid4

import pytest
import torch

import raycheck
from raycheck.bucket.store import open_store
from raycheck.group.coordinator.messages import RankRestore
from raycheck.group.worker.group_restore import RestoreResult
from tests.group.worker.test_damaged_restore import damage
from tests.support.histories.invariants import assert_invariants
from tests.support.processes.background_call import InThread
from tests.support.processes.coordinator_in_thread import group_of


@pytest.fixture
def uri() -> str:
    return f"memory://{uuid4().hex}"


def train(
    uri: str,
    *,
    world_size: int,
    until: int,
    peeks: bool = False,
    groups: Sequence[raycheck.adapters.Group] = (),
    **restoring: Any,
) -> RestoreResult:
    """Train to step `until`, saving every fourth step. Returns the result of rank 0's restore."""
    groups = groups or group_of(uri, world_size=world_size)

    def rank(group: raycheck.adapters.Group) -> Any:
        model = torch.nn.Linear(2, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        data = raycheck.Batches(range(40), global_batch=4, rank=group.rank, world_size=world_size)
        state = {"model": model, "optimizer": optimizer, "data": data}
        with raycheck.Checkpointer(state, raycheck.SaveSettings(every_steps=4), group=group) as ckpt:
            seen = ckpt.peek().step if peeks else None
            at = ckpt.restore(**restoring)
            assert seen in (None, at.step)
            step = at.step
            for epoch in range(at.epoch, 10):
                for _ in data.loader(epoch):
                    step += 1
                    with torch.no_grad():
                        model.weight.fill_(step)
                    ckpt.end_step({"loss": float(step)}, tokens=8)
                    ckpt.wait()
                    if step == until:
                        return at, data.samples
                ckpt.end_epoch()
        raise AssertionError("ten epochs did not reach the step")

    results, errors = [], []
    for thread in [InThread(lambda g=g: rank(g)) for g in groups]:
        try:
            results.append(thread.join())
        except raycheck.RaycheckError as error:
            errors.append(
                error
            )  # the other ranks must have closed their Checkpointers, too, before another group begins
    if errors:
        raise errors[0]
    assert len({(at.step, at.report.refused, samples) for at, samples in results}) == 1
    return results[0][0]


def test_a_run_goes_on_where_it_was_with_any_number_of_ranks(uri: str):
    first = train(uri, world_size=2, until=6)
    second = train(uri, world_size=1, until=13, peeks=True)
    third = train(uri, world_size=4, until=14)

    assert (first.step, first.checkpoint, first.attempt) == (0, None, 1)
    assert (second.step, second.samples, second.tokens, second.saved_world_size) == (6, 24, 48, 2)
    assert (third.step, third.epoch, third.epoch_step, third.attempt) == (13, 1, 3, 3)
    assert all(at.is_finished for at in (second, third))
    assert [entry.step for entry in assert_invariants(open_store(uri)).live] == [4, 6, 8, 12, 13, 14]


def test_weights_alone_start_at_step_0(uri: str):
    train(uri, world_size=1, until=6)

    at = train(uri, world_size=1, until=3, only=["model"])

    assert (at.step, at.samples, at.is_finished) == (0, 0, False)
    assert set(at.report.skipped) == {"optimizer", "data", "progress", "rng"}


@pytest.mark.parametrize("peeks", [False, True])
def test_all_ranks_go_back_before_a_damaged_checkpoint(uri: str, peeks: bool):
    train(uri, world_size=2, until=6)
    damage(open_store(uri), 6, "model.weight")

    if peeks:
        with pytest.raises(raycheck.errors.SupersededError, match="peek"):
            train(uri, world_size=2, until=8, peeks=True)
    at = train(uri, world_size=2, until=8, peeks=peeks)

    assert (at.step, at.saved_world_size) == (4, 2)
    assert [entry.step for entry in assert_invariants(open_store(uri)).live if entry.damaged] == [6]


@pytest.mark.parametrize("peeks", [False, True])
def test_a_rank_that_claims_after_another_has_found_damage_reports_it_too(uri: str, peeks: bool):
    train(uri, world_size=2, until=6)
    groups = group_of(uri, world_size=2)
    first = groups[0]
    bad = first.ask("claim", first.id, 2, timeout_s=30.0, what="claim").restore.key
    found = RankRestore(group=first.id, rank=0, world_size=2, key=bad, damage="a proof", is_peek=peeks)
    first.ask("restored", found, timeout_s=30.0, what="restore")

    at = train(uri, world_size=2, until=8, peeks=peeks, groups=groups)

    assert (at.step, at.report.refused) == (4, (f"{bad} (rank 0: a proof)",))
