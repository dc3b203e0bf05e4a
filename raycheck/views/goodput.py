"""Computes a run's goodput, the share of its time that became lasting training, and the highest possible goodput.

The limit is that of Young and Daly: if a save blocks training for C seconds, failures are M seconds apart, and a
restore takes R seconds, the best interval between saves leaves 1 - sqrt(2 C / M) - R / M. Downtime between attempts is
not included.
"""

import math
from collections.abc import Sequence

from raycheck.views.attempts import AttemptHistory, Ending

FAILURES: frozenset[Ending] = frozenset({"preempted", "failed", "driver lost", "gave up", "restarted"})
"""The involuntary endings. A resize, a change by hand, and the end of training do not count."""
MIN_FAILURES = 2


def goodput_of(*, trained_s: float | None, began_at: float | None, committed_at: float | None) -> float | None:
    """Return a checkpoint's seconds of training divided by the seconds from the run's start to its commit, 0 to 1.

    Returns None if one of them is unknown.
    """
    if trained_s is None or began_at is None or committed_at is None or committed_at <= began_at:
        return None
    return min(1.0, max(0.0, trained_s / (committed_at - began_at)))


def goodput_limit(
    attempts: Sequence[AttemptHistory], *, blocked_s: float | None, until: float | None = None
) -> float | None:
    """Return the highest possible goodput with the failures and restores of these attempts.

    blocked_s: how long a save blocks training. until: the time up to which an attempt without an end is known to be
    alive, in unix seconds. Returns None if a save's cost is unknown, for fewer than two failures, and if no restore was
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
