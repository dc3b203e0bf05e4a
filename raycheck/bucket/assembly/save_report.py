"""Defines the report that each rank hands in for a save."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from raycheck.bucket.assembly.plan_cache import Section
from raycheck.bucket.format.manifest import ShardRecord
from raycheck.bucket.format.object_keys import CheckpointName
from raycheck.bucket.format.progress import Progress
from raycheck.settings import ExportSettings, Retention

SAVE_ALIKE = "every rank must call end_step and save equally often"


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What one rank hands in when its shards are durable, or why they are not (`failure`).

    section: its part of the index. kept: the checkpoint in which a shard lies that was not uploaded, by component.
    exports: how it is to be exported, None: not at all. node: where the rank runs.
    partial, trained_s, began_at, is_rolling, settings: see Manifest.
    """

    group: str
    rank: int
    world_size: int
    attempt: int
    save: int
    progress: Progress
    failure: str = ""
    shards: tuple[ShardRecord, ...] = ()
    kept: Mapping[str, str] = field(default_factory=dict)
    section: Section | None = None
    restored_from: str | None = None
    partial: tuple[str, ...] = ()
    trained_s: float = 0.0
    began_at: float | None = None
    is_rolling: bool = False
    metrics: dict[str, float] = field(default_factory=dict)
    blocked_s: float = 0.0
    staged_s: float = 0.0
    upload_s: float = 0.0
    retention: Retention = field(default_factory=Retention)
    settings: tuple[str, ...] = ()
    exports: ExportSettings | None = None
    node: str = ""

    @property
    def checkpoint(self) -> str:
        """The name of the checkpoint that this save will be."""
        return str(CheckpointName(step=self.progress.step, attempt=self.attempt, save=self.save))

    @property
    def written(self) -> tuple[ShardRecord, ...]:
        """The shards that were uploaded."""
        return tuple(shard for shard in self.shards if shard.component not in self.kept)
