"""Says what the Checkpointer asks of whatever knows how far training has come in its data.

Batches is one such stream. A framework's own loader can be another one.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

from raycheck.data.proof_agreement import SourceProof


class DataStream(ABC):
    """Knows a position in the training data, which all ranks share, and which moves when a step or an epoch ends.

    A state may hold one of them. The Checkpointer then takes epoch, epoch_step and samples from it. It calls end_step
    at the end of each step, before a save reads state_dict; so the position counts what was trained on, not what was
    fetched ahead. An object may also have check_state_dict(state), which raises StateMismatchError for a position that
    would mean other samples here, before a restore has changed anything.
    """

    @property
    @abstractmethod
    def epoch(self) -> int:
        """Returns the current epoch, counted from 0."""

    @property
    @abstractmethod
    def epoch_step(self) -> int:
        """Returns the number of batches consumed of this epoch."""

    @property
    @abstractmethod
    def samples(self) -> int:
        """Returns the number of samples consumed over all epochs and ranks."""

    @abstractmethod
    def end_step(self) -> None:
        """Count as consumed what the training loop was given. Checkpointer.end_step calls this."""

    @abstractmethod
    def end_epoch(self) -> None:
        """Go to the beginning of the next epoch. Checkpointer.end_epoch calls this."""

    @abstractmethod
    def end_loaders(self) -> None:
        """Let nobody go on with an iterator that was begun before a restore. Checkpointer.restore calls this, and in a
        fresh run too."""

    @abstractmethod
    def before_first_batch(self, call: Callable[[], object]) -> None:
        """Have `call` put random state back, once, in the middle of an epoch. At the beginning of one, ignore it.

        Run it where the run that saved the position was then: what it had drawn by then to fetch batches is drawn anew
        before, and what it had not, after. Checkpointer.restore calls this after load_state_dict.
        """

    def prove(self) -> SourceProof | None:
        """Read some samples on trial. Checkpointer.restore calls this before the first step. None: nothing to prove."""
        return None

    def take_proof(self, proof: SourceProof) -> None:
        """Take what the proofs of all ranks came to."""
        del proof

    def leave_to_state(self, entries: Iterable[object]) -> None:
        """Learn which objects the state saves by itself: all entries of it."""
        del entries

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Returns the position, and what the order depends on: equal on all ranks."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved position."""


class SampleStream(DataStream):
    """Puts random state back just before its next batch is fetched, for a restore inside an epoch."""

    _before_first: Callable[[], object] | None = None

    @property
    @abstractmethod
    def is_in_mid_epoch(self) -> bool:
        """Returns whether a part of the current epoch is consumed."""

    def before_first_batch(self, call: Callable[[], object]) -> None:
        """Have `call` run once, just before the next batch is fetched, if the stream is in the middle of an epoch.

        There random state is put back exactly. At the beginning of an epoch, the script's own draws come before the
        first batch in every run, and nothing may be put back over them.
        """
        self._before_first = call if self.is_in_mid_epoch else None

    def _begin_batches(self) -> None:
        """Put random state back, if `before_first_batch` has asked for it."""
        if self._before_first is not None:
            call, self._before_first = self._before_first, None
            call()
