"""Optimizer slots that are not sharded as their parameters are come back as what they were, or are refused by name."""

from typing import Any

import pytest
import torch

from raycheck.bucket.store import Store
from raycheck.views.details import details_of
from tests.support.processes.gloo_ranks import Ranks
from tests.support.processes.save_without_ray import claimed, committed
from tests.support.samples import odd_optimizers


def save(ranks: Ranks, store: Store, kind: str, world_size: int) -> tuple[Any, list[Any], list[Any]]:
    name = claimed(store, world_size=world_size, step=odd_optimizers.PROGRESS.step)
    answers = ranks.run(odd_optimizers.save_trained, world_size, kind, store.uri, name)
    checkpoint = committed(store, name, [answer[0] for answer in answers], progress=odd_optimizers.PROGRESS)
    return checkpoint, [answer[1] for answer in answers], [answer[2] for answer in answers]


def workers_of(checkpoint: Any) -> str:
    manifest = checkpoint.read_manifest()
    return details_of(manifest, checkpoint.read_index(manifest)).workers


def assert_same(found: Any, expected: Any) -> None:
    assert {name: kind for name, (kind, _) in found.items()} == {name: kind for name, (kind, _) in expected.items()}
    assert [name for name, (_, value) in found.items() if not torch.equal(value, expected[name][1])] == []


@pytest.mark.parametrize("has_stepped", [False, True])
@pytest.mark.parametrize("kind", ["local", "rows"])
def test_slots_of_other_shapes_come_back_as_what_they_were(files: Store, ranks: Ranks, kind: str, has_stepped: bool):
    checkpoint, saved, after = save(ranks, files, kind, 4)

    found = ranks.run(odd_optimizers.load, 4, kind, files.uri, checkpoint.entry, has_stepped)

    for rank, (restored, one_step_on) in enumerate(found):
        assert_same(restored, saved[rank])
        assert_same(one_step_on, after[rank])


@pytest.mark.parametrize("world_size", [1, 2])
def test_plain_slots_of_a_rank_s_own_part_are_refused_by_name_on_another_mesh(
    files: Store, ranks: Ranks, world_size: int
):
    checkpoint, _, _ = save(ranks, files, "local", 4)

    assert workers_of(checkpoint).endswith(" tensors are parts that restore on the same mesh only")
    for said in ranks.run(odd_optimizers.load, world_size, "local", files.uri, checkpoint.entry, False):
        assert "optimizer.state.0.weight.momentum: each rank saved its own part of it" in said
        assert "only on the same mesh" in said


@pytest.mark.parametrize("world_size", [1, 2])
def test_slots_that_are_dtensors_of_other_shapes_go_on_at_another_world_size(
    files: Store, ranks: Ranks, world_size: int
):
    checkpoint, saved, _ = save(ranks, files, "rows", 4)
    assert workers_of(checkpoint) == "saved by 4; restores on any number"

    found = ranks.run(odd_optimizers.load, world_size, "rows", files.uri, checkpoint.entry, False)

    rows = torch.cat([own["0.weight.rows"][1] for own in saved])
    assert torch.equal(torch.cat([restored["0.weight.rows"][1] for restored, _ in found]), rows)
    kinds = {restored["0.weight.rows"][0] for restored, _ in found}
    assert kinds == ({"plain"} if world_size == 1 else {"(Shard(dim=0),)"})
