"""Where a training stands. Apart from the state as a whole, since a coordinator needs this and no torch."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """step: completed optimizer steps, and index of the next. epoch, samples: consumed position of the data."""

    step: int = 0
    epoch: int = 0
    samples: int = 0
