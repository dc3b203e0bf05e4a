"""Tracks the position in a stream of global batches, and which loader may continue from it.

The position counts samples consumed at the end of each step, so batches that workers prefetch do not count. Only one
loader is active at a time: anything else that moves the stream deactivates it.
"""

from collections.abc import Callable
from typing import Any

from raycheck.data.step_history import StepHistory
from raycheck.errors import ConfigError

_NEW_LOADER, _RESTORE, _NEW_EPOCH = "another loader of these Batches was started", "a restore", "end_epoch()"


class StreamPosition:
    """The epoch, and the samples that were delivered to the training loop and consumed by it.

    epoch: the current one. consumed: samples of this epoch up to the end of the last step, over all ranks, including
    skipped ones. samples: samples of all epochs that were trained on. taken: how many batches each of the first three
    steps took since the stream was last moved. history: which batches each step took.
    """

    def __init__(self, *, global_batch: int, batches_left: Callable[[int, int], int | None]) -> None:
        """batches_left: returns how many batches an epoch has from a given batch on; None for an unknown length."""
        self._global_batch = global_batch
        self._batches_left = batches_left
        self.epoch = 0
        self.consumed = 0
        self.samples = 0
        self.taken: list[int] = []
        self.history = StepHistory()
        self._given: list[int] = []  # numbers of the batches delivered in the unfinished step
        self._is_exhausted = False
        self._turn = 0
        self._moved_by = ""

    @property
    def epoch_step(self) -> int:
        """Return the number of batches consumed in this epoch."""
        return self.consumed // self._global_batch

    def deliver(self, batch: int) -> None:
        """Count one batch as delivered to the training loop. batch: its number in the epoch."""
        self._given.append(batch)

    def exhaust(self) -> None:
        """Note that the epoch has no more batches."""
        self._is_exhausted = True

    def end_step(self) -> None:
        """Count as consumed what was delivered to the training loop."""
        if len(self.taken) < 3:
            self.taken.append(len(self._given))
        self.history.end_step(self.epoch, self._given)
        self._consume_given()

    def end_epoch(self) -> None:
        """Move to the beginning of the next epoch."""
        self._go_on_to(self.epoch + 1)
        self._move(_NEW_EPOCH)

    def end_loaders(self) -> None:
        """Deactivate any loader that was started before a restore."""
        self._given = []
        self._move(_RESTORE)

    def restore(self, *, epoch: int, consumed: int, samples: int, history: dict[str, Any] | None) -> None:
        """Move to a saved position. samples: those of all epochs. history: None if it was not saved."""
        self.epoch, self.consumed, self.samples = epoch, consumed, samples
        self.history = StepHistory() if history is None else StepHistory.of(history)
        self.end_loaders()

    def begin_loader(self, epoch: int | None, *, is_again: bool) -> tuple[int, int]:
        """Make a loader the active one. Return the number of its turn, and its epoch.

        epoch: None for the current one. is_again: the loader has yielded all of its epoch, and continues with the next
        one.
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
        """Return how many batches a loader would yield if started now, with the arguments of `begin_loader`.

        None for a stream of unknown length.
        """
        at = self.epoch + is_again if epoch is None else epoch
        return self._batches_left(at, self.epoch_step if at == self.epoch else 0)

    def check_epoch(self, epoch: int) -> None:
        """Raise ConfigError for an epoch before the current position."""
        if epoch < self.epoch:
            raise ConfigError(
                f"Batches.loader({epoch}): the stream is at epoch {self.epoch} and only goes forward. Create loaders "
                "after restore(), or use loader() without an epoch, which continues from the stream's position"
            )

    def lost_turn_error(self, epoch: int) -> ConfigError:
        """Return the error for a loader that is no longer active. epoch: the loader's."""
        return ConfigError(
            f"this loader of epoch {epoch} was started before {self._moved_by}; its next batches would not be those "
            f"of the stream, which is at epoch {self.epoch}, batch {self.epoch_step}. Start the iteration again "
            "(`iter(loader)`, `for batch in loader`), with only one loader at a time; use a separate DataLoader for "
            "evaluation"
        )

    def _go_on_to(self, epoch: int) -> None:
        """Move to the beginning of a later epoch.

        If the current one is left midway, its completed steps still count.
        """
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
        """Deactivate the active loader. by: what moves the stream, for errors."""
        self._turn += 1
        self._moved_by = by
        self._is_exhausted = False
        self.taken = []
