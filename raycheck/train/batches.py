"""Streams global batches: every optimizer step sees the same samples, whatever the world size.

The order of an epoch is a pure function of (seed, epoch). The position counts samples CONSUMED, at the end of each
step, so that workers which fetch ahead do not count. One loader gives batches at a time, from where the stream was when
it gave its first one: a loader that was made before a restore follows it, one that was begun before is refused.
No global random state is touched: without a generator of its own `iter(DataLoader)` draws from it, even unshuffled.
"""

from collections.abc import Callable, Iterable, Sequence, Sized
from operator import index
from typing import Any, SupportsIndex

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from raycheck.errors import ConfigError, StateMismatchError
from raycheck.shards.entries.random_generators import generators_in, kind_of_generator
from raycheck.train.data.batch_loader import BatchLoader
from raycheck.train.data.data_stream import DataStream
from raycheck.train.data.epoch_order import epoch_order, order_digest, own_order, rank_share
from raycheck.train.data.sample_seeding import SeededPerSample
from raycheck.train.data.stream_position import StreamPosition
from raycheck.train.log import event, logger
from raycheck.train.ray_api.train_context import rank_and_world_size

_SET_BY_BATCHES = {"batch_size", "shuffle", "sampler", "batch_sampler", "drop_last", "generator"}


class Batches(DataStream):
    """Gives a map-style dataset out as a stream of global batches, shared among the ranks.

    Put it into the Checkpointer's state: then a restore goes on with the next sample, even with another world size.

    dataset: has `__len__` and `__getitem__`. global_batch: samples per batch, over all ranks together; each rank takes
    a nearly equal share of each batch (shares differ by at most one sample). The last len(dataset) % global_batch
    samples of an epoch's order are left out of that epoch. seed: what the order depends on, together with the epoch.
    shuffle: whether each epoch has a random order of its own, or the dataset's. order: an order of your own, such as
    by length: a function that is called with an epoch's number and returns the indices of its samples, equal on all
    ranks and after every restart, and equally many in each epoch; an index may come more than once. It takes the place
    of shuffle, and of the dataset's length in what is said above. rank, world_size: this rank and the number of ranks;
    by default those of Ray Train, else of torch.distributed, else 0 and 1.

    Random augmentation in loader workers is seeded per sample from (seed, epoch, position): it depends neither on the
    world size nor on a restart. This holds for the global generators, and for those in the dataset's attributes. With
    num_workers=0 the dataset draws in the training process; put a generator of its own into the state then.

    Raises ConfigError for a dataset without samples by number, for numbers that are not whole, and for a global_batch
    that leaves a rank without a sample.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        *,
        global_batch: int,
        seed: int = 0,
        shuffle: bool = True,
        order: Callable[[int], Sequence[int]] | None = None,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        here = rank_and_world_size()
        self._rank = here[0] if rank is None else rank
        self._world_size = here[1] if world_size is None else world_size
        self._dataset = dataset
        samples = _length_of(dataset)
        self._order = own_order(order, samples) if order is not None else None
        first = self._order(0) if self._order is not None else None
        self._length = samples if first is None else len(first)
        self._digest = {} if first is None else {"order": order_digest(first)}  # of the first epoch, which is enough
        self._global_batch = _whole("global_batch", global_batch)
        if not self._world_size <= self._global_batch <= self._length:
            raise ConfigError(
                f"Batches(global_batch={global_batch}) must lie between the world size ({self._world_size}) and the "
                f"dataset's length ({self._length}): each rank needs a sample in each batch"
            )
        self._seed = _whole("seed", seed)
        self._shuffle = shuffle
        self._position = StreamPosition(global_batch=self._global_batch, batches_per_epoch=self.batches_per_epoch)
        self._before_first: Callable[[], object] | None = None
        self._has_warned: set[str] = set()
        self._saved_elsewhere: set[int] = set()  # ids of the generators that the state saves by itself

    @property
    def epoch(self) -> int:
        """Returns the current epoch, counted from 0."""
        return self._position.epoch

    @property
    def epoch_step(self) -> int:
        """Returns the number of batches consumed of this epoch."""
        return self._position.epoch_step

    @property
    def batches_per_epoch(self) -> int:
        """Returns the number of global batches in a whole epoch."""
        return self._length // self._global_batch

    @property
    def samples(self) -> int:
        """Returns the number of samples consumed over all epochs and ranks."""
        return self._position.samples

    def loader(
        self,
        epoch: int | None = None,
        *,
        through: Callable[["DataLoader[Any]"], Iterable[Any]] | None = None,
        **options: Any,
    ) -> BatchLoader:
        """Returns this rank's batches of an epoch: in the restored epoch from the restored position, else all of them.

        epoch: counted from 0. Without it, the loader gives the rest of the stream's current epoch when it is iterated,
        and the next epoch each time it is iterated again; this is for frameworks that make one loader at the start.
        through: called with torch's DataLoader; returns an iterable that gives its batches, each once and in order.
        Put whatever fetches ahead here: around the loader, a batch that was fetched would count as consumed at the next
        end_step. options: go to torch's DataLoader (num_workers, collate_fn, pin_memory, ...).

        Raises ConfigError for an epoch that lies behind the position, and for options that would change the order.
        """
        if clash := _SET_BY_BATCHES & set(options):
            raise ConfigError(
                f"Batches.loader({min(clash)}=...): the order and the batch are set in Batches(...), by its seed"
            )
        if epoch is not None:
            epoch = _whole("epoch", epoch)
            self._position.check_epoch(epoch)
        return BatchLoader(self, self._position, epoch, lambda begun: self._open_epoch(begun, through, options))

    def _open_epoch(
        self, epoch: int, through: Callable[["DataLoader[Any]"], Iterable[Any]] | None, options: dict[str, Any]
    ) -> tuple[int, Iterable[Any]]:
        """Returns how many batches of this rank are left of an epoch, and these. Puts random state back before them."""
        if self._order is not None:
            order = self._order(epoch)
        else:
            order = epoch_order(self._length, seed=self._seed, epoch=epoch, shuffle=self._shuffle)
        start = self._position.consumed
        share = rank_share(order, self._global_batch, self._rank, self._world_size, start=start)
        if not options.get("num_workers"):
            self._warn_of_generators()
        loader: DataLoader[Any] = DataLoader(
            SeededPerSample(self._dataset, self._seed, epoch),
            batch_sampler=share,
            generator=torch.Generator().manual_seed(self._seed),
            **options,
        )
        batches = through(loader) if through else loader
        if self._before_first is not None:
            call, self._before_first = self._before_first, None
            call()
        return len(share), batches

    def end_step(self) -> None:
        """Count as consumed what the training loop was given. Checkpointer.end_step calls this."""
        self._position.end_step()
        self._warn_of_look_ahead()

    def end_epoch(self) -> None:
        """Go to the beginning of the next epoch. Checkpointer.end_epoch calls this."""
        self._position.end_epoch()

    def end_loaders(self) -> None:
        """Refuse the next batch of any loader that was begun before a restore. Checkpointer.restore calls this.

        That holds in a fresh run too: otherwise the script would run until its first restart only.
        """
        self._position.end_loaders()

    def before_first_batch(self, call: Callable[[], object]) -> None:
        """Have `call` run once, just before the next batch is fetched, if the stream is in the middle of an epoch.

        There random state is put back exactly. At the beginning of an epoch, the script's own draws come before the
        first batch in every run, and nothing may be put back over them.
        """
        self._before_first = call if self._position.consumed else None

    def leave_to_state(self, entries: Iterable[object]) -> None:
        """Note which generators the state saves by itself, so that nobody is warned of them."""
        self._saved_elsewhere |= {id(entry) for entry in entries}

    def state_dict(self) -> dict[str, Any]:
        """Returns the position, and what the order depends on."""
        return {
            "epoch": self._position.epoch,
            "consumed": self._position.consumed,
            "samples": self.samples,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "global_batch": self._global_batch,
            "length": self._length,
            **self._digest,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved position. Raises StateMismatchError when the saved order differs from this one."""
        self.check_state_dict(state)
        samples = int(state["samples"]) if "samples" in state else None
        self._position.restore(epoch=int(state["epoch"]), consumed=int(state["consumed"]), samples=samples)

    def check_state_dict(self, state: dict[str, Any]) -> None:
        """Raises StateMismatchError when a saved position would mean other samples here; changes nothing."""
        mine = self.state_dict()
        other = [
            f"{name}: saved {state.get(name)!r}, here {mine.get(name)!r}"
            for name in ("seed", "shuffle", "global_batch", "length", "order")
            if state.get(name) != mine.get(name)
        ]
        if other:
            raise StateMismatchError(
                "the data stream differs from the checkpoint's, so its position would mean other samples: "
                + "; ".join(other)
            )

    def _warn_of_look_ahead(self) -> None:
        """Warn of what seems to fetch ahead: the first step took one batch more than the second and the third did."""
        taken = self._position.taken
        if len(taken) == 3 and taken[2] and taken == [taken[2] + 1, taken[2], taken[2]]:
            self._warn(
                f"the training loop took {taken[0]} batches for its first step and {taken[2]} for each later one. If "
                "something around the loader fetches ahead, a batch that was not trained on counts as consumed, and a "
                "restore leaves it out: put that inside, as Batches.loader(epoch, through=...)"
            )

    def _warn_of_generators(self) -> None:
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
            logger.warning(event(text, rank=self._rank))


def _length_of(dataset: object) -> int:
    """Returns the number of samples in a dataset. Raises ConfigError when it has no samples by number."""
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
    """Returns a whole number as int, NumPy's integers too. Raises ConfigError for anything else."""
    if isinstance(value, SupportsIndex) and not isinstance(value, bool):
        return index(value)
    raise ConfigError(f"Batches: {name}={value!r}: give a whole number")
