"""Keeps how far a stream of global batches is, and which loader may go on with it.

The position counts samples consumed at the end of each step, so that workers which fetch ahead do not count. One loader
has the turn at a time: whatever else moves the stream takes the turn from it.
"""

from collections.abc import Callable
from typing import Any

from raycheck.data.step_history import StepHistory
from raycheck.errors import ConfigError

_NEW_LOADER, _RESTORE, _NEW_EPOCH = "another loader of these Batches was begun", "a restore", "end_epoch()"


class StreamPosition:
    """Counts the epoch, and the samples that were delivered to the training loop and consumed by it.

    epoch: the current one. consumed: samples of this epoch up to the end of the last step, over all ranks, those that
    were skipped included. samples: those of all epochs that were trained on. taken: how many batches each of the first
    three steps took since something last moved the stream. history: which batches each step took.
    """

    def __init__(self, *, global_batch: int, batches_left: Callable[[int, int], int | None]) -> None:
        """batches_left: returns how many batches an epoch has from a batch on; None for a stream that does not say."""
        self._global_batch = global_batch
        self._batches_left = batches_left
        self.epoch = 0
        self.consumed = 0
        self.samples = 0
        self.taken: list[int] = []
        self.history = StepHistory()
        self._given: list[int] = []  # numbers of the batches that the training loop has, of a step that has not ended
        self._is_exhausted = False
        self._turn = 0
        self._moved_by = ""

    @property
    def epoch_step(self) -> int:
        """Returns the number of batches consumed of this epoch."""
        return self.consumed // self._global_batch

    def deliver(self, batch: int) -> None:
        """Count one batch as given to the training loop. batch: its number in the epoch."""
        self._given.append(batch)

    def exhaust(self) -> None:
        """Note that the epoch has no more batches."""
        self._is_exhausted = True

    def end_step(self) -> None:
        """Count as consumed what the training loop was given."""
        if len(self.taken) < 3:
            self.taken.append(len(self._given))
        self.history.end_step(self.epoch, self._given)
        self._consume_given()

    def end_epoch(self) -> None:
        """Go to the beginning of the next epoch."""
        self._go_on_to(self.epoch + 1)
        self._move(_NEW_EPOCH)

    def end_loaders(self) -> None:
        """Take the turn from any loader that was begun before a restore."""
        self._given = []
        self._move(_RESTORE)

    def restore(self, *, epoch: int, consumed: int, samples: int, history: dict[str, Any] | None) -> None:
        """Go to a saved position. samples: those of all epochs. history: None when it was not kept."""
        self.epoch, self.consumed, self.samples = epoch, consumed, samples
        self.history = StepHistory() if history is None else StepHistory.of(history)
        self.end_loaders()

    def begin_loader(self, epoch: int | None, *, is_again: bool) -> tuple[int, int]:
        """Give the turn to a loader. Returns the number of its turn, and its epoch.

        epoch: None for the current one. is_again: the loader has given all of that, and goes on with the next one.
        """
        if epoch is None:
            epoch = self.epoch + is_again
        self.check_epoch(epoch)
        if epoch > self.epoch:
            self._go_on_to(epoch)
        self._given = []
        self._move(_NEW_LOADER)
        return self._turn, epoch

    def has_turn(self, turn: int) -> bool:
        return turn == self._turn

    def batches_left(self, epoch: int | None, *, is_again: bool) -> int | None:
        """Returns how many batches a loader would give that was begun now, with the arguments of `begin_loader`.

        None for a stream that does not say how long it is.
        """
        at = self.epoch + is_again if epoch is None else epoch
        return self._batches_left(at, self.epoch_step if at == self.epoch else 0)

    def check_epoch(self, epoch: int) -> None:
        """Raises ConfigError for an epoch that lies behind the position."""
        if epoch < self.epoch:
            raise ConfigError(
                f"Batches.loader({epoch}): the stream is at epoch {self.epoch} and only goes forward. Make loaders "
                "after restore(), or loader() without an epoch, which goes on where the stream is"
            )

    def lost_turn_error(self, epoch: int) -> ConfigError:
        """Returns the error for a loader that has lost its turn. epoch: the loader's."""
        return ConfigError(
            f"this loader of epoch {epoch} was begun before {self._moved_by}; its next batches would not be those of "
            f"the stream, which is at epoch {self.epoch}, batch {self.epoch_step}. Iterate a loader anew after "
            "that (`iter(loader)`, `for batch in loader`), and only one at a time; evaluation needs a DataLoader of "
            "its own"
        )

    def _go_on_to(self, epoch: int) -> None:
        """Go to the beginning of a later epoch. Of one that is left half-way, the steps that have ended count."""
        next_batch = self._given[-1] + 1 if self._given else self.epoch_step
        if self._is_exhausted or self._batches_left(self.epoch, next_batch) == 0:
            self._consume_given()
        self.epoch, self.consumed, self._given = epoch, 0, []

    def _consume_given(self) -> None:
        if self._given:
            self.consumed = (self._given[-1] + 1) * self._global_batch
            self.samples += len(self._given) * self._global_batch
        self._given = []

    def _move(self, by: str) -> None:
        """Take the turn from the loader that has it. by: what moves the stream, for errors."""
        self._turn += 1
        self._moved_by = by
        self._is_exhausted = False
        self.taken = []
