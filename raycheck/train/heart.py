"""Rank 0's word to the coordinator about how far it is, and the coordinator's answer whether a save is wanted."""

import time
from collections.abc import Callable
from typing import Any

from raycheck.train.group import Group
from raycheck.train.lifeline import Pulse

BEAT_S = 1.0


class Heart:
    """Silent on the other ranks. Never waits."""

    def __init__(self, group: Group, clock: Callable[[], float] = time.monotonic) -> None:
        self._group = group
        self._clock = clock
        self._beaten = float("-inf")
        self._told: Any = None

    @property
    def is_save_wanted(self) -> bool:
        """Whether the last word was answered so; said once."""
        answer = None if self._told is None else self._group.answer(self._told)
        if answer is not None:
            self._told = None
        return bool(answer)

    def beat(self, pulse: Callable[[], Pulse], *, is_last: bool = False) -> None:
        """About once a second."""
        if self._group.rank or (self._clock() - self._beaten < BEAT_S and not is_last):
            return
        self._beaten = self._clock()
        self._told = self._group.tell("beat", self._group.id, pulse())
