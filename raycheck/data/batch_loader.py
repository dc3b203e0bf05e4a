"""Iterates over one rank's batches, for the training loop."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Self

from raycheck.data.stream_position import StreamPosition
from raycheck.errors import ConfigError


class BatchLoader:
    """An iterator over one rank's batches, as described in Batches.loader. It starts when its first batch is requested.

    If iterated again after a restore or after end_epoch, it continues from the stream's position. If one of these
    happens while it is in use, or another loader is started, its next batch raises ConfigError.

    batches: the Batches that it belongs to, for an adapter that is only given the loader.
    """

    def __init__(
        self,
        batches: object,
        position: StreamPosition,
        epoch: int | None,
        open_epoch: Callable[[int], tuple[Iterable[int], Iterable[Any]]],
        delivered: Callable[[], None] = lambda: None,
    ) -> None:
        """batches: the Batches that this loader belongs to. epoch: None for the stream's current epoch. open_epoch:
        returns the numbers of the remaining batches of an epoch, and these batches. delivered: called with each batch
        that the training loop gets.
        """
        self.batches = batches
        self._position = position
        self._asked_epoch = epoch
        self._open_epoch = open_epoch
        self._epoch = epoch or 0
        self._turn = -1
        self._delivered = delivered
        self._length: int | None = None
        self._numbers: Iterator[int] = iter(())
        self._batches: Iterator[Any] | None = None
        self._is_over = False

    def __len__(self) -> int:
        """Return how many batches this pass yields, including those already yielded.

        Raises TypeError, as torch's DataLoader does, for a stream of unknown length.
        """
        has_turn = self._position.has_turn(self._turn)
        is_begun = has_turn and not self._is_over
        length = self._length if is_begun else self._position.batches_left(self._asked_epoch, is_again=has_turn)
        if length is None:
            raise TypeError("the number of batches left in a stream is unknown: set Batches(batches_per_epoch=...)")
        return length

    def __iter__(self) -> Self:
        has_turn = self._position.has_turn(self._turn)
        if has_turn and not self._is_over:
            return self
        if has_turn and self._asked_epoch is not None:
            raise ConfigError(
                f"this loader has yielded all of epoch {self._epoch}; use loader({self._epoch + 1}) for the next one, "
                "or loader() without an epoch, which yields the next one each time it is iterated"
            )
        self._batches = None
        return self

    def __next__(self) -> Any:
        if self._batches is None:
            self._batches = self._begin()
        if self._is_over:
            raise StopIteration
        if not self._position.has_turn(self._turn):
            raise self._position.lost_turn_error(self._epoch)
        try:
            batch = next(self._batches)
        except StopIteration:
            self._is_over = True
            self._batches = iter(())  # lets loader workers go
            self._position.exhaust()
            raise
        self._position.deliver(next(self._numbers))
        self._delivered()
        return batch

    def _begin(self) -> Iterator[Any]:
        is_again = self._is_over and self._position.has_turn(self._turn)
        self._turn, self._epoch = self._position.begin_loader(self._asked_epoch, is_again=is_again)
        self._is_over = False
        self._length = self._position.batches_left(self._epoch, is_again=False)
        numbers, batches = self._open_epoch(self._epoch)
        self._numbers = iter(numbers)
        return iter(batches)
