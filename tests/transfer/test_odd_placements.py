"""A DTensor is saved in the boxes that its placements give each rank, several ones for packed placements.

The judge is torch's own redistribute(): it says which rows each rank gets. What has no final values is refused.
"""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from raycheck.bucket.format.progress import Progress
from raycheck.bucket.store import open_store
from raycheck.errors import ConfigError
from raycheck.state.train_state import TrainState
from raycheck.transfer.stage.local_box import boxes_of
from tests.support.processes.gloo_ranks import Ranks
from tests.support.processes.save_without_ray import Own, claimed, committed, restore_state, upload

ROWS = 16
NAME = "step-000000001-a1-s1"
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


def rows_and_boxes(rank: int, world_size: int) -> list[tuple[list[int], list[int]]]:
    """Return for each of PLACEMENTS the rows that torch gives to this rank, and those of its boxes."""
    mesh = mesh_of_two_by_two()
    whole = torch.arange(ROWS).repeat_interleave(4).reshape(ROWS, 4)
    found = []
    for placements in PLACEMENTS:
        replicated = DTensor.from_local(whole, mesh, [Replicate(), Replicate()], run_check=False)
        tensor = replicated.redistribute(placements=placements)
        boxes = boxes_of("w", ("w",), tensor, may_spread=True, world_size=world_size)
        for box in boxes:
            rows = range(box.offsets[0], box.offsets[0] + box.sizes[0])
            assert box.local[:, 0].tolist() == list(rows)
        found.append((tensor.to_local()[:, 0].tolist(), [row for box in boxes for row in box.local[:, 0].tolist()]))
    return found


def test_the_boxes_of_a_placement_are_the_rows_that_torch_gives_to_the_rank(ranks: Ranks) -> None:
    for placements, of_ranks in zip(PLACEMENTS, zip(*ranks.run(rows_and_boxes, 4), strict=True), strict=True):
        for rows, boxed in of_ranks:
            assert boxed == rows, placements


def refusal(rank: int, world_size: int) -> str:
    mesh = mesh_of_two_by_two()
    model = torch.nn.Linear(4, 4, bias=False)
    partial = DTensor.from_local(torch.zeros(2, 4), mesh, [Partial(), Shard(0)], run_check=False)
    model.weight = torch.nn.Parameter(partial)
    state = TrainState({"model": model}, rank=rank, world_size=world_size)
    with pytest.raises(ConfigError) as error:
        state.check(is_before_restore=True)
    cured = torch.nn.Parameter(partial.redistribute(placements=[Shard(0), Shard(0)]))  # the cure that is named
    model.weight = cured
    TrainState({"model": model}, rank=rank, world_size=world_size).check(is_before_restore=True)
    return str(error.value)


def test_a_tensor_without_final_values_is_refused_before_the_first_step_and_the_named_cure_works(ranks: Ranks) -> None:
    for said in ranks.run(refusal, 4):
        assert "state at model.weight is a DTensor placed as" in said
        assert f"{Partial()!r} cannot be saved" in said


def packed(rank: int, world_size: int) -> DTensor:
    """Distribute rows in an order in which no rank has neighboring ones."""
    whole = torch.arange(ROWS * 4, dtype=torch.float32).reshape(ROWS, 4)
    replicated = DTensor.from_local(whole, mesh_of_two_by_two(), [Replicate(), Replicate()], run_check=False)
    return replicated.redistribute(placements=[Shard(0), _StridedShard(0, split_factor=2)])


def save_packed(uri: str, rank: int, world_size: int) -> Any:
    state = TrainState({"owner": Own({"w": packed(rank, world_size)})}, rank=rank, world_size=world_size)
    return upload(open_store(uri), state.stage(Progress(step=1)), name=NAME)


def test_a_packed_tensor_is_saved_whole(ranks: Ranks, tmp_path: Path) -> None:
    uri = f"file://{tmp_path}/run"
    store = open_store(uri)
    name = claimed(store, world_size=4)
    assert name == NAME

    checkpoint = committed(store, name, ranks.run(partial(save_packed, uri), 4), progress=Progress(step=1))

    here = {"owner": Own({"w": torch.zeros(ROWS, 4)})}
    restore_state(checkpoint, here)
    assert torch.equal(here["owner"].state["w"], torch.arange(ROWS * 4, dtype=torch.float32).reshape(ROWS, 4))
