"""Taking turns: sides that are compared run in one shuffled round after the other, so that drift meets them alike.

A ratio is taken within each round and then its median, never of two medians from different minutes.
"""

import gc
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

Measured = Mapping[str, float]
"""What one turn came to, by name; times in seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        return cls(median=statistics.median(values), low=min(values), high=max(values))


class Samples:
    """Rounds by side. All sides have equally many."""

    def __init__(self, rounds: Mapping[str, Sequence[Measured]]) -> None:
        self._rounds = rounds

    @property
    def sides(self) -> list[str]:
        return list(self._rounds)

    def of(self, side: str, what: str) -> list[float]:
        return [turn[what] for turn in self._rounds[side]]

    def ratio(self, side: str, under: str, what: str, *, under_what: str = "") -> Spread:
        """`what` of `side` divided by the same, or by `under_what`, of `under` in the same round."""
        pairs = zip(self.of(side, what), self.of(under, under_what or what), strict=True)
        return Spread.of([one / other for one, other in pairs])

    def fastest(self, sides: Sequence[str], what: str) -> str:
        """The side with the lowest median."""
        return min(sides, key=lambda side: statistics.median(self.of(side, what)))


def interleaved(sides: Mapping[str, Callable[[], Measured]], rounds: int, *, warm_ups: int, seed: int = 0) -> Samples:
    """First the rounds that do not count, for connections and caches, then `rounds` that do."""
    order, chance = list(sides), random.Random(seed)
    taken: dict[str, list[Measured]] = {side: [] for side in sides}
    for number in range(-warm_ups, rounds):
        chance.shuffle(order)
        for side in order:
            gc.collect()
            measured = sides[side]()
            if number >= 0:
                taken[side].append(measured)
    return Samples(taken)
