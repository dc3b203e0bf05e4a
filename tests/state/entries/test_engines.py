"""A training engine that keeps its weights elsewhere is refused by name, before a first step.

The classes and attributes here have the names that deepspeed 0.19.8 and megatron-core 0.16.1 give to theirs.
"""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from raycheck.errors import ConfigError
from raycheck.state.entries.per_rank_entries import PerRank, RankZero
from raycheck.state.train_state import TrainState
from tests.support.processes.save_without_ray import Own


def check(state: dict[str, Any]) -> None:
    TrainState(state, rank=0, world_size=1).check(is_before_restore=True)


def of_package(full_name: str, base: type) -> type:
    """Returns a class with the full name of one in a package that is not installed."""
    module, _, name = full_name.rpartition(".")
    return type(name, (base,), {"__module__": module})


def marked(attribute: str, value: object) -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    setattr(model[1].weight, attribute, value)
    return model


def test_an_engine_of_a_version_that_was_not_tried_is_refused() -> None:
    engine = of_package("deepspeed.runtime.engine.DeepSpeedEngine", nn.Linear)(2, 2)

    with pytest.raises(
        ConfigError, match=r"state\['model'\] is an engine of DeepSpeed with version .*save_checkpoint\(\)"
    ):
        check({"model": engine})


@pytest.mark.parametrize(
    "name",
    ["deepspeed.runtime.engine.DeepSpeedEngine", "deepspeed.runtime.pipe.engine.PipelineEngine"],
)
def test_an_engine_is_refused_wherever_it_is_in_a_module(name: str) -> None:
    engine = of_package(name, nn.Linear)(2, 2)

    with pytest.raises(ConfigError, match=rf"state\['model'\]\.actor is a {name}"):
        check({"model": nn.ModuleDict({"actor": engine})})


@pytest.mark.parametrize("mark", ["ds_id", "ds_tensor", "_hp_mapping"])
def test_a_model_that_deepspeed_has_taken_over_is_refused(mark: str) -> None:
    with pytest.raises(ConfigError, match=r"parameter 1\.weight, which belongs to an engine.*DeepSpeed"):
        check({"model": marked(mark, None)})


def test_a_model_that_deepspeed_takes_over_after_it_was_given_is_refused() -> None:
    model = nn.Linear(2, 2)
    state = TrainState({"model": model}, rank=0, world_size=1)

    model.weight._hp_mapping = None

    with pytest.raises(ConfigError, match="DeepSpeed"):
        state.check()


@pytest.mark.parametrize(
    "name",
    [
        "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3",
        "deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer",
        "deepspeed.runtime.bf16_optimizer.BF16_Optimizer",
        "deepspeed.runtime.fp16.unfused_optimizer.FP16_UnfusedOptimizer",
        "accelerate.utils.deepspeed.DeepSpeedOptimizerWrapper",
        "megatron.core.optimizer.distrib_optimizer.DistributedOptimizer",
        "fairscale.optim.oss.OSS",
        "colossalai.interface.optimizer.OptimizerWrapper",
    ],
)
@pytest.mark.parametrize("wrap", [lambda value: value, PerRank, RankZero], ids=["plain", "PerRank", "RankZero"])
def test_an_optimizer_of_an_engine_is_refused(name: str, wrap: Any) -> None:
    optimizer = of_package(name, Own)({"step": 1})

    with pytest.raises(ConfigError, match=rf"state\['optimizer'\] is a {name}\. raycheck cannot save a training of"):
        check({"optimizer": wrap(optimizer)})


def test_a_scheduler_and_a_plain_optimizer_of_deepspeed_are_taken() -> None:
    model = nn.Linear(2, 2)
    scheduler = of_package("deepspeed.runtime.lr_schedules.WarmupLR", Own)({"last": 1})
    optimizer = of_package("deepspeed.ops.adam.fused_adam.FusedAdam", torch.optim.Adam)(model.parameters())

    check({"model": model, "scheduler": scheduler, "optimizer": optimizer})


def test_a_part_of_a_megatron_parameter_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"1\.weight, which is a part of a larger one.*dist_checkpointing"):
        check({"model": marked("tensor_model_parallel", True)})


def parallel_state(*, tensor: int, pipeline: int) -> Any:
    return SimpleNamespace(
        model_parallel_is_initialized=lambda: True,
        get_tensor_model_parallel_world_size=lambda: tensor,
        get_pipeline_model_parallel_world_size=lambda: pipeline,
    )


def test_megatron_is_refused_only_where_ranks_share_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "megatron.core.models.gpt.gpt_model.GPTModel"
    model = of_package(name, nn.Linear)(2, 2)
    model.weight.tensor_model_parallel = True  # Megatron sets it also where a rank holds the whole parameter

    monkeypatch.setitem(sys.modules, "megatron.core.parallel_state", parallel_state(tensor=1, pipeline=1))
    check({"model": model})

    monkeypatch.setitem(sys.modules, "megatron.core.parallel_state", parallel_state(tensor=2, pipeline=1))
    with pytest.raises(ConfigError, match="part of a larger one"):
        check({"model": model})

    monkeypatch.setitem(sys.modules, "megatron.core.parallel_state", parallel_state(tensor=1, pipeline=2))
    with pytest.raises(ConfigError, match="a stage of Megatron's pipeline"):
        check({"model": model})


def test_a_trained_parameter_without_elements_is_refused_until_it_is_frozen() -> None:
    model = nn.Linear(2, 2)
    model.weight = nn.Parameter(torch.empty(0))

    with pytest.raises(
        ConfigError, match=r"weight, which is to be trained and has no elements\. If it really is empty, call requires"
    ):
        check({"model": model})
    model.weight.requires_grad_(False)
    check({"model": model})
