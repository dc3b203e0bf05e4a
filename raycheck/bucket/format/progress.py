"""Where a training stands. Apart from the state as a whole, since a coordinator needs this and no torch."""

from dataclasses import asdict, dataclass
from typing import Any

from raycheck.bucket.format.values import encode


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """step: completed optimizer steps, and index of the next. epoch: completed epochs, and index of the one to go on
    in; epoch_step: steps completed in it. samples: consumed over all epochs and ranks, as Batches count them. tokens,
    episodes: as `end_step` was told."""

    step: int = 0
    epoch: int = 0
    epoch_step: int = 0
    samples: int = 0
    tokens: int = 0
    episodes: int = 0

    def values(self) -> Any:
        """As a lossless tree."""
        return encode(asdict(self), "progress")

    @classmethod
    def of(cls, tree: Any) -> "Progress":
        """Counts that an earlier raycheck did not keep are 0. Raises KeyError, TypeError or ValueError for what is
        none."""
        counts = {name: tree[name] for name in ("step", "epoch", "samples")}
        counts |= {name: tree.get(name, 0) for name in ("epoch_step", "tokens", "episodes")}
        if any(type(count) is not int or count < 0 for count in counts.values()):
            raise ValueError(f"progress is {str(tree)[:100]}")
        return cls(**counts)
