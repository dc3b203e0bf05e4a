"""Makes batches of a dataset whose samples are fetched by number, in an order that seed and epoch decide."""

from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from raycheck.data.batch_source import BatchSource, RankShare
from raycheck.data.epoch_order import Skips, epoch_order, kept_batches, order_digest, own_order, rank_share
from raycheck.data.proof_agreement import SourceProof
from raycheck.data.sample_seeding import SeededPerSample
from raycheck.data.source_proof import numbered_proof
from raycheck.errors import ConfigError


class NumberedSamples(BatchSource):
    """A source of batches of a map-style dataset. seed, shuffle, order: see Batches.

    Raises ConfigError for a dataset without samples by number, or of unknown length.
    """

    compared = ("length", "order")

    def __init__(
        self,
        dataset: Dataset[Any],
        share: RankShare,
        *,
        seed: int,
        shuffle: bool,
        order: Callable[[int], Sequence[int]] | None,
    ) -> None:
        length = _length_of(dataset)
        self._dataset = dataset
        self._length = length
        self._share = share
        self._seed = seed
        self._shuffle = shuffle
        self._order = None if order is None else own_order(order, length)
        first = self._order(0) if self._order is not None else None
        self._digest = {} if first is None else {"order": order_digest(first)}  # of the first epoch, which is enough
        self.samples: int = length if first is None else len(first)
        self.batches_per_epoch: int = self.samples // share.global_batch

    def prove(self, order: Mapping[str, Any]) -> SourceProof:
        return numbered_proof(self._dataset, self._length, {**order, "length": self._length, **self._digest})

    def open(
        self, epoch: int, first: int, skips: Skips, options: Mapping[str, Any], *, is_mid_epoch: bool
    ) -> tuple[Iterable[int], "DataLoader[Any]"]:
        del is_mid_epoch
        if self._order is not None:
            order = self._order(epoch)
        else:
            order = epoch_order(self.samples, seed=self._seed, epoch=epoch, shuffle=self._shuffle)
        numbers = kept_batches(skips, epoch, first, self.batches_per_epoch)
        share = self._share
        return numbers, DataLoader(
            SeededPerSample(self._dataset, self._seed, epoch),
            batch_sampler=rank_share(order, share.global_batch, share.rank, share.world_size, numbers),
            generator=torch.Generator().manual_seed(self._seed),
            **options,
        )

    def state(self) -> dict[str, Any]:
        return {"length": self.samples, **self._digest}


def _length_of(dataset: object) -> int:
    """Return the number of samples in a dataset. Raises ConfigError if it has no samples by number."""
    name = type(dataset).__qualname__
    advice = (
        "Batches need a map-style dataset, with __len__ and __getitem__, or an IterableDataset. Any other stream can "
        "be given to torchdata's StatefulDataLoader, which, as an entry of the state, resumes at the same world size"
    )
    if isinstance(dataset, DataLoader):
        raise ConfigError(
            f"Batches(DataLoader): pass its dataset, and pass the DataLoader's options to Batches.loader. {advice}"
        )
    if not isinstance(dataset, Sized) or not hasattr(dataset, "__getitem__"):
        raise ConfigError(f"Batches({name}): it cannot return a sample by its number. {advice}")
    try:
        return len(dataset)
    except (TypeError, NotImplementedError) as error:
        raise ConfigError(f"Batches({name}): its length is unknown: {error}. {advice}") from error
