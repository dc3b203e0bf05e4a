"""Several ranks of a Trainer without Ray, each a process: DDP, FSDP2, models sharded at load, another number of ranks."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import FullyShardedDataParallelPlugin
from accelerate.utils import DistributedType
from transformers import LlamaForCausalLM, Trainer

import raycheck
from raycheck.bucket.store import open_store
from tests.support.frameworks.tiny_trainers import (
    CrashAfter,
    CrashError,
    Texts,
    arguments,
    fresh_accelerate,
    losses,
    tiny_llama,
    weights,
)
from tests.support.histories.invariants import assert_invariants
from tests.support.processes import gloo_ranks
from tests.support.processes.gloo_ranks import Ranks

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]
Outcome = tuple[dict[int, Any], dict[str, np.ndarray], list[int]]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    os.environ["HF_HUB_OFFLINE"] = "1"
    found = Ranks(2, tmp_path_factory.mktemp("ranks"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gloo_ranks, "ANSWER_WITHIN_S", 240.0)
        found.run(warm_up, 2)
        yield found
    found.stop()


def warm_up(rank: int, world_size: int) -> None:
    """transformers takes long to import, and each run has a deadline."""
    tiny_llama()


def train(
    rank: int, world_size: int, uri: str, folder: str, kind: str, crash: int | None, dropout: float = 0.1
) -> Outcome:
    """What a training function does on one rank, up to a crash if there is to be one."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1")
    with fresh_accelerate():
        data = Texts()
        trainer = Trainer(
            model=model_of(kind, folder, dropout),
            args=arguments(folder, per_device_train_batch_size=1, save_strategy="no", **OPTIONS.get(kind, {})),
            train_dataset=data,
            callbacks=[] if crash is None else [CrashAfter(crash)],
        )
        if kind == "fsdp2":
            shard_on_cpu(trainer)
        raycheck.transformers.prepare(trainer, raycheck.SaveSettings(every_steps=3), group=raycheck.torchrun_group(uri))
        try:
            trainer.train()
        except CrashError:
            assert crash is not None
        return losses(trainer), {name: tensor.numpy() for name, tensor in weights(trainer.model).items()}, data.read


OPTIONS = {
    "fsdp2": {"fsdp": True, "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}}
}


def model_of(kind: str, folder: str, dropout: float) -> torch.nn.Module:
    if kind != "sharded at load":
        return tiny_llama(dropout=dropout)
    from transformers.distributed import DistributedConfig

    return LlamaForCausalLM.from_pretrained(f"{folder}/model", distributed_config=DistributedConfig(fsdp_size=2))


def shard_on_cpu(trainer: Trainer) -> None:
    """accelerate shards on accelerators alone; its code for that works on a CPU, too."""
    state = trainer.accelerator.state
    state.distributed_type = DistributedType.FSDP
    state.fsdp_plugin = FullyShardedDataParallelPlugin(**trainer.args.fsdp_plugin_args)
    trainer.is_fsdp_enabled = True


@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "sharded at load"])
def test_ranks_that_are_cut_off_go_on_as_if_nothing_had_happened(kind: str, ranks: Ranks, tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path / "model")
    whole, hurt = (f"file://{tmp_path}/{name}" for name in ("whole", "hurt"))
    expected = ranks.run(train, 2, whole, str(tmp_path), kind, None)

    ranks.run(train, 2, hurt, str(tmp_path), kind, 5)
    found = ranks.run(train, 2, hurt, str(tmp_path), kind, None)

    assert [outcome[0] for outcome in found] == [outcome[0] for outcome in expected]
    for name, tensor in expected[0][1].items():
        assert (found[0][1][name] == tensor).all(), name
    assert [len(read) for _, _, read in found] == [18, 18]  # 9 of the 12 steps, 2 samples each
    assert_invariants(open_store(hurt))


def train_for_best(rank: int, world_size: int, uri: str, folder: str, kind: str) -> tuple[int, dict[str, np.ndarray]]:
    """Returns the best step, which is not the last one, and the model's whole weights after train()."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1")
    with fresh_accelerate():
        args = arguments(
            folder,
            save_strategy="steps",
            save_steps=6,
            eval_strategy="steps",
            eval_steps=3,
            metric_for_best_model="loss",
            greater_is_better=True,  # the first evaluation is the worst, and so the best
            load_best_model_at_end=True,
            **OPTIONS.get(kind, {}),
        )
        trainer = Trainer(model=tiny_llama(), args=args, train_dataset=Texts(), eval_dataset=Texts(4))
        if kind == "fsdp2":
            shard_on_cpu(trainer)
        raycheck.transformers.prepare(trainer, raycheck.SaveSettings(keep_last=1), group=raycheck.torchrun_group(uri))
        trainer.train()
        assert trainer.state.global_step > trainer.state.best_global_step
        assert trainer.state.best_model_checkpoint.startswith(uri)
        return trainer.state.best_global_step, {name: tensor.numpy() for name, tensor in weights(trainer.model).items()}


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_the_best_model_is_there_at_the_end(kind: str, ranks: Ranks, tmp_path: Path) -> None:
    uri = f"file://{tmp_path}/run"

    found = ranks.run(train_for_best, 2, uri, str(tmp_path), kind)

    best = tiny_llama(seed=1)
    assert raycheck.open_run(uri).at(found[0][0]).restore(into={"model": best}) == 3
    for step, state in found:
        assert step == 3
        assert all((state[name] == tensor.numpy()).all() for name, tensor in weights(best).items())


def test_another_number_of_ranks_trains_on_the_same_steps(ranks: Ranks, tmp_path: Path) -> None:
    """Without dropout the losses are those of a run that never changed, but for the order in which sums are made."""
    whole, hurt = (f"file://{tmp_path}/{name}" for name in ("whole", "hurt"))
    expected = ranks.run(train, 2, whole, str(tmp_path), "ddp", None, 0.0)[0]

    ranks.run(train, 2, hurt, str(tmp_path), "fsdp2", 6, 0.0)
    (found,) = ranks.run(train, 1, hurt, str(tmp_path), "ddp", None, 0.0)

    assert found[0].keys() == expected[0].keys()
    for step in (9, 12):
        assert found[0][step]["learning_rate"] == expected[0][step]["learning_rate"]
        assert found[0][step]["loss"] == pytest.approx(expected[0][step]["loss"], rel=1e-4)
    assert len(found[2]) == 24  # 6 steps of 4 samples, on one rank
