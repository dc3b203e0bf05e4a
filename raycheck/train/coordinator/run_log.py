"""What people are told of a run while it goes on: log lines, metrics, and the two documents of each attempt.

In the coordinator. Nothing in a running system depends on it, so nothing here raises for a store that fails.
"""

import asyncio
from collections.abc import Sequence

from raycheck.bucket.attempt_records import (
    AttemptRecord,
    ResumeRecord,
    read_record,
    record_end,
    record_failure,
    record_resume,
)
from raycheck.bucket.format.latest import Attempt, Entry, Latest
from raycheck.bucket.format.manifest import Manifest
from raycheck.bucket.store import Store
from raycheck.errors import RaycheckError
from raycheck.train.coordinator.lost_work import MAX_CAUSE, HeartbeatMessage, LostWork
from raycheck.train.coordinator.ray_metrics import RayMetrics
from raycheck.train.coordinator.rendezvous import Arrival
from raycheck.train.log import logger, name_of

TICK_S = 5.0
"""How often metrics that age are brought up to date."""


class RunLog:
    """Of one run, as one coordinator sees it."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._run = name_of(store.uri)
        self._lifeline = LostWork()
        self._telemetry = RayMetrics(store.uri)
        self._ticking: asyncio.Task[None] | None = None
        self._recording: asyncio.Task[None] | None = None

    def claimed(
        self, before: Attempt | None, attempt: Attempt, entry: Entry | None, *, had_finished: bool = False
    ) -> None:
        """`attempt` has just become the live one, and restores `entry`. before: what it ended, if anything.
        had_finished: that one had come to the end of training. In a thread."""
        then = f"restoring {entry.key}" if entry else "starting fresh"
        end = ", with which the run had finished" if had_finished else ""
        logger.info(
            "%s attempt %d: %d ranks, %s%s; %s",
            self._run,
            attempt.number,
            attempt.world_size,
            then,
            end,
            self._store.uri,
        )
        record = self._record_of(before) if before and before.owner != attempt.owner else None
        self._lifeline.claimed(before, attempt, now=attempt.claimed_at, record=record, had_finished=had_finished)
        self._telemetry.begin(attempt.number, entry, now=attempt.claimed_at)
        if before and not record and not record_end(self._store, before, by=attempt, cause=self._lifeline.cause):
            logger.info("%s attempt %d: its record was not written, or was there already", self._run, before.number)

    def adopted(self, attempt: Attempt, newest: Entry | None, *, now: float) -> None:
        """Another start of the coordinator had `attempt` claimed. now: by the store's clock. In a thread."""
        self._lifeline.claimed(None, attempt, now=now)
        self._lifeline.has_trained = True
        self._telemetry.begin(attempt.number, newest, now=now, is_adopted=True)

    def resumed(self, entry: Entry | None, arrivals: Sequence[Arrival]) -> ResumeRecord | None:
        """All ranks of the live attempt have restored `entry`. In the event loop."""
        resume = self._lifeline.resume(entry, arrivals)
        if resume is not None:
            logger.info("%s attempt %d goes on %s", self._run, resume.attempt, resume)
            self._telemetry.restored(resume)
            self._recording = asyncio.create_task(self._record(resume))
        return resume

    def beat(self, group: str, pulse: HeartbeatMessage) -> None:
        """In the event loop."""
        self._lifeline.beat(group, pulse)
        self._ticking = self._ticking or asyncio.create_task(self._tick())

    def hurt(self, causes: Sequence[str]) -> None:
        self._lifeline.hurt(causes)

    @property
    def has_trained(self) -> bool:
        """Whether any group of this driver has completed a step; see Lifeline."""
        return self._lifeline.has_trained

    def finished(self, body: Latest) -> None:
        """The live attempt has come to the end of training, and `body` says so."""
        end = f"with {body.head}" if body.head else "with nothing committed"
        logger.info("%s attempt %d: finished %s", self._run, body.attempt.number, end)

    def failed(self, attempt: Attempt, *, at: float, cause: str, is_final: bool) -> None:
        """The driver gives the run up. at: by the store's clock. In a thread."""
        if not record_failure(self._store, attempt, at=at, cause=cause[:MAX_CAUSE], is_final=is_final):
            logger.info("%s attempt %d: its record was not written, or was there already", self._run, attempt.number)

    def committed(self, manifest: Manifest, *, seconds: float) -> None:
        """seconds: from the last report to the commit."""
        self._telemetry.committed(manifest, seconds=seconds)
        blocked, staged, sent = (
            max(manifest.ranks, key=lambda rank: getattr(rank, name)) for name in ("blocked_s", "staged_s", "upload_s")
        )
        written = sum(rank.size_bytes for rank in manifest.ranks) / 1e6
        logger.info(
            f"{self._run} attempt {manifest.attempt}: committed {manifest.key}, {written:.1f} MB, "
            f"{written / max(sent.upload_s, 1e-9):.0f} MB/s over all ranks; at most, training blocked "
            f"{blocked.blocked_s:.3f} s (rank {blocked.rank}), copied in {staged.staged_s:.3f} s (rank {staged.rank}), "
            f"uploaded in {sent.upload_s:.2f} s (rank {sent.rank}); committed in {seconds:.2f} s"
        )

    def _record_of(self, ended: Attempt) -> AttemptRecord | None:
        try:
            return read_record(self._store, ended.number)
        except RaycheckError:  # for people only
            return None

    async def _record(self, resume: ResumeRecord) -> None:
        if not await asyncio.to_thread(record_resume, self._store, resume):
            text = "how it began was not written, or was there already"
            logger.info("%s attempt %d: %s", self._run, resume.attempt, text)

    async def _tick(self) -> None:
        while True:
            self._telemetry.tick(self._lifeline.pulse, now=self._lifeline.now)
            await asyncio.sleep(TICK_S)
