"""Sets the `raycheck_*` metrics, which Ray's metrics endpoint exports: all in the coordinator, as a run's one source.

The dashboard cluster/grafana/raycheck.json shows them. Each has the tag `run`: the run's URI without settings,
with what is not ASCII quoted.
"""

import re
import time
from collections.abc import Callable
from urllib.parse import quote

from ray.util.metrics import Counter, Gauge

from raycheck.bucket.attempt_records import ResumeRecord
from raycheck.bucket.format.latest import Entry
from raycheck.bucket.format.manifest import Manifest
from raycheck.bucket.store.address import shown_uri
from raycheck.group.coordinator.cluster import Metrics
from raycheck.group.coordinator.messages import HeartbeatMessage

GAUGES = {
    "raycheck_attempt": "Number of the live attempt",
    "raycheck_last_committed_step": "Step of the newest commit",
    "raycheck_last_commit_age_seconds": "Since the newest commit",
    "raycheck_blocked_seconds": "Training blocked by the newest commit's save, on the slowest rank",
    "raycheck_upload_seconds": "Upload of the newest commit, of the slowest rank",
    "raycheck_commit_seconds": "From the last rank's report to the newest commit",
    "raycheck_saved_bytes": "Uploaded for the newest commit by all ranks",
    "raycheck_upload_mb_per_second": "Uploaded for the newest commit by all ranks together, in 10^6 bytes per second",
    "raycheck_restore_seconds": "The live attempt's restore, on the slowest rank",
    "raycheck_restored_bytes": "Fetched for the live attempt's restore by all ranks",
    "raycheck_last_memory_step": "Step of the newest memory checkpoint",
    "raycheck_memory_bytes": "Of the newest memory checkpoint's shards, without their copies on other nodes",
    "raycheck_goodput": "Seconds of training that were not lost / seconds since the run began, over all attempts",
}
COUNTERS = {
    "raycheck_commits": "Saves that were committed",
    "raycheck_failed_saves": "Saves that failed",
    "raycheck_skipped_saves": "Saves that were skipped because the previous one had not ended",
    "raycheck_restores": "Restores of a checkpoint",
    "raycheck_memory_checkpoints": "Memory checkpoints that were listed",
    "raycheck_restores_from_memory": "Restores of a memory checkpoint",
    "raycheck_lost_steps": "Steps that were trained and thrown away, as far as known",
}


class RayMetrics(Metrics):
    """The gauges and counters of one run. The counters start at zero when the coordinator starts."""

    def __init__(self, uri: str, clock: Callable[[], float] = time.monotonic) -> None:
        # Ray's metrics take tags of ASCII alone.
        tags = {"run": re.sub(r"[^\x20-\x7e]", lambda found: quote(found[0], errors="surrogateescape"), shown_uri(uri))}
        self._gauges = {name: Gauge(name, description=text, tag_keys=("run",)) for name, text in GAUGES.items()}
        self._counters = {name: Counter(name, description=text, tag_keys=("run",)) for name, text in COUNTERS.items()}
        for metric in (*self._gauges.values(), *self._counters.values()):
            metric.set_default_tags(tags)
        self._clock = clock
        self._committed: float | None = None
        self._told: dict[str, int | None] = {"raycheck_failed_saves": 0, "raycheck_skipped_saves": 0}

    def begin(self, attempt: int, entry: Entry | None, *, now: float, is_adopted: bool = False) -> None:
        """Begin an attempt.

        entry: the newest commit. now: the store's time in unix seconds. is_adopted: an earlier start of the coordinator
        has counted this attempt's saves so far.
        """
        self._set("raycheck_attempt", attempt)
        self._told = dict.fromkeys(self._told, None if is_adopted else 0)
        if entry is not None:
            self._set("raycheck_last_committed_step", entry.step)
            self._committed = self._clock() - max(0.0, now - entry.committed_at)

    def restored(self, resume: ResumeRecord) -> None:
        """Count a restore, and the steps that the end of the previous attempt cost."""
        self._count("raycheck_lost_steps", resume.lost_steps or 0)
        if resume.restored is not None:
            self._count("raycheck_restores", 1)
            self._count("raycheck_restores_from_memory", int(resume.is_from_memory))
            self._set("raycheck_restore_seconds", resume.restore_s)
            self._set("raycheck_restored_bytes", resume.restore_bytes)

    def committed(self, manifest: Manifest, *, seconds: float) -> None:
        """Count a commit. seconds: from the last rank's report to the commit."""
        upload_s = max(rank.upload_s for rank in manifest.ranks)
        size = sum(rank.size_bytes for rank in manifest.ranks)
        self._committed = self._clock()
        self._count("raycheck_commits", 1)
        self._set("raycheck_last_committed_step", manifest.step)
        self._set("raycheck_blocked_seconds", max(rank.blocked_s for rank in manifest.ranks))
        self._set("raycheck_upload_seconds", upload_s)
        self._set("raycheck_commit_seconds", seconds)
        self._set("raycheck_saved_bytes", size)
        self._set("raycheck_upload_mb_per_second", size / 1e6 / max(upload_s, 1e-9))

    def in_memory(self, step: int, size_bytes: int) -> None:
        """Count a memory checkpoint."""
        self._count("raycheck_memory_checkpoints", 1)
        self._set("raycheck_last_memory_step", step)
        self._set("raycheck_memory_bytes", size_bytes)

    def tick(self, heartbeat: HeartbeatMessage | None, *, now: float) -> None:
        """Update the metrics that change with time. now: the store's time in unix seconds."""
        if self._committed is not None:
            self._set("raycheck_last_commit_age_seconds", self._clock() - self._committed)
        if heartbeat is None:
            return
        self._set("raycheck_goodput", heartbeat.trained_s / max(now - heartbeat.began_at, 1e-9))
        for name, total in (("raycheck_failed_saves", heartbeat.failed), ("raycheck_skipped_saves", heartbeat.skipped)):
            told = self._told[name]
            self._count(name, 0 if told is None else total - told)
            self._told[name] = total

    def _set(self, name: str, value: float) -> None:
        self._gauges[name].set(value)

    def _count(self, name: str, more: int) -> None:
        if more > 0:
            self._counters[name].inc(more)
