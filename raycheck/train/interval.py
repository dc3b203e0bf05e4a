"""How long to train between two saves, when the user gives a budget instead of an interval: SaveSettings(overhead=...).

Saving too often costs time each time, too rarely costs what is lost at a failure. Young (1974) and Daly (2006) balance
the two by the cost of a save and the mean time between failures. Both are observed: the cost on rank 0, the failures as
attempts of the run. Rank 0's alone; the others hear its word.
"""

import math
from collections.abc import Sequence

PRIOR_S = 3600.0
"""A run that has not been hurt yet counts as one that was hurt once in an hour more than it has been observed."""


def daly_interval_s(cost_s: float, mtbf_s: float) -> float:
    """Seconds of training between two saves that lose least, for a save that costs `cost_s` and failures that come
    every `mtbf_s` on average. J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart
    dumps", Future Generation Computer Systems 22 (2006), equation 37."""
    if cost_s >= 2 * mtbf_s:
        return mtbf_s
    share = cost_s / (2 * mtbf_s)
    return math.sqrt(2 * cost_s * mtbf_s) * (1 + math.sqrt(share) / 3 + share / 9) - cost_s


def mtbf_s(claims: Sequence[float], now: float) -> float:
    """Mean seconds between failures of a run whose attempts began at these times."""
    return (now - claims[0] + PRIOR_S) / len(claims)


class Interval:
    """overhead: the share of training time that saves may cost. at_most_s: never wait longer than this."""

    def __init__(self, overhead: float, *, at_most_s: float | None) -> None:
        self._overhead = overhead
        self._at_most_s = math.inf if at_most_s is None else at_most_s
        self._claims: tuple[float, ...] = (0.0,)
        self._trained_s = 0.0
        self._cost_s: float | None = None
        self._free = (0, 0.0)
        self._busy = (0, 0.0)

    def start(self, claims: Sequence[float]) -> None:
        """claims: bucket times at which the run's attempts began, this one's last."""
        self._claims = tuple(claims)

    def step(self, seconds: float, *, is_saving: bool) -> None:
        """A step took so long, beside a save or alone."""
        self._trained_s += seconds
        count, total = self._busy if is_saving else self._free
        both = (count + 1, total + seconds)
        if is_saving:
            self._busy = both
        else:
            self._free = both

    def saved(self, blocked_s: float) -> None:
        """A save blocked training for so long; the steps since the one before belong to that one."""
        slowed_s = 0.0
        if self._busy[0] and self._free[0]:
            slowed_s = max(0.0, self._busy[1] - self._busy[0] * self._free[1] / self._free[0])
        cost_s = blocked_s + slowed_s
        self._cost_s = cost_s if self._cost_s is None else (self._cost_s + cost_s) / 2
        self._busy = (0, 0.0)
        if self._free[0] > 1000:  # the model's pace changes over a run
            self._free = (self._free[0] // 2, self._free[1] / 2)

    @property
    def seconds(self) -> float:
        """To train until the next save. At once when none has been measured."""
        if self._cost_s is None:
            return 0.0
        best = daly_interval_s(self._cost_s, mtbf_s(self._claims, self._claims[-1] + self._trained_s))
        return min(self._at_most_s, max(best, self._cost_s / self._overhead))
