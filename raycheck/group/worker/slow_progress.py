"""Reports a slow upload or restore to the coordinator, and learns which rank is slowest.

Others wait for a rank that is slow, and cannot see why. Nothing is sent in a restore or a save that is soon over.
"""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from raycheck.bucket.attempt_records import bytes_of
from raycheck.bucket.store.moved_bytes import MovedBytes, counting
from raycheck.bucket.store.retry import ends_by
from raycheck.errors import StoreError
from raycheck.group.coordinator.messages import RankProgress
from raycheck.group.group import Group

FIRST_AFTER_S = 30.0
"""How long an upload or a restore takes before it is called slow. With less time than four times this, a quarter."""
EVERY_S = 10.0


class SlowProgress:
    """One rank's upload or restore: what it has moved, and what the coordinator knows of the others.

    moved: see MovedBytes.
    """

    def __init__(
        self, group: Group, checkpoint: str, save: int | None, limit_s: float, *, is_deferred: bool = False
    ) -> None:
        self.moved = MovedBytes(limit_s, self._late)
        self._group = group
        self._checkpoint = checkpoint
        self._save = save
        self._is_deferred = is_deferred
        self._node = socket.gethostname()
        self._told: Any = None
        self._slowest = ""

    def tell(self) -> None:
        """Tell the coordinator how far it is, without waiting, and take the answer to the call before."""
        self._listen()
        with suppress(Exception):  # a coordinator that is being started again is told the next time
            self._told = self._group.tell("note_progress", self._message())

    def __str__(self) -> str:
        """Return in words how far this rank is, and which one is the slowest, if that is another one."""
        self._listen()
        mine, verb = self._message(), "read" if self._save is None else "sent"
        at_hand = f", and is at {mine.object}" if mine.object else ""
        text = f"on node {mine.node}, {verb} {bytes_of(mine.done_bytes, mine.wanted_bytes)}{at_hand}"
        is_mine = f": rank {mine.rank} " in self._slowest
        return text if is_mine or not self._slowest else f"{text}; slowest: {self._slowest}"

    def _late(self, error: StoreError) -> StoreError:
        """Return the error of a restore whose time is over. All ranks are told it, so it names this one."""
        return StoreError(
            f"rank {self._group.rank}: restore of {self._checkpoint}: not done within {self.moved.limit_s:.0f} s: "
            f"{self} ({error}). If only one node is slow, replace it; if all are, give "
            "SaveSettings(save_timeout_s=...) a larger value"
        )

    def _listen(self) -> None:
        with suppress(Exception):
            if self._told is not None and (said := self._group.answer(self._told)) is not None:
                self._slowest = said

    def _message(self) -> RankProgress:
        return RankProgress(
            group=self._group.id,
            rank=self._group.rank,
            world_size=self._group.world_size,
            node=self._node,
            checkpoint=self._checkpoint,
            save=self._save,
            is_deferred=self._is_deferred,
            done_bytes=self.moved.done,
            wanted_bytes=self.moved.wanted,
            object=self.moved.object,
            seconds=self.moved.seconds,
        )


@contextmanager
def slow_progress(
    group: Group,
    checkpoint: str,
    *,
    save: int | None = None,
    until: float,
    limit_s: float,
    is_deferred: bool = False,
) -> Iterator[SlowProgress]:
    """Count what this thread moves inside the block, and tell the coordinator if it takes long.

    save: its number; None for a restore. until: when the requests of the block must have ended, by time.monotonic.
    limit_s: how long that is after the beginning; errors name it. is_deferred: the restore has returned already.
    """
    told, is_over = SlowProgress(group, checkpoint, save, limit_s, is_deferred=is_deferred), threading.Event()

    def tell() -> None:
        pause_s = min(FIRST_AFTER_S, limit_s / 4)
        while not is_over.wait(pause_s):
            told.tell()
            pause_s = min(EVERY_S, limit_s / 4)

    if group.world_size > 1:
        threading.Thread(target=tell, name="raycheck-progress", daemon=True).start()
    try:
        with counting(told.moved), ends_by(until):
            yield told
    finally:
        is_over.set()
