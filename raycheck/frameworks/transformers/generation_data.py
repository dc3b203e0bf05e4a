"""The data of TRL's GRPO: its batches are prompts to generate from, and their completions last for several steps.

A generation batch is `generation_batch_size` completions of a few prompts. TRL's loader yields it again for each
micro-batch that uses it. Here it is one batch of the stream at each step, which yields the same micro-batches. Every
rank saves the completions that it still uses, so a save can happen at any step. At another world size they are
generated again.
"""

from collections.abc import Sequence
from typing import Any

import torch

from raycheck.errors import ConfigError
from raycheck.frameworks.transformers.training_data import Layout


def generates(trainer: Any) -> bool:
    """Return whether this trainer generates its own training data, as GRPO does."""
    return hasattr(trainer, "_buffered_inputs")


def hold_generation_batch(trainer: Any, accumulation: int) -> None:
    """Keep a generation batch's size when the number of micro-batches per step changes."""
    args = trainer.args
    if not generates(trainer) or accumulation == args.gradient_accumulation_steps:
        return
    micro = args.steps_per_generation * accumulation
    if micro % args.gradient_accumulation_steps:
        raise ConfigError(
            f"steps_per_generation={args.steps_per_generation} with "
            f"gradient_accumulation_steps={args.gradient_accumulation_steps}, which must be {accumulation} at this "
            "number of workers: the generation batch cannot be kept. Use another number of workers"
        )
    args.steps_per_generation = micro // args.gradient_accumulation_steps
    args.generation_batch_size = args.per_device_train_batch_size * args.world_size * args.steps_per_generation


def generation_layout(trainer: Any) -> Layout:
    """Return GRPO's layout: an epoch's prompts in generation batches, repeated for every step that trains on them."""
    args = trainer.args
    uses = args.steps_per_generation * trainer.num_iterations
    if uses % args.gradient_accumulation_steps:
        raise ConfigError(
            f"steps_per_generation={args.steps_per_generation} x num_iterations={trainer.num_iterations} is not a "
            f"multiple of gradient_accumulation_steps={args.gradient_accumulation_steps}: a step would train on two "
            "generations"
        )
    prompts = args.generation_batch_size // trainer.num_generations
    steps, each = uses // args.gradient_accumulation_steps, trainer.num_generations
    samples, seed, is_shuffled = len(trainer.train_dataset), args.seed, trainer.shuffle_dataset

    def order(epoch: int) -> Sequence[int]:
        generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**63)
        indices = torch.randperm(samples, generator=generator).tolist() if is_shuffled else [*range(samples)]
        batches = [indices[at : at + prompts] for at in range(0, samples // prompts * prompts, prompts)]
        return [index for batch in batches for _ in range(steps) for index in batch for _ in range(each)]

    return Layout(
        global_batch=args.generation_batch_size,
        micro_batches=args.gradient_accumulation_steps,
        micro_batch=None,
        order=order,
    )
