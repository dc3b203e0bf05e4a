"""The global batch stream: which samples every optimizer step sees, whatever the world size.

The order of an epoch is a pure function of (seed, epoch); the position is counted in samples CONSUMED, at the end of
each step, so that workers which fetch ahead do not count. One loader gives batches at a time, from where the stream
stood when it gave its first one: a loader made before a restore follows it, one begun before a restore is refused. No
global random state is touched: `iter(DataLoader)` draws from it even unshuffled, unless it has a generator of its own.
"""

import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sized
from operator import index
from typing import Any, Self, SupportsIndex

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from raycheck.errors import ConfigError, StateMismatchError
from raycheck.shards.entries.random_generators import generators_in, kind_of_generator, seed_generator
from raycheck.train.log import logger
from raycheck.train.ray_api.train_context import rank_and_world_size

_NEW_LOADER, _RESTORE, _NEW_EPOCH = "another loader of these Batches was begun", "a restore", "end_epoch()"


class Batches:
    """A map-style dataset as a stream of global batches, shared out over the ranks.

    dataset: has `__len__` and `__getitem__`. global_batch: samples per batch over all ranks together; rank r takes
    the r-th of nearly equal shares (they differ by at most one sample). The len(dataset) % global_batch samples at
    the end of an epoch's order are left out of that epoch. seed, shuffle: the order. rank and world_size default to
    those of Ray Train, else of torch.distributed, else 0 of 1.

    Random augmentation inside loader workers is seeded per sample from (seed, epoch, position), so it neither
    depends on the world size nor on a restart: the global generators, and those in the dataset's attributes. With
    num_workers=0 the dataset draws in the training process, and a generator of its own has to be in the state.
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
        self._length = _length_of(dataset)
        self._global_batch = _whole("global_batch", global_batch)
        if not self._world_size <= self._global_batch <= self._length:
            raise ConfigError(
                f"Batches(global_batch={global_batch}) must lie between the world size ({self._world_size}) and the "
                f"dataset's length ({self._length}): each rank needs a sample in each batch"
            )
        self._seed = _whole("seed", seed)
        self._shuffle = shuffle
        self._epoch = 0
        self._consumed = 0
        self._delivered = 0
        self._samples_before = 0
        self._before_first: Callable[[], object] | None = None
        self._turn = 0
        """Counts what moves the stream; only the loader that was begun last, with nothing moved since, may go on."""
        self._moved_by = ""
        self._taken: list[int] = []  # batches for the first steps since
        self._has_warned: set[str] = set()
        self._saved_elsewhere: set[int] = set()

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
        return self._samples_before + self._consumed

    def loader(
        self,
        epoch: int | None = None,
        *,
        through: Callable[["DataLoader[Any]"], Iterable[Any]] | None = None,
        **options: Any,
    ) -> "BatchLoader":
        """This rank's batches of `epoch`: from the restored position on in the restored epoch, else from the start.

        epoch: without it, the loader gives the rest of the epoch in which the stream stands when it is iterated, and
        the next epoch each time it is iterated again: for frameworks that make one loader at the start.
        through: called with torch's DataLoader, returns what gives its batches, each once and in order: the place for
        whatever fetches ahead, since a batch that is fetched counts as consumed at the next end_step.
        options go to torch's DataLoader (num_workers, collate_fn, pin_memory, ...). Raises ConfigError for an epoch
        that lies behind the position, and for options that would change the order.
        """
        clash = {"batch_size", "shuffle", "sampler", "batch_sampler", "drop_last", "generator"} & set(options)
        if clash:
            raise ConfigError(
                f"Batches.loader({min(clash)}=...): the order and the batch are set in Batches(...), by its seed"
            )
        if epoch is not None:
            epoch = _whole("epoch", epoch)
            self._check_epoch(epoch)
        return BatchLoader(self, epoch, through, options)

    def end_step(self) -> None:
        """Count what the training loop was given as consumed. Called by Checkpointer.end_step."""
        self._look_for_look_ahead((self._delivered - self._consumed) // self._global_batch)
        self._consumed = self._delivered

    def end_epoch(self) -> None:
        """Go to the beginning of the next epoch. Called by Checkpointer.end_epoch."""
        self._go_on_to(self._epoch + 1)
        self._move(_NEW_EPOCH)

    def leave_loaders(self) -> None:
        """Refuse the next batch of any loader that was begun before a restore, in a fresh run too: else the script
        would run until its first restart. Called by Checkpointer.restore."""
        self._delivered = self._consumed
        self._move(_RESTORE)

    def before_first_batch(self, call: Callable[[], object]) -> None:
        """Have `call` run once, just before the next batch is fetched, when the stream stands inside an epoch: where
        random state is put back exactly. At an epoch's beginning the script's own draws come before the first batch
        in every run, and nothing is put back over them."""
        self._before_first = call if self._consumed else None

    def leave_to_state(self, entries: Iterable[object]) -> None:
        """Tell which generators the state saves by itself, so that nobody is warned of them."""
        self._saved_elsewhere |= {id(entry) for entry in entries}

    def state_dict(self) -> dict[str, Any]:
        return {
            "epoch": self._epoch,
            "consumed": self._consumed,
            "samples": self.samples,
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
        whole = self.batches_per_epoch * self._global_batch
        # An earlier raycheck did not count them: no epoch was left half-way, as far as it knew.
        self._samples_before = int(state.get("samples", self._epoch * whole + self._consumed)) - self._consumed
        self._move(_RESTORE)

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

    def begin(self, epoch: int | None, *, is_again: bool) -> tuple[int, int, list[list[tuple[int, int]]]]:
        """Give the turn to a loader: its number, the epoch, and this rank's share of what is left of it."""
        if epoch is None:
            epoch = self._epoch + is_again
        self._check_epoch(epoch)
        if epoch > self._epoch:
            self._go_on_to(epoch)
        self._delivered = self._consumed
        self._move(_NEW_LOADER)
        share = _shares(self._order(epoch), self._global_batch, self._rank, self._world_size, start=self._consumed)
        return self._turn, epoch, share

    def left(self, epoch: int | None, *, is_again: bool) -> int:
        """How many batches a loader would give that was begun now."""
        at = self._epoch + is_again if epoch is None else epoch
        return self.batches_per_epoch - (self.epoch_step if at == self._epoch else 0)

    def has_turn(self, turn: int) -> bool:
        return turn == self._turn

    def put_back(self) -> None:
        """Put random state back, if that is to be done."""
        if self._before_first is not None:
            call, self._before_first = self._before_first, None
            call()

    def deliver(self) -> None:
        """Count one batch as given to the training loop."""
        self._delivered += self._global_batch

    def stale(self, epoch: int) -> ConfigError:
        """What to say to a loader that has lost its turn."""
        return ConfigError(
            f"this loader of epoch {epoch} was begun before {self._moved_by}; its next batches would not be those of "
            f"the stream, which stands at epoch {self._epoch}, batch {self.epoch_step}. Iterate a loader anew after "
            "that (`iter(loader)`, `for batch in loader`), and only one at a time; evaluation needs a DataLoader of "
            "its own"
        )

    def torch_loader(
        self, epoch: int, share: list[list[tuple[int, int]]], options: dict[str, Any]
    ) -> "DataLoader[Any]":
        if not options.get("num_workers"):
            self._look_for_generators()
        return DataLoader(
            _SeededPerSample(self._dataset, self._seed, epoch),
            batch_sampler=share,
            generator=torch.Generator().manual_seed(self._seed),
            **options,
        )

    def _check_epoch(self, epoch: int) -> None:
        if epoch < self._epoch:
            raise ConfigError(
                f"Batches.loader({epoch}): the stream is at epoch {self._epoch} and only goes forward. Make loaders "
                "after restore(), or loader() without an epoch, which goes on where the stream stands"
            )

    def _go_on_to(self, epoch: int) -> None:
        """An epoch that was left half-way counts as far as steps of it were ended."""
        is_whole = self._delivered == self.batches_per_epoch * self._global_batch
        self._samples_before += self._delivered if is_whole else self._consumed
        self._epoch, self._consumed, self._delivered = epoch, 0, 0

    def _move(self, by: str) -> None:
        self._turn += 1
        self._moved_by = by
        self._taken = []

    def _look_for_look_ahead(self, taken: int) -> None:
        """Warn of what seems to fetch a batch ahead: the first step took one more than the second and third did."""
        if len(self._taken) == 3:
            return
        self._taken.append(taken)
        if taken and self._taken == [taken + 1, taken, taken]:
            self._warn(
                f"the training loop took {taken + 1} batches for its first step and {taken} for each later one. If "
                "something around the loader fetches ahead, a batch that was not trained on counts as consumed, and a "
                "restore leaves it out: put that inside, as Batches.loader(epoch, through=...)"
            )

    def _look_for_generators(self) -> None:
        for path, generator in generators_in(self._dataset, "dataset"):
            if id(generator) not in self._saved_elsewhere:
                self._warn(
                    f"{path} is a random generator of the dataset's own, of {kind_of_generator(generator)}. With "
                    "num_workers=0 it draws in the training process and starts over after a restart: put it into the "
                    "state, as an entry of its own, or use num_workers=1 or more, where Batches seed it per sample"
                )

    def _warn(self, text: str) -> None:
        if text not in self._has_warned:
            self._has_warned.add(text)
            logger.warning("rank %d: %s", self._rank, text)

    def _order(self, epoch: int) -> list[int]:
        if not self._shuffle:
            return list(range(self._length))
        generator = torch.Generator().manual_seed((self._seed * 1_000_003 + epoch) % 2**63)
        order: list[int] = torch.randperm(self._length, generator=generator).tolist()
        return order


class BatchLoader:
    """One rank's batches, as Batches.loader gives them out: an iterator that begins when its first batch is asked for.

    Iterated anew after a restore or after end_epoch it goes on where the stream stands then. When one of them happens
    while it is in use, or another loader is begun, its next batch is a ConfigError.
    """

    def __init__(
        self,
        stream: Batches,
        epoch: int | None,
        through: Callable[["DataLoader[Any]"], Iterable[Any]] | None,
        options: dict[str, Any],
    ) -> None:
        self._stream = stream
        self._asked_epoch = epoch
        self._through = through
        self._options = options
        self._epoch = epoch or 0
        self._turn = -1
        self._length = 0
        self._source: Iterator[Any] | None = None
        self._is_over = False

    def __len__(self) -> int:
        """How many batches this pass gives, those already given included."""
        has_turn = self._stream.has_turn(self._turn)
        if has_turn and not self._is_over:
            return self._length
        return self._stream.left(self._asked_epoch, is_again=has_turn)

    def __iter__(self) -> Self:
        has_turn = self._stream.has_turn(self._turn)
        if has_turn and not self._is_over:
            return self
        if has_turn and self._asked_epoch is not None:
            raise ConfigError(
                f"this loader has given all of epoch {self._epoch}; take loader({self._epoch + 1}) for the next one, "
                "or loader() without an epoch, which gives the next one each time it is iterated"
            )
        self._source = None
        return self

    def __next__(self) -> Any:
        if self._source is None:
            self._begin()
        assert self._source is not None, "begun just now"
        if self._is_over:
            raise StopIteration
        if not self._stream.has_turn(self._turn):
            raise self._stream.stale(self._epoch)
        try:
            batch = next(self._source)
        except StopIteration:
            self._is_over = True
            self._source = iter(())  # lets loader workers go
            raise
        self._stream.deliver()
        return batch

    def _begin(self) -> None:
        stream = self._stream
        is_again = self._is_over and stream.has_turn(self._turn)
        self._turn, self._epoch, share = stream.begin(self._asked_epoch, is_again=is_again)
        self._length, self._is_over = len(share), False
        loader = stream.torch_loader(self._epoch, share, self._options)
        through = self._through(loader) if self._through else loader
        stream.put_back()
        self._source = iter(through)


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
        self._generators: list[object] | None = None  # the dataset's own, in this process

    def __getitem__(self, item: tuple[int, int]) -> Any:
        position, index = item
        if get_worker_info() is not None:
            seed = hash((*self._key, position)) & 0x7FFFFFFF  # hash of ints: the same in every process
            random.seed(seed)
            torch.manual_seed(seed)
            if "numpy" in sys.modules:
                sys.modules["numpy"].random.seed(seed)
            if self._generators is None:
                self._generators = [generator for _, generator in generators_in(self._dataset, "dataset")]
            for number, generator in enumerate(self._generators, start=1):
                seed_generator(generator, hash((*self._key, position, number)) & 0x7FFFFFFF)
        return self._dataset[index]


def _length_of(dataset: object) -> int:
    """Raises ConfigError for what has no samples by number."""
    name = type(dataset).__qualname__
    advice = (
        "Batches need a map-style dataset, with __len__ and __getitem__: only then can every rank go to any position. "
        "For a stream use torchdata's StatefulDataLoader in the state, which goes on at the same world size"
    )
    if isinstance(dataset, DataLoader):
        raise ConfigError(
            f"Batches(DataLoader): give its dataset, and to Batches.loader the DataLoader's options. {advice}"
        )
    if isinstance(dataset, IterableDataset) or not isinstance(dataset, Sized) or not hasattr(dataset, "__getitem__"):
        raise ConfigError(f"Batches({name}): it cannot be asked for one sample by its number. {advice}")
    try:
        return len(dataset)
    except (TypeError, NotImplementedError) as error:
        raise ConfigError(f"Batches({name}): its length is not known: {error}. {advice}") from error


def _whole(name: str, value: object) -> int:
    """Also numpy's integers, as scripts compute them. Raises ConfigError for what is no whole number."""
    if isinstance(value, SupportsIndex) and not isinstance(value, bool):
        return index(value)
    raise ConfigError(f"Batches: {name}={value!r}: give a whole number")
