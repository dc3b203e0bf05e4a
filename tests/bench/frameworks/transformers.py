"""Measures how long a save blocks the Trainer of transformers: `python -m tests.bench.frameworks.transformers`.

One process, a model of 100 MB with AdamW (300 MB of state), a local folder, a save at each step. The median of the saves
counts. Ray's callback copies the folder that the Trainer wrote to a temporary one and uploads that while training
waits; here the upload is a second copy.
"""

import shutil
import statistics
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import raycheck
from raycheck.frameworks.transformers import trainer_run
from tests.support.coordinator_in_thread import group_of

STEPS = 6
SIZES = {
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 3,
    "num_attention_heads": 12,
    "vocab_size": 3000,
}


def trainer_in(folder: Path, kind: type[Trainer]) -> Trainer:
    torch.manual_seed(0)
    texts = [{"input_ids": row, "labels": row} for row in torch.randint(0, 3000, (STEPS, 4))]
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=STEPS,
        save_steps=1,
        save_total_limit=1,
        per_device_train_batch_size=1,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    return kind(model=LlamaForCausalLM(LlamaConfig(**SIZES)), args=arguments, train_dataset=texts)


class TimedTrainer(Trainer):
    """Times the Trainer's own saves, and what Ray's callback would do after each of them."""

    uploads = False

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        began = time.monotonic()
        super()._save_checkpoint(model, trial)
        if self.uploads:
            with tempfile.TemporaryDirectory() as copy, tempfile.TemporaryDirectory() as uploaded:
                source = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
                shutil.copytree(source, Path(copy) / "checkpoint")
                shutil.copytree(Path(copy) / "checkpoint", Path(uploaded) / "checkpoint")
        seconds.append(time.monotonic() - began)


seconds: list[float] = []


class TimedCheckpointer(raycheck.Checkpointer):
    """Times the saves, each with the one before committed, as in a training of long steps."""

    def save(self, *args: Any, **options: Any) -> None:
        self.wait()
        began = time.monotonic()
        super().save(*args, **options)
        seconds.append(time.monotonic() - began)


def measured() -> float:
    """Returns the median of what was timed, without the first save, which claims memory, and forgets it."""
    median = statistics.median(seconds[1:])
    seconds.clear()
    return median


def main() -> None:
    warnings.simplefilter("ignore")
    found = {}
    with tempfile.TemporaryDirectory() as name:
        for way in ("the Trainer's own", "and Ray's callback"):
            trainer = trainer_in(Path(name) / "own", TimedTrainer)
            trainer.uploads = way == "and Ray's callback"
            trainer.train()
            found[way] = measured()
            shutil.rmtree(Path(name) / "own")
        trainer_run.Checkpointer = TimedCheckpointer
        trainer = trainer_in(Path(name) / "ours", Trainer)
        raycheck.transformers.prepare(trainer, group=group_of(f"file://{name}/run")[0])
        trainer.train()
        seconds[STEPS:] = []  # the end of training saves once more
        found["raycheck"] = measured()
    for way, median in found.items():
        print(f"{way}: {median:.2f} s, {median / found['raycheck']:.1f} times raycheck's")


if __name__ == "__main__":
    main()
