"""What the ranks run: a small FSDP2 training, saved and loaded by raycheck and by stock torch."""

from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from raycheck.bucket.format.latest import Entry
from raycheck.bucket.format.progress import Progress
from raycheck.bucket.reading import Checkpoint
from raycheck.bucket.store import open_store
from raycheck.state.train_state import TrainState
from tests.support.processes.gloo_ranks import mesh_of
from tests.support.processes.save_without_ray import Uploaded, upload

PROGRESS = Progress(step=3, epoch=1, samples=24)
Tensors = dict[str, torch.Tensor]


class Net(nn.Module):
    """Uneven on every world size in use: 7 and 5 rows, and one with fewer rows than there are ranks."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(6, 7)
        self.norm = nn.BatchNorm1d(7)
        self.last = nn.Linear(7, 5)
        self.narrow = nn.Linear(5, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.narrow(self.last(self.norm(self.first(x)).relu()))


def build(world_size: int, *, seed: int) -> dict[str, Any]:
    """A state as a user has it, FSDP2 on every layer."""
    model = Net(seed)
    mesh = mesh_of(world_size)
    for layer in (model.first, model.last, model.narrow):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    return {"model": model, "optimizer": optimizer, "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2)}


def train(state: dict[str, Any], steps: int) -> None:
    """The same batch on every rank, so that results do not depend on the world size beyond rounding."""
    for step in range(steps):
        batch = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
        state["model"](batch).pow(2).mean().backward()
        state["optimizer"].step()
        state["optimizer"].zero_grad()
        state["scheduler"].step()


def full(state: dict[str, Any]) -> Tensors:
    """Every tensor of model and optimizer, whole, by the name it has in a checkpoint. A collective."""
    model, optimizer = state["model"], state["optimizer"]
    names = {parameter: name for name, parameter in model.named_parameters()}
    tensors = {f"model.{name}": value for name, value in model.state_dict().items()}
    for parameter, slots in optimizer.state.items():
        tensors |= {f"optimizer.state.{names[parameter]}.{slot}": value for slot, value in slots.items()}
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
        for name, value in tensors.items()
    }


def save_trained(rank: int, world_size: int, places: dict[str, str]) -> tuple[dict[str, Uploaded], Tensors]:
    """Three steps, then this rank's shard to each place (uri to checkpoint name). Returns the full tensors too."""
    state = build(world_size, seed=1)
    train(state, PROGRESS.step)
    saver = TrainState(state, rank=rank, world_size=world_size)
    uploads = {uri: upload(open_store(uri), saver.stage(PROGRESS), name=name) for uri, name in places.items()}
    return uploads, full(state)


def load_by_raycheck(rank: int, world_size: int, uri: str, entry: Entry) -> tuple[Tensors, dict[str, Any], int]:
    """Into other weights and an optimizer that never stepped. Returns full tensors, the scheduler, and bytes read."""
    state = build(world_size, seed=2)
    done = TrainState(state, rank=rank, world_size=world_size).apply(Checkpoint(open_store(uri), entry))
    assert done.progress == PROGRESS
    return full(state), state["scheduler"].state_dict(), done.bytes_fetched


def load_by_stock_torch(rank: int, world_size: int, reader: type, place: str, options: dict[str, Any]) -> Tensors:
    """As torch's own tutorial does it: get_state_dict, dcp.load, set_state_dict."""
    state = build(world_size, seed=2)
    model_state, optimizer_state = get_state_dict(state["model"], state["optimizer"])
    nested = {"model": model_state, "optimizer": optimizer_state, "progress": {"step": 0, "epoch": 0, "samples": 0}}
    dcp.load(nested, storage_reader=reader(place, **options))
    set_state_dict(
        state["model"],
        state["optimizer"],
        model_state_dict=nested["model"],
        optim_state_dict=nested["optimizer"],
    )
    assert nested["progress"] == {"step": 3, "epoch": 1, "samples": 24}
    return full(state)


def load_flattened_by_stock_torch(rank: int, world_size: int, place: str) -> Tensors:
    """In torchtitan's layout."""
    state = build(world_size, seed=2)
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    model, optimizer = get_state_dict(state["model"], state["optimizer"], options=flat)
    dcp.load({"model": model, "optimizer": optimizer}, storage_reader=dcp.FileSystemReader(place))
    set_state_dict(state["model"], state["optimizer"], model_state_dict=model, optim_state_dict=optimizer, options=flat)
    return full(state)


def go_on_by_raycheck(rank: int, world_size: int, uri: str, entry: Entry) -> tuple[Tensors, Tensors]:
    """Two more steps without and with an interruption."""
    uninterrupted = build(world_size, seed=1)
    train(uninterrupted, PROGRESS.step)
    train(uninterrupted, 2)
    restored = build(world_size, seed=2)
    TrainState(restored, rank=rank, world_size=world_size).apply(Checkpoint(open_store(uri), entry))
    train(restored, 2)
    return full(uninterrupted), full(restored)


def assert_same(found: Tensors, expected: Tensors) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name
