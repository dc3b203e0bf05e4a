"""The progress counters of a training, separate from the state: a coordinator needs them, and has no torch."""

from dataclasses import asdict, dataclass
from typing import Any

from raycheck.bucket.format.values import encode


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """The progress of a training.

    step: the completed optimizer steps, which is also the index of the next one. epoch: the completed epochs, which is
    also the index of the epoch in which to continue. epoch_step: the steps completed in that epoch. samples: consumed
    over all epochs and ranks, as Batches count them. tokens, episodes: the sums of what `end_step` received.
    """

    step: int = 0
    epoch: int = 0
    epoch_step: int = 0
    samples: int = 0
    tokens: int = 0
    episodes: int = 0

    def values(self) -> Any:
        """Return the counters as a tree of values.py."""
        return encode(asdict(self), "progress")

    @classmethod
    def of(cls, tree: Any) -> "Progress":
        """Read the counters from a tree. Counters that an earlier raycheck did not keep are 0.

        Raises KeyError, TypeError or ValueError for a tree that contains no progress.
        """
        counts = {name: tree[name] for name in ("step", "epoch", "samples")}
        counts |= {name: tree.get(name, 0) for name in ("epoch_step", "tokens", "episodes")}
        if any(type(count) is not int or count < 0 for count in counts.values()):
            raise ValueError(f"progress is {str(tree)[:100]}")
        return cls(**counts)
