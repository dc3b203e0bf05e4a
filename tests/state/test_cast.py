"""`cast=True` converts floating-point tensors at a restore as stock DCP does; without it another type is refused.

The outside judge is stock torch's own dcp.load into the same live types.
"""

from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import raycheck
from raycheck.bucket.format.latest import Entry
from raycheck.bucket.reading import Checkpoint
from raycheck.bucket.store import Store, open_store
from raycheck.errors import StateMismatchError
from raycheck.state.train_state import TrainState
from tests.state.entries.test_meta_tensors import place_of
from tests.support.frameworks import fsdp_training
from tests.support.processes.gloo_ranks import Ranks
from tests.support.processes.rank_fixtures import Trained
from tests.support.processes.save_without_ray import restore_state, save_state

no_group = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized:UserWarning")
TYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def build(dtype: torch.dtype, seed: int = 1) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4)).to(dtype)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)}


def train(state: dict[str, Any], steps: int = 2) -> None:
    dtype = state["model"][0].weight.dtype
    for step in range(steps):
        batch = torch.randn(3, 6, generator=torch.Generator().manual_seed(step)).to(dtype)
        state["model"](batch).pow(2).mean().backward()
        state["optimizer"].step()
        state["optimizer"].zero_grad()


@no_group
@pytest.mark.parametrize("here", TYPES)
@pytest.mark.parametrize("saved", TYPES)
def test_types_are_cast_as_stock_dcp_casts_them(files: Store, saved: torch.dtype, here: torch.dtype):
    one = build(saved)
    train(one)
    checkpoint = save_state(files, one)
    ours, theirs = build(here, seed=2), build(here, seed=2)

    done = TrainState(ours, rank=0, world_size=1).apply(checkpoint, cast=True)

    model, optimizer = get_state_dict(theirs["model"], theirs["optimizer"])
    dcp.load({"model": model, "optimizer": optimizer}, storage_reader=FileSystemReader(place_of(checkpoint)))
    set_state_dict(theirs["model"], theirs["optimizer"], model_state_dict=model, optim_state_dict=optimizer)
    fsdp_training.assert_same(fsdp_training.full(ours), fsdp_training.full(theirs))
    names = {name: str(dtype).removeprefix("torch.") for name, dtype in (("saved", saved), ("here", here))}
    expected = f"model.0.weight: {names['saved']} saved, {names['here']} here"
    assert (expected in done.report.cast) == (saved != here)
    assert bool(done.report.cast) == (saved != here)
    assert done.is_whole is False or saved == here
    train(ours)
    train(theirs)
    fsdp_training.assert_same(fsdp_training.full(ours), fsdp_training.full(theirs))


def test_another_type_is_refused_unless_it_is_asked_for(memory: Store):
    one, two = build(torch.float32), build(torch.bfloat16)
    checkpoint = save_state(memory, one)

    with pytest.raises(StateMismatchError, match=r"model\.0\.weight: bfloat16\[5, 6\] here, float32\[5, 6\] saved"):
        restore_state(checkpoint, two)


def test_moments_of_another_type_than_their_parameters_keep_it(memory: Store):
    def with_moments(dtype: torch.dtype, moments: torch.dtype) -> dict[str, Any]:
        state = build(dtype)
        for parameter in state["model"].parameters():
            master = torch.randn_like(parameter, dtype=moments)
            state["optimizer"].state[parameter] |= {"step": torch.tensor(1.0), "master": master}
        return state

    one, two = with_moments(torch.bfloat16, torch.float32), build(torch.float16)

    TrainState(two, rank=0, world_size=1).apply(save_state(memory, one), cast=True)

    for ours, theirs in zip(one["model"].parameters(), two["model"].parameters(), strict=True):
        assert torch.equal(one["optimizer"].state[ours]["master"], two["optimizer"].state[theirs]["master"])


@pytest.mark.parametrize("there", [torch.int64, torch.bool, torch.complex64])
def test_what_is_no_float_is_never_cast(memory: Store, there: torch.dtype):
    one, two = nn.Linear(2, 2), nn.Linear(2, 2)
    one.register_buffer("extra", torch.ones(3, dtype=there))
    two.register_buffer("extra", torch.ones(3))

    for first, second in ((one, two), (two, one)):
        memory_of = save_state(memory, {"model": first}, save_number=1 + (first is two), step=1 + (first is two))
        with pytest.raises(StateMismatchError, match=r"model\.extra"):
            TrainState({"model": second}, rank=0, world_size=1).apply(memory_of, cast=True)


def test_another_shape_is_refused_with_a_cast_too(memory: Store):
    checkpoint = save_state(memory, {"model": nn.Linear(2, 2)})

    with pytest.raises(StateMismatchError, match=r"model\.weight"):
        TrainState({"model": nn.Linear(3, 2).half()}, rank=0, world_size=1).apply(checkpoint, cast=True)


def test_a_run_is_opened_and_read_into_half_precision_on_meta(files: Store):
    one = build(torch.float32)
    save_state(files, one)
    with torch.device("meta"):
        model = build(torch.bfloat16)["model"]

    raycheck.open_run(files.uri).restore(into={"model": model}, cast=True)

    fsdp_training.assert_same(dict(model.state_dict()), dict(one["model"].bfloat16().state_dict()))


def load_cast(rank: int, world_size: int, uri: str, entry: Entry) -> fsdp_training.Tensors:
    state = fsdp_training.build(world_size, seed=2)
    state["model"].to(torch.bfloat16)
    state["optimizer"] = torch.optim.AdamW(state["model"].parameters())
    del state["scheduler"]
    TrainState(state, rank=rank, world_size=world_size).apply(
        Checkpoint(open_store(uri), entry), strict=False, share=True, cast=True
    )
    return fsdp_training.full(state)


@pytest.mark.parametrize(("saving", "loading"), [(4, 2), (2, 4)])
def test_shards_are_cast_on_the_way_to_another_number_of_ranks(
    trained: Trained, ranks: Ranks, saving: int, loading: int
):
    checkpoint, expected = trained[saving].checkpoints["file"], trained[saving].tensors

    answers = ranks.run(load_cast, loading, checkpoint.store.uri, checkpoint.entry)

    for found in answers:
        for name, tensor in expected.items():
            is_cast = tensor.is_floating_point() and not name.endswith(".step")
            assert torch.equal(found[name], tensor.bfloat16() if is_cast else tensor), name
