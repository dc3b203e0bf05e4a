"""Defines what a Checkpointer asks of data whose position it keeps: Batches, and a dataset of Ray Data."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable


class DataStream(ABC):
    """Counts epochs and samples, and goes on after a restore with the samples that come next."""

    _before_first: Callable[[], object] | None = None

    @property
    @abstractmethod
    def epoch(self) -> int:
        """Returns the current epoch, counted from 0."""

    @property
    @abstractmethod
    def epoch_step(self) -> int:
        """Returns how far the current epoch has come: in global batches, or in steps where there are none."""

    @property
    @abstractmethod
    def samples(self) -> int:
        """Returns the number of samples consumed over all epochs and ranks."""

    @property
    @abstractmethod
    def is_in_mid_epoch(self) -> bool:
        """Returns whether a part of the current epoch is consumed."""

    @abstractmethod
    def end_step(self) -> None:
        """Count as consumed what the training loop was given. Checkpointer.end_step calls this."""

    @abstractmethod
    def end_epoch(self) -> None:
        """Go to the beginning of the next epoch. Checkpointer.end_epoch calls this."""

    @abstractmethod
    def end_loaders(self) -> None:
        """Refuse the next batch of any loader that was begun before a restore. Checkpointer.restore calls this.

        That holds in a fresh run too: otherwise the script would run until its first restart only.
        """

    def before_first_batch(self, call: Callable[[], object]) -> None:
        """Have `call` run once, just before the next batch is fetched, if the stream is in the middle of an epoch.

        There random state is put back exactly. At the beginning of an epoch, the script's own draws come before the
        first batch in every run, and nothing may be put back over them.
        """
        self._before_first = call if self.is_in_mid_epoch else None

    def leave_to_state(self, entries: Iterable[object]) -> None:  # noqa: B027  most have nobody to warn
        """Note which objects the state saves by itself, so that nobody is warned of them."""

    def _begin_batches(self) -> None:
        """Put random state back, if `before_first_batch` has asked for it."""
        if self._before_first is not None:
            call, self._before_first = self._before_first, None
            call()
