"""What rank 0 has to do with the coordinator between saves: say how far it is, hear whether a save is wanted, and find
out that the attempt is over."""

import threading
import time
from collections.abc import Callable
from typing import Any

from raycheck.errors import CorruptError, FencedError, RaycheckError, SupersededError
from raycheck.train.coordinator.lost_work import HeartbeatMessage
from raycheck.train.group import CLAIM_TIMEOUT_S, Group
from raycheck.train.log import logger

BEAT_S = 1.0
WATCH_S = 45.0
"""How often the coordinator looks at `latest` for rank 0."""


class Heartbeat:
    """Silent on the other ranks. Never waits."""

    def __init__(self, group: Group, clock: Callable[[], float] = time.monotonic) -> None:
        self._group = group
        self._clock = clock
        self._beaten = float("-inf")
        self._told: Any = None

    def take_save_request(self) -> bool:
        """Return whether the coordinator has answered the last heartbeat by asking for a save. It says so once."""
        answer = None if self._told is None else self._group.answer(self._told)
        if answer is not None:
            self._told = None
        return bool(answer)

    def send(self, pulse: Callable[[], HeartbeatMessage], *, is_last: bool = False) -> None:
        """About once a second."""
        if self._group.rank or (self._clock() - self._beaten < BEAT_S and not is_last):
            return
        self._beaten = self._clock()
        self._told = self._group.tell("beat", self._group.id, pulse())


class FencingWatch:
    """A thread on rank 0 that learns that the attempt is over even when no save is due."""

    def __init__(self, group: Group) -> None:
        self.over: RaycheckError | None = None
        self._group = group
        self._is_ended = threading.Event()

    def start(self) -> None:
        if self._group.rank == 0:
            threading.Thread(target=self._run, name="raycheck-watch", daemon=True).start()

    def end(self) -> None:
        self._is_ended.set()

    @property
    def is_ended(self) -> bool:
        return self._is_ended.is_set()

    def _run(self) -> None:
        while not self._is_ended.wait(WATCH_S):
            try:
                self._group.ask("watch", self._group.id, timeout_s=CLAIM_TIMEOUT_S, what="watch")
            except (FencedError, SupersededError, CorruptError) as error:
                self.over = error
                return
            except RaycheckError as error:
                logger.warning("the run's latest could not be watched: %s", error)
