"""What the ranks run: trainings over meshes of two dimensions, and pipelines, saved and loaded on real gloo groups."""

from collections import OrderedDict
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from raycheck.bucket.assembly.replica_agreement import agree
from raycheck.bucket.format.latest import Entry
from raycheck.bucket.format.progress import Progress
from raycheck.bucket.reading import Checkpoint
from raycheck.bucket.store import open_store
from raycheck.errors import StateMismatchError
from raycheck.state.train_state import TrainState
from tests.support.frameworks.fsdp_training import Tensors
from tests.support.processes.save_without_ray import Uploaded, upload

PROGRESS = Progress(step=2)
State = dict[str, Any]


def whole(seed: int) -> nn.Sequential:
    """`up` and `down` are split by tensor parallelism; `tail` has rows that two ranks cannot share evenly."""
    torch.manual_seed(seed)
    return nn.Sequential(
        OrderedDict(up=nn.Linear(6, 8), mid=nn.Tanh(), down=nn.Linear(8, 5), norm=nn.LayerNorm(5), tail=nn.Linear(5, 3))
    )


def with_adam(model: nn.Module) -> State:
    # one tensor at a time: the fused loops of torch refuse tensors of several meshes
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)}


def build(kind: str, world_size: int, seed: int) -> State:
    model = whole(seed)
    if kind == "plain":
        return with_adam(model)
    name = uuid4().hex  # a mesh of its own: torch caches DTensor specs by equal meshes, across destroyed groups
    if kind == "fsdp":
        mesh = dist.init_device_mesh("cpu", (world_size,), mesh_dim_names=(name,))
        return with_adam(fully_shard(model, mesh=mesh))
    outer, inner = f"outer{name}", f"inner{name}"
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=(outer, inner))
    if kind == "hybrid":
        fully_shard(model.down, mesh=mesh)
        return with_adam(fully_shard(model, mesh=mesh))
    if kind == "pipeline":
        stages = (("up", "mid"), ("down", "norm", "tail"))
        stage = nn.Sequential(OrderedDict((key, getattr(model, key)) for key in stages[mesh.get_local_rank(outer)]))
        return with_adam(fully_shard(stage, mesh=mesh[inner]))
    parallelize_module(model, mesh[inner], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if kind == "fsdp x tensor parallel":
        fully_shard(model, mesh=mesh[outer])
    return with_adam(model)  # else replicas of tensor parallel groups; the same batch makes the all-reduce idle


def train(state: State, steps: int, *, start: int = 0) -> None:
    """The same batch on every rank."""
    width = next(iter(state["model"].children())).in_features
    for step in range(start, start + steps):
        batch = torch.randn(4, width, generator=torch.Generator().manual_seed(step))
        state["model"](batch).pow(2).sum().backward()
        state["optimizer"].step()
        state["optimizer"].zero_grad()


def full(state: State) -> Tensors:
    """Every tensor of model and optimizer, whole, by the name it has in a checkpoint. A collective."""
    names = {parameter: name for name, parameter in state["model"].named_parameters()}
    tensors = {f"model.{name}": value for name, value in state["model"].state_dict().items()}
    for parameter, slots in state["optimizer"].state.items():
        tensors |= {f"optimizer.state.{names[parameter]}.{slot}": value for slot, value in slots.items()}
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
        for name, value in tensors.items()
    }


def settled(state: State, rank: int, world_size: int, *, leaving: frozenset[int] = frozenset()) -> TrainState:
    """This rank's state after all ranks agreed on who writes what. leaving: as after a notice."""
    saver = TrainState(state, rank=rank, world_size=world_size)
    holdings: list[Any] = [None] * world_size
    dist.all_gather_object(holdings, saver.replica_checksums(with_spares=bool(leaving)))
    saver.use_agreement(agree(holdings, leaving=leaving)[rank])
    return saver


def save_trained(
    rank: int, world_size: int, kind: str, uri: str, name: str, leaving: frozenset[int] = frozenset()
) -> tuple[Uploaded, Tensors, Tensors]:
    """Returns the tensors that were saved, and those after one more step."""
    state = build(kind, world_size, seed=1)
    train(state, PROGRESS.step)
    staged = settled(state, rank, world_size, leaving=leaving).stage(PROGRESS)
    saved = full(state)
    train(state, 1, start=PROGRESS.step)
    return upload(open_store(uri), staged, name=name), saved, full(state)


def load(rank: int, world_size: int, kind: str, uri: str, entry: Entry) -> tuple[Tensors, Tensors, Any]:
    """Into other weights and an optimizer that never stepped: the restored tensors, those after one more step, and
    the report."""
    state = build(kind, world_size, seed=2)
    done = TrainState(state, rank=rank, world_size=world_size).apply(Checkpoint(open_store(uri), entry))
    restored = full(state)
    train(state, 1, start=PROGRESS.step)
    return restored, full(state), done.report


def load_by_stock_torch(rank: int, world_size: int, kind: str, reader: type, place: str) -> Tensors:
    """As torch's own tutorial does it: get_state_dict, dcp.load, set_state_dict."""
    state = build(kind, world_size, seed=2)
    model, optimizer = get_state_dict(state["model"], state["optimizer"])
    dcp.load({"model": model, "optimizer": optimizer}, storage_reader=reader(place))
    set_state_dict(state["model"], state["optimizer"], model_state_dict=model, optim_state_dict=optimizer)
    return full(state)


def save_tied(rank: int, world_size: int, uri: str, name: str) -> tuple[Uploaded, Tensors]:
    """FSDP2 over tied weights with fewer rows than there are ranks."""
    state = build_tied(world_size, seed=1)
    for _ in range(PROGRESS.step):
        state["model"](torch.tensor([[0, 1]])).pow(2).sum().backward()
        state["optimizer"].step()
        state["optimizer"].zero_grad()
    return upload(open_store(uri), settled(state, rank, world_size).stage(PROGRESS), name=name), full(state)


def load_tied(rank: int, world_size: int, uri: str, entry: Entry) -> Tensors:
    state = build_tied(world_size, seed=2)
    TrainState(state, rank=rank, world_size=world_size).apply(Checkpoint(open_store(uri), entry))
    assert state["model"].head.weight is state["model"].embed.weight
    return full(state)


def refusal_of_tied(rank: int, world_size: int, uri: str, entry: Entry) -> str:
    state = build_tied(world_size, seed=2)
    try:
        TrainState(state, rank=rank, world_size=world_size).apply(Checkpoint(open_store(uri), entry))
    except StateMismatchError as error:
        return str(error)
    return "restored"


class Tied(nn.Module):
    """An embedding whose weight is the head's too."""

    def __init__(self, seed: int, *, rows: int = 3, is_tied: bool = True) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(rows, 4)
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, rows, bias=False)
        if is_tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embed(tokens)))


def build_tied(world_size: int, seed: int) -> State:
    mesh = dist.init_device_mesh("cpu", (world_size,), mesh_dim_names=(uuid4().hex,))
    return with_adam(fully_shard(Tied(seed), mesh=mesh))
