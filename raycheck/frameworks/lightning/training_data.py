"""Feeds Lightning's training from raycheck's Batches, whose position is saved, instead of from a DataLoader.

Lightning creates its iterators early, sometimes before a restore. The loader here starts at the stream's position when
its first batch is fetched. A loader whose position cannot be saved is refused before the first step.
"""

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sized
from typing import Any, cast

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, SequentialSampler

from raycheck.adapters import Batches
from raycheck.errors import ConfigError
from raycheck.frameworks.lightning.packages import named, package_of

logger = logging.getLogger("raycheck")

OPTIONS = ("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context")
ADVICE = (
    "Give raycheck.Batches(dataset, global_batch=...).loader(num_workers=...) as the training loader, or "
    "Callback(..., data_position=False), with which an interrupted epoch restarts at the loader's first batch"
)


class EpochLoader:
    """A loader that yields one epoch of Batches each time it is iterated, or the rest of a restored epoch.

    Its length is that of a whole epoch even in a restored one, because Lightning counts all batches of the epoch.
    """

    def __init__(self, loader: Any, batches: Batches) -> None:
        self._loader = loader
        self.batches = batches

    def __len__(self) -> int:
        return self.batches.batches_per_epoch

    def __iter__(self) -> Iterator[Any]:
        return iter(self._loader)

    def state_dict(self) -> dict[str, Any]:
        """Return no state: the position is a separate entry. Lightning takes this method to mean resumable."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing: the position is restored as a separate entry."""


class ConvertedSource:
    """A proxy for Lightning's source of training loaders, which converts the loaders once."""

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
    """The conversion of a Trainer's training loader into one with a position. batches: None before, or without one."""

    def __init__(self, trainer: Any, saved: Mapping[str, Any]) -> None:
        """saved: the state of Batches in the checkpoint to restore; empty without one."""
        self._trainer = trainer
        self._saved = saved
        self.batches: Batches | None = None

    def convert(self, loaders: Any) -> Any:
        """Return the loaders in the form given (one, or a list, dict, or CombinedLoader of one), with a position.

        Raises ConfigError, naming the loader, if it cannot resume in the middle of an epoch.
        """
        if isinstance(loaders, named(package_of(self._trainer), "utilities.combined_loader", "CombinedLoader")):
            loaders = loaders.iterables  # with one loader, all its modes are equivalent
        if isinstance(loaders, dict | list | tuple):
            if len(loaders) != 1:
                raise ConfigError(
                    f"{len(loaders)} training loaders: a run has a single position in its data. Combine the datasets "
                    "into one, such as torch.utils.data.StackDataset(a=..., b=...), whose batches have the same form. "
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
            raise ConfigError("Batches.loader(epoch) yields a single epoch; give Lightning loader() without an epoch")
        if not isinstance(batches, Batches):
            raise ConfigError(
                f"the training loader is a {type(loaders).__module__}.{type(loaders).__qualname__}, whose position is "
                f"not saved. {ADVICE}"
            )
        self.batches = batches
        return EpochLoader(loaders, batches)

    def _converted(self, loader: "DataLoader[Any]") -> tuple[Batches, Any]:
        """Return Batches of the loader's dataset, and a loader of them with the same options."""
        trainer = self._trainer
        sampler = loader.sampler
        self._refuse_other_orders(loader)
        is_distributed = trainer._accelerator_connector.is_distributed
        place = trainer.distributed_sampler_kwargs if is_distributed else {"num_replicas": 1, "rank": 0}
        if isinstance(sampler, DistributedSampler):
            shuffle, seed = sampler.shuffle, sampler.seed
        else:  # Lightning shuffles training data whenever it distributes it
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
                "a global batch of %d cannot be divided evenly among %d workers: their shares differ by one sample, "
                "but each worker's mean has the same weight",
                global_batch,
                place["num_replicas"],
            )
        _check_last_batch(loader, global_batch, shuffle=shuffle, is_first=trainer.global_rank == 0)
        options = {name: getattr(loader, name) for name in OPTIONS}
        if loader.num_workers:
            options["prefetch_factor"] = loader.prefetch_factor
        if trainer.global_rank == 0:
            logger.info(
                "the training DataLoader is replaced by raycheck.Batches(global_batch=%d, seed=%d, shuffle=%s)",
                global_batch,
                batches.state_dict()["seed"],
                shuffle,
            )
        return batches, batches.loader(**options)

    def _refuse_other_orders(self, loader: "DataLoader[Any]") -> None:
        """Raise ConfigError for a DataLoader whose order or batches differ from those of Batches."""
        sampler, connector = loader.sampler, self._trainer._accelerator_connector
        is_torchdatas = type(loader).__module__.startswith("torchdata.")
        is_whole = not isinstance(sampler, RandomSampler) or (
            not sampler.replacement and sampler.num_samples == _num_samples(loader)
        )
        is_shared = isinstance(sampler, DistributedSampler) or connector.use_distributed_sampler
        is_known = type(sampler) in (RandomSampler, SequentialSampler, DistributedSampler) and is_whole
        problem = ""
        if type(loader).__iter__ is not DataLoader.__iter__ and not is_torchdatas:
            problem = f"is a {type(loader).__module__}.{type(loader).__qualname__} with a custom iterator"
        elif isinstance(loader.dataset, torch.utils.data.IterableDataset):
            problem = f"streams from a {type(loader.dataset).__qualname__}"
        elif type(loader.batch_sampler) is not BatchSampler or loader.batch_size is None:
            problem = f"forms its batches with a {type(loader.batch_sampler).__qualname__}"
        elif not is_known:
            problem = f"is ordered by a {type(sampler).__qualname__}"
        elif connector.is_distributed and not is_shared:
            problem = "gives every worker all samples (use_distributed_sampler=False)"
        if problem:
            raise ConfigError(f"the training loader {problem}, so its position is not saved. {ADVICE}")


def _num_samples(loader: "DataLoader[Any]") -> int:
    return len(cast("Sized", loader.dataset))


def _check_last_batch(loader: "DataLoader[Any]", global_batch: int, *, shuffle: bool, is_first: bool) -> None:
    """Log that a last partial batch is left out. Raises ConfigError if its samples are the same in every epoch."""
    length = _num_samples(loader)
    left = length % global_batch
    if not left or loader.drop_last:
        return
    if not shuffle:
        raise ConfigError(
            f"the training loader keeps a last, smaller batch: the last {left} of {length} samples would never be "
            "trained on, since raycheck.Batches yields whole batches only. Set drop_last=True to accept that, or "
            "shuffle=True, with which different samples are left out in each epoch"
        )
    if is_first:
        logger.warning(
            "%d training samples leave a remainder of %d that does not fill a batch of %d and is left out, different "
            "samples in each epoch: raycheck.Batches yields whole batches only",
            length,
            left,
            global_batch,
        )


def _global_seed() -> int:
    """Return the seed that Lightning would give its DistributedSampler: that of seed_everything, or 0."""
    return int(os.environ.get("PL_GLOBAL_SEED", "0"))
