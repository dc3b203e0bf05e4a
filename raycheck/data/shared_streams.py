"""Shares a stream of samples, which have no numbers to ask for, among ranks: in one order for any world size.

A global batch has as many samples of each of the dataset's streams, in a fixed order: of the one stream that it is, or
of its shards where it can be sharded. A rank reads the streams that its part of the batch comes from, and leaves out
the samples of other ranks. So what a batch holds depends neither on the world size nor on a restart.

A stream goes to a position by its own `state_dict` where that is exact; otherwise the samples before it are read once
more and dropped.
"""

import copy
import sys
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info

from raycheck.data.sample_seeding import seed_worker
from raycheck.errors import ConfigError, StateMismatchError
from raycheck.state.entries.object_entry import has_state_dict


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamState:
    """Says how far a stream was read: which pass over it this is, and how many samples of it were read in this pass.

    source: the dataset's own state there; None where it has none that is exact. first: a checksum of the pass's first
    sample, by which a stream is known that comes in another order each time; 0 before there is one.
    """

    number: int
    turn: int = 0
    rows: int = 0
    source: Any = None
    first: int = 0

    def as_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamPlan:
    """Says which samples of a global batch come from which stream, and which of them are this rank's.

    streams: how many there are; they divide global_batch. is_endless: a stream that has ended begins anew; else the
    epoch ends with it.
    """

    global_batch: int
    streams: int
    rank: int
    world_size: int
    is_endless: bool
    seed: int

    @property
    def per_stream(self) -> int:
        """Returns how many samples of each stream a global batch has."""
        return self.global_batch // self.streams

    def slots(self) -> range:
        """Returns the places in a global batch that are this rank's."""
        low, high = (self.global_batch * rank // self.world_size for rank in (self.rank, self.rank + 1))
        return range(low, high)

    def mine(self) -> range:
        """Returns the numbers of the streams that this rank reads."""
        slots = self.slots()
        return range(slots.start // self.per_stream, (slots.stop - 1) // self.per_stream + 1)


def plan_streams(
    dataset: Any, *, global_batch: int, rank: int, world_size: int, is_endless: bool, seed: int
) -> StreamPlan:
    """Returns the plan for a dataset. Shards are read apart only if no epoch ends with them: ranks end together."""
    shards = getattr(dataset, "num_shards", 1) if is_endless and callable(getattr(dataset, "shard", None)) else 1
    streams = max(
        count for count in range(1, global_batch + 1) if global_batch % count == 0 and count <= max(1, shards)
    )
    return StreamPlan(
        global_batch=global_batch, streams=streams, rank=rank, world_size=world_size, is_endless=is_endless, seed=seed
    )


_RIGHT_DATASETS = (5, 1)
"""The first release of Hugging Face's datasets in which the state of every kind of stream that has one is exact."""
_RIGHT_BEFORE_5 = {
    "ArrowExamplesIterable",
    "ExamplesIterable",
    "VerticallyConcatenatedMultiSourcesExamplesIterable",
    "SkipExamplesIterable",
    "TakeExamplesIterable",
    "RepeatExamplesIterable",
}
"""What streams are made of whose state the releases before 5.0 restore exactly. 5.0 itself restores none twice."""


def has_exact_state(dataset: Any) -> bool:
    """Returns whether a dataset goes on exactly where its `state_dict` was taken.

    Hugging Face's shuffle buffer does not: it drops what it holds. source_proof.py tries what seems to be exact.
    """
    return has_state(dataset) and not known_fault(dataset)


def has_state(dataset: Any) -> bool:
    """Returns whether a dataset has a `state_dict`, and nothing in it is known to drop samples by design."""
    return has_state_dict(dataset) and not any("Shuffled" in name or "Randomly" in name for name in _stages_of(dataset))


def known_fault(dataset: Any) -> str:
    """Returns why the state of this dataset of Hugging Face's is known to lead elsewhere; "" where it is not."""
    stages = _stages_of(dataset)
    if not stages:
        return ""
    version = str(sys.modules["datasets"].__version__)
    parts = tuple(int(part) if part.isdecimal() else 0 for part in version.split(".")[:2])
    if parts >= _RIGHT_DATASETS or (parts < (5, 0) and {*stages} <= _RIGHT_BEFORE_5):
        return ""
    return (
        f"datasets {version} does not restore a stream's state exactly after a map, filter, batch or interleave; "
        f"{'.'.join(map(str, _RIGHT_DATASETS))} does"
    )


def _stages_of(dataset: Any) -> list[str]:
    """Returns the classes of what a stream of Hugging Face's is made of; nothing for another dataset."""
    found, todo = [], [getattr(dataset, "_ex_iterable", None)]
    while todo:
        inner = todo.pop()
        if inner is not None:
            found.append(type(inner).__name__)
            todo += [getattr(inner, "ex_iterable", None), *getattr(inner, "ex_iterables", ())]
    return found


class OneStream:
    """Reads one stream, sample by sample."""

    def __init__(
        self, dataset: Any, plan: StreamPlan, number: int, at: StreamState, *, is_exact: bool | None = None
    ) -> None:
        """is_exact: whether the dataset's own state leads to where it was taken; None to judge by its kind alone."""
        self._dataset = dataset if plan.streams == 1 else dataset.shard(num_shards=plan.streams, index=number)
        self._plan = plan
        self._is_exact = has_exact_state(self._dataset) if is_exact is None else is_exact
        self._at = replace(at, source=None)
        self._source = at.source if self._is_exact else None
        self._rows: Iterator[Any] | None = None

    def read(self) -> Any:
        """Returns the next sample. Raises StopIteration at the end of the pass, if that ends the epoch."""
        if self._rows is None:
            self._rows = self._go_to_position()
        try:
            sample = self._next(self._rows)
        except StopIteration:
            if not self._plan.is_endless:
                raise
            if not self._at.rows:
                raise ConfigError(f"Batches: stream {self._at.number} of the dataset has no samples") from None
            self._at, self._source = StreamState(number=self._at.number, turn=self._at.turn + 1), None
            self._rows = self._go_to_position()
            return self.read()
        self._at = replace(self._at, rows=self._at.rows + 1, first=self._at.first or checksum(sample))
        return sample

    def state(self) -> StreamState:
        """Returns the position after the last sample that was read."""
        if not self._is_exact or self._rows is None:
            return replace(self._at, source=self._source)
        return replace(self._at, source=copy.deepcopy(self._dataset.state_dict()))

    def _go_to_position(self) -> Iterator[Any]:
        if callable(getattr(self._dataset, "set_epoch", None)):
            self._dataset.set_epoch(self._at.turn)
        if self._source is not None:
            self._dataset.load_state_dict(self._source)
            rows: Iterator[Any] = iter(self._dataset)
            return rows
        rows = iter(self._dataset)
        at, self._at = self._at, replace(self._at, rows=0)
        for number in range(at.rows):
            try:
                sample = self._next(rows)
            except StopIteration:
                raise StateMismatchError(
                    f"the stream ends after {number} samples, and {at.rows} were consumed"
                ) from None
            self._at = replace(self._at, rows=number + 1)
            if number == 0 and checksum(sample) != at.first:
                raise StateMismatchError(
                    "the stream begins with another sample than when the checkpoint was saved, so its position would "
                    "mean other samples: let it give them in one order, for example by shuffle(seed=...), and without "
                    "what differs from start to start, such as the path of a cache"
                )
        return rows

    def _next(self, rows: Iterator[Any]) -> Any:
        if get_worker_info() is not None:  # the training process's random state is the user's, and is saved
            seed_worker(hash((self._plan.seed, self._at.number, self._at.turn, self._at.rows)) & 0x7FFFFFFF)
        return next(rows)


class ShareOfStreams(IterableDataset[Any]):
    """Gives this rank's part of each global batch, with the position of its streams after that.

    states: of the streams that were begun before, by number. left_out: says for the number of a batch of the epoch
    whether it is read and not given. last: the number of the epoch's last batch and one; None when nobody knows it.
    is_exact: see OneStream.
    """

    def __init__(
        self,
        dataset: Any,
        plan: StreamPlan,
        states: Mapping[int, StreamState],
        *,
        first: int,
        last: int | None,
        left_out: Callable[[int], bool],
        turn: int,
        is_exact: bool | None = None,
    ) -> None:
        self._dataset = dataset
        self._plan = plan
        self._states = dict(states)
        self._first = first
        self._last = last
        self._left_out = left_out
        self._turn = turn
        self._is_exact = is_exact

    def __iter__(self) -> Iterator[tuple[list[Any], list[StreamState]]]:
        plan, slots = self._plan, self._plan.slots()
        streams = [
            OneStream(
                self._dataset,
                plan,
                number,
                self._states.get(number, StreamState(number=number, turn=self._turn)),
                is_exact=self._is_exact,
            )
            for number in plan.mine()
        ]
        batch = self._first
        while self._last is None or batch < self._last:
            mine = []
            for number, stream in zip(plan.mine(), streams, strict=True):
                for at in range(plan.per_stream):
                    try:
                        sample = stream.read()
                    except StopIteration:
                        return
                    if number * plan.per_stream + at in slots:
                        mine.append(sample)
            if not self._left_out(batch):
                yield mine, [stream.state() for stream in streams]
            batch += 1


@dataclass(frozen=True, slots=True)
class Collated:
    """Collates the samples of a batch, and leaves the position beside them as it is."""

    collate: Callable[[list[Any]], Any] = default_collate

    def __call__(self, item: tuple[list[Any], list[StreamState]]) -> tuple[Any, list[StreamState]]:
        samples, states = item
        return self.collate(samples), states


@dataclass(slots=True)
class Positions:
    """Holds the positions after batches that were fetched, until these are given to the training loop."""

    waiting: deque[list[StreamState]] = field(default_factory=deque)


class StreamLoader(DataLoader[Any]):
    """Loads the batches of a ShareOfStreams, and puts their positions aside."""

    positions: Positions

    def __iter__(self) -> Any:
        for batch, states in super().__iter__():
            self.positions.waiting.append(states)
            yield batch


def stream_loader(share: ShareOfStreams, positions: Positions, options: dict[str, Any]) -> StreamLoader:
    """Returns a DataLoader of this share. Raises ConfigError for options under which samples would be lost."""
    if options.get("num_workers", 0) > 1:
        raise ConfigError(
            f"Batches.loader(num_workers={options['num_workers']}): a stream is read by one worker at most, which "
            "reads ahead (prefetch_factor); several would read it several times"
        )
    collate = options.get("collate_fn") or default_collate
    loader = StreamLoader(share, **{**options, "batch_size": None, "collate_fn": Collated(collate)})
    loader.positions = positions
    return loader


def checksum(sample: Any) -> int:
    """Returns a checksum of a sample's numbers and texts, alike in every process. It is never 0.

    Of an absolute path its last part counts alone.
    """
    total = 1
    for part in _bytes_of(sample):
        total = zlib.crc32(part, total)
    return total or 1


def _bytes_of(value: Any) -> Iterable[bytes]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield str(key).encode()
            yield from _bytes_of(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _bytes_of(item)
    elif isinstance(value, torch.Tensor):
        yield value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    elif isinstance(value, bytes):
        yield value
    elif hasattr(value, "tobytes"):  # arrays of NumPy, images
        yield value.tobytes()
    elif isinstance(value, str) and value.startswith("/") and "\n" not in value:
        yield repr(PurePosixPath(value).name).encode()  # the folder, as of a cache, differs from machine to machine
    elif isinstance(value, str | int | float | bool | None):
        yield repr(value).encode()
