"""Tied weights are stored once, under every name they have."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

from raycheck.bucket.format.object_keys import component_prefix
from raycheck.bucket.format.progress import Progress
from raycheck.bucket.reading import Checkpoint
from raycheck.bucket.store import Store
from raycheck.errors import StateMismatchError
from raycheck.state.entries.per_rank_entries import PerRank
from raycheck.state.restore_selection import Selection
from raycheck.state.train_state import TrainState
from raycheck.transfer.stage.local_box import TRAIN
from tests.support.frameworks import fsdp_training
from tests.support.processes.gloo_ranks import Ranks
from tests.support.processes.save_without_ray import agreed, claimed, committed, restore_state, save, save_state
from tests.support.samples import parallel_shapes
from tests.support.samples.parallel_shapes import Tied

compiling = pytest.mark.filterwarnings("ignore:.torch.jit.:DeprecationWarning")
no_group = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized:UserWarning")


def as_it_is(model: nn.Module) -> nn.Module:
    return model


@compiling
@pytest.mark.parametrize("wrap", [as_it_is, DistributedDataParallel, torch.compile], ids=["plain", "ddp", "compiled"])
def test_a_tied_weight_is_one_record_with_two_names(
    memory: Store, group_of_one: None, wrap: Callable[[nn.Module], nn.Module]
):
    model, again = wrap(Tied(1, rows=9999)), Tied(2, rows=9999)
    optimizer = torch.optim.SGD(model.parameters())

    checkpoint = save_state(memory, {"model": model, "optimizer": optimizer})
    restore_state(checkpoint, {"model": again, "optimizer": torch.optim.SGD(again.parameters())})

    stored = sum(parameter.nbytes for parameter in model.parameters())
    assert {"model.embed.weight", "model.head.weight"} <= names_of(checkpoint)
    assert stored <= shard_bytes(checkpoint) < 1.5 * stored
    assert again.head.weight is again.embed.weight
    assert torch.equal(again.head.weight, next(model.parameters()))


def test_fsdp2_ties_a_weight_with_fewer_rows_than_ranks(tmp_path: Path, files: Store, ranks: Ranks):
    name = claimed(files, world_size=4, step=parallel_shapes.PROGRESS.step)

    answers = ranks.run(parallel_shapes.save_tied, 4, files.uri, name)
    checkpoint = committed(files, name, [uploaded for uploaded, _ in answers], progress=parallel_shapes.PROGRESS)
    again = ranks.run(parallel_shapes.load_tied, 2, files.uri, checkpoint.entry)
    again += ranks.run(parallel_shapes.load_tied, 4, files.uri, checkpoint.entry)
    one = parallel_shapes.with_adam(Tied(3))
    restore_state(checkpoint, one)

    expected = answers[0][1]
    for found in (*again, parallel_shapes.full(one)):
        fsdp_training.assert_same(found, expected)
    assert one["model"].head.weight is one["model"].embed.weight
    written = [chunk for chunk in index_of(checkpoint).chunks if chunk.payload_size]
    assert (
        len({(chunk.rank, chunk.record_offset) for chunk in written}) == len(written) - 3
    )  # the number of rows, on three ranks


@no_group
def test_stock_torch_loads_both_names_of_a_tied_weight(files: Store):
    model = Tied(1)
    checkpoint = save_state(files, {"model": model})
    found = {"model": {name: torch.zeros_like(tensor) for name, tensor in model.state_dict().items()}}

    dcp.load(found, storage_reader=FileSystemReader(place_of(checkpoint)))

    fsdp_training.assert_same(found["model"], dict(model.state_dict()))
    assert list(found["model"]) == ["embed.weight", "body.weight", "body.bias", "head.weight"]


def test_what_was_tied_may_go_into_two_tensors_of_their_own(memory: Store):
    tied, untied = Tied(1), Tied(2, is_tied=False)

    restore_state(save_state(memory, {"model": tied}), {"model": untied})

    fsdp_training.assert_same(dict(untied.state_dict()), dict(tied.state_dict()))
    assert untied.head.weight.data_ptr() != untied.embed.weight.data_ptr()


def test_an_optimizer_says_that_it_has_nothing_for_the_second_of_two_untied_weights(memory: Store):
    saved, live = parallel_shapes.with_adam(Tied(1)), parallel_shapes.with_adam(Tied(2, is_tied=False))
    one_step(saved)
    checkpoint = save_state(memory, saved)

    with pytest.raises(StateMismatchError, match=r"missing in the checkpoint: optimizer\.state\.head\.weight"):
        restore_state(checkpoint, live)
    done = TrainState(live, rank=0, world_size=1).apply(checkpoint, strict=False)

    assert done.report.missing == ("optimizer.state.head.weight",)
    fsdp_training.assert_same(parallel_shapes.full(live), parallel_shapes.full(live) | parallel_shapes.full(saved))
    one_step(live)


def test_two_weights_are_not_squeezed_into_a_tied_one(memory: Store):
    untied, tied = Tied(1, is_tied=False), Tied(2)
    before = {name: tensor.clone() for name, tensor in tied.state_dict().items()}
    checkpoint = save_state(memory, {"model": untied})

    for strict in (True, False):
        with pytest.raises(StateMismatchError, match=r"model\.embed\.weight and model\.head\.weight are tied here"):
            TrainState({"model": tied}, rank=0, world_size=1).apply(checkpoint, strict=strict)

    fsdp_training.assert_same(dict(tied.state_dict()), before)


def test_all_ranks_refuse_to_squeeze_also_those_without_a_row_of_it(files: Store, ranks: Ranks):
    checkpoint = save_state(files, parallel_shapes.with_adam(Tied(1, is_tied=False)))

    refusals = ranks.run(parallel_shapes.refusal_of_tied, 4, files.uri, checkpoint.entry)

    assert all("model.embed.weight and model.head.weight are tied here" in text for text in refusals)


def test_a_checkpoint_with_one_name_fills_a_tied_weight(memory: Store):
    class Headless(nn.Module):
        def __init__(self, tied: Tied) -> None:
            super().__init__()
            self.embed, self.body = tied.embed, tied.body

    one, two = Tied(1), Tied(2)

    restore_state(save_state(memory, {"model": Headless(one)}, save_number=1), {"model": two})
    fsdp_training.assert_same(dict(two.state_dict()), dict(one.state_dict()))

    three = Headless(Tied(3))
    restore_state(save_state(memory, {"model": one}, save_number=2, step=2), {"model": three})
    assert torch.equal(three.embed.weight, one.embed.weight)


def test_a_tie_between_two_entries_is_stored_once_and_comes_back(memory: Store):
    def build(seed: int) -> dict[str, Any]:
        body = Tied(seed, rows=9999)
        head = nn.Linear(4, 9999, bias=False)
        head.weight = body.embed.weight
        return {"body": body, "head": head}

    one, two = build(1), build(2)

    checkpoint = save_state(memory, one)
    restore_state(checkpoint, two)

    assert two["head"].weight is two["body"].embed.weight
    assert torch.equal(two["head"].weight, one["head"].weight)
    assert shard_bytes(checkpoint) < 2 * one["head"].weight.nbytes
    alone = nn.Linear(4, 9999, bias=False)
    TrainState({"head": alone}, rank=0, world_size=1).apply(checkpoint, Selection.of(["head"], ()))
    assert torch.equal(alone.weight, one["head"].weight)


def test_half_of_a_tie_is_neither_restored_nor_skipped(memory: Store):
    one, two = Tied(1), Tied(2)
    checkpoint = save_state(memory, {"model": one})
    before = two.embed.weight.clone()

    for selection in (Selection.of(["model.head"], ()), Selection.of(None, ["model.embed"])):
        with pytest.raises(StateMismatchError, match=r"model\.head\.weight is tied to model\.embed\.weight"):
            TrainState({"model": two}, rank=0, world_size=1).apply(checkpoint, selection)
    assert torch.equal(two.embed.weight, before)

    TrainState({"model": two}, rank=0, world_size=1).apply(checkpoint, Selection.of(["model.head", "model.embed"], ()))
    assert torch.equal(two.head.weight, one.head.weight)


def test_a_rank_keeps_its_own_view_of_a_weight_that_another_rank_writes(memory: Store):
    model = nn.Linear(3, 3)
    states = [{"model": model, "mine": PerRank({"view": model.weight.detach(), "rank": rank})} for rank in range(2)]
    ranks = agreed([TrainState(state, rank=rank, world_size=2) for rank, state in enumerate(states)])

    checkpoint = save(memory, [rank.stage(Progress(step=1)) for rank in ranks])

    for rank in range(2):
        mine = PerRank(None)
        TrainState({"model": nn.Linear(3, 3), "mine": mine}, rank=rank, world_size=2).apply(checkpoint)
        assert mine.value["rank"] == rank
        assert torch.equal(mine.value["view"], model.weight)


@no_group
def test_a_tied_hugging_face_model_is_stored_once_and_read_by_stock_torch(files: Store):
    def llama(seed: int) -> LlamaForCausalLM:
        torch.manual_seed(seed)
        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=997,
                hidden_size=16,
                intermediate_size=16,
                num_hidden_layers=1,
                num_attention_heads=2,
                num_key_value_heads=2,
                tie_word_embeddings=True,
            )
        )

    one, two = llama(1), llama(2)
    stored = sum(parameter.nbytes for parameter in one.parameters())

    checkpoint = save_state(files, {"model": one})
    restore_state(checkpoint, {"model": two})

    assert stored <= shard_bytes(checkpoint) < stored + one.lm_head.weight.nbytes
    assert two.lm_head.weight is two.model.embed_tokens.weight
    fsdp_training.assert_same(dict(two.state_dict()), dict(one.state_dict()))
    found = {"model": {name: torch.zeros_like(tensor) for name, tensor in one.state_dict().items()}}
    dcp.load(found, storage_reader=FileSystemReader(place_of(checkpoint)))
    fsdp_training.assert_same(found["model"], dict(one.state_dict()))


def one_step(state: dict[str, Any]) -> None:
    state["model"](torch.tensor([[0, 1]])).pow(2).sum().backward()
    state["optimizer"].step()
    state["optimizer"].zero_grad()


def index_of(checkpoint: Checkpoint) -> Any:
    return checkpoint.read_index(checkpoint.read_manifest())


def names_of(checkpoint: Checkpoint) -> set[str]:
    return {tensor.name for tensor in index_of(checkpoint).tensors}


def shard_bytes(checkpoint: Checkpoint) -> int:
    return sum(shard.size_bytes for shard in checkpoint.read_manifest().components[0].shards)


def place_of(checkpoint: Checkpoint) -> str:
    return f"{checkpoint.store.uri.removeprefix('file://')}/{component_prefix(checkpoint.entry.key, TRAIN)}"
