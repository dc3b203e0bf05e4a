"""The global batch stream: which samples every optimizer step sees, whatever the world size.

The order of an epoch is a pure function of (seed, epoch); the position is counted in samples CONSUMED, at the end of
each step, so that workers which fetch ahead do not count. No global random state is touched: `iter(DataLoader)`
draws from it even unshuffled, unless it has a generator of its own.
"""

import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from raycheck.errors import ConfigError, StateMismatchError
from raycheck.train.ray_names import rank_and_world_size


class Batches:
    """A map-style dataset as a stream of global batches, shared out over the ranks.

    dataset: has `__len__` and `__getitem__`. global_batch: samples per batch over all ranks together; rank r takes
    the r-th of nearly equal shares (they differ by at most one sample). The len(dataset) % global_batch samples at
    the end of an epoch's order are left out of that epoch. seed, shuffle: the order. rank and world_size default to
    those of Ray Train, else of torch.distributed, else 0 of 1.

    Random augmentation inside loader workers is seeded per sample from (seed, epoch, position), so it neither
    depends on the world size nor on a restart.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        *,
        global_batch: int,
        seed: int = 0,
        shuffle: bool = True,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        here = rank_and_world_size()
        self._rank = here[0] if rank is None else rank
        self._world_size = here[1] if world_size is None else world_size
        self._dataset = dataset
        self._length = len(dataset)  # type: ignore[arg-type]
        if not self._world_size <= global_batch <= self._length:
            raise ConfigError(
                f"Batches(global_batch={global_batch}) must lie between the world size ({self._world_size}) and the "
                f"dataset's length ({self._length}): each rank needs a sample in each batch"
            )
        self._global_batch = global_batch
        self._seed = seed
        self._shuffle = shuffle
        self._epoch = 0
        self._consumed = 0
        self._delivered = 0
        self._before_first: Callable[[], object] | None = None

    @property
    def epoch(self) -> int:
        return self._epoch

    @property
    def epoch_step(self) -> int:
        """Batches consumed of this epoch."""
        return self._consumed // self._global_batch

    @property
    def batches_per_epoch(self) -> int:
        return self._length // self._global_batch

    @property
    def samples(self) -> int:
        """Samples consumed over all epochs and ranks."""
        return self._epoch * self.batches_per_epoch * self._global_batch + self._consumed

    def loader(self, epoch: int, **options: Any) -> Iterator[Any]:
        """This rank's batches of `epoch`: from the restored position on in the restored epoch, else from the start.

        options go to torch's DataLoader (num_workers, collate_fn, pin_memory, ...). Raises ConfigError for an epoch
        that lies behind the position, and for options that would change the order.
        """
        clash = {"batch_size", "shuffle", "sampler", "batch_sampler", "drop_last", "generator"} & set(options)
        if clash:
            raise ConfigError(f"Batches.loader({min(clash)}=...): the order and the batch are set in Batches(...)")
        if epoch < self._epoch:
            raise ConfigError(f"Batches.loader({epoch}): the stream is at epoch {self._epoch} and only goes forward")
        if epoch > self._epoch:
            self._epoch, self._consumed = epoch, 0
        self._delivered = self._consumed
        return self._iterate(epoch, options)

    def end_step(self) -> None:
        """Count what the training loop was given as consumed. Called by Checkpointer.end_step."""
        self._consumed = self._delivered

    def end_epoch(self) -> None:
        """Go to the beginning of the next epoch. Called by Checkpointer.end_epoch."""
        self._epoch, self._consumed, self._delivered = self._epoch + 1, 0, 0

    def before_first_batch(self, call: Callable[[], object]) -> None:
        """Have `call` run once, just before the next batch is fetched: where random state is put back exactly."""
        self._before_first = call

    def state_dict(self) -> dict[str, Any]:
        return {
            "epoch": self._epoch,
            "consumed": self._consumed,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "global_batch": self._global_batch,
            "length": self._length,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved position. Raises StateMismatchError when the saved order is another one than this."""
        self.check_state_dict(state)
        self._epoch, self._consumed = int(state["epoch"]), int(state["consumed"])
        self._delivered = self._consumed

    def check_state_dict(self, state: dict[str, Any]) -> None:
        """Raise StateMismatchError when a saved position would mean other samples here; changes nothing."""
        mine = self.state_dict()
        other = [
            f"{name}: saved {state[name]!r}, here {mine[name]!r}"
            for name in ("seed", "shuffle", "global_batch", "length")
            if state[name] != mine[name]
        ]
        if other:
            raise StateMismatchError(
                "the data stream is another one than the checkpoint's, so its position would mean other samples: "
                + "; ".join(other)
            )

    def _iterate(self, epoch: int, options: dict[str, Any]) -> Iterator[Any]:
        share = _shares(self._order(epoch), self._global_batch, self._rank, self._world_size, start=self._consumed)
        loader: DataLoader[Any] = DataLoader(
            _SeededPerSample(self._dataset, self._seed, epoch),
            batch_sampler=share,
            generator=torch.Generator().manual_seed(self._seed),
            **options,
        )
        if self._before_first is not None:
            call, self._before_first = self._before_first, None
            call()
        for batch in loader:
            self._delivered += self._global_batch
            yield batch

    def _order(self, epoch: int) -> list[int]:
        if not self._shuffle:
            return list(range(self._length))
        generator = torch.Generator().manual_seed((self._seed * 1_000_003 + epoch) % 2**63)
        order: list[int] = torch.randperm(self._length, generator=generator).tolist()
        return order


def _shares(order: list[int], batch: int, rank: int, world_size: int, *, start: int) -> list[list[tuple[int, int]]]:
    """(position, index) pairs of one rank, batch by batch, from the consumed position on."""
    low, high = batch * rank // world_size, batch * (rank + 1) // world_size
    whole = len(order) // batch * batch
    return [[(at, order[at]) for at in range(base + low, base + high)] for base in range(start, whole, batch)]


class _SeededPerSample(Dataset[Any]):
    """Unpacks (position, index). In a loader worker it seeds that process first; the training process, whose random
    state is the user's and is saved, is left alone."""

    def __init__(self, dataset: Dataset[Any], seed: int, epoch: int) -> None:
        self._dataset = dataset
        self._key = (seed, epoch)

    def __getitem__(self, item: tuple[int, int]) -> Any:
        position, index = item
        if get_worker_info() is not None:
            seed = hash((*self._key, position)) & 0x7FFFFFFF  # hash of ints: the same in every process
            random.seed(seed)
            torch.manual_seed(seed)
            if "numpy" in sys.modules:
                sys.modules["numpy"].random.seed(seed)
        return self._dataset[index]
