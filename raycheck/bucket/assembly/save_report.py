"""Defines the report that each rank hands in for a save."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from raycheck.bucket.assembly.plan_cache import Section
from raycheck.bucket.format.label import NO_LABEL, Label
from raycheck.bucket.format.manifest import Component, ShardRecord
from raycheck.bucket.format.object_keys import CheckpointName
from raycheck.bucket.format.progress import Progress
from raycheck.settings import BuiltIn, Retention

SAVE_ALIKE = "every rank must call end_step and save equally often"


@dataclass(frozen=True, kw_only=True, slots=True)
class Reference:
    """A component that a rank does not upload, since the bucket already has the same bytes.

    checkpoint: the checkpoint whose directory holds it. record: None if it was saved in the boxes that the ranks would
    write: each rank refers to its own shard, and reports the shard's rows. Otherwise its record in the manifest: it was
    saved in other boxes, so all ranks refer to it or none does, and rank 0 reports its rows.
    """

    name: str
    checkpoint: str
    record: Component | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """One rank's report when its shards are durable, or why they are not (`failure`).

    shards: those that it has uploaded, and its own shards of components that it refers to. references: what it refers
    to. section: the rank's part of the index. blocked_s, staged_s, upload_s: see RankRecord. tasks: the tasks after the
    commit, by name, in rank 0's report: an export, or a function as bytes. node: the node on which the rank runs.
    restored_from, partial, trained_s, began_at, is_rolling, is_by_notice, settings, replaces: see Manifest.
    is_in_memory: the shards are in the node's memory, for a memory checkpoint. label: the name, the note and the expiry
    that the save gives its checkpoint. keeps_drift: replicas that differ do not fail the save, as the first holder's
    are written. leaves: the rank is about to be taken away; None before any notice. rows: in rank 0's report, the
    metrics of the steps since its last one: steps and values of each, and under "" the times of the steps by the host's
    clock. sent_at: when it was sent, by that clock.
    """

    group: str
    rank: int
    world_size: int
    attempt: int
    save: int
    progress: Progress
    failure: str = ""
    shards: tuple[ShardRecord, ...] = ()
    references: tuple[Reference, ...] = ()
    section: Section | None = None
    restored_from: str | None = None
    partial: tuple[str, ...] = ()
    trained_s: float = 0.0
    began_at: float | None = None
    is_rolling: bool = False
    is_by_notice: bool = False
    metrics: dict[str, float] = field(default_factory=dict)
    blocked_s: float = 0.0
    staged_s: float = 0.0
    upload_s: float = 0.0
    retention: Retention = field(default_factory=Retention)
    settings: tuple[str, ...] = ()
    tasks: Mapping[str, BuiltIn | bytes] = field(default_factory=dict)
    label: Label = NO_LABEL
    replaces: str | None = None
    node: str = ""
    is_in_memory: bool = False
    keeps_drift: bool = False
    leaves: bool | None = None
    rows: Mapping[str, tuple[Sequence[int], Sequence[float]]] = field(default_factory=dict)
    sent_at: float = 0.0

    @property
    def checkpoint(self) -> str:
        """Return the name of the checkpoint that this save will become."""
        return str(CheckpointName(step=self.progress.step, attempt=self.attempt, save=self.save))

    @property
    def written(self) -> tuple[ShardRecord, ...]:
        """Return the shards that were uploaded."""
        if not self.references:
            return self.shards
        return tuple(shard for shard in self.shards if self.place_of(shard.component) == self.checkpoint)

    def place_of(self, component: str) -> str:
        """Return the checkpoint whose directory holds this rank's shard of a component."""
        return next((found.checkpoint for found in self.references if found.name == component), self.checkpoint)
