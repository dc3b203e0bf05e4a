"""Defines what Batches require of a data source: samples with numbers, or streams of samples.

Batches keep the position that all ranks share, counted in batches. A source makes a rank's batches from a given
position, and keeps whatever else a restart needs to know.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from raycheck.data.epoch_order import Skips
from raycheck.data.proof_agreement import SourceProof

if TYPE_CHECKING:
    from torch.utils.data import DataLoader


@dataclass(frozen=True, kw_only=True, slots=True)
class RankShare:
    """The number of samples in a global batch, and this rank's place among the ranks that share it."""

    global_batch: int
    rank: int
    world_size: int


class BatchSource(ABC):
    """A source of one rank's batches of a dataset.

    samples: how many samples an epoch's order has; None if unknown. batches_per_epoch: None for a stream that ends when
    its data does. streams: how many positions there are, each known only to the ranks that read that stream. compared:
    the names in `state` whose values must be equal in the checkpoint and here.
    """

    samples: int | None
    batches_per_epoch: int | None
    streams: int = 1
    compared: tuple[str, ...] = ()

    @abstractmethod
    def open(
        self, epoch: int, first: int, skips: Skips, options: Mapping[str, Any], *, is_mid_epoch: bool
    ) -> tuple[Iterable[int], "DataLoader[Any]"]:
        """Return the numbers of the remaining batches of an epoch, and a loader of this rank's share of them.

        first: the number of the first one, counted from 0. skips: batches to leave out. options: for torch's
        DataLoader. is_mid_epoch: whether part of the stream's current epoch is consumed.
        """

    @abstractmethod
    def prove(self, order: Mapping[str, Any]) -> SourceProof:
        """Read some samples as a trial. order: what else the order of samples depends on."""

    def take_proof(self, proof: SourceProof) -> None:
        """Apply what the proofs of all ranks showed."""
        del proof

    def take(self) -> None:
        """Note that the training loop received the next batch."""
        return

    def end_step(self) -> None:
        """Count as consumed what the training loop has received."""
        return

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Return what the order depends on, and positions that do not follow from the number of batches."""

    def differences(self, states: Sequence[Mapping[str, Any]]) -> list[str]:
        """Return why the states of all ranks that saved do not fit together, as one text per reason."""
        del states
        return []

    def load(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Move to saved positions. states: the states of all ranks that saved."""
        del states
