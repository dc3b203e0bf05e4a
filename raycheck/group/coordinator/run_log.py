"""Reports on a run while it is running: log lines, metrics, and the two documents of each attempt.

Nothing in a running system depends on these reports, so nothing here raises when the store fails.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace

from raycheck.bucket.attempt_records import (
    AttemptRecord,
    ResumeRecord,
    SlowRecord,
    read_record,
    record_end,
    record_failure,
    record_resume,
    record_slow,
)
from raycheck.bucket.format.latest import Attempt, Entry, Latest
from raycheck.bucket.format.manifest import Manifest
from raycheck.bucket.store import Store
from raycheck.errors import RaycheckError
from raycheck.group.coordinator.cluster import Metrics
from raycheck.group.coordinator.lost_work import MAX_CAUSE, LostWork
from raycheck.group.coordinator.messages import Arrival, HeartbeatMessage
from raycheck.log import event, logger

TICK_S = 5.0
"""How often the metrics that change with time are updated."""


class RunLog:
    """The log lines, metrics and attempt documents of one run, as one coordinator sees it."""

    def __init__(self, store: Store, metrics: Metrics | None = None) -> None:
        self._store = store
        self._lost_work = LostWork()
        self._metrics = metrics or Metrics()
        self._ticking: asyncio.Task[None] | None = None
        self._slow: Future[None] | None = None
        self._documents = ThreadPoolExecutor(1, thread_name_prefix="raycheck-records")  # no rank waits for them

    def claimed(
        self, before: Attempt | None, attempt: Attempt, entry: Entry | None, *, finished_at: float | None = None
    ) -> None:
        """Log that `attempt` has just become the live one, and which checkpoint it restores. Call it in a thread.

        entry: that checkpoint; None in a fresh run. before: the attempt that it ended, if any. finished_at: when
        `before` came to the end of training, None if it did not.
        """
        then = f"restoring {entry.key}" if entry else "starting fresh"
        had_finished = finished_at is not None
        end = ", with which the run had finished" if had_finished else ""
        self._info(f"claimed the run, {then}{end}", attempt=attempt.number, world_size=attempt.world_size)
        record = self._record_of(before) if before and before.owner != attempt.owner else None
        self._lost_work.claimed(before, attempt, now=attempt.claimed_at, record=record, had_finished=had_finished)
        self._metrics.begin(attempt.number, entry, now=attempt.claimed_at)
        if before and not record:
            cause = self._lost_work.cause
            self._record(
                "end",
                before.number,
                lambda: record_end(self._store, before, by=attempt, cause=cause, finished_at=finished_at),
            )

    def adopted(self, attempt: Attempt, newest: Entry | None, *, now: float) -> None:
        """Take over `attempt`, which an earlier start of this coordinator has claimed. Call it in a thread.

        newest: the newest commit. now: the store's time in unix seconds.
        """
        self._lost_work.claimed(None, attempt, now=now)
        self._lost_work.has_trained = True
        self._metrics.begin(attempt.number, newest, now=now, is_adopted=True)

    def resumed(
        self,
        entry: Entry | None,
        arrivals: Sequence[Arrival],
        *,
        is_from_memory: bool = False,
        memory_problem: str = "",
    ) -> ResumeRecord | None:
        """Log that all ranks of the live attempt have restored `entry`. Return what the end of the last attempt cost.

        is_from_memory, memory_problem: see ResumeRecord. Returns None for a run's first attempt. Call it in the event
        loop.
        """
        resume = self._lost_work.resume(entry, arrivals, is_from_memory=is_from_memory)
        if resume is not None:
            resume = replace(resume, memory_problem=memory_problem[:MAX_CAUSE])
            self._info(
                f"resumed after attempt {resume.after} ({resume.cause}): {resume.what}",
                step=resume.step,
                attempt=resume.attempt,
                restored=resume.restored or "nothing",
                is_from_memory=resume.is_from_memory,
                **({"memory_problem": resume.memory_problem} if resume.memory_problem else {}),
                world_size=resume.world_size,
                world_size_before=resume.world_size_before,
                lost_steps="unknown" if resume.lost_steps is None else resume.lost_steps,
                lost_s=resume.lost_s,
                since_commit_s=resume.since_commit_s,
                bytes=resume.restore_bytes,
                restore_s=resume.restore_s,
            )
            self._metrics.restored(resume)
            self._record("start", resume.attempt, lambda: record_resume(self._store, resume))
        return resume

    def slow(self, slow: SlowRecord, *, is_new: bool) -> None:
        """Record which rank the others wait for. is_new: log it too. Call it in the event loop."""
        if is_new:
            logger.warning(event(f"slow {slow}", attempt=slow.attempt, run=self._store.uri))
        if self._slow is None or self._slow.done():  # while the store is slow too, the newest one is enough
            self._slow = self._documents.submit(self._write_slow, slow)

    def _write_slow(self, slow: SlowRecord) -> None:
        with suppress(RaycheckError):  # the log has it
            record_slow(self._store, slow)

    def in_memory(self, step: int, size_bytes: int) -> None:
        """Record that a memory checkpoint of this many bytes is listed."""
        self._metrics.in_memory(step, size_bytes)

    def heartbeat(self, group: str, message: HeartbeatMessage) -> None:
        """Record a heartbeat of rank 0. Call it in the event loop."""
        self._lost_work.heartbeat(group, message)
        self._ticking = self._ticking or asyncio.create_task(self._tick())

    def group_failed(self, causes: Sequence[str]) -> None:
        """Record what Ray Train's controller saw happen to the live group, one line for each cause."""
        self._lost_work.group_failed(causes)

    @property
    def attempt(self) -> int | None:
        """Return the number of the live attempt, as far as this process knows it."""
        return self._lost_work.attempt

    @property
    def cause(self) -> str:
        """Return why the attempt before the live one ended; "" if there was none."""
        return self._lost_work.cause

    @property
    def now(self) -> float:
        """Return the store's time in unix seconds, computed from the claim's."""
        return self._lost_work.now

    @property
    def has_trained(self) -> bool:
        """Return whether any group of this driver has completed a step, as far as `LostWork` knows."""
        return self._lost_work.has_trained

    def finished(self, body: Latest) -> None:
        """Log that the live attempt has come to the end of training, as `body` says."""
        end = f"with {body.head}" if body.head else "with nothing committed"
        self._info(f"the run has finished {end}", attempt=body.attempt.number)

    def failed(self, attempt: Attempt, *, at: float, cause: str, is_final: bool) -> None:
        """Record that the driver gives up the run. Call it in a thread.

        at: the store's time in unix seconds. is_final: the same script would fail in the same way again.
        """
        if not record_failure(self._store, attempt, at=at, cause=cause[:MAX_CAUSE], is_final=is_final):
            self._info("the record of its end was not written (or already existed)", attempt=attempt.number)

    def committed(self, manifest: Manifest, *, seconds: float) -> None:
        """Log a commit, and count it. seconds: from the last rank's report to the commit."""
        self._metrics.committed(manifest, seconds=seconds)
        blocked, staged, sent = (
            max(manifest.ranks, key=lambda rank: getattr(rank, name)) for name in ("blocked_s", "staged_s", "upload_s")
        )
        size = sum(rank.size_bytes for rank in manifest.ranks)
        self._info(  # each time is that of the slowest rank, which is named
            f"committed {manifest.key}",
            step=manifest.step,
            attempt=manifest.attempt,
            bytes=size,
            mb_per_s=size / 1e6 / max(sent.upload_s, 1e-9),
            blocked_s=blocked.blocked_s,
            blocked_rank=blocked.rank,
            staged_s=staged.staged_s,
            staged_rank=staged.rank,
            upload_s=sent.upload_s,
            upload_rank=sent.rank,
            commit_s=seconds,
        )

    def _info(self, what: str, **fields: object) -> None:
        logger.info(event(what, **fields, run=self._store.uri))

    def _record_of(self, ended: Attempt) -> AttemptRecord | None:
        try:
            return read_record(self._store, ended.number)
        except RaycheckError:  # for people only
            return None

    def _record(self, of: str, attempt: int, write: Callable[[], bool]) -> None:
        """Have a document written. Errors are only logged, because nobody waits for the document."""

        def record() -> None:
            try:
                if write():
                    return
                self._info(f"the record of its {of} was not written (or already existed)", attempt=attempt)
            except Exception:  # noqa: BLE001  whatever it was, training continues without the record
                logger.exception(event(f"the record of its {of} was not written", attempt=attempt, run=self._store.uri))

        self._documents.submit(record)

    async def _tick(self) -> None:
        while True:
            self._metrics.tick(self._lost_work.newest, now=self._lost_work.now)
            await asyncio.sleep(TICK_S)
