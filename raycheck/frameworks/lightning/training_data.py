"""Gives Lightning training batches from raycheck's Batches, whose position is saved, instead of from a DataLoader.

Lightning makes its iterators early, and sometimes before a restore; the loader here begins at its first batch, from
where the stream is then. A loader whose position nobody could save is refused before the first step.
"""

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, SequentialSampler

from raycheck.adapters import Batches
from raycheck.errors import ConfigError
from raycheck.frameworks.lightning.packages import named, package_of

logger = logging.getLogger("raycheck")

OPTIONS = ("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context")
ADVICE = (
    "Give raycheck.Batches(dataset, global_batch=...).loader(num_workers=...) as the training loader, or "
    "Callback(..., data_position=False), with which an epoch that was cut off goes on at the loader's beginning"
)


class EpochLoader:
    """Gives Lightning one epoch of Batches each time it is iterated; in a restored epoch what is left of it.

    Lightning counts the batches of the whole epoch, also in a restored one, so the length is that of a whole epoch.
    """

    def __init__(self, loader: Any, batches: Batches) -> None:
        self._loader = loader
        self.batches = batches

    def __len__(self) -> int:
        return self.batches.batches_per_epoch

    def __iter__(self) -> Iterator[Any]:
        return iter(self._loader)

    def state_dict(self) -> dict[str, Any]:
        """Returns nothing: the position is an entry of its own. With this method Lightning takes it to be resumable."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take nothing: the position is restored by itself."""


class ConvertedSource:
    """Stands in for Lightning's source of training loaders, and converts what it gives, once."""

    def __init__(self, source: Any, convert: Callable[[Any], Any]) -> None:
        self._source = source
        self._convert = convert
        self._loaders: Any = None
        self._is_made = False

    def dataloader(self) -> Any:
        if not self._is_made:
            self._loaders, self._is_made = self._convert(self._source.dataloader()), True
        return self._loaders

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)


class LoaderConversion:
    """Converts a Trainer's training loader into one with a position. batches: None until then, and for none."""

    def __init__(self, trainer: Any, saved: Mapping[str, Any]) -> None:
        """saved: the state of the Batches in the checkpoint that is to be restored, empty for none."""
        self._trainer = trainer
        self._saved = saved
        self.batches: Batches | None = None

    def convert(self, loaders: Any) -> Any:
        """Returns the loaders in the form given (one, or a list, dict or CombinedLoader of one), with a position.

        Raises ConfigError, naming the loader, when it could not go on in the middle of an epoch.
        """
        if isinstance(loaders, named(package_of(self._trainer), "utilities.combined_loader", "CombinedLoader")):
            loaders = loaders.iterables  # of one loader all its modes are the same
        if isinstance(loaders, dict | list | tuple):
            if len(loaders) != 1:
                raise ConfigError(
                    f"{len(loaders)} training loaders: a run has one position in its data. Combine their datasets into "
                    "one, such as torch.utils.data.StackDataset(a=..., b=...), whose batches have the same form. "
                    f"{ADVICE}"
                )
            if isinstance(loaders, dict):
                return {name: self.convert(loader) for name, loader in loaders.items()}
            return [self.convert(loaders[0])] if isinstance(loaders, list) else (self.convert(loaders[0]),)
        batches = loaders if isinstance(loaders, Batches) else getattr(loaders, "batches", None)
        if isinstance(loaders, DataLoader):
            batches, loaders = self._converted(loaders)
        elif isinstance(loaders, Batches):
            loaders = loaders.loader()
        elif getattr(loaders, "_asked_epoch", None) is not None:
            raise ConfigError("Batches.loader(epoch) gives one epoch alone; give Lightning loader() without an epoch")
        if not isinstance(batches, Batches):
            raise ConfigError(
                f"the training loader is a {type(loaders).__module__}.{type(loaders).__qualname__}, whose position is "
                f"not saved. {ADVICE}"
            )
        self.batches = batches
        return EpochLoader(loaders, batches)

    def _converted(self, loader: "DataLoader[Any]") -> tuple[Batches, Any]:
        """Returns Batches of the loader's dataset, and a loader of these with its options."""
        trainer = self._trainer
        sampler = loader.sampler
        self._refuse_other_orders(loader)
        is_distributed = trainer._accelerator_connector.is_distributed
        place = trainer.distributed_sampler_kwargs if is_distributed else {"num_replicas": 1, "rank": 0}
        if isinstance(sampler, DistributedSampler):
            shuffle, seed = sampler.shuffle, sampler.seed
        else:  # Lightning shuffles training data whenever it distributes them
            shuffle, seed = is_distributed or isinstance(sampler, RandomSampler), _global_seed()
        shuffle = bool(shuffle) and not trainer.overfit_batches
        assert loader.batch_size is not None
        global_batch = self._saved.get("global_batch", loader.batch_size * place["num_replicas"])
        batches = Batches(
            loader.dataset,
            global_batch=global_batch,
            seed=self._saved.get("seed", seed),
            shuffle=shuffle,
            rank=place["rank"],
            world_size=place["num_replicas"],
        )
        if global_batch % place["num_replicas"] and trainer.global_rank == 0:
            logger.warning(
                "a global batch of %d does not divide among %d workers: their shares differ by one sample, and each "
                "worker's mean counts alike",
                global_batch,
                place["num_replicas"],
            )
        _check_last_batch(loader, global_batch, shuffle=shuffle, is_first=trainer.global_rank == 0)
        options = {name: getattr(loader, name) for name in OPTIONS}
        if loader.num_workers:
            options["prefetch_factor"] = loader.prefetch_factor
        if trainer.global_rank == 0:
            logger.info(
                "the training DataLoader is given out as raycheck.Batches(global_batch=%d, seed=%d, shuffle=%s)",
                global_batch,
                batches.state_dict()["seed"],
                shuffle,
            )
        return batches, batches.loader(**options)

    def _refuse_other_orders(self, loader: "DataLoader[Any]") -> None:
        """Raise ConfigError for a DataLoader whose order or batches are not those that Batches would give."""
        sampler, connector = loader.sampler, self._trainer._accelerator_connector
        is_torchdatas = type(loader).__module__.startswith("torchdata.")
        is_whole = not isinstance(sampler, RandomSampler) or (
            not sampler.replacement and sampler.num_samples == len(loader.dataset)  # type: ignore[arg-type]
        )
        is_shared = isinstance(sampler, DistributedSampler) or connector.use_distributed_sampler
        is_known = type(sampler) in (RandomSampler, SequentialSampler, DistributedSampler) and is_whole
        problem = ""
        if type(loader).__iter__ is not DataLoader.__iter__ and not is_torchdatas:
            problem = f"is a {type(loader).__module__}.{type(loader).__qualname__} with an iterator of its own"
        elif isinstance(loader.dataset, torch.utils.data.IterableDataset):
            problem = f"streams a {type(loader.dataset).__qualname__}"
        elif type(loader.batch_sampler) is not BatchSampler or loader.batch_size is None:
            problem = f"makes its batches by a {type(loader.batch_sampler).__qualname__}"
        elif not is_known:
            problem = f"has a {type(sampler).__qualname__} for its order"
        elif connector.is_distributed and not is_shared:
            problem = "gives every worker all samples (use_distributed_sampler=False)"
        if problem:
            raise ConfigError(f"the training loader {problem}, so its position is not saved. {ADVICE}")


def _check_last_batch(loader: "DataLoader[Any]", global_batch: int, *, shuffle: bool, is_first: bool) -> None:
    """Say that the samples which fill no whole batch are left out. Raises ConfigError if they were always the same."""
    length = len(loader.dataset)  # type: ignore[arg-type]
    left = length % global_batch
    if not left or loader.drop_last:
        return
    if not shuffle:
        raise ConfigError(
            f"the training loader keeps a last, smaller batch: the last {left} of {length} samples would never be "
            "trained on, since raycheck.Batches gives whole batches only. Set drop_last=True if that is meant, or "
            "shuffle=True, by which other samples are left out in each epoch"
        )
    if is_first:
        logger.warning(
            "of %d training samples %d fill no whole batch of %d and are left out, in each epoch other ones: "
            "raycheck.Batches gives whole batches only",
            length,
            left,
            global_batch,
        )


def _global_seed() -> int:
    """Returns the seed that Lightning would give its DistributedSampler: that of seed_everything, else 0."""
    return int(os.environ.get("PL_GLOBAL_SEED", "0"))
