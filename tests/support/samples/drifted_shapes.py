"""What the ranks run: trainings over meshes in which one rank's replica has drifted apart, saved on real gloo groups."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from raycheck.bucket.store import open_store
from tests.support.frameworks.fsdp_training import Tensors
from tests.support.processes.gloo_ranks import mesh_of
from tests.support.processes.save_without_ray import Uploaded, upload
from tests.support.samples.parallel_shapes import PROGRESS, State, build, settled, train


def replicated(world_size: int) -> State:
    """A model whose tensors are DTensors, whole on every rank."""
    torch.manual_seed(1)
    model = nn.Linear(6, 4)
    for name, parameter in list(model.named_parameters()):
        whole = distribute_tensor(parameter.detach(), mesh_of(world_size), [Replicate()])
        model.register_parameter(name, nn.Parameter(whole))
    return {"model": model}


def save_drifted(
    rank: int, world_size: int, kind: str, uri: str, name: str, drift: dict[str, Any]
) -> tuple[Uploaded, Tensors]:
    """Save a training in which, on one rank, one element of a tensor has changed. drift: the rank, and the tensor's
    name; empty for none. Returns this rank's own tensors, too."""
    if kind == "replicated":
        state = replicated(world_size)
    else:
        state = build(kind, world_size, seed=1)
        train(state, PROGRESS.step)
    saver = settled(state, rank, world_size)
    if drift.get("rank") == rank:
        parameter = state["model"].get_parameter(drift["parameter"])
        tensor = state["optimizer"].state[parameter][drift["slot"]] if "slot" in drift else parameter
        assert isinstance(tensor, DTensor)
        with torch.no_grad():
            tensor.to_local().view(-1)[-1] += 1e-3
    staged = saver.stage(PROGRESS)
    dist.barrier()
    own = {
        key: value.to_local() if isinstance(value, DTensor) else value
        for key, value in state["model"].state_dict().items()
    }
    return upload(open_store(uri), staged, name=name), own
