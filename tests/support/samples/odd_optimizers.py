"""What the ranks run: optimizers whose slots are not sharded as their parameters are, over FSDP2 on gloo groups."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate

from raycheck.bucket.format.latest import Entry
from raycheck.bucket.format.progress import Progress
from raycheck.bucket.reading import Checkpoint
from raycheck.bucket.store import open_store
from raycheck.errors import StateMismatchError
from raycheck.state.train_state import TrainState
from tests.support.processes.gloo_ranks import mesh_of
from tests.support.processes.save_without_ray import Uploaded, upload
from tests.support.samples.parallel_shapes import State, settled

PROGRESS = Progress(step=2)
Slots = dict[str, torch.Tensor]


class LocalSlots(torch.optim.Optimizer):
    """Keeps plain tensors: a momentum of the shape of the rank's own part, statistics of its rows, and one of columns
    that is equal on all ranks."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            gradient = _local(parameter.grad)
            slots = self.state[parameter]
            if not slots:
                slots["momentum"] = torch.zeros_like(gradient)
                slots["rows"] = torch.zeros(gradient.shape[:1])
                slots["counts"] = torch.zeros(7)
            slots["momentum"].mul_(0.9).add_(gradient)
            slots["rows"].add_(gradient.square().sum(-1) if gradient.dim() > 1 else gradient.square())
            slots["counts"].add_(1)
            scale = (1 + slots["rows"]).rsqrt().reshape(-1, *[1] * (gradient.dim() - 1))
            _local(parameter).sub_(slots["momentum"] * scale * self.param_groups[0]["lr"])


class RowSlots(torch.optim.Optimizer):
    """Keeps DTensors of other shapes than the parameter's: the mean square of each row, and a whole one per column."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            square = parameter.grad.square()
            slots = self.state[parameter]
            rows, columns = square.mean(-1) if square.dim() > 1 else square, _whole(square).mean(0)
            slots["rows"] = slots["rows"] * 0.9 + rows if slots else rows
            slots["columns"] = slots["columns"] * 0.9 + columns if "columns" in slots else columns
            scale = (1e-3 + slots["rows"]).rsqrt().reshape(-1, *[1] * (parameter.dim() - 1))
            parameter.sub_(parameter.grad * scale * self.param_groups[0]["lr"])


OPTIMIZERS = {"local": LocalSlots, "rows": RowSlots}


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.redistribute(placements=[Replicate()]) if isinstance(tensor, DTensor) else tensor


def build(kind: str, world_size: int, seed: int) -> State:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
    if world_size > 1:
        fully_shard(model, mesh=mesh_of(world_size))
    return {"model": model, "optimizer": OPTIMIZERS[kind](model.parameters())}


def train(state: State, steps: int, *, start: int = 0) -> None:
    """The same batch on every rank."""
    for number in range(start, start + steps):
        batch = torch.randn(4, 6, generator=torch.Generator().manual_seed(number))
        state["model"](batch).square().sum().backward()
        state["optimizer"].step()
        state["optimizer"].zero_grad()


def own_tensors(state: State) -> dict[str, tuple[str, torch.Tensor]]:
    """This rank's part of every tensor, with what kind of tensor it is."""
    names = {parameter: name for name, parameter in state["model"].named_parameters()}
    tensors = dict(state["model"].state_dict())
    for parameter, slots in state["optimizer"].state.items():
        tensors |= {f"{names[parameter]}.{slot}": value for slot, value in slots.items()}
    return {
        name: (str(value.placements) if isinstance(value, DTensor) else "plain", _local(value).detach().clone())
        for name, value in tensors.items()
    }


def save_trained(rank: int, world_size: int, kind: str, uri: str, name: str) -> tuple[Uploaded, Any, Any]:
    """Returns this rank's tensors at the save, and those after one more step."""
    state = build(kind, world_size, seed=1)
    train(state, PROGRESS.step)
    staged = settled(state, rank, world_size).stage(PROGRESS)
    saved = own_tensors(state)
    train(state, 1, start=PROGRESS.step)
    return upload(open_store(uri), staged, name=name), saved, own_tensors(state)


def load(rank: int, world_size: int, kind: str, uri: str, entry: Entry, has_stepped: bool) -> tuple[Any, Any] | str:
    """Returns this rank's restored tensors, and those after one more step; or why the restore is refused."""
    state = build(kind, world_size, seed=2)
    if has_stepped:
        train(state, 1, start=50)
    try:
        TrainState(state, rank=rank, world_size=world_size).apply(Checkpoint(open_store(uri), entry))
    except StateMismatchError as error:
        return str(error)
    restored = own_tensors(state)
    train(state, 1, start=PROGRESS.step)
    return restored, own_tensors(state)
