"""Computes the order of samples in an epoch, and each rank's share of its batches, with pure functions."""

import zlib
from collections.abc import Callable, Iterable, Sequence

import torch

from raycheck.errors import ConfigError

Skips = tuple[tuple[int, int, int], ...]
"""Batches to leave out: (epoch, first batch, last batch + 1), each counted from 0."""


def epoch_order(length: int, *, seed: int, epoch: int, shuffle: bool) -> list[int]:
    """Return the indices of a dataset's samples in the order of this epoch."""
    if not shuffle:
        return list(range(length))
    generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**63)
    order: list[int] = torch.randperm(length, generator=generator).tolist()
    return order


def own_order(order: Callable[[int], Sequence[int]], samples: int) -> Callable[[int], list[int]]:
    """Return a user's order as a function that checks the indices and raises ConfigError for invalid ones.

    samples: the dataset's length.
    """
    lengths: set[int] = set()

    def checked(epoch: int) -> list[int]:
        indices = [*map(int, order(epoch))]
        lengths.add(len(indices))
        if len(lengths) > 1:
            raise ConfigError(
                f"Batches(order=): epochs of {' and '.join(map(str, sorted(lengths)))} samples; every "
                "epoch must have the same number of samples"
            )
        if indices and not 0 <= min(indices) <= max(indices) < samples:
            raise ConfigError(
                f"Batches(order=): epoch {epoch} has indices from {min(indices)} to {max(indices)}, and the dataset "
                f"has {samples} samples"
            )
        return indices

    return checked


def order_digest(indices: Sequence[int]) -> int:
    """Return a number that distinguishes two orders."""
    return zlib.crc32(torch.tensor(indices, dtype=torch.int64).numpy().tobytes())


def is_left_out(skips: Skips, epoch: int, batch: int) -> bool:
    """Return whether a batch is one of those to skip."""
    return any(at == epoch and first <= batch < end for at, first, end in skips)


def kept_batches(skips: Skips, epoch: int, first: int, end: int) -> Sequence[int]:
    """Return the numbers of the batches of an epoch from `first` to before `end` that are not left out."""
    if not any(at == epoch for at, _, _ in skips):
        return range(first, end)
    return [batch for batch in range(first, end) if not is_left_out(skips, epoch, batch)]


def rank_share(
    order: list[int], size: int, rank: int, world_size: int, batches: Iterable[int]
) -> list[list[tuple[int, int]]]:
    """Return one rank's (position, index) pairs, batch by batch.

    size: samples in a global batch. batches: the numbers of the batches to return.
    """
    low, high = size * rank // world_size, size * (rank + 1) // world_size
    return [[(at, order[at]) for at in range(base + low, base + high)] for base in (batch * size for batch in batches)]
