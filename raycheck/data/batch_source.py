"""Says what Batches need of the data that they give out: samples with numbers, or streams of samples.

Batches keep the position that all ranks share, counted in batches. A source makes a rank's batches from a position on,
and keeps what else a restart needs to know.
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
    """Says how many samples a global batch has, and which of the ranks that share it this one is."""

    global_batch: int
    rank: int
    world_size: int


class BatchSource(ABC):
    """Makes one rank's batches of a dataset.

    samples: how many an epoch's order has; None where nobody knows. batches_per_epoch: None for a stream that ends by
    itself. streams: how many positions there are, each of which only the ranks that read it know. compared: the names
    in `state` that must be equal in a checkpoint and here.
    """

    samples: int | None
    batches_per_epoch: int | None
    streams: int = 1
    compared: tuple[str, ...] = ()

    @abstractmethod
    def open(
        self, epoch: int, first: int, skips: Skips, options: Mapping[str, Any], *, is_mid_epoch: bool
    ) -> tuple[Iterable[int], "DataLoader[Any]"]:
        """Returns the numbers of the batches that are left of an epoch, and a loader of this rank's share of them.

        first: the number of the first one, counted from 0. skips: batches that are left out. options: torch's
        DataLoader's. is_mid_epoch: whether a part of the stream's current epoch is consumed.
        """

    @abstractmethod
    def prove(self, order: Mapping[str, Any]) -> SourceProof:
        """Read some samples on trial. order: what else the order of samples depends on."""

    def take_proof(self, proof: SourceProof) -> None:
        """Take what the ranks have found out together."""
        del proof

    def take(self) -> None:
        """Note that the training loop has got the next batch."""
        return

    def end_step(self) -> None:
        """Count as consumed what the training loop has got."""
        return

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Returns what the order depends on, and positions that the number of batches does not tell."""

    def differences(self, states: Sequence[Mapping[str, Any]]) -> list[str]:
        """Returns why the states of all ranks that saved do not fit together, one text for each reason."""
        del states
        return []

    def load(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Go to saved positions. states: those of all ranks that saved."""
        del states
