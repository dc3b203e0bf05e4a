"""Rank 0 and the coordinator keep in touch between saves.

About once a second, rank 0 sends a heartbeat, which says how far training is. The answer says whether a save is wanted.
A second thread has the coordinator check from time to time that this attempt has not been fenced.
"""

import threading
import time
from collections.abc import Callable
from typing import Any

from raycheck.errors import CorruptError, FencedError, RaycheckError, SupersededError
from raycheck.group.coordinator.messages import HeartbeatMessage
from raycheck.group.group import CLAIM_TIMEOUT_S, Group
from raycheck.log import event, logger

HEARTBEAT_S = 1.0
WATCH_S = 45.0
"""How often the coordinator reads `latest` for rank 0."""


class Heartbeat:
    """The sender of rank 0's heartbeats to the coordinator. It never waits, and sends nothing on the other ranks."""

    def __init__(self, group: Group, clock: Callable[[], float] = time.monotonic) -> None:
        self._group = group
        self._clock = clock
        self._sent_at = float("-inf")
        self._unanswered: Any = None

    def take_save_request(self) -> bool:
        """Return True, once, if the coordinator has answered the last heartbeat with a request for a save."""
        answer = None if self._unanswered is None else self._group.answer(self._unanswered)
        if answer is not None:
            self._unanswered = None
        return bool(answer)

    def send(self, message: Callable[[], HeartbeatMessage], *, is_last: bool = False) -> None:
        """Send a heartbeat, unless the last one is less than a second old. is_last: send it in any case."""
        if self._group.rank or (self._clock() - self._sent_at < HEARTBEAT_S and not is_last):
            return
        self._sent_at = self._clock()
        self._unanswered = self._group.tell("heartbeat", self._group.id, message())


class FencingWatch:
    """A thread on rank 0 that finds out when the attempt is over, even when no save is due.

    over: the error that ended it, None while it is live.
    """

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
                self._group.ask("check_live", self._group.id, timeout_s=CLAIM_TIMEOUT_S, what="watch")
            except (FencedError, SupersededError, CorruptError) as error:
                self.over = error
                return
            except RaycheckError as error:
                logger.warning(event("could not check latest for a newer attempt", cause=error, run=self._group.uri))
