"""What the golden run holds. Every tensor is a formula of its name and step, so that no seed and no version of torch
decides what a reader must find."""

import enum
import io
import random
import zlib
from collections import Counter, OrderedDict, defaultdict, deque
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from pathlib import PurePosixPath
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from raycheck.bucket.store import open_store
from raycheck.run import open_run
from raycheck.state.entries.per_rank_entries import PerRank
from raycheck.state.train_state import Progress
from tests.support.frameworks.fsdp_training import Tensors
from tests.support.processes.gloo_ranks import mesh_of
from tests.support.processes.save_without_ray import Own, Uploaded, upload
from tests.support.samples.parallel_shapes import Tied, settled

STEPS = (2, 4)
WORLD_SIZE = 2
SEED = 7
DTYPES = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "complex64", "int64", "int8", "uint8", "bool")
SHAPES: dict[str, tuple[int, ...]] = {"matrix": (2, 3), "scalar": (), "empty": (0, 4)}


def progress_of(step: int) -> Progress:
    return Progress(step=step, epoch=1, samples=8 * step)


def value_of(name: str, step: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Small numbers, exact in every dtype."""
    numbers = (torch.arange(torch.Size(shape).numel()) + zlib.crc32(f"{name} at {step}".encode())) % 13
    if dtype == torch.complex64:
        return torch.complex(numbers / 2, numbers / 4).reshape(shape)
    return (numbers / 2 if dtype.is_floating_point else numbers).to(dtype).reshape(shape)


def values_of(step: int) -> dict[str, Any]:
    """One of everything that JSON cannot say, and of what it can."""
    return {
        "plain": [None, True, step, 2**70, "text é", 0.1, {"deep": {"er": []}}],
        "tuple": (1, (2, "b")),
        "sets": [{1, 2}, frozenset({"x"})],
        "keys": {1: "int", (2, 3): "tuple", "$odd": 1},
        "counter": Counter({5: 2}),
        "ordered": OrderedDict([("b", 1), ("a", 2)]),
        "deque": deque([1, 2], maxlen=3),
        "bytes": [b"\x00\xff", bytearray(b"ab")],
        "floats": [float("inf"), float("-inf"), complex(1, -2)],
        "arrays": [np.arange(6, dtype=np.int16).reshape(2, 3), np.float32(1.5)],
    }


class Mode(enum.Enum):
    TRAIN = "train"


@dataclass
class Best:
    step: int
    loss: float


class Span(NamedTuple):
    start: int
    stop: int


def kinds_of(step: int) -> dict[str, Any]:
    """One of every kind of value that format version 2 added."""
    bytesio = io.BytesIO(b"abc")
    bytesio.seek(1)
    return {
        "default": defaultdict(int, {"a": step}),
        "large": 1 << 40_000,
        "text": "\ud83d\ude00",
        "moment": datetime(2026, 11, 23, 4, 5, 6, 789, tzinfo=UTC),
        "times": [date(2026, 1, 2), time(3, 4), timedelta(seconds=step)],
        "path": PurePosixPath("a/b"),
        "bytesio": bytesio,
        "torch": [torch.bfloat16, torch.device("cpu"), torch.Size([2, step])],
        "mode": Mode.TRAIN,
        "best": Best(step=step, loss=0.5),
        "span": Span(step, step + 1),
    }


def build(*, is_sharded: bool) -> dict[str, Any]:
    """The objects before anything was put into them, FSDP2 over the group where there is one."""
    model = Tied(seed=SEED, rows=7)
    if is_sharded:
        fully_shard(model, mesh=mesh_of(WORLD_SIZE))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25, weight_decay=0.5, foreach=False)
    return {
        "model": model,
        "reference": torch.nn.Linear(3, 2).requires_grad_(False),
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[1, 3, 3], gamma=0.5),
        "tensors": Own({}),
        "values": Own({}),
        "kinds": kinds_of(0),
        "counter": PerRank(0),
    }


def fill(state: dict[str, Any], rank: int, step: int) -> None:
    """Bring the objects to `step`."""
    model, optimizer = state["model"], state["optimizer"]
    for _ in range(step - state["scheduler"].last_epoch):
        model(torch.tensor([[0, 1]])).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        state["scheduler"].step()
    for name, tensor in tensors_of(state).items():
        assign(tensor, value_of(name, step, tuple(tensor.shape), tensor.dtype))
    for name, tensor in frozen_of(state).items():
        assign(tensor, value_of(name, 0, tuple(tensor.shape), tensor.dtype))
    state["tensors"].state = others_of(step)
    state["values"].state = values_of(step)
    state["kinds"].update(kinds_of(step))
    state["counter"].value = {"of rank": rank, "tensor": torch.tensor([rank, step])}


def tensors_of(state: dict[str, Any]) -> Tensors:
    """The live tensors of model and optimizer by the name they have in a checkpoint, a tied one by its first."""
    names = {parameter: name for name, parameter in state["model"].named_parameters()}
    found = {f"model.{name}": parameter for parameter, name in names.items()}
    for parameter, slots in state["optimizer"].state.items():
        found |= {f"optimizer.state.{names[parameter]}.{slot}": value for slot, value in slots.items()}
    return found


def frozen_of(state: dict[str, Any]) -> Tensors:
    """The live tensors that hold the same at every step."""
    return {f"reference.{name}": parameter for name, parameter in state["reference"].named_parameters()}


def others_of(step: int) -> Tensors:
    """A vector of every dtype, and other shapes."""
    kinds = {dtype: ((5,), getattr(torch, dtype)) for dtype in DTYPES}
    kinds |= {shape: (sizes, torch.float32) for shape, sizes in SHAPES.items()}
    return {name: value_of(f"tensors.{name}", step, *kind) for name, kind in kinds.items()}


def assign(tensor: torch.Tensor, whole: torch.Tensor) -> None:
    with torch.no_grad():
        if isinstance(tensor, DTensor):
            whole = distribute_tensor(whole, tensor.device_mesh, tensor.placements)
        tensor.copy_(whole)


def save(rank: int, world_size: int, uri: str, name: str, step: int) -> Uploaded:
    """What each rank runs."""
    state = build(is_sharded=True)
    fill(state, rank, step)
    saver = settled(state, rank, world_size)
    head = open_run(uri).head if step > STEPS[0] else None
    if head is not None:  # so that this checkpoint refers to what that one has
        saver.apply(head._stored)
        fill(state, rank, step)
    random.seed(SEED + rank)
    np.random.seed(SEED + rank)  # noqa: NPY002  the global state is what is saved
    torch.manual_seed(SEED + rank)
    return upload(open_store(uri), saver.stage(progress_of(step)), name=name)
