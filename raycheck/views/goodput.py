"""Computes which share of a run's time stands, and which share could stand at best.

The limit is Young's and Daly's: with a save that holds up training for C seconds, failures M seconds apart and a
restore of R seconds, the best interval between saves leaves 1 - sqrt(2 C / M) - R / M. Downtime between two attempts is
not in it.
"""

import math
from collections.abc import Sequence

from raycheck.views.attempts import AttemptHistory, Ending

FAILURES: frozenset[Ending] = frozenset({"preempted", "failed", "driver lost", "gave up", "restarted"})
"""The endings that come unasked. A resize, a change by hand and the end of training do not count."""
MIN_FAILURES = 2


def goodput_of(*, trained_s: float | None, began_at: float | None, committed_at: float | None) -> float | None:
    """Return the seconds of training in a checkpoint by the seconds from the run's begin to its commit, 0 to 1.

    Returns None when one of them is not known.
    """
    if trained_s is None or began_at is None or committed_at is None or committed_at <= began_at:
        return None
    return min(1.0, max(0.0, trained_s / (committed_at - began_at)))


def goodput_limit(
    attempts: Sequence[AttemptHistory], *, blocked_s: float | None, until: float | None = None
) -> float | None:
    """Return the share of the time that could stand, with the failures and restores of these attempts.

    blocked_s: for how long a save holds up training. until: up to when an attempt that has not ended is known to live,
    in unix seconds. Returns None when a save's cost is not known, for fewer than two failures and when no restore was
    recorded.
    """
    failures = sum(item.ending in FAILURES for item in attempts)
    restores = [item.restore_s for item in attempts if item.restored is not None and item.restore_s is not None]
    lived_s = 0.0
    for item in attempts:
        end = until if item.ended_at is None else item.ended_at
        if item.world_size and end is not None:
            lived_s += max(0.0, end - item.began_at)
    if blocked_s is None or failures < MIN_FAILURES or not restores or lived_s <= 0:
        return None
    between_s = lived_s / failures
    lost = math.sqrt(2 * max(0.0, blocked_s) / between_s) + sum(restores) / len(restores) / between_s
    return max(0.0, 1.0 - lost)
