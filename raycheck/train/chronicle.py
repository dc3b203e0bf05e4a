"""What people are told of a run while it goes on: log lines, metrics, and the two documents of each attempt.

In the coordinator. Nothing in a running system depends on it, so nothing here raises for a store that fails.
"""

import asyncio
from collections.abc import Sequence

from raycheck.bucket.latest import Attempt, Entry
from raycheck.bucket.manifest import Manifest
from raycheck.bucket.record import Resume, record_end, record_resume
from raycheck.bucket.store import Store
from raycheck.train.lifeline import Lifeline, Pulse
from raycheck.train.log import logger
from raycheck.train.meeting import Arrival
from raycheck.train.telemetry import Telemetry

TICK_S = 5.0
"""How often metrics that age are brought up to date."""


class Chronicle:
    """Of one run, as one coordinator sees it."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lifeline = Lifeline()
        self._telemetry = Telemetry(store.uri)
        self._ticking: asyncio.Task[None] | None = None
        self._recording: asyncio.Task[None] | None = None

    def claimed(self, before: Attempt | None, attempt: Attempt, entry: Entry | None) -> None:
        """`attempt` has just become the live one, and restores `entry`. before: what it ended, if anything. In a
        thread."""
        then = f"restoring {entry.key}" if entry else "starting fresh"
        logger.info("run %s attempt %d: %d ranks, %s", self._store.uri, attempt.number, attempt.world_size, then)
        self._lifeline.claimed(before, attempt, now=attempt.claimed_at)
        self._telemetry.begin(attempt.number, entry, now=attempt.claimed_at)
        if before and not record_end(self._store, before, by=attempt, cause=self._lifeline.cause):
            logger.info("attempt %d: its record was not written, or was there already", before.number)

    def adopted(self, attempt: Attempt, newest: Entry | None, *, now: float) -> None:
        """Another start of the coordinator had `attempt` claimed. now: by the store's clock. In a thread."""
        self._lifeline.claimed(None, attempt, now=now)
        self._telemetry.begin(attempt.number, newest, now=now, is_adopted=True)

    def resumed(self, entry: Entry | None, arrivals: Sequence[Arrival]) -> Resume | None:
        """All ranks of the live attempt have restored `entry`. In the event loop."""
        resume = self._lifeline.resume(entry, arrivals)
        if resume is not None:
            logger.info("run %s attempt %d goes on %s", self._store.uri, resume.attempt, resume)
            self._telemetry.restored(resume)
            self._recording = asyncio.create_task(self._record(resume))
        return resume

    def beat(self, group: str, pulse: Pulse) -> None:
        """In the event loop."""
        self._lifeline.beat(group, pulse)
        self._ticking = self._ticking or asyncio.create_task(self._tick())

    def hurt(self, causes: Sequence[str]) -> None:
        self._lifeline.hurt(causes)

    def committed(self, manifest: Manifest, *, seconds: float) -> None:
        """seconds: from the last report to the commit."""
        self._telemetry.committed(manifest, seconds=seconds)
        blocked, staged, sent = (
            max(manifest.ranks, key=lambda rank: getattr(rank, name)) for name in ("blocked_s", "staged_s", "upload_s")
        )
        written = sum(rank.size_bytes for rank in manifest.ranks) / 1e6
        logger.info(
            f"run {self._store.uri} attempt {manifest.attempt}: committed {manifest.key}, {written:.1f} MB, "
            f"{written / max(sent.upload_s, 1e-9):.0f} MB/s over all ranks; at most, training blocked "
            f"{blocked.blocked_s:.3f} s (rank {blocked.rank}), copied in {staged.staged_s:.3f} s (rank {staged.rank}), "
            f"uploaded in {sent.upload_s:.2f} s (rank {sent.rank}); committed in {seconds:.2f} s"
        )

    async def _record(self, resume: Resume) -> None:
        if not await asyncio.to_thread(record_resume, self._store, resume):
            logger.info("attempt %d: how it began was not written, or was there already", resume.attempt)

    async def _tick(self) -> None:
        while True:
            self._telemetry.tick(self._lifeline.pulse, now=self._lifeline.now)
            await asyncio.sleep(TICK_S)
