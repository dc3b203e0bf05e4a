"""Tensors of which a rank's part is not one box are refused before the first step, by the placement's name.

The judge is torch's own redistribute(): it says which rows each rank gets.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from raycheck.errors import ConfigError
from raycheck.state.train_state import TrainState
from raycheck.transfer.stage.local_box import box_of
from tests.support.processes.gloo_ranks import Ranks

ROWS = 16
PLACEMENTS: list[list[Placement]] = [
    [Shard(0), Shard(0)],
    [Shard(0), Shard(1)],
    [Replicate(), Shard(0)],
    [_StridedShard(0, split_factor=2), Shard(0)],  # FSDP2 over tensor parallelism
    [_StridedShard(0, split_factor=2), Shard(1)],
    [_StridedShard(0, split_factor=4), Shard(0)],
    [_StridedShard(0, split_factor=2), Replicate()],
    [Replicate(), _StridedShard(0, split_factor=2)],
    [Shard(0), _StridedShard(0, split_factor=2)],
    [Shard(0), _StridedShard(0, split_factor=1)],
]


def mesh_of_two_by_two() -> dist.DeviceMesh:
    return dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))


def rows_and_boxes(rank: int, world_size: int) -> list[tuple[list[int], Any]]:
    """Returns for each of PLACEMENTS the rows that torch gives to this rank, and its box's rows or the refusal."""
    mesh = mesh_of_two_by_two()
    whole = torch.arange(ROWS).repeat_interleave(4).reshape(ROWS, 4)
    found: list[tuple[list[int], Any]] = []
    for placements in PLACEMENTS:
        replicated = DTensor.from_local(whole, mesh, [Replicate(), Replicate()], run_check=False)
        tensor = replicated.redistribute(placements=placements)
        try:
            box = box_of("w", ("w",), tensor, may_spread=True, world_size=world_size)
            boxed: Any = list(range(box.offsets[0], box.offsets[0] + box.sizes[0]))
        except ConfigError as error:
            boxed = str(error)
        found.append((tensor.to_local()[:, 0].tolist(), boxed))
    return found


def test_a_placement_is_accepted_exactly_where_each_rank_holds_the_rows_of_its_box(ranks: Ranks) -> None:
    for placements, of_ranks in zip(PLACEMENTS, zip(*ranks.run(rows_and_boxes, 4), strict=True), strict=True):
        are_boxes = all(rows == list(range(rows[0], rows[-1] + 1)) for rows, _ in of_ranks)
        for rows, boxed in of_ranks:
            assert boxed == rows if are_boxes else "cannot be saved" in boxed, placements


def refusals(rank: int, world_size: int) -> list[str]:
    mesh = mesh_of_two_by_two()
    found = []
    for placements in ([Shard(0), _StridedShard(0, split_factor=2)], [Partial(), Shard(0)]):
        model = torch.nn.Linear(4, 4, bias=False)
        local = torch.zeros(4 // (1 if isinstance(placements[0], Partial) else 2) // 2, 4)
        packed = DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size((4, 4)), stride=(4, 1))
        model.weight = torch.nn.Parameter(packed)
        state = TrainState({"model": model}, rank=rank, world_size=world_size)
        with pytest.raises(ConfigError) as error:
            state.check(is_before_restore=True)
        found.append(str(error.value))
        model.weight = torch.nn.Parameter(
            packed.redistribute(placements=[Shard(0), Shard(0)])
        )  # the cure that is named
        TrainState({"model": model}, rank=rank, world_size=world_size).check(is_before_restore=True)
    return found


def test_a_packed_parameter_is_refused_before_the_first_step_and_the_named_cure_works(ranks: Ranks) -> None:
    for packed, partial in ranks.run(refusals, 4):
        assert "state at model.weight is a DTensor placed as" in packed
        assert f"{_StridedShard(0, split_factor=2)!r} cannot be saved" in packed
        assert f"{Partial()!r} cannot be saved" in partial


def describe_as_shard(tensor: torch.Tensor) -> None:
    """Gives a tensor what torch.distributed.checkpoint.CheckpointableTensor of torch 2.14 asks for."""
    tensor.global_shape = (8, 2)  # type: ignore[attr-defined]
    tensor.global_offsets = ((4, 0),)  # type: ignore[attr-defined]
    tensor.local_offsets = ((0, 0),)  # type: ignore[attr-defined]
    tensor.local_sizes = ((4, 2),)  # type: ignore[attr-defined]


def with_parameter() -> dict[str, object]:
    model = torch.nn.Linear(2, 4, bias=False)
    describe_as_shard(model.weight)
    return {"model": model}


def with_buffer() -> dict[str, object]:
    model = torch.nn.Module()
    model.register_buffer("queue", torch.zeros(4, 2))
    describe_as_shard(model.queue)  # type: ignore[arg-type]
    return {"model": model}


def with_slot() -> dict[str, object]:
    model = torch.nn.Linear(2, 4, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    describe_as_shard(optimizer.state[model.weight]["momentum_buffer"])
    return {"model": model, "optimizer": optimizer}


def with_value() -> dict[str, object]:
    tensor = torch.zeros(4, 2)
    describe_as_shard(tensor)
    owner = SimpleNamespace(state_dict=lambda: {"part": tensor}, load_state_dict=lambda _: None)
    return {"owner": owner}


@pytest.mark.parametrize("make", [with_parameter, with_buffer, with_slot, with_value])
def test_a_plain_tensor_that_describes_its_own_shard_is_refused_by_name(make: Any) -> None:
    with pytest.raises(ConfigError, match=r"state at .* is a plain tensor that describes its own shard of \[8, 2\]"):
        TrainState(make(), rank=1, world_size=2).check(is_before_restore=True)
