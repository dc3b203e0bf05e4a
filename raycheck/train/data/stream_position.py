"""Keeps how far a stream of global batches is, and which loader may go on with it.

The position counts samples consumed at the end of each step, so that workers which fetch ahead do not count. One loader
has the turn at a time: whatever else moves the stream takes the turn from it.
"""

from raycheck.errors import ConfigError

_NEW_LOADER, _RESTORE, _NEW_EPOCH = "another loader of these Batches was begun", "a restore", "end_epoch()"


class StreamPosition:
    """Counts the epoch, and the samples that were delivered to the training loop and consumed by it.

    epoch: the current one. consumed: samples of this epoch in steps that have ended, over all ranks. taken: how many
    batches each of the first three steps took since something last moved the stream.
    """

    def __init__(self, *, global_batch: int, batches_per_epoch: int) -> None:
        self._global_batch = global_batch
        self._batches_per_epoch = batches_per_epoch
        self.epoch = 0
        self.consumed = 0
        self.taken: list[int] = []
        self._delivered = 0
        self._samples_before = 0  # consumed in earlier epochs
        self._turn = 0
        self._moved_by = ""

    @property
    def epoch_step(self) -> int:
        """Returns the number of batches consumed of this epoch."""
        return self.consumed // self._global_batch

    @property
    def samples(self) -> int:
        """Returns the number of samples consumed over all epochs and ranks."""
        return self._samples_before + self.consumed

    def deliver(self) -> None:
        """Count one batch as given to the training loop."""
        self._delivered += self._global_batch

    def end_step(self) -> None:
        """Count as consumed what the training loop was given."""
        if len(self.taken) < 3:
            self.taken.append((self._delivered - self.consumed) // self._global_batch)
        self.consumed = self._delivered

    def end_epoch(self) -> None:
        """Go to the beginning of the next epoch."""
        self._go_on_to(self.epoch + 1)
        self._move(_NEW_EPOCH)

    def end_loaders(self) -> None:
        """Take the turn from any loader that was begun before a restore."""
        self._delivered = self.consumed
        self._move(_RESTORE)

    def restore(self, *, epoch: int, consumed: int, samples: int | None) -> None:
        """Go to a saved position. samples: those of all epochs; None when they were not counted."""
        self.epoch, self.consumed = epoch, consumed
        if samples is None:  # an earlier raycheck, which knew of no epoch that was left half-way
            samples = epoch * self._batches_per_epoch * self._global_batch + consumed
        self._samples_before = samples - consumed
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
        self._delivered = self.consumed
        self._move(_NEW_LOADER)
        return self._turn, epoch

    def has_turn(self, turn: int) -> bool:
        return turn == self._turn

    def batches_left(self, epoch: int | None, *, is_again: bool) -> int:
        """Returns how many batches a loader would give that was begun now, with the arguments of `begin_loader`."""
        at = self.epoch + is_again if epoch is None else epoch
        return self._batches_per_epoch - (self.epoch_step if at == self.epoch else 0)

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
        is_whole = self._delivered == self._batches_per_epoch * self._global_batch
        self._samples_before += self._delivered if is_whole else self.consumed
        self.epoch, self.consumed, self._delivered = epoch, 0, 0

    def _move(self, by: str) -> None:
        """Take the turn from the loader that has it. by: what moves the stream, for errors."""
        self._turn += 1
        self._moved_by = by
        self.taken = []
