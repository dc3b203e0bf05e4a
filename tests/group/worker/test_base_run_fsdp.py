"""Tests FSDP2 runs that refer to a base run of another world size (step 39)."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import raycheck
from raycheck.bucket.reading import read_latest
from raycheck.bucket.store import open_store
from tests.support.histories.invariants import assert_invariants
from tests.support.processes.gloo_ranks import Ranks, mesh_of

pytestmark = pytest.mark.slow


def layers() -> torch.nn.Sequential:
    """Make a model whose frozen layers have 7 and 5 rows: uneven on every world size in use."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 7), torch.nn.Linear(7, 5), torch.nn.Linear(5, 2))
    model[:2].requires_grad_(requires_grad=False)
    return model


def whole(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: (item.full_tensor() if isinstance(item, DTensor) else item).clone()
        for name, item in model.state_dict().items()
    }


def train_fsdp(rank: int, world_size: int, uri: str, base: str | None, changed: bool) -> dict[str, torch.Tensor]:
    """Train one step and save. changed: one bit of one rank's frozen part is flipped. Returns the whole model."""
    model = layers()
    mesh = mesh_of(world_size)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if changed and rank == world_size - 1:
        model[1].weight.to_local().view(torch.int32).view(-1)[0] ^= 1
    optimizer = torch.optim.SGD([it for it in model.parameters() if it.requires_grad], lr=0.1 * (2 if base else 1))
    settings = raycheck.SaveSettings(every_steps=1, base=base)
    with raycheck.Checkpointer(
        {"model": model, "optimizer": optimizer}, settings, group=raycheck.torchrun_group(uri)
    ) as ckpt:
        ckpt.restore()
        model(torch.ones(2, 6)).sum().backward()
        optimizer.step()
        ckpt.end_step()
    return whole(model)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    ranks = Ranks(3, tmp_path_factory.mktemp("rendezvous"))
    yield ranks
    ranks.stop()


def frozen_bytes(uri: str) -> int:
    return sum(item.size_bytes for item in open_store(uri).list_objects("checkpoints/") if "frozen" in item.key)


@pytest.mark.parametrize(("saved_by", "used_by"), [(2, 3), (3, 2), (1, 3)])
def test_a_base_that_fsdp2_saved_serves_fsdp2_at_another_world_size(
    ranks: Ranks, tmp_path: Path, saved_by: int, used_by: int
) -> None:
    base, uri = f"file://{tmp_path}/base", f"file://{tmp_path}/run"
    ranks.run(train_fsdp, saved_by, base, None, False)

    models = ranks.run(train_fsdp, used_by, uri, base, False)

    assert frozen_bytes(uri) == 0 < frozen_bytes(base)
    body = assert_invariants(open_store(uri))
    assert body is not None
    assert [loan.source for loan in body.loans] == ["../base"]
    blank = torch.nn.Sequential(torch.nn.Linear(6, 7), torch.nn.Linear(7, 5), torch.nn.Linear(5, 2))
    raycheck.open_run(uri).restore(into={"model": blank})
    for model in models:
        assert all(torch.equal(blank.state_dict()[name], item) for name, item in model.items())


def test_one_other_bit_in_one_rank_s_shard_is_another_base(ranks: Ranks, tmp_path: Path) -> None:
    base, uri = f"file://{tmp_path}/base", f"file://{tmp_path}/run"
    ranks.run(train_fsdp, 2, base, None, False)

    models = ranks.run(train_fsdp, 3, uri, base, True)

    assert frozen_bytes(uri) >= frozen_bytes(base) / 2
    assert read_latest(open_store(uri)).loans == ()
    blank = torch.nn.Sequential(torch.nn.Linear(6, 7), torch.nn.Linear(7, 5), torch.nn.Linear(5, 2))
    raycheck.open_run(uri).restore(into={"model": blank})
    assert all(torch.equal(blank.state_dict()[name], item) for name, item in models[0].items())
