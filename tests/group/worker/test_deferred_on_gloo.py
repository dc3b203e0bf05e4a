"""Tests on gloo groups that what a restore defers is read beside the script's own collectives, and comes to the same."""

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import raycheck
from raycheck.bucket.store import open_store
from raycheck.bucket.store.address import join_uri
from raycheck.errors import SupersededError
from tests.group.worker.test_damaged_restore import damage
from tests.group.worker.test_deferred_optimizer import rules_for_moments
from tests.support.histories.invariants import assert_invariants
from tests.support.processes.background_call import InThread
from tests.support.processes.gloo_ranks import Ranks, mesh_of
from tests.support.servers.http_fault_proxy import FaultProxy

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch
STEPS = 2
MORE = 3
WITHIN_S = 100.0
Tensors = dict[str, torch.Tensor]
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
}


class Training:
    """A training of this rank. kind: "ddp", or "fsdp", whose layers have uneven numbers of rows."""

    def __init__(self, world_size: int, kind: str, optimizer: str, *, seed: int) -> None:
        torch.manual_seed(seed)
        self.plain = torch.nn.Sequential(torch.nn.Linear(64, 301), torch.nn.ReLU(), torch.nn.Linear(301, 7))
        self.model: Any = self.plain
        if kind == "ddp":
            self.model = DistributedDataParallel(self.plain)
        else:
            mesh = mesh_of(world_size)
            for layer in (self.plain[0], self.plain[2], self.plain):
                fully_shard(layer, mesh=mesh)
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())

    def backward(self, step: int) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(8, 64, generator=torch.Generator().manual_seed(step))).square().mean().backward()

    def tensors(self) -> Tensors:
        """Return all tensors of model and optimizer, whole. A collective."""
        found = dict(self.plain.named_parameters())
        for name, parameter in self.plain.named_parameters():
            slots = self.optimizer.state[parameter]
            found |= {f"{name}.{slot}": value for slot, value in slots.items() if isinstance(value, torch.Tensor)}
        return {
            name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
            for name, value in found.items()
        }


def save(rank: int, world_size: int, uri: str, kind: str, optimizer: str) -> tuple[int, Tensors]:
    """Save after STEPS more steps. Return that step, and what it comes to MORE steps later without a restart."""
    training = Training(world_size, kind, optimizer, seed=0)
    state = {"model": training.model, "optimizer": training.optimizer}
    with raycheck.Checkpointer(state, group=raycheck.torchrun_group(uri)) as ckpt:
        at = ckpt.restore().step
        for step in range(at, at + STEPS):
            training.backward(step)
            training.optimizer.step()
            ckpt.end_step()
    for step in range(at + STEPS, at + STEPS + MORE):
        training.backward(step)
        training.optimizer.step()
    return at + STEPS, training.tensors()


def go_on(
    rank: int,
    world_size: int,
    uri: str,
    kind: str,
    optimizer: str,
    defers: bool = True,
    mark: Path | None = None,
) -> tuple[int, Tensors]:
    """Restore and train MORE steps, of which nothing is saved. mark: a file made after the first backward pass."""
    training = Training(world_size, kind, optimizer, seed=1)
    state = {"model": training.model, "optimizer": training.optimizer}
    ckpt = raycheck.Checkpointer(state, raycheck.SaveSettings(every_steps=100), group=raycheck.torchrun_group(uri))
    at = ckpt.restore(defer_optimizer=defers)
    for step in range(at.step, at.step + MORE):
        training.backward(step)
        if mark is not None and step == at.step:
            dist.barrier()
            mark.touch()
        training.optimizer.step()
        ckpt.end_step()
    found = training.tensors()
    ckpt.__exit__(RuntimeError, RuntimeError("nothing is saved"), None)
    return at.step, found


def assert_same(found: list[tuple[int, Tensors]], expected: list[tuple[int, Tensors]]) -> None:
    assert [step for step, _ in found] == [step for step, _ in expected]
    for (_, here), (_, there) in zip(found, expected, strict=True):
        assert here.keys() == there.keys()
        assert [name for name in here if not torch.equal(here[name], there[name])] == []


@pytest.mark.server
@pytest.mark.parametrize(
    ("kind", "optimizer"),
    [
        ("ddp", "AdamW"),
        *(
            pytest.param(*others, marks=pytest.mark.slow)
            for others in (("ddp", "SGD"), ("fsdp", "AdamW"), ("fsdp", "SGD"))
        ),
    ],
)
def test_the_first_backward_pass_runs_while_the_moments_are_read(
    ranks: Ranks, wire: FaultProxy, s3: str, tmp_path: Path, kind: str, optimizer: str
) -> None:
    name, mark = uuid4().hex, tmp_path / "mark"
    expected = ranks.run(save, 2, join_uri(s3, name), kind, optimizer)
    held = rules_for_moments(wire, join_uri(s3, name), "hold")

    training = InThread(lambda: ranks.run(go_on, 2, join_uri(wire.uri, name), kind, optimizer, True, mark))
    deadline = time.monotonic() + WITHIN_S
    while not mark.exists():
        assert time.monotonic() < deadline, "the backward pass waits for the moments"
        time.sleep(0.05)
    assert not training.ends_within(0.3)
    for rule in held:
        rule.release()

    assert_same(training.join(), expected)
    moments = sum(tensor.nbytes for name, tensor in expected[0][1].items() if name.count(".") > 1)
    ranges = [
        re.findall(r"\d+", head.headers["range"])
        for rule in held
        for head in wire.heads
        if head.method == "GET" and rule.key in head.target and head.first_byte >= rule.from_byte
    ]
    assert sum(int(last) + 1 - int(first) for first, last in ranges) < 1.5 * moments, "every byte is read by one rank"


@pytest.mark.parametrize("kind", [pytest.param("ddp", marks=pytest.mark.slow), "fsdp"])
def test_at_another_world_size_it_comes_to_the_same(ranks: Ranks, tmp_path: Path, kind: str) -> None:
    uri = f"file://{tmp_path}/run"
    ranks.run(save, 2, uri, kind, "AdamW")

    expected, found = (ranks.run(go_on, 3, uri, kind, "AdamW", defers) for defers in (False, True))

    assert expected[0][0] == STEPS
    assert_same(found, expected)


def fail_late(rank: int, world_size: int, uri: str) -> tuple[int, str, bool]:
    """Return the restored step, the error of the first step, and whether the weights are what they were before."""
    training = Training(world_size, "ddp", "AdamW", seed=1)
    state = {"model": training.model, "optimizer": training.optimizer}
    ckpt = raycheck.Checkpointer(state, group=raycheck.torchrun_group(uri))
    at = ckpt.restore(defer_optimizer=True)
    training.backward(0)
    before = [parameter.clone() for parameter in training.plain.parameters()]
    with pytest.raises(SupersededError) as caught:
        training.optimizer.step()
    ckpt.__exit__(SupersededError, caught.value, None)
    return at.step, str(caught.value), all(map(torch.equal, before, training.plain.parameters()))


def test_damage_that_the_reading_rank_finds_late_ends_the_attempt_on_all(ranks: Ranks, tmp_path: Path) -> None:
    uri = f"file://{tmp_path}/run"
    for _ in range(2):
        ranks.run(save, 2, uri, "ddp", "AdamW")
    bad = damage(open_store(uri), 2 * STEPS, "optimizer.state.0.weight.exp_avg")

    told = ranks.run(fail_late, 2, uri)
    again = ranks.run(go_on, 2, uri, "ddp", "AdamW")

    for rank, (step, text, is_unchanged) in enumerate(told):
        assert step == 2 * STEPS
        assert f"rank {rank}: {bad} is damaged" in text
        assert is_unchanged
    assert [step for step, _ in again] == [STEPS, STEPS]
    assert [bool(entry.damaged) for entry in assert_invariants(open_store(uri)).live] == [False, True]
