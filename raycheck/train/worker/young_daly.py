"""How long to train between two saves, when the user gives a budget instead of an interval: SaveSettings(overhead=...).

Saving too often costs time each time, too rarely costs what is lost at a failure. Young (1974) and Daly (2006) balance
the two by the cost of a save and the mean time between failures. Both are observed: the cost on rank 0, the failures as
attempts of the run. Rank 0's alone; the others hear its word.
"""

import math
import statistics
from collections import deque
from collections.abc import Sequence

PRIOR_S = 3600.0
"""A run that has not been hurt yet counts as one that was hurt once in an hour more than it has been observed."""
RECENT = 200
"""Of so many steps the usual time is taken."""


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
        self._alone: deque[float] = deque(maxlen=RECENT)
        self._beside: list[float] = []

    def start(self, claims: Sequence[float]) -> None:
        """claims: bucket times at which the run's attempts began, this one's last."""
        self._claims = tuple(claims)

    def step(self, seconds: float, *, is_saving: bool) -> None:
        """A step took so long, beside a save or alone."""
        self._trained_s += seconds
        (self._beside if is_saving else self._alone).append(seconds)

    def saved(self, blocked_s: float) -> None:
        """A save blocked training for so long; the steps beside a save since then were beside the one before."""
        slowed_s = 0.0
        if self._alone:
            usual_s = statistics.median(self._alone)  # not the mean: first steps and evaluations take long
            slowed_s = max(0.0, sum(self._beside) - len(self._beside) * usual_s)
        self._beside.clear()
        cost_s = blocked_s + slowed_s
        self._cost_s = cost_s if self._cost_s is None else (self._cost_s + cost_s) / 2

    @property
    def seconds(self) -> float:
        """To train until the next save. At once when none has been measured."""
        if self._cost_s is None:
            return 0.0
        best = daly_interval_s(self._cost_s, mtbf_s(self._claims, self._claims[-1] + self._trained_s))
        return min(self._at_most_s, max(best, self._cost_s / self._overhead))
