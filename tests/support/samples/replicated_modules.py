"""What the ranks of test_replica_broadcast.py run: plain replicated modules, as under DDP."""

from typing import Any

import torch
from torch import nn

from raycheck.bucket.format.latest import Entry
from raycheck.bucket.reading import Checkpoint
from raycheck.bucket.store import open_store
from raycheck.errors import RaycheckError
from raycheck.state.restore_selection import Selection
from raycheck.state.train_state import Progress, TrainState

Loaded = tuple[dict[str, torch.Tensor], int]
"""Every tensor of model and optimizer, and the bytes that this rank fetched."""


def build(seed: int) -> dict[str, Any]:
    """Tensors above and below a bucket, of no elements and of one, and of kinds that gloo does not send."""
    torch.manual_seed(seed)
    model = nn.Module()
    model.large = nn.Linear(3000, 3001)
    model.small = nn.ModuleList(nn.Linear(7, 5) for _ in range(40))
    model.transposed = nn.Parameter(torch.randn(30, 20).t())
    model.brain = nn.Parameter(torch.randn(33).bfloat16())
    model.register_buffer("empty", torch.empty(0, 4))
    model.register_buffer("flags", torch.rand(17) > 0.5)
    model.register_buffer("scalar", torch.tensor(float(seed)))
    model.register_buffer("short", (torch.arange(5) + seed).to(torch.uint16))
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    for parameter in model.parameters():
        optimizer.state[parameter]["momentum_buffer"] = torch.randn_like(parameter)
    return {"model": model, "optimizer": optimizer}


def tensors_of(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    slots = state["optimizer"].state_dict()["state"]
    found = {f"{number}.{slot}": value for number, held in slots.items() for slot, value in held.items()}
    return {name: tensor.detach().clone() for name, tensor in (found | state["model"].state_dict()).items()}


def load(rank: int, world_size: int, uri: str, entry: Entry, skip: tuple[tuple[str, ...], ...]) -> Loaded | str:
    """Into other values; skip: entries that each rank leaves as they are. The error's type and text, if there is one."""
    state = build(seed=2)
    selection = Selection.of(None, skip[rank])
    try:
        done = TrainState(state, rank=rank, world_size=world_size).apply(
            Checkpoint(open_store(uri), entry), selection, share=True
        )
    except RaycheckError as error:
        return f"{type(error).__name__}: {error}"
    assert done.progress == Progress(step=3)
    return tensors_of(state), done.bytes_fetched
