"""Computes the order of samples in an epoch, and each rank's share of its batches, by pure functions."""

import torch


def epoch_order(length: int, *, seed: int, epoch: int, shuffle: bool) -> list[int]:
    """Returns the indices of a dataset's samples in the order of this epoch."""
    if not shuffle:
        return list(range(length))
    generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**63)
    order: list[int] = torch.randperm(length, generator=generator).tolist()
    return order


def rank_share(order: list[int], batch: int, rank: int, world_size: int, *, start: int) -> list[list[tuple[int, int]]]:
    """Returns one rank's (position, index) pairs, batch by batch.

    batch: samples in a global batch. start: the position from which the epoch goes on. Samples at the end that fill no
    whole batch are left out.
    """
    low, high = batch * rank // world_size, batch * (rank + 1) // world_size
    whole = len(order) // batch * batch
    return [[(at, order[at]) for at in range(base + low, base + high)] for base in range(start, whole, batch)]
