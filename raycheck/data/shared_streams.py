"""Shares a stream of samples, which have no numbers, among ranks: in one order for any world size.

A global batch contains the same number of samples from each of the dataset's streams, in a fixed order. The streams are
its shards if it can be sharded, otherwise the dataset is one stream. A rank reads the streams that its part of the
batch comes from, and discards the samples of other ranks. So the content of a batch depends neither on the world size
nor on restarts.

A stream moves to a position with its own `state_dict` if that is exact; otherwise the samples before the position are
read again and discarded.
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
    """The position in a stream: the number of the pass over it, and how many samples of this pass were read.

    source: the dataset's own state at that position; None if it has none that is exact. first: a checksum of the pass's
    first sample, which reveals a stream whose order changes from pass to pass; 0 before there is one.
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
    """The stream of each sample in a global batch, and the samples that belong to this rank.

    streams: how many there are; a divisor of global_batch. is_endless: a stream that has ended starts over; otherwise
    the epoch ends with it.
    """

    global_batch: int
    streams: int
    rank: int
    world_size: int
    is_endless: bool
    seed: int

    @property
    def per_stream(self) -> int:
        """Return how many samples of each stream are in a global batch."""
        return self.global_batch // self.streams

    def slots(self) -> range:
        """Return this rank's places in a global batch."""
        low, high = (self.global_batch * rank // self.world_size for rank in (self.rank, self.rank + 1))
        return range(low, high)

    def mine(self) -> range:
        """Return the numbers of the streams that this rank reads."""
        slots = self.slots()
        return range(slots.start // self.per_stream, (slots.stop - 1) // self.per_stream + 1)


def plan_streams(
    dataset: Any, *, global_batch: int, rank: int, world_size: int, is_endless: bool, seed: int
) -> StreamPlan:
    """Return the plan for a dataset.

    Shards are read separately only if epochs do not end with them: ranks end together.
    """
    shards = getattr(dataset, "num_shards", 1) if is_endless and callable(getattr(dataset, "shard", None)) else 1
    streams = max(
        count for count in range(1, global_batch + 1) if global_batch % count == 0 and count <= max(1, shards)
    )
    return StreamPlan(
        global_batch=global_batch, streams=streams, rank=rank, world_size=world_size, is_endless=is_endless, seed=seed
    )


_RIGHT_DATASETS = (5, 1)
"""The first release of Hugging Face's datasets in which every stream state is exact, for all kinds that have one."""
_RIGHT_BEFORE_5 = {
    "ArrowExamplesIterable",
    "ExamplesIterable",
    "VerticallyConcatenatedMultiSourcesExamplesIterable",
    "SkipExamplesIterable",
    "TakeExamplesIterable",
    "RepeatExamplesIterable",
}
"""The stages whose state releases before 5.0 restore exactly. 5.0 itself restores none of them a second time."""


def has_exact_state(dataset: Any) -> bool:
    """Return whether a dataset resumes exactly where its `state_dict` was taken.

    Hugging Face's shuffle buffer does not: it drops its contents. source_proof.py tests whatever seems to be exact.
    """
    return has_state(dataset) and not known_fault(dataset)


def has_state(dataset: Any) -> bool:
    """Return whether a dataset has a `state_dict`, and contains nothing that is known to drop samples by design."""
    return has_state_dict(dataset) and not any("Shuffled" in name or "Randomly" in name for name in _stages_of(dataset))


def known_fault(dataset: Any) -> str:
    """Return why the state of this Hugging Face dataset is known to lead to a wrong position; "" if it is not."""
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
    """Return the classes of the stages of a Hugging Face stream; nothing for another dataset."""
    found, todo = [], [getattr(dataset, "_ex_iterable", None)]
    while todo:
        inner = todo.pop()
        if inner is not None:
            found.append(type(inner).__name__)
            todo += [getattr(inner, "ex_iterable", None), *getattr(inner, "ex_iterables", ())]
    return found


class OneStream:
    """A reader of one stream, sample by sample."""

    def __init__(
        self, dataset: Any, plan: StreamPlan, number: int, at: StreamState, *, is_exact: bool | None = None
    ) -> None:
        """is_exact: whether the dataset's own state leads back to where it was taken; None to go by its kind alone."""
        self._dataset = dataset if plan.streams == 1 else dataset.shard(num_shards=plan.streams, index=number)
        self._plan = plan
        self._is_exact = has_exact_state(self._dataset) if is_exact is None else is_exact
        self._at = replace(at, source=None)
        self._source = at.source if self._is_exact else None
        self._rows: Iterator[Any] | None = None

    def read(self) -> Any:
        """Return the next sample. Raises StopIteration at the end of the pass, if that ends the epoch."""
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
        """Return the position after the last sample read."""
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
                    f"the stream ends after {number} samples, but {at.rows} were consumed"
                ) from None
            self._at = replace(self._at, rows=number + 1)
            if number == 0 and checksum(sample) != at.first:
                raise StateMismatchError(
                    "the stream begins with another sample than when the checkpoint was saved, so its position would "
                    "mean other samples: make its order repeatable, for example by shuffle(seed=...), and keep out of "
                    "its samples whatever changes at each start, such as the path of a cache"
                )
        return rows

    def _next(self, rows: Iterator[Any]) -> Any:
        if get_worker_info() is not None:  # the training process's random state is the user's, and is saved
            seed_worker(hash((self._plan.seed, self._at.number, self._at.turn, self._at.rows)) & 0x7FFFFFFF)
        return next(rows)


class ShareOfStreams(IterableDataset[Any]):
    """This rank's part of each global batch, each with the position of its streams after it.

    states: the positions of the streams that were started before, by number. left_out: returns whether a batch of the
    epoch, given its number, is read and discarded. last: the number of the epoch's last batch plus one; None if
    unknown. is_exact: see OneStream.
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
    """A callable that collates the samples of a batch and leaves its position unchanged."""

    collate: Callable[[list[Any]], Any] = default_collate

    def __call__(self, item: tuple[list[Any], list[StreamState]]) -> tuple[Any, list[StreamState]]:
        samples, states = item
        return self.collate(samples), states


@dataclass(slots=True)
class Positions:
    """The positions after batches that were fetched, until the training loop gets these batches."""

    waiting: deque[list[StreamState]] = field(default_factory=deque)


class StreamLoader(DataLoader[Any]):
    """A DataLoader over a ShareOfStreams that moves the positions of its batches into a Positions."""

    positions: Positions

    def __iter__(self) -> Any:
        for batch, states in super().__iter__():
            self.positions.waiting.append(states)
            yield batch


def stream_loader(share: ShareOfStreams, positions: Positions, options: dict[str, Any]) -> StreamLoader:
    """Return a DataLoader of this share. Raises ConfigError for options that would lose samples."""
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
    """Return a checksum of the numbers and strings in a sample, equal in every process. It is never 0.

    If a string is an absolute path, only its last component is used.
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
        yield repr(PurePosixPath(value).name).encode()  # the folder, such as a cache, differs between machines
    elif isinstance(value, str | int | float | bool | None):
        yield repr(value).encode()
