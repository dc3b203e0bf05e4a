"""Seeds random augmentation per sample, so that it depends neither on the world size nor on a restart."""

import random
import sys
from typing import Any

import torch
from torch.utils.data import Dataset, get_worker_info

from raycheck.state.entries.random_generators import generators_in, seed_generator


class SeededPerSample(Dataset[Any]):
    """A dataset that returns samples by (position, index), and seeds a loader worker before each of them.

    It seeds the worker's global generators and those in the dataset's attributes. It does not seed the training
    process, whose random state belongs to the user and is saved.
    """

    def __init__(self, dataset: Dataset[Any], seed: int, epoch: int) -> None:
        self._dataset = dataset
        self._key = (seed, epoch)
        self._generators: list[object] | None = None  # the dataset's own, in this process

    def __getitem__(self, item: tuple[int, int]) -> Any:
        position, index = item
        if get_worker_info() is not None:
            seed = hash((*self._key, position)) & 0x7FFFFFFF  # a hash of ints is the same in every process
            seed_worker(seed)
            if self._generators is None:
                self._generators = [generator for _, generator in generators_in(self._dataset, "dataset")]
            for number, generator in enumerate(self._generators, start=1):
                seed_generator(generator, hash((*self._key, position, number)) & 0x7FFFFFFF)
        return self._dataset[index]


def seed_worker(seed: int) -> None:
    """Seed the global random generators of a loader worker."""
    random.seed(seed)
    torch.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
