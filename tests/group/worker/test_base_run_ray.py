"""Tests runs under Ray Train that refer to a base run (step 39)."""

from pathlib import Path
from typing import Any

import pytest
import ray.train
import ray.train.torch
import torch

import raycheck
from raycheck.bucket.reading import read_latest
from raycheck.bucket.store import open_store
from tests.support.histories.invariants import assert_invariants

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # Ray itself warns


def train_under_ray(config: dict[str, Any]) -> None:
    torch.manual_seed(0)
    plain = torch.nn.Sequential(torch.nn.Linear(6, 7), torch.nn.Linear(7, 5), torch.nn.Linear(5, 2))
    for parameter in plain[:2].parameters():
        parameter.requires_grad_(requires_grad=False)
    model = ray.train.torch.prepare_model(plain)
    optimizer = torch.optim.SGD([it for it in model.parameters() if it.requires_grad], lr=0.1)
    settings = raycheck.SaveSettings(every_steps=1, base=config["base"])
    with raycheck.Checkpointer({"model": model, "optimizer": optimizer}, settings) as ckpt:
        at = ckpt.restore().step
        for step in range(at, config["steps"]):
            model(torch.full((2, 6), float(step))).sum().backward()
            optimizer.step()
            ckpt.end_step()


def frozen_bytes(uri: str) -> int:
    return sum(item.size_bytes for item in open_store(uri).list_objects("checkpoints/") if "frozen" in item.key)


def test_a_run_under_ray_refers_to_its_base_and_so_does_its_restart_at_another_world_size(job, tmp_path: Path) -> None:
    storage, base, uri = f"file://{tmp_path}/runs", f"file://{tmp_path}/runs/base", f"file://{tmp_path}/runs/run"
    raycheck.fit(job(storage, "base", workers=1, train=train_under_ray, base=None, steps=1))

    raycheck.fit(job(storage, "run", workers=2, train=train_under_ray, base=base, steps=2))
    first = read_latest(open_store(uri))
    raycheck.fit(job(storage, "run", workers=1, train=train_under_ray, base=base, steps=4))

    body = assert_invariants(open_store(uri))
    assert body is not None
    assert [entry.step for entry in body.live] == [1, 2, 3, 4]
    assert frozen_bytes(uri) == 0 < frozen_bytes(base)
    assert len({entry.refs for entry in body.live}) == 1
    assert [loan.source for loan in first.loans] == [loan.source for loan in body.loans] == ["../base"]
    assert list(raycheck.open_run(base).lent) == ["../run"]
