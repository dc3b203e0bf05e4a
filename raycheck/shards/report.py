"""What a rank hands in for a save, and how all ranks' reports become the files of a checkpoint.

Every byte written here is a pure function of the reports sorted by rank: no clock, no chance, no host. A coordinator
that died half-way and its successor write the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from raycheck.bucket import layout
from raycheck.bucket.checksum import crc32
from raycheck.bucket.commit import put_once
from raycheck.bucket.index_file import dump_index, load_index
from raycheck.bucket.manifest import Blob, Component, Manifest, RankRecord, ShardRecord
from raycheck.bucket.merge import merge, uncovered
from raycheck.bucket.store import Store
from raycheck.bucket.store.base import MAX_CONDITIONAL_BYTES
from raycheck.errors import SaveFailedError
from raycheck.settings import Retention
from raycheck.shards.dcp import dcp_metadata
from raycheck.shards.progress import Progress

SAVE_ALIKE = "every rank must call end_step and save equally often"


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What one rank hands in when its shards are durable, or why they are not (`failure`).

    section: its part of the index, encoded. partial: see Manifest.
    """

    group: str
    rank: int
    world_size: int
    attempt: int
    save: int
    progress: Progress
    failure: str = ""
    shards: tuple[ShardRecord, ...] = ()
    section: bytes = b""
    restored_from: str | None = None
    partial: tuple[str, ...] = ()
    metrics: dict[str, float] = field(default_factory=dict)
    blocked_s: float = 0.0
    upload_s: float = 0.0
    retention: Retention = field(default_factory=Retention)
    is_to_be_exported: bool = False

    @property
    def checkpoint(self) -> str:
        """The name of the checkpoint that this save will be."""
        return str(layout.CheckpointName(step=self.progress.step, attempt=self.attempt, save=self.save))


def assemble(store: Store, reports: Sequence[Report]) -> tuple[Manifest, bool]:
    """Step 16: write index and `.metadata`; returns the manifest to write next, and whether ranks wrote something
    twice, so that they should agree anew on who writes it. `reports`: all, in order of rank.

    Raises SaveFailedError when the shards leave a hole or overlap, ConfigError when ranks disagree on a tensor.
    """
    first, name = reports[0], reports[0].checkpoint
    if [report.rank for report in reports] != list(range(first.world_size)):
        raise SaveFailedError(f"{name}: reports came from ranks {[report.rank for report in reports]}")
    for report in reports:
        if report.checkpoint != name:
            raise SaveFailedError(
                f"rank 0 saved {name} while rank {report.rank} saved {report.checkpoint}: {SAVE_ALIKE}"
            )
    sections = [load_index(report.section, what=f"report of rank {report.rank}") for report in reports]
    index, has_copies = merge(sections)
    holes = uncovered(index.plan)
    if holes:
        raise SaveFailedError(
            f"{name}: the ranks' shards do not cover {', '.join(holes[:5])}"
            f"{' and more' if len(holes) > 5 else ''} exactly once; do all ranks hold the same state?"
        )
    components = []
    for component in sorted({shard.component for report in reports for shard in report.shards}):
        shards = [shard for report in reports for shard in report.shards if shard.component == component]
        metadata = _put_blob(store, layout.metadata_key(name, component), dcp_metadata(index.plan, component))
        components.append(
            Component(name=component, checkpoint=name, metadata=metadata, shards=tuple(shards)),
        )
    manifest = Manifest(
        key=name,
        step=first.progress.step,
        attempt=first.attempt,
        save=first.save,
        epoch=first.progress.epoch,
        samples=first.progress.samples,
        world_size=len(reports),
        restored_from=first.restored_from,
        partial=first.partial,
        metrics=first.metrics,
        index=_put_blob(store, layout.index_key(name), dump_index(index)),
        components=tuple(components),
        ranks=tuple(
            RankRecord(
                rank=report.rank,
                blocked_s=report.blocked_s,
                upload_s=report.upload_s,
                size_bytes=sum(shard.size_bytes for shard in report.shards),
            )
            for report in reports
        ),
    )
    return manifest, has_copies


def _put_blob(store: Store, key: str, data: bytes) -> Blob:
    if len(data) <= MAX_CONDITIONAL_BYTES:
        put_once(store, key, data)
    else:
        store.put(key, data)  # too large for a condition; a repeated write carries the same bytes
    return Blob(size_bytes=len(data), crc32=crc32(data))
