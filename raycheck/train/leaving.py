"""What to save when a node of the group is about to go: rank 0's judgement of a preemption notice.

A save at once, since nodes have gone before their time; one more as late as it surely fits, so that little is lost of
what was trained since; none that cannot end in time, since that would only cost steps.
"""

import math
import time
from collections.abc import Callable

SAFETY = 1.5
"""A save may take so many times as long as the last one did."""
LATE_S = 2.0
"""How much earlier than needed the late save begins: rank 0 is asked only so often."""


class Leaving:
    """clock: unix seconds, as the notice has them."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._notice: float | None = None
        self._deadline = math.inf
        self._has_late_save = False

    @property
    def is_noticed(self) -> bool:
        return self._notice is not None

    def hear(self, notice: float | None) -> bool:
        """Whether this notice is news. notice: unix seconds at which the node goes, inf when that is not known."""
        if notice is None or notice == self._notice:
            return False
        # A time that is past already comes from another clock than this one: it says nothing about how much is left.
        self._notice, self._deadline = notice, notice if notice > self._clock() else math.inf
        self._has_late_save = False
        return True

    def fits(self, *, save_s: float, busy_s: float) -> bool:
        """Whether a save that begins now can end in time. save_s: how long the last one took. busy_s: how long the one
        under way may still take."""
        return self._left_s() > busy_s + SAFETY * save_s

    def is_late(self, *, save_s: float, busy_s: float) -> bool:
        """Whether this is the moment for the late save. True once per notice."""
        if self._has_late_save or self._left_s() > LATE_S + busy_s + 2 * SAFETY * save_s:
            return False
        self._has_late_save = True
        return self.fits(save_s=save_s, busy_s=busy_s)

    def _left_s(self) -> float:
        return self._deadline - self._clock()
