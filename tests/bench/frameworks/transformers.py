"""Measures how long a save blocks the Trainer of transformers: `python -m tests.bench.frameworks.transformers`.

One worker of Ray Train, a model of 100 MB with AdamW (300 MB of state), a local folder as storage, a save at each step.
Measured are the Trainer's own save, that together with Ray's RayTrainReportCallback, which copies the folder that the
Trainer wrote and uploads the copy, and raycheck's. The median of the saves counts, without the first, which claims
memory.
"""

import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from ray.train.huggingface.transformers import RayTrainReportCallback
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import raycheck
from tests.bench.frameworks.worker import seconds_in_worker

STEPS = 6
SIZES = {
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 3,
    "num_attention_heads": 12,
    "vocab_size": 3000,
}


def trainer_in(folder: str) -> Trainer:
    torch.manual_seed(0)
    texts = [{"input_ids": row, "labels": row} for row in torch.randint(0, 3000, (STEPS, 4))]
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=STEPS,
        save_steps=1,
        save_total_limit=1,
        per_device_train_batch_size=1,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    return Trainer(model=LlamaForCausalLM(LlamaConfig(**SIZES)), args=arguments, train_dataset=texts)


@contextmanager
def timed(owner: type, name: str, *, wait: bool = False) -> Iterator[list[float]]:
    """Gives the seconds of each call of a method. wait: each call begins with the save before it committed, as in a
    training of long steps; that wait does not count."""
    seconds: list[float] = []
    method = getattr(owner, name)

    def call(self: object, *args: object, **options: object) -> object:
        if wait:
            self.wait()
        began = time.monotonic()
        try:
            return method(self, *args, **options)
        finally:
            seconds.append(time.monotonic() - began)

    setattr(owner, name, call)
    try:
        yield seconds
    finally:
        setattr(owner, name, method)


def through_the_trainer() -> list[list[float]]:
    """Returns the seconds of each save of the Trainer's own, and of Ray's callback after it."""
    with (
        tempfile.TemporaryDirectory() as folder,
        timed(Trainer, "_save_checkpoint") as own,
        timed(RayTrainReportCallback, "on_save") as report,
    ):
        trainer = trainer_in(folder)
        trainer.add_callback(RayTrainReportCallback())
        trainer.train()
    return [own, report]


def through_raycheck() -> list[float]:
    with tempfile.TemporaryDirectory() as folder, timed(raycheck.Checkpointer, "save", wait=True) as saves:
        raycheck.transformers.prepare(trainer_in(folder)).train()
    return saves[:STEPS]  # the end of training saves once more


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        storage = Path(name)
        own, report = seconds_in_worker(through_the_trainer, storage, "own", lambda trainer: trainer.fit())
        ours = statistics.median(seconds_in_worker(through_raycheck, storage, "ours", raycheck.fit)[1:])
    both = [a + b for a, b in zip(own, report, strict=True)]
    print(f"raycheck: {ours:.3f} s")
    for way, seconds in (("the Trainer's own", own), ("and Ray's callback", both)):
        median = statistics.median(seconds[1:])
        print(f"{way}: {median:.2f} s, {median / ours:.1f} times raycheck's")


if __name__ == "__main__":
    main()
