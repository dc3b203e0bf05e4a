"""Tiny trainings with transformers' Trainer, made anew for each start of a run, as a script would."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments


class Texts(Dataset):
    """Numbered samples; `read` says which of them were read, in this process."""

    def __init__(self, count: int = 26, length: int = 6) -> None:
        self._ids = torch.randint(0, 64, (count, length), generator=torch.Generator().manual_seed(1))
        self.read: list[int] = []

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        self.read.append(index)
        return {"input_ids": self._ids[index], "labels": self._ids[index]}


class CrashError(RuntimeError):
    """Ends a training as an error of the script would."""


class CrashAfter(TrainerCallback):
    """Raises once the next step begins."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            raise CrashError(f"after step {self.step}")


def tiny_llama(seed: int = 0, dropout: float = 0.1, *, is_tied: bool = False) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            vocab_size=64,
            max_position_embeddings=32,
            attention_dropout=dropout,
            tie_word_embeddings=is_tied,
        )
    )


def arguments(folder: object, **more: Any) -> TrainingArguments:
    return TrainingArguments(
        **{
            "output_dir": str(folder),
            "use_cpu": True,
            "report_to": [],
            "disable_tqdm": True,
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 2,
            "num_train_epochs": 2,
            "learning_rate": 1e-2,
            "lr_scheduler_type": "cosine",
            "logging_steps": 3,
            "seed": 5,
            **more,
        }
    )


@contextmanager
def fresh_accelerate() -> Iterator[None]:
    """accelerate keeps what it found out about the process in singletons."""
    for state in (AcceleratorState, PartialState):
        state._reset_state()
    GradientState._reset_state()
    try:
        yield
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


def losses(trainer: Trainer) -> dict[int, Mapping[str, float]]:
    """What was logged by step, without times."""
    found: dict[int, dict[str, float]] = {}
    for line in trainer.state.log_history:
        kept = {k: v for k, v in line.items() if "runtime" not in k and "per_second" not in k}
        found.setdefault(line["step"], {}).update(kept)
    return found


def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()
        for name, value in model.state_dict().items()
    }
