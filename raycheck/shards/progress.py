"""Where a training stands. Apart from the state as a whole, since a coordinator needs this and no torch."""

from dataclasses import asdict, dataclass
from typing import Any

from raycheck.bucket.lossless import encode


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """step: completed optimizer steps, and index of the next. epoch, samples: consumed position of the data."""

    step: int = 0
    epoch: int = 0
    samples: int = 0

    def values(self) -> Any:
        """As a lossless tree."""
        return encode(asdict(self), "progress")

    @classmethod
    def of(cls, tree: Any) -> "Progress":
        """Raises KeyError, TypeError or ValueError for what is none."""
        if any(type(tree[name]) is not int or tree[name] < 0 for name in ("step", "epoch", "samples")):
            raise ValueError(f"progress is {str(tree)[:100]}")
        return cls(step=tree["step"], epoch=tree["epoch"], samples=tree["samples"])
