"""Decides what rank 0 saves when a node of the group is about to be taken away.

It saves at once, because nodes have disappeared before their announced time. A final save starts as late as possible
while still finishing before the deadline, so that little of the work since then is lost. It begins no save that cannot
end in time, since that would only cost steps, unless ranks on other nodes can complete it.
"""

import math
import time
from collections.abc import Callable

from raycheck.group.ports import PreemptionNotice

SAFETY = 1.5
"""A save may take this many times as long as the last one, and the next step may be late by this factor."""
MARGIN_S = 1.0
ASSUMED_S = 110.0
"""Seconds left after a notice without a time. Ray Train waits 120 s from when it gets the notice."""


class Preemption:
    """Judge by the newest preemption notice whether a save fits before the node is taken away.

    clock: returns unix seconds, the unit of notices.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._notice: PreemptionNotice | None = None
        self._deadline = math.inf
        self._late_needed_s = math.inf  # how long the newest late save was expected to take

    @property
    def is_noticed(self) -> bool:
        return self._notice is not None

    def take_notice(self, notice: PreemptionNotice | None) -> bool:
        """Record the newest notice. Return whether its time differs from that of the last one."""
        if notice is None:
            return False
        before, self._notice = self._notice, notice
        if before is not None and notice.at == before.at:
            return False
        # A time that has passed already comes from another clock than this one: it does not say how much time is left.
        is_known = self._clock() < notice.at < math.inf
        self._deadline = notice.at if is_known else self._clock() + ASSUMED_S
        self._late_needed_s = math.inf
        return True

    def can_save_in_time(self, *, save_s: float, busy_s: float) -> bool:
        """Return whether a save that begins now can end before the node is taken away.

        save_s: for how long the ranks on that node are needed for a save. busy_s: how long the saves in progress may
        still take.
        """
        return self._left_s() > self._needed_s(save_s, busy_s)

    def take_last_chance(self, *, save_s: float, busy_s: float, again_s: float) -> bool:
        """Return True when a save fits now and would not fit at the next call, again_s later.

        It does so once per notice, and again if a save turns out to take less than half as long: the first save of a
        group takes much longer than the others.
        """
        needed_s = self._needed_s(save_s, busy_s)
        is_too_late_then = self._left_s() - SAFETY * again_s - MARGIN_S <= needed_s
        can_save = self.can_save_in_time(save_s=save_s, busy_s=busy_s)
        if needed_s > self._late_needed_s / 2 or not (is_too_late_then and can_save):
            return False
        self._late_needed_s = needed_s
        return True

    def _needed_s(self, save_s: float, busy_s: float) -> float:
        return busy_s + SAFETY * save_s

    def _left_s(self) -> float:
        return self._deadline - self._clock()
