"""Keeps what the coordinator learns about the live group between saves, to report what the end of an attempt lost.

Rank 0's newest heartbeat says how far the group is, and Ray Train's controller says what happened to it. At the next
start, the two show how many steps were trained and lost, and why. All of this is in memory only, and only informs
people. If the driver died, it is gone; what was lost is then unknown, and reported as unknown.
"""

import time
from collections.abc import Callable, Iterable, Sequence

from raycheck.bucket.attempt_records import HAD_FINISHED, AttemptRecord, ResumeRecord
from raycheck.bucket.format.latest import Attempt, Entry
from raycheck.group.coordinator.messages import Arrival, HeartbeatMessage

MAX_CAUSE = 500


class LostWork:
    """The progress of the live group, from which the next attempt's `ResumeRecord` is made.

    cause: why the attempt before the live one ended. newest: the live group's newest heartbeat. has_trained: whether
    any group of this driver has completed a step, as far as this process can tell; a coordinator that was started again
    assumes so.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.cause = ""
        self.newest: HeartbeatMessage | None = None
        self.has_trained = False
        self._clock = clock
        self._attempt: Attempt | None = None
        self._before: Attempt | None = None
        self._began = 0.0
        self._reached: tuple[int, float] | None = None  # step and trained seconds of the live attempt
        self._last: tuple[int, float] | None = None  # those of the attempts before it, by which lost work is counted
        self._has_lost_nothing = False
        self._furthest: int | None = None
        self._failures: list[str] = []

    @property
    def attempt(self) -> int | None:
        """Return the number of the live attempt, as far as this process knows it."""
        return None if self._attempt is None else self._attempt.number

    @property
    def now(self) -> float:
        """Return the store's time in unix seconds: the claim's time plus the time that has passed on this process's
        clock."""
        return self._began + self._clock()

    def claimed(
        self,
        before: Attempt | None,
        attempt: Attempt,
        *,
        now: float,
        record: AttemptRecord | None = None,
        had_finished: bool = False,
    ) -> None:
        """Make `attempt` the live one, after `before` has ended.

        now: the store's time in unix seconds. record: what the driver of `before` wrote about its end. had_finished:
        `before` had come to the end of training.
        """
        is_ours = self._attempt is not None and before is not None and before.group == self._attempt.group
        self.has_trained |= self._attempt is None and before is not None and before.owner == attempt.owner
        # If the last attempt ended before it had restored, report what the attempt before that lost.
        self._last = (self._reached or self._last) if is_ours else None
        self._furthest = max(self._furthest or 0, self._last[0]) if self._last else None
        self._reached = None
        self._has_lost_nothing = had_finished
        self.cause = _cause(before, attempt, self._failures, record, had_finished=had_finished) if before else ""
        self._attempt, self._before, self._began = attempt, before, now - self._clock()
        self.newest, self._failures = None, []

    def heartbeat(self, group: str, message: HeartbeatMessage) -> None:
        """Record a heartbeat of rank 0. A late heartbeat of a group that is gone is ignored."""
        if self._attempt is not None and group == self._attempt.group:
            self.newest = message
            self.has_trained |= self._reached is None or message.step > self._reached[0]
            self._reached = message.step, message.trained_s

    def group_failed(self, causes: Iterable[str]) -> None:
        """Record what Ray Train's controller saw happen to the live group. A repeated cause counts once."""
        self._failures += [cause for cause in causes if cause not in self._failures]

    def resume(
        self, entry: Entry | None, arrivals: Sequence[Arrival], *, is_from_memory: bool = False
    ) -> ResumeRecord | None:
        """Return how the live attempt resumes, once all its ranks have restored `entry`; None for a run's first.

        arrivals: the ranks' arrivals, in order. is_from_memory: `entry` is a memory checkpoint.
        """
        first = arrivals[0] if arrivals else Arrival()
        last, self._reached = self._last, (first.step, first.trained_s)
        if self._has_lost_nothing:
            last = self._reached
        if self._attempt is None or self._before is None:
            return None
        return ResumeRecord(
            attempt=self._attempt.number,
            after=self._before.number,
            cause=self.cause,
            restored=entry.key if entry else None,
            step=first.step,
            world_size_before=self._before.world_size,
            world_size=self._attempt.world_size,
            lost_steps=max(0, last[0] - first.step) if last else None,
            lost_s=max(0.0, last[1] - first.trained_s) if last else None,
            since_commit_s=max(0.0, self.now - entry.committed_at) if entry else None,
            restore_s=max((arrival.seconds for arrival in arrivals), default=0.0),
            restore_bytes=sum(arrival.bytes_fetched for arrival in arrivals),
            what=first.what,
            furthest_step=self._furthest,
            is_from_memory=is_from_memory,
        )


def _cause(
    before: Attempt, by: Attempt, failures: Sequence[str], record: AttemptRecord | None, *, had_finished: bool
) -> str:
    """Return in words why attempt `before` ended, which `by` has replaced."""
    if had_finished:
        return HAD_FINISHED
    if before.owner != by.owner:
        if not before.world_size or not before.number:
            return "the run was rewound, repaired or copied"
        return f"its driver gave up: {record.cause}" if record else "its driver was killed or replaced by another one"
    if failures:
        return "; ".join(failures)[:MAX_CAUSE]
    if before.world_size != by.world_size:
        return f"Ray changed the group from {before.world_size} to {by.world_size} ranks"
    return "the same driver restarted its workers"
