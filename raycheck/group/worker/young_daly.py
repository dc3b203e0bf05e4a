"""Computes how long to train between two saves from the user's budget, SaveSettings(overhead=...).

Saving too often costs time at every save; saving too rarely costs the work that a failure loses. Young (1974) and Daly
(2006) balance the two by the cost of a save and the mean time between failures. Rank 0 observes both: the cost in its
own saves, and the failures as attempts of the run. The other ranks only get its decision.
"""

import math
import statistics
from collections import deque
from collections.abc import Sequence

PRIOR_S = 3600.0
"""Added to the observed time: a run without a failure has a mean time between failures of its age plus an hour."""
RECENT = 200
"""The number of steps from which the usual step time is taken."""


def daly_interval_s(cost_s: float, mtbf_s: float) -> float:
    """Return the seconds of training between two saves that lose the least time.

    cost_s: what a save costs. mtbf_s: mean time between failures. J. T. Daly, "A higher order estimate of the optimum
    checkpoint interval for restart dumps", Future Generation Computer Systems 22 (2006), equation 37.
    """
    if cost_s >= 2 * mtbf_s:
        return mtbf_s
    share = cost_s / (2 * mtbf_s)
    return math.sqrt(2 * cost_s * mtbf_s) * (1 + math.sqrt(share) / 3 + share / 9) - cost_s


def mtbf_s(claims: Sequence[float], now: float) -> float:
    """Return the mean seconds between failures of a run whose attempts began at the times `claims`."""
    return (now - claims[0] + PRIOR_S) / len(claims)


class Interval:
    """The measured cost of saves, and the training time between two saves that follows from it.

    overhead: the share of training time that saves may cost. at_most_s: the longest interval; None for no limit.
    """

    def __init__(self, overhead: float, *, at_most_s: float | None) -> None:
        self._overhead = overhead
        self._at_most_s = math.inf if at_most_s is None else at_most_s
        self._claims: tuple[float, ...] = (0.0,)
        self._trained_s = 0.0
        self._cost_s: float | None = None
        self._alone: deque[float] = deque(maxlen=RECENT)
        self._beside: list[float] = []

    def start(self, claims: Sequence[float]) -> None:
        """Set when the run's attempts began. claims: times of the bucket's clock, this attempt's last."""
        self._claims = tuple(claims)

    def step(self, seconds: float, *, is_saving: bool) -> None:
        """Record how long a step took. is_saving: a save was in progress during the step."""
        self._trained_s += seconds
        (self._beside if is_saving else self._alone).append(seconds)

    def saved(self, blocked_s: float) -> None:
        """Record how long a save has blocked training. The steps with `is_saving` so far ran during the last save."""
        slowed_s = 0.0
        if self._alone:
            usual_s = statistics.median(self._alone)  # not the mean: first steps and evaluations take long
            slowed_s = max(0.0, sum(self._beside) - len(self._beside) * usual_s)
        self._beside.clear()
        cost_s = blocked_s + slowed_s
        self._cost_s = cost_s if self._cost_s is None else (self._cost_s + cost_s) / 2

    @property
    def seconds(self) -> float:
        """Return the seconds to train until the next save; 0 before the first one, which measures the cost."""
        if self._cost_s is None:
            return 0.0
        best = daly_interval_s(self._cost_s, mtbf_s(self._claims, self._claims[-1] + self._trained_s))
        return min(self._at_most_s, max(best, self._cost_s / self._overhead))
