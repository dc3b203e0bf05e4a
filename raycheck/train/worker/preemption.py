"""What to save when a node of the group is about to go: rank 0's judgement of a preemption notice.

A save at once, since nodes have gone before their time; one more as late as it surely fits, so that little is lost of
what was trained since; none that cannot end in time, since that would only cost steps.
"""

import math
import time
from collections.abc import Callable

SAFETY = 1.5
"""A save may take so many times as long as the last one did, and the next step end may be so much later."""
MARGIN_S = 1.0
ASSUMED_S = 110.0
"""Ray Train waits 120 s from when it has heard of a notice without a time."""


class Preemption:
    """clock: unix seconds, as the notice has them."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._notice: float | None = None
        self._deadline = math.inf
        self._has_late_save = False

    @property
    def is_noticed(self) -> bool:
        return self._notice is not None

    def take_notice(self, notice: float | None) -> bool:
        """Whether this notice is news. notice: unix seconds at which the node goes, inf when that is not known."""
        if notice is None or notice == self._notice:
            return False
        # A time that is past already comes from another clock than this one: it says nothing about how much is left.
        is_known = self._clock() < notice < math.inf
        self._notice, self._deadline = notice, notice if is_known else self._clock() + ASSUMED_S
        self._has_late_save = False
        return True

    def can_save_in_time(self, *, save_s: float, busy_s: float) -> bool:
        """Whether a save that begins now can end in time. save_s: how long the last one took. busy_s: how long those
        under way may still take."""
        return self._left_s() > self._needed_s(save_s, busy_s)

    def take_last_chance(self, *, save_s: float, busy_s: float, again_s: float) -> bool:
        """Whether a save that begins now can end in time, and one that begins at the next question, again_s later, can
        not. True once per notice."""
        is_too_late_then = self._left_s() - SAFETY * again_s - MARGIN_S <= self._needed_s(save_s, busy_s)
        if self._has_late_save or not is_too_late_then:
            return False
        self._has_late_save = True
        return self.can_save_in_time(save_s=save_s, busy_s=busy_s)

    def _needed_s(self, save_s: float, busy_s: float) -> float:
        return busy_s + SAFETY * save_s

    def _left_s(self) -> float:
        return self._deadline - self._clock()
