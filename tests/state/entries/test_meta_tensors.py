"""Modules on torch's meta device get memory and values, as the same objects; what nothing can fill is refused by name.

The outside judge is stock torch's own load of the same checkpoint into the same kind of module.
"""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.testing._internal.two_tensor import TwoTensor

import raycheck
from raycheck.bucket.format.latest import Entry
from raycheck.bucket.format.object_keys import component_prefix
from raycheck.bucket.format.progress import Progress
from raycheck.bucket.reading import Checkpoint
from raycheck.bucket.store import Store, open_store
from raycheck.errors import ConfigError, StateMismatchError
from raycheck.state.restore_selection import Selection
from raycheck.state.train_state import TrainState
from raycheck.transfer.stage.local_box import TRAIN
from tests.support.frameworks import fsdp_training
from tests.support.processes.gloo_ranks import Ranks, mesh_of
from tests.support.processes.save_without_ray import agreed, places, restore_state, save, save_state
from tests.support.samples.parallel_shapes import Tied

no_group = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized:UserWarning")


def net(seed: int = 1) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))


def on_meta(make: Any, *args: Any) -> Any:
    with torch.device("meta"):
        return make(*args)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        batch = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        model(batch).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def assert_same(one: nn.Module, other: nn.Module) -> None:
    fsdp_training.assert_same(dict(one.state_dict()), dict(other.state_dict()))


@no_group
def test_a_module_on_meta_is_restored_as_stock_torch_loads_it(files: Store):
    model = net()
    checkpoint = save_state(files, {"model": model})
    ours, theirs = on_meta(net), on_meta(net)
    held = [*ours.parameters(), *ours.buffers()]

    step = raycheck.open_run(files.uri).restore(into={"model": ours})

    loaded = {"model": {name: torch.empty_like(value, device="cpu") for name, value in theirs.state_dict().items()}}
    dcp.load(loaded, storage_reader=FileSystemReader(place_of(checkpoint)))
    theirs.load_state_dict(loaded["model"], assign=True)
    assert step == 1
    assert_same(ours, theirs)
    assert_same(ours, model)
    for before, now in zip(held, [*ours.parameters(), *ours.buffers()], strict=True):
        assert before is now
        assert not now.is_meta
    assert all(parameter.requires_grad for parameter in ours.parameters())


def test_an_optimizer_made_over_meta_parameters_goes_on_with_them(memory: Store):
    model, again = net(), on_meta(net)
    ours, theirs = torch.optim.AdamW(model.parameters()), torch.optim.AdamW(again.parameters())
    again[0].weight.mark = "the user's own"
    train(model, ours, 3)

    restore_state(save_state(memory, {"model": model, "optimizer": ours}), {"model": again, "optimizer": theirs})

    assert [id(p) for p in theirs.param_groups[0]["params"]] == [id(p) for p in again.parameters()]
    assert again[0].weight.mark == "the user's own"
    train(model, ours, 2)
    train(again, theirs, 2)
    assert_same(again, model)


def test_an_optimizer_alone_over_meta_parameters_is_refused(memory: Store):
    model, again = net(), on_meta(net)
    ours, theirs = torch.optim.AdamW(model.parameters()), torch.optim.AdamW(again.parameters())
    train(model, ours, 1)
    checkpoint = save_state(memory, {"model": model, "optimizer": ours})
    made_before = net(2)

    with pytest.raises(StateMismatchError, match=r"optimizer: unnamed\.0\.0 is on the meta device and in no module"):
        restore_state(checkpoint, {"model": made_before, "optimizer": theirs})

    assert_same(made_before, net(2))


def test_tied_weights_on_meta_stay_tied_and_others_of_their_shape_do_not_become_it(memory: Store):
    model, again = Tied(1, rows=4), on_meta(lambda: Tied(2, rows=4))
    square = net()

    restore_state(save_state(memory, {"model": model, "net": square}), {"model": again, "net": on_meta(net)})

    assert again.head.weight is again.embed.weight
    assert_same(again, model)


def test_an_untied_model_on_meta_takes_what_was_saved_tied(memory: Store):
    model, again = Tied(1, rows=4), on_meta(lambda: Tied(2, rows=4, is_tied=False))

    restore_state(save_state(memory, {"model": model}), {"model": again})

    assert_same(again, model)
    assert again.head.weight.data_ptr() != again.embed.weight.data_ptr()


class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(2, 2)
        self.register_buffer("angles", torch.arange(4.0), persistent=False)


def test_a_buffer_that_is_not_saved_is_refused_on_meta_before_anything_changes(memory: Store):
    checkpoint = save_state(memory, {"model": Rotary()})
    again = on_meta(Rotary)

    for strict in (True, False):
        with pytest.raises(
            StateMismatchError, match=r"model\.angles is on the meta device .*to_empty\(device="
        ) as told:
            TrainState({"model": again}, rank=0, world_size=1).apply(checkpoint, strict=strict)
    assert "inside" not in str(told.value)
    assert again.inside.weight.is_meta

    again.angles = torch.arange(4.0)
    restore_state(checkpoint, {"model": again})
    assert not again.inside.weight.is_meta


def test_what_the_checkpoint_lacks_or_the_caller_skips_stays_not_on_meta_silently(memory: Store):
    checkpoint = save_state(memory, {"model": net()})
    again = on_meta(net).append(on_meta(nn.Linear, 4, 4))

    with pytest.raises(StateMismatchError, match=r"not alike: model\.3\.weight is on the meta device"):
        TrainState({"model": again}, rank=0, world_size=1).apply(checkpoint, strict=False)
    with pytest.raises(StateMismatchError, match=r"not alike: model\.0\.weight is on the meta device"):
        TrainState({"model": on_meta(net)}, rank=0, world_size=1).apply(checkpoint, Selection.of(["model.2"], ()))
    with pytest.raises(StateMismatchError, match=r"not alike: model\.0\.weight is on the meta device"):
        TrainState({"model": on_meta(net)}, rank=0, world_size=1).apply(checkpoint, Selection.of([], ()))


def test_parameters_on_meta_that_share_memory_without_being_one_are_refused(memory: Store):
    checkpoint = save_state(memory, {"model": net()})
    again = on_meta(net)
    again[2].weight = nn.Parameter(again[0].weight.detach())

    with pytest.raises(StateMismatchError, match=r"model\.2\.weight .*shares its memory with model\.0\.weight"):
        restore_state(checkpoint, {"model": again})


def test_a_parameter_with_hooks_is_refused_on_meta(memory: Store):
    checkpoint = save_state(memory, {"model": net()})
    again = on_meta(net)
    again[0].weight.register_post_accumulate_grad_hook(lambda _parameter: None)

    with pytest.raises(ConfigError, match=r"model\.0\.weight is on the meta device and has hooks"):
        restore_state(checkpoint, {"model": again})


def test_a_module_in_part_on_meta_goes_where_the_rest_is(memory: Store):
    model, again = net(), net(2)
    again[2] = on_meta(nn.Linear, 4, 4)

    restore_state(save_state(memory, {"model": model}), {"model": again})

    assert_same(again, model)


@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_tensor_subclass_on_meta_gets_its_inner_tensors(memory: Store, requires_grad: bool):
    def build(*halves: torch.Tensor) -> nn.Module:
        model = nn.Module()
        model.weight = nn.Parameter(TwoTensor(*halves), requires_grad=requires_grad)
        return model

    one = build(torch.randn(3), torch.randn(3))
    again = build(torch.empty(3, device="meta"), torch.empty(3, device="meta"))
    held = again.weight

    restore_state(save_state(memory, {"model": one}), {"model": again})

    assert again.weight is held
    assert held.requires_grad == requires_grad
    assert torch.equal(held.a, one.weight.a)
    assert torch.equal(held.b, one.weight.b)


def test_what_is_on_meta_is_not_saved(memory: Store):
    saver = TrainState({"model": on_meta(net)}, rank=0, world_size=1)

    saver.check(is_before_restore=True)

    for call in (saver.check, saver.replica_checksums, lambda: saver.stage(Progress(step=1))):
        with pytest.raises(ConfigError, match=r"state at model\.0\.weight is on the meta device"):
            call()


@pytest.mark.parametrize("wrap", [lambda made: made, raycheck.PerRank], ids=["plain", "PerRank"])
def test_an_object_whose_own_tensors_are_on_meta_does_not_count_as_restored(memory: Store, wrap: Any):
    class Average:
        """Loads its state by copying into its own tensor, as many objects do."""

        def __init__(self, device: str) -> None:
            self.shadow = torch.ones(3, device=device)

        def state_dict(self) -> dict[str, Any]:
            return {"shadow": self.shadow}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.shadow.copy_(state["shadow"])

    checkpoint = save_state(memory, {"average": wrap(Average("cpu"))})

    with pytest.raises(ConfigError, match=r"average\.(rank0\.)?shadow was not restored"):
        restore_state(checkpoint, {"average": wrap(Average("meta"))})


def test_a_module_without_a_shape_yet_is_refused_by_name(memory: Store):
    checkpoint = save_state(memory, {"model": nn.Sequential(nn.Linear(3, 3))})

    with pytest.raises(ConfigError, match=r"model\.0\.weight has no shape yet"):
        restore_state(checkpoint, {"model": nn.Sequential(nn.LazyLinear(3))})
    with pytest.raises(ConfigError, match=r"model\.0\.weight has no shape yet"):
        save_state(memory, {"model": nn.Sequential(nn.LazyLinear(3))}, step=2, save_number=2)


def test_a_frozen_module_on_meta_is_restored_and_referred_to_by_the_next_save(memory: Store):
    def build(make: Any) -> dict[str, Any]:
        return {"model": make(net), "base": make(lambda: net().requires_grad_(False))}

    def plain(make: Any) -> Any:
        return make()

    first = build(plain)
    checkpoint = save_state(memory, first)
    second = build(on_meta)
    state = TrainState(second, rank=0, world_size=1)

    state.apply(checkpoint)

    assert_same(second["base"], first["base"])
    assert not any(parameter.requires_grad for parameter in second["base"].parameters())
    assert set(places(state.stage(Progress(step=2))).values()) == {checkpoint.entry.key}


def sharded(world_size: int, *, seed: int, is_meta: bool) -> dict[str, Any]:
    mesh = mesh_of(world_size)
    torch.manual_seed(seed)
    with torch.device("meta" if is_meta else "cpu"):
        model = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 2))
        model.register_buffer("scale", torch.full((), float(seed)))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.01)}


def step_sharded(state: dict[str, Any], steps: int) -> None:
    for step in range(steps):
        batch = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
        state["model"](batch).pow(2).mean().backward()
        state["optimizer"].step()
        state["optimizer"].zero_grad()


def restore_sharded(
    rank: int, world_size: int, uri: str, entry: Entry, place: str
) -> tuple[fsdp_training.Tensors, ...]:
    """Restore into meta and into real memory by raycheck, and into meta by stock torch. Returns each state as restored, and
    two steps later."""
    checkpoint = Checkpoint(open_store(uri), entry)
    found = []
    for is_meta in (True, False):
        state = sharded(world_size, seed=3, is_meta=is_meta)
        held = list(state["model"].parameters())
        TrainState(state, rank=rank, world_size=world_size).apply(checkpoint, share=True)
        assert all(one is other for one, other in zip(held, state["model"].parameters(), strict=True))
        assert all(isinstance(one, DTensor) and not one.to_local().is_meta for one in held)
        found.append(fsdp_training.full(state))
        step_sharded(state, 2)
        found.append(fsdp_training.full(state))
    state = sharded(world_size, seed=3, is_meta=True)
    whole = {"model": {name: torch.zeros(value.shape) for name, value in state["model"].state_dict().items()}}
    dcp.load(whole, storage_reader=FileSystemReader(place), no_dist=True)
    set_model_state_dict(
        state["model"],
        whole["model"] if not rank else {},
        options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
    )
    stock = get_model_state_dict(state["model"], options=StateDictOptions(full_state_dict=True))
    gathered: list[Any] = [stock]
    dist.broadcast_object_list(gathered)
    return (*found, {f"model.{name}": value for name, value in gathered[0].items()})


def test_fsdp2_over_meta_is_restored_as_into_real_memory_and_as_stock_torch_does(
    tmp_path: Path, files: Store, ranks: Ranks
):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 2))
    model.register_buffer("scale", torch.full((), 5.0))
    one = {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.01)}
    step_sharded(one, 3)
    checkpoint = save_state(files, one)

    answers = ranks.run(restore_sharded, 2, files.uri, checkpoint.entry, place_of(checkpoint))

    for meta, meta_later, real, real_later, stock in answers:
        fsdp_training.assert_same(meta, fsdp_training.full(one))
        fsdp_training.assert_same(real, meta)
        fsdp_training.assert_same(meta_later, real_later)
        fsdp_training.assert_same({name: meta[name] for name in stock}, stock)


def test_replicas_on_meta_are_filled_from_other_ranks(memory: Store, files: Store, ranks: Ranks):
    states = [TrainState({"model": wide()}, rank=rank, world_size=2) for rank in range(2)]
    checkpoint = save(files, [state.stage(Progress(step=1)) for state in agreed(states)])

    answers = ranks.run(restore_replica, 2, files.uri, checkpoint.entry)

    assert sum(fetched for fetched, _ in answers) < 1.5 * sum(tensor.nbytes for tensor in wide().state_dict().values())
    for _, tensors in answers:
        fsdp_training.assert_same(tensors, dict(wide().state_dict()))


def wide() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(500, 501), nn.Linear(501, 500))


def restore_replica(rank: int, world_size: int, uri: str, entry: Entry) -> tuple[int, fsdp_training.Tensors]:
    model = on_meta(wide)
    done = TrainState({"model": model}, rank=rank, world_size=world_size).apply(
        Checkpoint(open_store(uri), entry), share=True
    )
    return done.bytes_fetched, dict(copy.deepcopy(model).state_dict())


def place_of(checkpoint: Checkpoint) -> str:
    uri = checkpoint.store.uri.removeprefix("file://")
    return f"{uri}/{component_prefix(checkpoint.entry.key, TRAIN)}".rstrip("/")
