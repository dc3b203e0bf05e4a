"""Tensors of a checkpoint, compared with the live objects, and two checkpoints compared without reading a tensor."""

from pathlib import Path
from typing import Any

import pytest
import torch

from raycheck.bucket.format.checksum import SUB_BLOCK
from raycheck.bucket.store import open_store
from raycheck.run import CommittedCheckpoint, open_run
from tests.support.processes.save_without_ray import save_state


def saved(folder: Path, state: dict[str, Any], *, number: int) -> CommittedCheckpoint:
    save_state(open_store(f"file://{folder}"), state, save_number=number, step=number)
    return open_run(f"file://{folder}").at(number)


@pytest.fixture
def trained() -> dict[str, Any]:
    model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.LayerNorm(4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 8)).square().sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "note": {"lr": 0.1}}


def test_every_tensor_is_listed_with_form_size_and_the_parameter_of_a_moment(
    tmp_path: Path, trained: dict[str, Any]
) -> None:
    found = {item.name: item for item in saved(tmp_path, trained, number=1).tensors()}

    model = trained["model"].state_dict()
    assert {name for name, item in found.items() if item.entry == "model"} == {f"model.{name}" for name in model}
    for name, tensor in model.items():
        item = found[f"model.{name}"]
        assert (item.shape, item.dtype, item.size_bytes) == (tuple(tensor.shape), "float32", tensor.nbytes)
        assert (item.boxes, item.ranks, item.is_sharded, item.parameter) == (1, (0,), False, None)
        assert found[f"optimizer.state.{name}.exp_avg"].parameter == f"model.{name}"


def test_only_what_was_trained_differs(tmp_path: Path, trained: dict[str, Any]) -> None:
    first = saved(tmp_path, trained, number=1)
    with torch.no_grad():
        trained["model"][0].weight[0, 0] += 1
    trained["note"]["lr"] = 0.2

    found = first.diff(saved(tmp_path, trained, number=2))

    assert [item.name for item in found.tensors if item.change != "equal"] == ["model.0.weight"]
    assert found.counts == {"equal": len(found.tensors) - 1, "changed": 1}
    assert set(found.values_changed) == {"note", "progress"}
    assert (found.before, found.after) == (first.key, "step-000000002-a1-s2")


def test_a_change_of_one_element_changes_one_block(tmp_path: Path) -> None:
    blocks = 3
    table = torch.zeros(blocks * SUB_BLOCK // 4)
    first = saved(tmp_path, {"state": {"table": table}}, number=1)
    table[-1] = 1

    (item,) = first.diff(saved(tmp_path, {"state": {"table": table}}, number=2)).tensors

    assert (item.change, item.changed_bytes, item.size_bytes) == ("changed", SUB_BLOCK, blocks * SUB_BLOCK)


def test_added_removed_and_reformed_tensors_are_told_apart(tmp_path: Path) -> None:
    first = saved(tmp_path, {"state": {"a": torch.zeros(2), "b": torch.zeros(2), "c": torch.zeros(2)}}, number=1)
    second = {"state": {"b": torch.zeros(3), "c": torch.zeros(2, dtype=torch.float64), "d": torch.zeros(2)}}

    found = first.diff(saved(tmp_path, second, number=2))

    forms = {item.name: (item.change, item.before, item.after) for item in found.tensors}
    assert forms == {
        "state.a": ("removed", "float32 [2]", None),
        "state.b": ("reformed", "float32 [2]", "float32 [3]"),
        "state.c": ("reformed", "float32 [2]", "float64 [2]"),
        "state.d": ("added", None, "float32 [2]"),
    }
