"""Describes how a checkpoint was saved and what is in it, from its manifest and its index."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from raycheck.bucket.format.index import Index
from raycheck.bucket.format.label import NoteValue
from raycheck.bucket.format.manifest import Manifest, RankRecord

_PER_RANK = re.compile(r"\.rank\d+\..*")
"""The names of values per rank are <entry>.rank<r>.<path>, as FORMAT.md says."""
_CUT = re.compile(r"@[\d,]*\+[\d,]*(&[\d,]*\+[\d,]*)*")
"""The end of the name of an optimizer's slot that is only a rank's own part, as it was cut."""
_OWN = {"rng", "progress"}
"""Entries that raycheck itself adds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointDetails:
    """A checkpoint as its manifest and index describe it.

    note: the user's, of its save. drifted: what differed between replicas. restored_from: the checkpoint from which its
    attempt began, None for a fresh start. trained_s: seconds of training in its state. settings: those of the training
    that differ from the defaults, as text. blocked_s: how long its save kept training waiting. upload_s, upload_bytes:
    of the rank whose upload took longest. own_bytes: the size of the tensors that it shares with no other checkpoint.
    entries: the names in the state. components: the checkpoint whose directory has each of them. objects: the size in
    bytes of each of its objects but the manifest, by key. values, rank_values: what is not a tensor, by entry, of all
    ranks and of each rank; empty unless asked for. per_rank: the entries of which each rank has saved its own value;
    None unless values were asked for. num_cut: how many tensors can only be restored on the mesh that saved them.
    """

    note: Mapping[str, NoteValue]
    epoch: int
    samples: int
    metrics: Mapping[str, float]
    drifted: tuple[str, ...]
    attempt: int
    world_size: int
    restored_from: str | None
    trained_s: float
    settings: tuple[str, ...]
    blocked_s: float
    upload_s: float
    upload_bytes: int
    own_bytes: int
    num_tensors: int
    entries: tuple[str, ...]
    components: Mapping[str, str]
    objects: Mapping[str, int]
    values: Mapping[str, Any]
    rank_values: Sequence[Mapping[str, Any]]
    per_rank: tuple[str, ...] | None = None
    num_cut: int = 0

    @property
    def workers(self) -> str:
        """Return in words how many workers saved it and, if that is known, how many can restore it."""
        text = f"saved by {self.world_size}"
        if self.num_cut:
            return f"{text}; {self.num_cut} tensors are parts that restore on the same mesh only"
        if self.per_rank is None:
            return text
        text += "; restores on any number"
        if self.per_rank:
            own = ", ".join(self.per_rank)
            text += f" ({own}: one for each worker; if that is a data loader, only {self.world_size} can restore it)"
        return text


def details_of(manifest: Manifest, index: Index) -> CheckpointDetails:
    """Return the details in a checkpoint's manifest and index."""
    slowest: RankRecord | None = max(manifest.ranks, key=lambda rank: rank.upload_s, default=None)
    own = [part for part in manifest.components if part.checkpoint == manifest.key]
    return CheckpointDetails(
        note=manifest.note,
        epoch=manifest.epoch,
        samples=manifest.samples,
        metrics=manifest.metrics,
        drifted=manifest.drifted,
        attempt=manifest.attempt,
        world_size=manifest.world_size,
        restored_from=manifest.restored_from,
        trained_s=manifest.trained_s,
        settings=manifest.settings,
        blocked_s=max((rank.blocked_s for rank in manifest.ranks), default=0.0),
        upload_s=slowest.upload_s if slowest else 0.0,
        upload_bytes=slowest.size_bytes if slowest else 0,
        own_bytes=sum(shard.size_bytes for part in own for shard in part.shards),
        num_tensors=len(index.tensors),
        entries=tuple(sorted(_entries(index))),
        components={part.name: part.checkpoint for part in manifest.components},
        objects={key: record.size_bytes for key, record in manifest.objects()},
        values=index.values,
        rank_values=index.rank_values,
        per_rank=tuple(sorted(_per_rank(index))) if index.rank_values else None,
        num_cut=sum(_CUT.fullmatch(tensor.name[tensor.name.rfind("@") :]) is not None for tensor in index.tensors),
    )


def _per_rank(index: Index) -> set[str]:
    """Return the names of entries whose values are each rank's own. Their values are wrapped in a list."""
    trees = (item for values in index.rank_values for item in values.items())
    return {name for name, tree in trees if isinstance(tree, list)} - _OWN


def _entries(index: Index) -> set[str]:
    """Return the names of the state's entries from the paths of its tensors and other leaves. No value is read."""
    paths = [*(tensor.path for tensor in index.tensors), *(leaf.path for leaf in index.leaves)]
    return {_PER_RANK.sub("", str(path[0])) for path in paths if path} - {"progress"}
