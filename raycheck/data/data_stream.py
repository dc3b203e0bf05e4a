"""Defines what the Checkpointer requires of an object that knows how far training has come in its data.

Batches is one such stream. A framework's own loader can be another one.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

from raycheck.data.proof_agreement import SourceProof


class DataStream(ABC):
    """A position in the training data that all ranks share, and that moves when a step or an epoch ends.

    A state may contain one. The Checkpointer then reads epoch, epoch_step and samples from it. It calls end_step at the
    end of each step, before a save reads state_dict, so the position counts what was trained on, not what was
    prefetched. The object may also have check_state_dict(state), which raises StateMismatchError for a position that
    would mean other samples here, before a restore has changed anything.
    """

    @property
    @abstractmethod
    def epoch(self) -> int:
        """Return the current epoch, counted from 0."""

    @property
    @abstractmethod
    def epoch_step(self) -> int:
        """Return the number of batches consumed in this epoch."""

    @property
    @abstractmethod
    def samples(self) -> int:
        """Return the number of samples consumed over all epochs and ranks."""

    @abstractmethod
    def end_step(self) -> None:
        """Count as consumed what the training loop has received. Checkpointer.end_step calls this."""

    @abstractmethod
    def end_epoch(self) -> None:
        """Move to the beginning of the next epoch. Checkpointer.end_epoch calls this."""

    @abstractmethod
    def end_loaders(self) -> None:
        """Invalidate every iterator that was started before a restore.

        Checkpointer.restore calls this, also in a run that starts from the beginning.
        """

    @abstractmethod
    def before_first_batch(self, call: Callable[[], object]) -> None:
        """Run `call`, which restores random state, once, just before the first batch after a restore in mid-epoch.

        Repeat first the draws that the saving run had made to fetch batches ahead; make all later draws after `call`.
        At the start of an epoch, do nothing. Checkpointer.restore calls this after load_state_dict.
        """

    def prove(self) -> SourceProof | None:
        """Read some samples as a trial.

        Checkpointer.restore calls this before the first step. None: nothing to prove.
        """
        return None

    def take_proof(self, proof: SourceProof) -> None:
        """Apply what the proofs of all ranks showed."""
        del proof

    def leave_to_state(self, entries: Iterable[object]) -> None:
        """Record which objects the state saves as entries. entries: all of them."""
        del entries

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the position, and what the order depends on: equal on all ranks."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Move to a saved position."""


class SampleStream(DataStream):
    """A stream that, for a restore inside an epoch, restores random state just before its next batch is fetched."""

    _before_first: Callable[[], object] | None = None

    @property
    @abstractmethod
    def is_in_mid_epoch(self) -> bool:
        """Return whether a part of the current epoch is consumed."""

    def before_first_batch(self, call: Callable[[], object]) -> None:
        """Call `call` once, just before the next batch is fetched, if the stream is in the middle of an epoch.

        That restores random state exactly. At the beginning of an epoch, every run makes the script's own draws before
        the first batch, so nothing may be restored over them.
        """
        self._before_first = call if self.is_in_mid_epoch else None

    def _begin_batches(self) -> None:
        """Restore random state, if `before_first_batch` has asked for it."""
        if self._before_first is not None:
            call, self._before_first = self._before_first, None
            call()
