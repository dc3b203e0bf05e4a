"""Lets one process play every rank of a training in turn. DTensors know their own box without any communication."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Placement, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from raycheck.bucket.format.progress import Progress
from raycheck.bucket.reading import Checkpoint
from raycheck.bucket.store import Store
from raycheck.state.restore_result import Restored
from raycheck.state.train_state import TrainState
from tests.support.processes.save_without_ray import save

Tensors = Mapping[str, torch.Tensor]
Layout = Mapping[str, Sequence[Placement]]
"""Placements by parameter; the others are sharded on their first dimension. A scalar stays plain."""


@contextmanager
def playing(rank: int, world_size: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


class Played:
    """Holds one rank's model and AdamW state over `weights`, in the layout that is given.

    blank: filled with another value, and an optimizer that never stepped. is_bare: no optimizer at all.
    """

    def __init__(
        self, weights: Tensors, layout: Layout, mesh: tuple[int, ...], *, is_bare: bool, blank: bool = False
    ) -> None:
        # A name of its own: torch caches specs by equal meshes, and would hand this rank the last one's coordinate.
        names = tuple(uuid4().hex for _ in mesh)
        self._mesh = dist.init_device_mesh("cpu", mesh, mesh_dim_names=names)
        self._layout = layout
        self.model = nn.Module()
        self.model.register_buffer("seen", torch.tensor(0 if blank else 17))
        for name, tensor in weights.items():
            value = torch.full_like(tensor, -1) if blank else tensor
            self.model.register_parameter(name, nn.Parameter(self.placed(name, value), requires_grad=False))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self._is_bare = is_bare
        if not blank and not is_bare:
            for name, parameter in self.model.named_parameters():
                self.optimizer.state[parameter] = {
                    "step": torch.tensor(3.0),
                    **{slot: self.placed(name, value) for slot, value in slots_of(weights[name]).items()},
                }

    def placed(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() == 0:
            return tensor.clone()
        placements = self._layout.get(name, [Shard(0)])
        return distribute_tensor(tensor.clone(), self._mesh, placements, src_data_rank=None)

    def state(self) -> dict[str, Any]:
        return {"model": self.model} if self._is_bare else {"model": self.model, "optimizer": self.optimizer}


def slots_of(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"exp_avg": weight * 2, "exp_avg_sq": weight + 1}


def save_played(
    store: Store,
    weights: Tensors,
    *,
    world_size: int,
    layout: Layout | None = None,
    mesh: tuple[int, ...] = (),
    is_bare: bool = False,
) -> Checkpoint:
    staged = []
    for rank in range(world_size):
        with playing(rank, world_size):
            played = Played(weights, layout or {}, mesh or (world_size,), is_bare=is_bare)
            staged.append(TrainState(played.state(), rank=rank, world_size=world_size).stage(Progress(step=1)))
    return save(store, staged)


def check_restore(
    checkpoint: Checkpoint,
    weights: Tensors,
    *,
    world_size: int,
    layout: Layout | None = None,
    mesh: tuple[int, ...] = (),
    is_bare: bool = False,
) -> list[Restored]:
    """Restore on each rank of a training that never stepped, and compare every local tensor with its expected box."""
    restores = []
    for rank in range(world_size):
        with playing(rank, world_size):
            wanted = Played(weights, layout or {}, mesh or (world_size,), is_bare=is_bare)
            played = Played(weights, layout or {}, mesh or (world_size,), is_bare=is_bare, blank=True)
            restores.append(TrainState(played.state(), rank=rank, world_size=world_size).apply(checkpoint))
            assert played.model.seen == 17
            for name, parameter in played.model.named_parameters():
                assert_equal(parameter, wanted.model.get_parameter(name), f"{name} on rank {rank} of {world_size}")
                slots = played.optimizer.state.get(parameter, {"step": 3})
                assert slots["step"] == 3
                for slot, value in ({} if is_bare else slots_of(weights[name])).items():
                    what = f"{slot} of {name} on rank {rank} of {world_size}"
                    assert_equal(slots[slot], wanted.placed(name, value), what)
    return restores


def assert_equal(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    assert isinstance(found, DTensor) == isinstance(expected, DTensor), what
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape), what
    assert torch.equal(local(found), local(expected)), what


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
