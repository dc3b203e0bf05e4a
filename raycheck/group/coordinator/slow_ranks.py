"""Finds the slowest rank of an upload or a restore that takes long, and has it logged and recorded while others wait.

The ranks say how far they are (worker/slow_progress.py). All of this only informs people. Its work is linear in the
ranks, and done at most once a second, however many of them call.
"""

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from raycheck.bucket.attempt_records import SlowRecord
from raycheck.group.coordinator.messages import Pending, RankProgress
from raycheck.group.coordinator.rendezvous import Rendezvous
from raycheck.group.coordinator.run_log import RunLog

Answer = TypeVar("Answer")
LOOK_EVERY_S = 1.0
FAR_BEHIND = 0.5
"""A rank is slow when it has done less than this share of what half of the ranks have done."""
MAX_TRANSFERS = 4
"""Of how many uploads and restores is known how far the ranks are: no more are in progress."""


@dataclass(slots=True)
class _Transfer:
    """One upload or restore of a group. told: the newest message of each rank. slowest: in words, "" while unknown."""

    told: dict[int, RankProgress] = field(default_factory=dict)
    looked_at: float = float("-inf")
    slowest: str = ""
    named: set[int] = field(default_factory=set)


class SlowRanks:
    """How far the ranks are with the uploads and restores that take long."""

    def __init__(self, run_log: RunLog, clock: Callable[[], float] = time.monotonic) -> None:
        self._run_log = run_log
        self._clock = clock
        self._all: dict[tuple[str, str], _Transfer] = {}  # by group and checkpoint

    def note(self, progress: RankProgress, rendezvous: Rendezvous[Any, Any] | None) -> str:
        """Take a rank's message. Return which rank is the slowest, in words; "" while that is not known.

        rendezvous: where the ranks come that have finished; None while there is none.
        """
        at = progress.group, progress.checkpoint
        if rendezvous is not None and rendezvous.is_decided:
            self._all.pop(at, None)
            return ""
        found = self._all.setdefault(at, _Transfer())
        found.told[progress.rank] = progress
        if self._clock() - found.looked_at >= LOOK_EVERY_S:
            found.looked_at = self._clock()
            self._look(found, progress, () if rendezvous is None else rendezvous.came)
            while len(self._all) > MAX_TRANSFERS:
                del self._all[next(iter(self._all))]
        return found.slowest

    def named_in(self, answer: Answer, group: str, checkpoint: str) -> Answer:
        """Return the answer to a rank that waits; if it names missing ranks, with how far the slowest one is."""
        found = self._all.get((group, checkpoint))
        if found is None or not found.slowest or not isinstance(answer, Pending):
            return answer
        return replace(answer, message=f"{answer.message}; slowest: {found.slowest}")

    def _look(self, found: _Transfer, progress: RankProgress, came: Collection[int]) -> None:
        shares = [0.0] * progress.world_size
        for rank, told in found.told.items():
            shares[rank] = told.share
        for rank in came:
            shares[rank] = 1.0
        rank = min(found.told, key=shares.__getitem__)
        slowest, finished = found.told[rank], sum(share == 1.0 for share in shares)
        if shares[rank] == 1.0:
            found.slowest = ""
            return
        record = SlowRecord(
            attempt=self._run_log.attempt or 0,
            at=self._run_log.now,
            checkpoint=slowest.checkpoint,
            is_restore=slowest.save is None,
            rank=rank,
            node=slowest.node,
            object=slowest.object,
            done_bytes=slowest.done_bytes,
            wanted_bytes=slowest.wanted_bytes,
            seconds=slowest.seconds,
            finished=finished,
            world_size=progress.world_size,
        )
        found.slowest = str(record)
        typical = sorted(shares)[progress.world_size // 2]
        if finished == progress.world_size - 1 or shares[rank] < FAR_BEHIND * typical:
            self._run_log.slow(record, is_new=rank not in found.named)
            found.named.add(rank)
