"""What the coordinator hears of the live group between saves: how far it is, and what hurt it. From that, at the next
start, what the end of an attempt cost.

In memory only, and nothing depends on it but what people are told. A driver that died took it along; then the cost is
not known, and said so.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from raycheck.bucket.attempt_records import AttemptRecord, ResumeRecord
from raycheck.bucket.format.latest import Attempt, Entry
from raycheck.train.coordinator.rendezvous import Arrival

MAX_CAUSE = 500


@dataclass(frozen=True, kw_only=True, slots=True)
class HeartbeatMessage:
    """What rank 0 says now and then: completed steps, seconds of training that stand in them, how long the last step
    took, when the run began by the store's clock, of which step it has begun its newest save, and how many saves have
    failed or were skipped in this attempt."""

    step: int
    trained_s: float
    step_s: float = 0.0
    began_at: float
    begun: int = -1
    failed: int = 0
    skipped: int = 0


class LostWork:
    """Of one live group at a time. cause: why the attempt before it ended. pulse: its newest word. has_trained: whether
    any group of this driver has completed a step, as far as this process can tell: a coordinator that was started again
    takes it for granted."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._attempt: Attempt | None = None
        self._before: Attempt | None = None
        self._began = 0.0
        self._reached: tuple[int, float] | None = None
        self._last: tuple[int, float] | None = None
        self._has_lost_nothing = False
        self._furthest: int | None = None
        self.cause = ""
        self._hurts: list[str] = []
        self.pulse: HeartbeatMessage | None = None
        self.has_trained = False

    @property
    def now(self) -> float:
        """By the store's clock, as far as the claim and this process's clock tell."""
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
        """`attempt` is the live one, after `before` has ended. now: by the store's clock. record: what the driver of
        `before` said about its end. had_finished: `before` had come to the end of training."""
        is_ours = self._attempt is not None and before is not None and before.group == self._attempt.group
        self.has_trained |= self._attempt is None and before is not None and before.owner == attempt.owner
        # An attempt that ended before it had restored has lost nothing itself: what the one before lost is still lost.
        self._last = (self._reached or self._last) if is_ours else None
        self._furthest = max(self._furthest or 0, self._last[0]) if self._last else None
        self._reached = None
        self._has_lost_nothing = had_finished
        self.cause = _cause(before, attempt, self._hurts, record, had_finished=had_finished) if before else ""
        self._attempt, self._before, self._began = attempt, before, now - self._clock()
        self.pulse, self._hurts = None, []

    def beat(self, group: str, pulse: HeartbeatMessage) -> None:
        if self._attempt is not None and group == self._attempt.group:  # a word of a group that is gone may come late
            self.pulse = pulse
            self.has_trained |= self._reached is None or pulse.step > self._reached[0]
            self._reached = pulse.step, pulse.trained_s

    def hurt(self, causes: Iterable[str]) -> None:
        """What Ray's controller saw of the live group. It may come twice."""
        self._hurts += [cause for cause in causes if cause not in self._hurts]

    def resume(self, entry: Entry | None, arrivals: Sequence[Arrival]) -> ResumeRecord | None:
        """How the live attempt went on, once all its ranks have restored `entry`, by rank. None for a run's first."""
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
        )


def _cause(
    before: Attempt, by: Attempt, hurts: Sequence[str], record: AttemptRecord | None, *, had_finished: bool
) -> str:
    if had_finished:
        return "it had finished"
    if before.owner != by.owner:
        if not before.world_size or not before.number:
            return "the run was rewound, repaired or copied"
        return f"its driver gave up: {record.cause}" if record else "its driver was killed or replaced by another one"
    if hurts:
        return "; ".join(hurts)[:MAX_CAUSE]
    if before.world_size != by.world_size:
        return f"Ray changed the group from {before.world_size} to {by.world_size} ranks"
    return "the same driver restarted its workers"
