"""Stock torch loads every committed component: plain DCP directories, with no help from raycheck."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from raycheck.bucket.catalog import Checkpoint
from raycheck.bucket.layout import component_prefix
from raycheck.bucket.store import Store
from raycheck.shards.pieces import TRAIN
from tests.shards import fsdp
from tests.shards.conftest import Trained
from tests.shards.ranks import Ranks
from tests.shards.saving import save_state

no_group = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized:UserWarning")


@pytest.mark.parametrize("kind", ["file", "s3"])
@pytest.mark.parametrize("world_size", [4, 2])
@no_group
def test_one_stock_process_reads_tensors_and_leaves_of_all_ranks(trained: Trained, world_size: int, kind: str):
    checkpoints, expected = trained[world_size].checkpoints, trained[world_size].tensors
    reader, place, options = place_of(checkpoints[kind])
    tensors = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    leaves = {
        "scheduler": {"last_epoch": 0, "step_size": 0, "_last_lr": []},
        "progress": {"step": 0, "epoch": 0, "samples": 0},
    }

    dcp.load(tensors, storage_reader=reader(place, **options))
    dcp.load(leaves, storage_reader=reader(place, **options))

    fsdp.assert_same(tensors, expected)
    assert leaves == {
        "scheduler": {"last_epoch": 3, "step_size": 2, "_last_lr": [0.001]},
        "progress": {"step": 3, "epoch": 1, "samples": 24},
    }


@pytest.mark.parametrize("kind", ["file", "s3"])
@pytest.mark.parametrize(("saving", "loading"), [(4, 2), (2, 4), (4, 4)])
def test_stock_torch_reshards_a_training_between_ranks(
    trained: Trained, ranks: Ranks, saving: int, loading: int, kind: str
):
    checkpoints, expected = trained[saving].checkpoints, trained[saving].tensors

    loaded = ranks.run(fsdp.load_by_stock_torch, loading, *place_of(checkpoints[kind]))

    for tensors in loaded:
        fsdp.assert_same(tensors, expected)


@no_group
def test_dcp_to_torch_save_gives_one_file_that_plain_modules_load(trained: Trained, tmp_path: Path):
    checkpoints, expected = trained[4].checkpoints, trained[4].tensors
    _, place, _ = place_of(checkpoints["file"])
    model = fsdp.Net(seed=3)
    optimizer = torch.optim.AdamW(model.parameters())

    dcp_to_torch_save(place, tmp_path / "whole.pt")
    whole = torch.load(tmp_path / "whole.pt", weights_only=True)
    model.load_state_dict(whole["model"])
    order = [name for name, _ in model.named_parameters()]
    optimizer.load_state_dict(
        {
            "state": {order.index(name): slots for name, slots in whole["optimizer"]["state"].items()},
            "param_groups": [{**group, "params": range(len(order))} for group in whole["optimizer"]["param_groups"]],
        }
    )

    fsdp.assert_same(fsdp.full({"model": model, "optimizer": optimizer}), expected)
    assert [group["params"] for group in whole["optimizer"]["param_groups"]] == [order]
    assert whole["progress"] == asdict(fsdp.PROGRESS)
    assert whole["scheduler"]["last_epoch"] == 3


class Odd:
    """An object of a user's own with every kind of leaf."""

    def __init__(self, state: dict[Any, Any]) -> None:
        self.state = state

    def state_dict(self) -> dict[Any, Any]:
        return self.state

    def load_state_dict(self, state: dict[Any, Any]) -> None:
        self.state = state


@no_group
def test_stock_torch_reads_odd_tensors_and_leaves_on_every_store(store: Store):
    tensors = {
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
        "half": torch.arange(5, dtype=torch.bfloat16),
        "bytes": torch.arange(7, dtype=torch.uint8),
        "flags": torch.tensor([[True], [False]]),
        "turned": torch.arange(6.0).view(2, 3).t(),
    }
    values = {"none": None, "text": "a", "pair": (1, 2.5), "list": [1, "b"], "blob": b"xyz", "number": 7}
    checkpoint = save_state(store, {"odd": Odd({**tensors, **values, "deep": {5: [torch.ones(2)]}})})
    reader, place, options = place_of(checkpoint)
    found: dict[str, Any] = {
        "odd": {
            **{name: torch.zeros_like(tensor) for name, tensor in tensors.items()},
            **dict.fromkeys(values, "not read"),
            "deep": {5: [torch.zeros(2)]},
        }
    }

    dcp.load(found, storage_reader=reader(place, **options))

    assert torch.equal(found["odd"]["deep"][5][0], torch.ones(2))
    assert {name: found["odd"][name] for name in values} == values
    fsdp.assert_same({name: found["odd"][name] for name in tensors}, tensors)


def place_of(checkpoint: Checkpoint) -> tuple[type, str, dict[str, Any]]:
    """The stock reader for the checkpoint's component, with its arguments."""
    uri, _, query = checkpoint.store.uri.partition("?")
    place = f"{uri}/{component_prefix(checkpoint.entry.key, TRAIN)}".rstrip("/")
    if uri.startswith("file://"):
        return FileSystemReader, place.removeprefix("file://"), {}
    if uri.startswith("memory://"):
        return FsspecReader, place, {}
    address = dict(item.split("=") for item in query.split("&"))["endpoint_override"]
    return FsspecReader, place, {"endpoint_url": f"http://{address}"}
