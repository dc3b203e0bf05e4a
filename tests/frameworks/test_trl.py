"""TRL's trainers over a restart: SFT, DPO with a reference model that is mixed, GRPO in the middle of a generation."""

import os
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import torch
import trl
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Trainer

import raycheck
from raycheck.errors import ConfigError
from raycheck.frameworks.transformers.generation_data import hold_generation_batch
from tests.support.frameworks.tiny_trainers import (
    CrashAfter,
    CrashError,
    arguments,
    fresh_accelerate,
    losses,
    tiny_llama,
    weights,
)
from tests.support.processes import gloo_ranks
from tests.support.processes.coordinator_in_thread import group_of
from tests.support.processes.gloo_ranks import Ranks

pytestmark = pytest.mark.filterwarnings("ignore")  # TRL and transformers warn of each other


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("CI", "1")  # no telemetry
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    with fresh_accelerate():
        yield


def tokenizer() -> PreTrainedTokenizerFast:
    words = ["<pad>", "<eos>", "<unk>", *(f"w{number}" for number in range(40))]
    made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )


def words(number: int, count: int = 4) -> str:
    return " ".join(f"w{(number * 7 + at) % 40}" for at in range(count))


def reward(completions: list[str], **columns: Any) -> list[float]:
    return [float(len(set(text.split()))) for text in completions]


COMMON = {
    "seed": 5,
    "learning_rate": 1e-2,
    "use_cpu": True,
    "bf16": False,
    "report_to": [],
    "disable_tqdm": True,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "num_train_epochs": 1,
    "logging_steps": 2,
}


def sft(folder: Path, callbacks: list[Any], **options: Any) -> Trainer:
    config = trl.SFTConfig(output_dir=str(folder), max_length=16, **{**COMMON, **options})
    data = Dataset.from_dict({"text": [words(number) for number in range(26)]})
    return trl.SFTTrainer(
        model=tiny_llama(), args=config, train_dataset=data, processing_class=tokenizer(), callbacks=callbacks
    )


def dpo(folder: Path, callbacks: list[Any], **options: Any) -> Trainer:
    config = trl.DPOConfig(
        output_dir=str(folder),
        max_length=16,
        sync_ref_model=True,
        ref_model_sync_steps=2,
        ref_model_mixup_alpha=0.5,
        **{**COMMON, **options},
    )
    columns = ("prompt", "chosen", "rejected")
    data = Dataset.from_dict({name: [words(number + at, 3) for number in range(26)] for at, name in enumerate(columns)})
    return trl.DPOTrainer(
        model=tiny_llama(),
        ref_model=tiny_llama(),
        args=config,
        train_dataset=data,
        processing_class=tokenizer(),
        callbacks=callbacks,
    )


def grpo(folder: Path, callbacks: list[Any], reward: Any = reward, **options: Any) -> Trainer:
    config = trl.GRPOConfig(
        output_dir=str(folder),
        **{
            **COMMON,
            "max_completion_length": 6,
            "num_generations": 2,
            "num_iterations": 2,
            "beta": 0.0,
            **options,
        },
    )
    data = Dataset.from_dict({"prompt": [words(number, 3) for number in range(8)]})
    return trl.GRPOTrainer(
        model=tiny_llama(),
        reward_funcs=reward,
        args=config,
        train_dataset=data,
        processing_class=tokenizer(),
        callbacks=callbacks,
    )


def logged(trainer: Trainer) -> dict[int, dict[str, float]]:
    return {
        step: {name: value for name, value in line.items() if "time" not in name}
        for step, line in losses(trainer).items()
    }


@pytest.mark.parametrize("make", [sft, dpo, grpo])
def test_a_restart_goes_on_as_if_training_had_never_been_cut_off(make: Any, tmp_path: Path) -> None:
    """GRPO's save of step 3 is in the middle of a generation, which two steps train on: the completions are saved."""
    settings = raycheck.SaveSettings(every_steps=3)

    def start(run: str, *callbacks: Any) -> Trainer:
        trainer = make(tmp_path, [*callbacks])
        raycheck.transformers.prepare(trainer, settings, group=group_of(run)[0])
        trainer.train()
        return trainer

    straight, again = f"memory://{uuid4().hex}", f"memory://{uuid4().hex}"
    whole = start(straight)
    with pytest.raises(CrashError):
        start(again, CrashAfter(4))
    found = start(again)

    assert logged(found) == logged(whole)
    assert found.state.global_step == whole.state.global_step >= 6
    for name, tensor in weights(whole.model).items():
        assert torch.equal(weights(found.model)[name], tensor), name
    if make is dpo:
        reference, expected = weights(found.ref_model), weights(whole.ref_model)
        assert all(torch.equal(reference[name], expected[name]) for name in expected)
        assert not torch.equal(reference["lm_head.weight"], weights(tiny_llama())["lm_head.weight"])


def test_the_generation_batch_is_held_when_a_step_gets_more_micro_batches(tmp_path: Path) -> None:
    trainer = grpo(tmp_path, [], steps_per_generation=4)
    assert trainer.args.generation_batch_size == 8

    hold_generation_batch(trainer, 4)  # half as many workers as before: as many samples again for each

    assert (trainer.args.steps_per_generation, trainer.args.generation_batch_size) == (8, 16)
    trainer.args.gradient_accumulation_steps = 3
    with pytest.raises(ConfigError, match=r"steps_per_generation=8 .* the generation batch cannot be kept"):
        hold_generation_batch(trainer, 4)


def train_on_generations(rank: int, world_size: int, uri: str, folder: Path, crash: int | None) -> dict[str, Any]:
    """Returns which prompts this rank generated from, by the number of steps that were done then, and what was logged."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1")
    seen: dict[int, list[str]] = {}

    def note(prompts: list[str], completions: list[str], trainer_state: Any, **columns: Any) -> list[float]:
        seen[trainer_state.global_step] = list(prompts)
        return reward(completions)

    with fresh_accelerate():
        callbacks = [] if crash is None else [CrashAfter(crash)]
        trainer = grpo(folder, callbacks, reward=note, num_train_epochs=2)
        group = raycheck.torchrun_group(uri)
        raycheck.transformers.prepare(trainer, raycheck.SaveSettings(every_steps=3), group=group)
        with suppress(CrashError):
            trainer.train()
        rates = {step: line["learning_rate"] for step, line in losses(trainer).items() if "learning_rate" in line}
        return {"prompts": seen, "rates": rates, "steps": trainer.state.global_step, "args": trainer.args.to_dict()}


@pytest.mark.slow
def test_half_the_ranks_generate_from_the_same_prompts(
    pair: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A generation of 4 prompts lasts for two steps. The save of step 3 is inside the second one, whose completions are
    generated anew."""
    monkeypatch.setattr(gloo_ranks, "ANSWER_WITHIN_S", 240.0)  # the first answer comes after TRL's import
    whole, hurt = (f"file://{tmp_path}/{name}" for name in ("whole", "hurt"))
    expected = pair.run(train_on_generations, 2, whole, tmp_path, None)

    pair.run(train_on_generations, 2, hurt, tmp_path, 4)
    (found,) = pair.run(train_on_generations, 1, hurt, tmp_path, None)

    of_both = {step: [text for one in expected for text in one["prompts"][step]] for step in expected[0]["prompts"]}
    assert sorted(of_both) == [0, 2, 4, 6]
    assert found["prompts"] == {3: of_both[2], 4: of_both[4], 6: of_both[6]}
    assert found["steps"] == expected[0]["steps"] == 8
    assert found["rates"] == expected[0]["rates"]
    held = {name: found["args"][name] for name in ("gradient_accumulation_steps", "steps_per_generation")}
    assert held == {"gradient_accumulation_steps": 4, "steps_per_generation": 4}
    assert found["args"]["generation_batch_size"] == expected[0]["args"]["generation_batch_size"] == 8


def test_generations_that_end_inside_a_step_are_refused(tmp_path: Path) -> None:
    trainer = grpo(tmp_path, [], num_iterations=1, gradient_accumulation_steps=2, steps_per_generation=3)
    raycheck.transformers.prepare(trainer, group=group_of(f"memory://{uuid4().hex}")[0])

    with pytest.raises(ConfigError, match="steps_per_generation=3 x num_iterations=1 is not a multiple"):
        trainer.train()


def test_trainers_of_trl_that_nobody_has_tested_are_refused_by_name(tmp_path: Path) -> None:
    class KTOTrainer(Trainer):
        pass

    KTOTrainer.__module__ = "trl.trainer.kto_trainer"
    trainer = KTOTrainer(model=tiny_llama(), args=arguments(tmp_path))

    with pytest.raises(ConfigError, match=r"KTOTrainer of TRL may keep state.*SFTTrainer, DPOTrainer, GRPOTrainer"):
        raycheck.transformers.prepare(trainer)
