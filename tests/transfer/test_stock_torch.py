"""Stock torch loads every committed component: plain DCP directories, with no help from raycheck."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from raycheck.bucket.format.object_keys import component_prefix
from raycheck.bucket.reading import Checkpoint
from raycheck.bucket.store import Store
from raycheck.transfer.stage.local_box import TRAIN
from tests.support.frameworks import fsdp_training
from tests.support.processes.gloo_ranks import Ranks
from tests.support.processes.rank_fixtures import Trained
from tests.support.processes.save_without_ray import restore_state, save_state

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

    fsdp_training.assert_same(tensors, expected)
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

    loaded = ranks.run(fsdp_training.load_by_stock_torch, loading, *place_of(checkpoints[kind]))

    for tensors in loaded:
        fsdp_training.assert_same(tensors, expected)


@no_group
def test_dcp_to_torch_save_gives_one_file_that_plain_modules_load(trained: Trained, tmp_path: Path):
    checkpoints, expected = trained[4].checkpoints, trained[4].tensors
    _, place, _ = place_of(checkpoints["file"])
    model = fsdp_training.Net(seed=3)
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

    fsdp_training.assert_same(fsdp_training.full({"model": model, "optimizer": optimizer}), expected)
    assert [group["params"] for group in whole["optimizer"]["param_groups"]] == [order]
    assert whole["progress"] == asdict(fsdp_training.PROGRESS)
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
@pytest.mark.parametrize("uri", ["memory", "file", "s3"], indirect=True)
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
    fsdp_training.assert_same({name: found["odd"][name] for name in tensors}, tensors)


def one_optimizer(model: nn.Sequential) -> Any:
    return torch.optim.AdamW(
        [{"params": model[0].parameters(), "lr": 0.25}, {"params": model[2].parameters(), "weight_decay": 0.5}], lr=0.01
    )


def list_of_optimizers(model: nn.Sequential) -> Any:
    return [
        torch.optim.AdamW(model[0].parameters(), lr=0.25),
        torch.optim.SGD([{"params": [model[2].weight]}, {"params": [model[2].bias], "lr": 0.5}], lr=0.1, momentum=0.9),
    ]


def optimizer_of_each(model: nn.Sequential) -> Any:
    return {parameter: torch.optim.AdamW([parameter], lr=0.01) for parameter in model.parameters()}


def as_list(optimizers: Any) -> list[torch.optim.Optimizer]:
    if isinstance(optimizers, torch.optim.Optimizer):
        return [optimizers]
    return list(optimizers.values() if isinstance(optimizers, dict) else optimizers)


def small(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 4))


def step(model: nn.Module, optimizers: Any, count: int) -> None:
    for number in range(count):
        model(torch.randn(3, 4, generator=torch.Generator().manual_seed(number))).pow(2).mean().backward()
        for optimizer in as_list(optimizers):
            optimizer.step()
            optimizer.zero_grad()


@no_group
@pytest.mark.parametrize("is_flat", [False, True], ids=["nested", "flattened"])
@pytest.mark.parametrize("make", [one_optimizer, list_of_optimizers, optimizer_of_each], ids=lambda make: make.__name__)
def test_stock_torch_reads_optimizers_in_both_of_its_layouts(files: Store, make: Any, is_flat: bool):
    """Stock torch also trains on to the last bit."""
    one, two = small(1), small(2)
    ours, theirs = make(one), make(two)
    for group in (group for optimizer in as_list(theirs) for group in optimizer.param_groups):
        group["lr"] = 0.125
    step(one, ours, 3)
    checkpoint = save_state(files, {"model": one, "optimizer": ours})
    options = StateDictOptions(flatten_optimizer_state_dict=is_flat)

    found = {
        "model": two.state_dict(),
        "optimizer": get_optimizer_state_dict(two, as_list(theirs), options=options),
    }
    _, place, _ = place_of(checkpoint)
    dcp.load(found, storage_reader=FileSystemReader(place))
    set_optimizer_state_dict(two, as_list(theirs), found["optimizer"], options=options)

    step(one, ours, 2)
    step(two, theirs, 2)
    fsdp_training.assert_same(dict(two.state_dict()), dict(one.state_dict()))
    for first, second in zip(as_list(ours), as_list(theirs), strict=True):
        assert first.param_groups[0]["lr"] == second.param_groups[0]["lr"] != 0.125


class OptimizersContainer(torch.optim.Optimizer):
    """Is torchtitan's container: one optimizer per part of a pipeline, whose states it flattens together."""

    def __init__(self, parts: list[nn.Module]) -> None:
        self.parts = parts
        self.optimizers = [torch.optim.AdamW(part.parameters(), lr=0.01) for part in parts]
        super().__init__([parameter for part in parts for parameter in part.parameters()], {"lr": 0.01})

    def step(self, *_: Any, **__: Any) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self, *_: Any, **__: Any) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        flat = StateDictOptions(flatten_optimizer_state_dict=True)
        pairs = zip(self.parts, self.optimizers, strict=True)
        return {
            key: value
            for part, optimizer in pairs
            for key, value in get_optimizer_state_dict(part, optimizer, options=flat).items()
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        flat = StateDictOptions(flatten_optimizer_state_dict=True)
        for part, optimizer in zip(self.parts, self.optimizers, strict=True):
            set_optimizer_state_dict(part, optimizer, state_dict, options=flat)


@no_group
@pytest.mark.parametrize("is_stock", [False, True], ids=["raycheck", "stock torch"])
def test_a_container_that_flattens_its_optimizers_comes_back(files: Store, is_stock: bool):
    one, two = small(1), small(2)
    ours, theirs = OptimizersContainer([one]), OptimizersContainer([two])
    step(one, ours, 3)
    checkpoint = save_state(files, {"model": one, "optimizer": ours})

    if is_stock:
        found = {"model": two.state_dict(), "optimizer": theirs.state_dict()}
        dcp.load(found, storage_reader=FileSystemReader(place_of(checkpoint)[1]))
        theirs.load_state_dict(found["optimizer"])
    else:
        restore_state(checkpoint, {"model": two, "optimizer": theirs})

    step(one, ours, 2)
    step(two, theirs, 2)
    fsdp_training.assert_same(dict(two.state_dict()), dict(one.state_dict()))


@no_group
def test_further_names_for_stock_torch_take_no_further_bytes(files: Store):
    one, two = small(1), small(1)
    ours, theirs = one_optimizer(one), one_optimizer(two)
    step(one, ours, 1)
    step(two, theirs, 1)
    sizes = []
    for number, state in enumerate(({"optimizer": ours}, {"optimizer": [theirs]}), start=1):
        checkpoint = save_state(files, {"model": one if number == 1 else two, **state}, save_number=number, step=number)
        (component,) = checkpoint.read_manifest().components
        sizes.append(sum(shard.size_bytes for shard in component.shards))

    assert abs(sizes[0] - sizes[1]) < 2048, "names of leaves differ in length"


def test_stock_torch_reshards_flattened_optimizer_state_between_ranks(trained: Trained, ranks: Ranks):
    checkpoint, expected = trained[4].checkpoints["file"], trained[4].tensors

    loaded = ranks.run(fsdp_training.load_flattened_by_stock_torch, 2, place_of(checkpoint)[1])

    for tensors in loaded:
        fsdp_training.assert_same(tensors, expected)


@no_group
def test_a_parameter_called_like_a_number_does_not_hide_a_group(files: Store):
    model = nn.ParameterList([nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))])
    optimizer = torch.optim.SGD([{"params": [model[1]], "lr": 0.5}, {"params": [model[0]], "lr": 0.25}], momentum=0.9)
    sum((parameter.sum() for parameter in model), torch.zeros(())).backward()
    optimizer.step()
    checkpoint = save_state(files, {"model": model, "optimizer": optimizer})

    found = {"optimizer": get_optimizer_state_dict(model, optimizer)}
    for group in found["optimizer"]["param_groups"]:
        group["lr"] = 0.0
    dcp.load(found, storage_reader=FileSystemReader(place_of(checkpoint)[1]))

    assert [group["lr"] for group in found["optimizer"]["param_groups"]] == [0.5, 0.25]


@no_group
def test_optimizers_of_two_models_with_parameters_of_one_name_stay_apart(files: Store):
    one, two = small(1), small(2)
    optimizers = [torch.optim.AdamW(one.parameters()), torch.optim.AdamW(two.parameters())]
    step(one, optimizers[0], 1)
    step(two, optimizers[1], 1)

    checkpoint = save_state(files, {"one": one, "two": two, "optimizer": optimizers})

    names = {tensor.name for tensor in checkpoint.read_index(checkpoint.read_manifest()).tensors}
    assert not any(name.startswith("optimizer.state.") for name in names)
    assert "optimizer.1.state.0.weight.exp_avg" in names


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
