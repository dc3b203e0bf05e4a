"""Imports of what other programs have written, restored into live objects and compared to the last bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict

from raycheck.bucket.reading import Checkpoint
from raycheck.bucket.store import open_store
from raycheck.bucket.verify import verify
from raycheck.catalog.importing.import_checkpoint import import_checkpoint
from raycheck.errors import ConfigError
from raycheck.run import open_run
from tests.support.invariants import assert_invariants


class Net(torch.nn.Module):
    """Has parameters of several shapes, buffers, a tied weight and a frozen one."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = torch.nn.Linear(4, 8)
        self.norm = torch.nn.BatchNorm1d(8)
        self.last = torch.nn.Linear(8, 4)
        self.tied = torch.nn.Linear(8, 4)
        self.tied.weight = self.last.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x))) + self.tied(self.first(x))


def trained(seed: int = 0, *, steps: int = 3, split: bool = False) -> tuple[Net, torch.optim.AdamW]:
    net = Net(seed)
    groups: Any = net.parameters()
    if split:
        named = dict(net.named_parameters())
        groups = [
            {"params": [p for p in named.values() if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in named.values() if p.dim() == 1], "weight_decay": 0.0},
        ]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    for _ in range(steps):
        net(torch.randn(5, 4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return net, optimizer


def flat(value: Any, at: str = "") -> dict[str, Any]:
    if isinstance(value, dict):
        return {name: item for key, inner in value.items() for name, item in flat(inner, f"{at}.{key}").items()}
    if isinstance(value, list | tuple):
        return {name: item for key, inner in enumerate(value) for name, item in flat(inner, f"{at}.{key}").items()}
    return {at: value}


def assert_equal(found: Any, expected: Any) -> None:
    here, there = flat(found), flat(expected)
    assert here.keys() == there.keys()
    for name, value in there.items():
        if isinstance(value, torch.Tensor):
            assert here[name].dtype == value.dtype, name
            assert torch.equal(here[name], value), name
        else:
            assert here[name] == value, name


def checked(uri: str) -> Any:
    """Returns the head of an imported run, which must be whole and keep every invariant."""
    run = open_run(uri)
    assert run.head is not None
    assert [finding.problem for finding in run.head.verify()] == []
    assert_invariants(run.store, before=run.latest)
    return run.head


def assert_restores(uri: str, net: Net, optimizer: torch.optim.Optimizer, *, split: bool = False) -> None:
    live, its_optimizer = trained(9, steps=1, split=split)

    checked(uri).restore(into={"model": live, "optimizer": its_optimizer})

    assert_equal(live.state_dict(), net.state_dict())
    assert_equal(its_optimizer.state_dict(), optimizer.state_dict())


@pytest.mark.parametrize("split", [False, True])
def test_a_dict_of_state_dicts_becomes_entries(tmp_path: Path, *, split: bool) -> None:
    net, optimizer = trained(split=split)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    states = {
        "model_state_dict": net.state_dict(),
        "optimizer_state_dict": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "global_step": 30,
        "epoch": 2,
    }
    torch.save(states, tmp_path / "last.pt")

    done = import_checkpoint(str(tmp_path / "last.pt"), f"file://{tmp_path}/runs/new")

    assert (done.step, done.kind, done.is_new) == (30, "torch", True)
    assert {e.name: e.kind for e in done.entries} == {
        "model": "module", "optimizer": "optimizer", "scheduler": "object", "global_step": "value", "epoch": "value"
    }  # fmt: skip
    assert_restores(done.uri, net, optimizer, split=split)
    again = torch.optim.lr_scheduler.StepLR(trained(1, steps=0)[1], 99)
    checked(done.uri).restore(into={"scheduler": again})
    assert_equal(again.state_dict(), scheduler.state_dict())


@pytest.mark.parametrize("form", ["named", "numbered", "flat"])
def test_a_directory_of_stock_dcp_is_imported(tmp_path: Path, form: str) -> None:
    net, optimizer = trained()
    options = StateDictOptions(flatten_optimizer_state_dict=form == "flat")
    own = optimizer.state_dict() if form == "numbered" else get_optimizer_state_dict(net, optimizer, options=options)
    dcp.save({"model": get_model_state_dict(net), "optimizer": own, "step": 12}, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)

    done = import_checkpoint(str(tmp_path / "dcp"), f"file://{tmp_path}/runs/new")

    assert (done.kind, done.step) == ("dcp", 12)
    assert_restores(done.uri, net, optimizer)
