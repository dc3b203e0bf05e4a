"""Streams global batches: every optimizer step sees the same samples, whatever the world size.

The order of an epoch is a pure function of (seed, epoch); a stream has its own order. The position counts samples
CONSUMED, at the end of each step, so batches that workers prefetch do not count. Only one loader yields batches at a
time, from the position that the stream had at its first batch: a loader that was created before a restore starts from
the restored position, and one that was started before is refused. No global random state is changed: `iter(DataLoader)`
without its own generator draws from it, even unshuffled.
"""

from collections.abc import Callable, Iterable, Sequence
from operator import index
from typing import Any, SupportsIndex

from torch.utils.data import DataLoader, Dataset

from raycheck.data.batch_loader import BatchLoader
from raycheck.data.batch_source import BatchSource, RankShare
from raycheck.data.data_stream import SampleStream
from raycheck.data.epoch_order import Skips, kept_batches
from raycheck.data.numbered_samples import NumberedSamples
from raycheck.data.proof_agreement import SourceProof
from raycheck.data.stream_position import StreamPosition
from raycheck.data.streamed_samples import StreamedSamples, is_stream
from raycheck.errors import ConfigError, StateMismatchError
from raycheck.host import host
from raycheck.log import event, logger
from raycheck.state.entries.random_generators import generators_in, kind_of_generator

_SET_BY_BATCHES = {"batch_size", "shuffle", "sampler", "batch_sampler", "drop_last", "generator"}


class Batches(SampleStream):
    """A stream of a dataset's global batches, shared among the ranks.

    Put it into the Checkpointer's state: then training resumes with the next sample, even with another world size.

    dataset: has `__len__` and `__getitem__`, or is an IterableDataset of torch or Hugging Face that yields its samples
        in a fixed order.
    global_batch: samples per batch, over all ranks together; each rank takes a nearly equal share of each batch (shares
        differ by at most one sample). The last len(dataset) % global_batch samples of an epoch's order are left out of
        that epoch.
    seed: what the order depends on, together with the epoch.
    shuffle: True for a different random order in each epoch, False for the dataset's order.
    order: your own order, such as by length: a function that is called with an epoch's number and returns the indices
        of its samples. It must return the same indices on all ranks and after every restart, and the same number of
        them for each epoch; an index may occur more than once. It replaces shuffle, and its length replaces the
        dataset's length above.
    rank, world_size: this rank and the number of ranks; by default those of Ray Train, otherwise of torch.distributed,
        otherwise 0 and 1.
    skip: batches to leave out, as (epoch, first batch, last batch + 1), counted from 0; you may change it at a restart
        without moving other batches.
    prove: whether Checkpointer.restore first reads some samples as a trial, see `prove`.

    Every rank reads all of an IterableDataset and takes its part. batches_per_epoch, for an IterableDataset only: an
    epoch has that many batches, and the data starts over whenever it ends. The ranks then share the shards of a dataset
    that has `shard` and `num_shards`: each shard is read by the ranks that train on it. A restore moves the dataset to
    the position with its `state_dict` if that is exact; otherwise it reads all samples before the position again.

    Random augmentation in loader workers is seeded per sample from (seed, epoch, position): it depends neither on the
    world size nor on restarts. This covers the global generators and those in the dataset's attributes. With
    num_workers=0 the dataset draws random numbers in the training process; then put its own generator into the state.

    Raises ConfigError for a dataset that is neither an IterableDataset nor has `__len__` and `__getitem__`, for
    arguments that must be whole numbers and are not, and for a global_batch that leaves a rank without a sample.
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
        skip: Iterable[Sequence[int]] = (),
        batches_per_epoch: int | None = None,
        prove: bool = True,
    ) -> None:
        here = host().rank_and_world_size()
        self._rank = here[0] if rank is None else rank
        self._world_size = here[1] if world_size is None else world_size
        self._dataset = dataset
        self._global_batch = _whole("global_batch", global_batch)
        self._seed = _whole("seed", seed)
        self._shuffle = shuffle
        self._skips = _skips(skip)
        if self._global_batch < self._world_size:
            raise ConfigError(
                f"Batches(global_batch={global_batch}) must lie between the world size ({self._world_size}) and the "
                "dataset's length: each rank needs a sample in each batch"
            )
        self._source = self._source_of(dataset, order, batches_per_epoch)
        if self._source.samples is not None and self._global_batch > self._source.samples:
            raise ConfigError(
                f"Batches(global_batch={global_batch}) must lie between the world size ({self._world_size}) and the "
                f"dataset's length ({self._source.samples}): each rank needs a sample in each batch"
            )
        self._position = StreamPosition(global_batch=self._global_batch, batches_left=self._batches_left)
        self._is_proving = prove
        self._proof: SourceProof | None = None  # what all ranks agreed on
        self._saved_checksums: Sequence[Sequence[int]] = ()  # of the restored checkpoint
        self._has_warned: set[str] = set()
        self._saved_elsewhere: set[int] = set()  # ids of the generators that are in the state as entries

    def _source_of(
        self, dataset: Dataset[Any], order: Callable[[int], Sequence[int]] | None, batches_per_epoch: int | None
    ) -> BatchSource:
        """Return the source of this rank's batches of the dataset.

        Raises ConfigError for arguments that do not fit its kind.
        """
        share = RankShare(global_batch=self._global_batch, rank=self._rank, world_size=self._world_size)
        if is_stream(dataset):
            if order is not None:
                raise ConfigError("Batches(order=): an IterableDataset decides the order of its samples itself")
            if batches_per_epoch is not None and _whole("batches_per_epoch", batches_per_epoch) < 1:
                raise ConfigError(f"Batches(batches_per_epoch={batches_per_epoch}): must be at least 1")
            whole = None if batches_per_epoch is None else index(batches_per_epoch)
            return StreamedSamples(dataset, share, seed=self._seed, batches_per_epoch=whole)
        source = NumberedSamples(dataset, share, seed=self._seed, shuffle=self._shuffle, order=order)
        if batches_per_epoch is not None:
            raise ConfigError(
                f"Batches(batches_per_epoch={batches_per_epoch}): only for an IterableDataset; this "
                "dataset has a length"
            )
        return source

    @property
    def epoch(self) -> int:
        """Return the current epoch, counted from 0."""
        return self._position.epoch

    @property
    def epoch_step(self) -> int:
        """Return the number of batches consumed in this epoch, including skipped ones."""
        return self._position.epoch_step

    @property
    def batches_per_epoch(self) -> int:
        """Return the number of global batches in a whole epoch, including those to skip.

        Raises ConfigError for a stream of unknown length.
        """
        if self._source.batches_per_epoch is None:
            raise ConfigError("the number of batches in a stream is unknown: set Batches(batches_per_epoch=...)")
        return self._source.batches_per_epoch

    @property
    def is_in_mid_epoch(self) -> bool:
        return self._position.consumed > 0

    @property
    def merges_ranks(self) -> bool:
        """Return whether each rank knows only its own shards' positions, so that a restore merges those
        of all ranks.
        """
        return self._source.streams > 1

    @property
    def samples(self) -> int:
        """Return the number of samples consumed over all epochs and ranks. Skipped samples do not count."""
        return self._position.samples

    def loader(
        self,
        epoch: int | None = None,
        *,
        through: Callable[["DataLoader[Any]"], Iterable[Any]] | None = None,
        **options: Any,
    ) -> BatchLoader:
        """Return this rank's batches of an epoch: in the restored epoch from the restored position, otherwise all of
        them.

        epoch: counted from 0. Without it, the loader yields the rest of the stream's current epoch when it is iterated,
        and the next epoch each time it is iterated again; this is for frameworks that create one loader at the start.
        through: called with torch's DataLoader; returns an iterable that yields its batches, each once and in order.
        Put anything that prefetches here: around the loader, a prefetched batch would count as consumed at the next
        end_step. options: passed to torch's DataLoader (num_workers, collate_fn, pin_memory, ...).

        Raises ConfigError for an epoch before the current position, and for options that would change the order.
        """
        if clash := _SET_BY_BATCHES & set(options):
            raise ConfigError(
                f"Batches.loader({min(clash)}=...): the order and the batch are set in Batches(...), by its seed"
            )
        if epoch is not None:
            epoch = _whole("epoch", epoch)
            self._position.check_epoch(epoch)
        return BatchLoader(
            self,
            self._position,
            epoch,
            lambda begun: self._open_epoch(begun, through, options),
            self._source.take,
        )

    def _open_epoch(
        self, epoch: int, through: Callable[["DataLoader[Any]"], Iterable[Any]] | None, options: dict[str, Any]
    ) -> tuple[Iterable[int], Iterable[Any]]:
        """Return the numbers of the remaining batches of an epoch, and this rank's share of them.

        Restore random state first.
        """
        if isinstance(self._source, NumberedSamples) and not options.get("num_workers"):
            self._warn_of_generators()
        numbers, loader = self._source.open(
            epoch, self._position.epoch_step, self._skips, options, is_mid_epoch=self.is_in_mid_epoch
        )
        batches = through(loader) if through else loader
        self._begin_batches()
        return numbers, batches

    def _batches_left(self, epoch: int, batch: int) -> int | None:
        end = self._source.batches_per_epoch
        return None if end is None else len(kept_batches(self._skips, epoch, batch, end))

    def prove(self) -> SourceProof | None:
        """Read some samples as a trial, in a separate process so that the dataset is left unchanged.

        Return what the ranks compare; None with Batches(prove=False).
        """
        if not self._is_proving:
            return None
        order = {"seed": self._seed, "shuffle": self._shuffle, "global_batch": self._global_batch}
        return self._source.prove(order)

    def take_proof(self, proof: SourceProof) -> None:
        """Apply what the proofs of all ranks showed.

        From now on states include the checksums of the samples. A stream whose state does not lead back to its position
        is read again from its beginning after a restart.
        """
        self._proof = proof
        self._source.take_proof(proof)
        for text in proof.said:
            logger.debug(event(f"Batches of {proof.kind}: {text}", rank=self._rank))
        if proof.reason:
            then = "After a restart the samples before the position are read again and discarded"
            if proof.is_exact is None:
                then = "A restart trusts its state, which is unproven"
            self._warn(f"Batches of {proof.kind}: {proof.reason}. {then}")

    def end_step(self) -> None:
        self._position.end_step()
        self._source.end_step()
        self._warn_of_look_ahead()

    def end_epoch(self) -> None:
        self._position.end_epoch()

    def end_loaders(self) -> None:
        self._position.end_loaders()

    def leave_to_state(self, entries: Iterable[object]) -> None:
        """Record which generators are in the state as entries, so that there is no warning about them."""
        self._saved_elsewhere |= {id(entry) for entry in entries}

    def state_dict(self) -> dict[str, Any]:
        """Return the position, and what the order depends on."""
        return {
            "epoch": self._position.epoch,
            "consumed": self._position.consumed,
            "samples": self.samples,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "global_batch": self._global_batch,
            **self._source.state(),
            "history": self._position.history.state(),
            **({"checksums": self._proof.state(self._saved_checksums)} if self._proof is not None else {}),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Move to a saved position. Raises StateMismatchError when the saved order differs from this one."""
        self.load_rank_states([state])

    def load_rank_states(self, states: list[dict[str, Any]]) -> None:
        """Move to a saved position.

        states: those of all ranks that saved, each of which knows its own shards' positions.
        """
        self.check_rank_states(states)
        state = states[0]
        epoch, consumed = int(state["epoch"]), int(state["consumed"])
        # An earlier raycheck did not count samples, and did not allow an epoch to end early.
        whole = epoch * (self._source.batches_per_epoch or 0) * self._global_batch + consumed
        self._position.restore(
            epoch=epoch, consumed=consumed, samples=int(state.get("samples", whole)), history=state.get("history")
        )
        self._source.load(states)
        self._saved_checksums = state.get("checksums", ())

    def check_state_dict(self, state: dict[str, Any]) -> None:
        """Raise StateMismatchError when a saved position would mean other samples here. Change nothing."""
        self.check_rank_states([state])

    def check_rank_states(self, states: list[dict[str, Any]]) -> None:
        """Raise StateMismatchError as `check_state_dict` does, for the states of all ranks that saved."""
        mine = self.state_dict()
        other = [
            f"{name}: saved {state.get(name)!r}, here {mine.get(name)!r}"
            for state in states[:1]
            for name in ("seed", "shuffle", "global_batch", *self._source.compared)
            if state.get(name) != mine.get(name)
        ]
        if len({(state["epoch"], state["consumed"]) for state in states}) > 1:
            other.append("the ranks' positions differ")
        other += self._source.differences(states)
        saved = states[0].get("checksums", ())
        if self._proof is not None and (unlike := self._proof.differing(saved)):
            compared = sum(number in self._proof.lasting for number, _ in saved)
            other.append(
                f"{len(unlike)} of {compared} compared samples have other content "
                f"({', '.join(map(str, unlike[:4]))}). Was the dataset replaced, or do its samples contain something "
                "that changes at each start, such as the path of a cache? restore(skip=[...]) with this entry's name "
                "starts the new dataset from its beginning; Batches(prove=False) continues in it at the saved position"
            )
        if other:
            raise StateMismatchError(
                "the data stream differs from the checkpoint's, so its position would mean other samples: "
                + "; ".join(other)
            )

    def _warn_of_look_ahead(self) -> None:
        """Warn of an apparent prefetch: the first step took one batch more than the second and the third did."""
        taken = self._position.taken
        if len(taken) == 3 and taken[2] and taken == [taken[2] + 1, taken[2], taken[2]]:
            self._warn(
                f"the training loop took {taken[0]} batches for its first step and {taken[2]} for each later one. If "
                "something around the loader prefetches, a batch that was not trained on counts as consumed, and a "
                "restore leaves it out: put it inside, with Batches.loader(epoch, through=...)"
            )

    def _warn_of_generators(self) -> None:
        for path, generator in generators_in(self._dataset, "dataset"):
            if id(generator) not in self._saved_elsewhere:
                self._warn(
                    f"{path} is the dataset's own random generator, of {kind_of_generator(generator)}. With "
                    "num_workers=0 it draws in the training process and starts over after a restart: put it into the "
                    "state, as a separate entry, or use num_workers=1 or more, where Batches seed it per sample"
                )

    def _warn(self, text: str) -> None:
        if text not in self._has_warned:
            self._has_warned.add(text)
            logger.warning(event(text, rank=self._rank))


def _skips(given: Iterable[Sequence[int]]) -> Skips:
    """Return the batches to skip. Raises ConfigError for an item other than (epoch, first batch, last batch + 1)."""
    skips = []
    for item in given:
        try:
            epoch, first, end = (_whole("skip", number) for number in item)
        except (TypeError, ValueError):
            raise ConfigError(f"Batches(skip=[{item!r}]): give (epoch, first batch, last batch + 1)") from None
        if not (epoch >= 0 and 0 <= first < end):
            raise ConfigError(f"Batches(skip=[{item!r}]): give (epoch, first batch, last batch + 1), counted from 0")
        skips.append((epoch, first, end))
    return tuple(skips)


def _whole(name: str, value: object) -> int:
    """Return a whole number, which may be a NumPy integer, as int. Raises ConfigError for anything else."""
    if isinstance(value, SupportsIndex) and not isinstance(value, bool):
        return index(value)
    raise ConfigError(f"Batches: {name}={value!r}: give a whole number")
