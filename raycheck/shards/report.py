"""What a rank hands in for a save, and how all ranks' reports become the files of a checkpoint.

Every byte written here is a pure function of the reports sorted by rank: no clock, no chance, no host. A coordinator
that died half-way and its successor write the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from raycheck.bucket import layout
from raycheck.bucket.checksum import crc32
from raycheck.bucket.commit import put_once
from raycheck.bucket.manifest import Blob, Component, Manifest, RankRecord, ShardRecord
from raycheck.bucket.store import Store
from raycheck.bucket.store.base import MAX_CONDITIONAL_BYTES
from raycheck.errors import SaveFailedError
from raycheck.settings import Retention
from raycheck.shards.plans import Plans, Section
from raycheck.shards.progress import Progress

SAVE_ALIKE = "every rank must call end_step and save equally often"


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What one rank hands in when its shards are durable, or why they are not (`failure`).

    section: its part of the index. partial: see Manifest.
    """

    group: str
    rank: int
    world_size: int
    attempt: int
    save: int
    progress: Progress
    failure: str = ""
    shards: tuple[ShardRecord, ...] = ()
    section: Section | None = None
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


def assemble(store: Store, reports: Sequence[Report], plans: Plans | None = None) -> tuple[Manifest, bool]:
    """Step 16: write index and `.metadata`; returns the manifest to write next, and whether ranks wrote something
    twice, so that they should agree anew on who writes it. `reports`: all, in order of rank. plans: of earlier saves.

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
    sections = [report.section for report in reports if report.section is not None]
    assert len(sections) == len(reports), "a report without a failure has a section"
    shards: dict[str, list[ShardRecord]] = {}
    for report in reports:
        for shard in report.shards:
            shards.setdefault(shard.component, []).append(shard)
    whole = (plans or Plans()).whole(sections, sorted(shards))
    holes = whole.holes
    if holes:
        raise SaveFailedError(
            f"{name}: the ranks' shards do not cover {', '.join(holes[:5])}"
            f"{' and more' if len(holes) > 5 else ''} exactly once; do all ranks hold the same state?"
        )
    components = []
    for component, (metadata, blob) in whole.metadata.items():
        _put(store, layout.metadata_key(name, component), metadata)
        components.append(
            Component(name=component, checkpoint=name, metadata=blob, shards=tuple(shards[component])),
        )
    index = whole.index(sections)
    _put(store, layout.index_key(name), index)
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
        index=Blob(size_bytes=len(index), crc32=crc32(index)),
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
    return manifest, whole.merged.has_copies


def _put(store: Store, key: str, data: bytes) -> None:
    if len(data) <= MAX_CONDITIONAL_BYTES:
        put_once(store, key, data)
    else:
        store.put(key, data)  # too large for a condition; a repeated write carries the same bytes
