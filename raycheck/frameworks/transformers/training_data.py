"""The stream of batches behind the loader that the Trainer expects.

One batch of raycheck.Batches is one optimizer step: this rank's micro-batches, collated in the process that reads the
samples. The Trainer sees a loader of micro-batches and takes those of one step at a time, so nothing is read ahead
without being counted. The number of samples per step stays the same when the world size changes.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from raycheck.adapters import Batches
from raycheck.errors import ConfigError, StateMismatchError
from raycheck.frameworks.transformers.refusals import refuse_dataset

MICRO_BATCH = "per_device_train_batch_size"


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """The samples that an optimizer step takes, and the division of a rank's share into micro-batches.

    global_batch: samples in one batch of the stream, over all ranks. micro_batches: how many of them a step has on each
    rank. micro_batch: samples in each; None: a step's micro-batches are all the same batch. order: the order of
    samples, by epoch; None: random, or the dataset's order if is_sequential.
    """

    global_batch: int
    micro_batches: int
    micro_batch: int | None
    order: Callable[[int], Sequence[int]] | None = None
    is_sequential: bool = False


def held_accumulation(trainer: Any, facts: Mapping[str, Any]) -> int:
    """Return how many micro-batches a step needs here to have as many samples as in the checkpoint.

    facts: the checkpoint's, see `facts_of`. Raises StateMismatchError when the script asks for another number of
    samples, and ConfigError when they cannot be divided among the current ranks.
    """
    args = trainer.args
    samples = args.per_device_train_batch_size * args.world_size
    here, saved = samples * args.gradient_accumulation_steps, int(facts["step_samples"])
    if here == saved:
        return int(args.gradient_accumulation_steps)
    if args.world_size == facts["world_size"]:
        raise StateMismatchError(
            f"a step has {here} samples here ({MICRO_BATCH}={args.per_device_train_batch_size} x "
            f"gradient_accumulation_steps={args.gradient_accumulation_steps} x {args.world_size} ranks) and {saved} in "
            "the checkpoint, so steps and schedule would mean different samples. Keep the product the same"
        )
    if saved % samples:
        raise ConfigError(
            f"the checkpoint's steps have {saved} samples, which {args.world_size} ranks with "
            f"{MICRO_BATCH}={args.per_device_train_batch_size} cannot divide evenly: give a {MICRO_BATCH} that divides "
            f"{saved / args.world_size:g}, or another number of workers"
        )
    return int(saved // samples)


def facts_of(trainer: Any) -> dict[str, int]:
    """Return the values that a restart at another world size must keep or know."""
    args = trainer.args
    size = args.per_device_train_batch_size * args.world_size
    return {"step_samples": size * args.gradient_accumulation_steps, "world_size": args.world_size}


def plain_layout(trainer: Any) -> Layout:
    """Return the layout of supervised training, following train_sampling_strategy."""
    args = trainer.args
    strategy = str(getattr(args.train_sampling_strategy, "value", args.train_sampling_strategy))
    batch = facts_of(trainer)["step_samples"]
    return Layout(
        global_batch=batch,
        micro_batches=args.gradient_accumulation_steps,
        micro_batch=args.per_device_train_batch_size,
        order=_by_length(trainer, batch) if strategy == "group_by_length" else None,
        is_sequential=strategy == "sequential",
    )


def data_seed(args: Any) -> int:
    return int(args.data_seed if args.data_seed is not None else args.seed)


def _by_length(trainer: Any, batch: int) -> Callable[[int], Sequence[int]]:
    """Return the order of transformers' LengthGroupedSampler, seeded by the epoch."""
    from transformers.trainer_pt_utils import LengthGroupedSampler

    dataset, args = trainer.train_dataset, trainer.args
    columns = getattr(dataset, "column_names", None) or ()
    tokenizer = trainer.processing_class
    sampler = LengthGroupedSampler(
        batch,
        dataset=dataset,
        lengths=list(dataset[args.length_column_name]) if args.length_column_name in columns else None,
        model_input_name=tokenizer.model_input_names[0] if tokenizer is not None else None,
    )

    def order(epoch: int) -> list[int]:
        sampler.generator = torch.Generator().manual_seed((data_seed(args) * 1_000_003 + epoch) % 2**63)
        return [*sampler]

    return order


@dataclass(kw_only=True, slots=True)
class TrainingData:
    """The stream, an entry of the state, and the loader, given to the Trainer."""

    batches: Batches
    loader: "DataLoader[Any]"


def training_data(trainer: Any, layout: Layout) -> TrainingData:
    """Make a stream of the trainer's train_dataset. Raises ConfigError for data that cannot be streamed this way."""
    args, dataset = trainer.args, trainer.train_dataset
    if dataset is None:
        raise ConfigError("train_dataset=None: training needs one")
    refuse_dataset(dataset)
    columns = getattr(dataset, "column_names", None)
    if columns is not None and hasattr(dataset, "remove_columns"):  # a datasets.Dataset
        dataset, collate = trainer._remove_unused_columns(dataset, description="training"), trainer.data_collator  # noqa: SLF001
    else:
        collate = trainer._get_collator_with_removed_columns(trainer.data_collator, description="training")  # noqa: SLF001
    batches = Batches(
        dataset,
        global_batch=layout.global_batch,
        seed=data_seed(args),
        shuffle=not layout.is_sequential,
        order=layout.order,
        rank=args.process_index,
        world_size=args.world_size,
    )
    options = {
        "collate_fn": _Collate(collate, layout),
        "num_workers": args.dataloader_num_workers,
        "pin_memory": args.dataloader_pin_memory and torch.accelerator.is_available(),
        "multiprocessing_context": args.dataloader_multiprocessing_context,
        "prefetch_factor": args.dataloader_prefetch_factor,
        "in_order": args.dataloader_in_order,
    }
    micro = _MicroBatches(batches, options, layout)
    loader: DataLoader[Any] = DataLoader(
        micro, batch_sampler=_Numbers(micro), collate_fn=_only, generator=torch.Generator()
    )
    return TrainingData(batches=batches, loader=loader)


@dataclass(frozen=True, slots=True)
class _Collate:
    """A collator that divides a rank's share of a step into micro-batches, in the process that reads the samples."""

    collate: Callable[[list[Any]], Any]
    layout: Layout

    def __call__(self, samples: list[Any]) -> list[Any]:
        size = self.layout.micro_batch
        if size is None:
            return [self.collate(samples)]
        return [self.collate(samples[at : at + size]) for at in range(0, len(samples), size)]


class _MicroBatches(Dataset[Any]):
    """A dataset that yields the stream's micro-batches in order, whatever index is requested. Its length is in samples
    because the Trainer reads their number from it."""

    def __init__(self, batches: Batches, options: dict[str, Any], layout: Layout) -> None:
        self._stream = batches.loader(**options)
        self._waiting: list[Any] = []
        self._steps: Iterator[Any] = iter(())
        self._repeats = layout.micro_batches if layout.micro_batch is None else 1
        self._samples = batches.batches_per_epoch * layout.global_batch
        self.per_epoch = batches.batches_per_epoch * layout.micro_batches

    def begin(self) -> None:
        """Continue from the stream's position: the start of an epoch, or a restored position inside it."""
        self._steps, self._waiting = iter(self._stream), []

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> Any:
        if not self._waiting:
            self._waiting = next(self._steps) * self._repeats
        return self._waiting.pop(0)


@dataclass(frozen=True, slots=True)
class _Numbers(Sampler[list[int]]):
    """A sampler that numbers an epoch's micro-batches. After a restart transformers skips numbers, not data."""

    micro: _MicroBatches = field()

    def __iter__(self) -> Iterator[list[int]]:
        self.micro.begin()
        return ([number] for number in range(self.micro.per_epoch))

    def __len__(self) -> int:
        return self.micro.per_epoch


def _only(micro_batches: list[Any]) -> Any:
    return micro_batches[0]
