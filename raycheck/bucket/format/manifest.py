"""Defines a checkpoint's manifest: immutable, small, and the only proof that its objects are complete.

It names only durable shards, each with size and checksum (I1), and the index and `.metadata`, which are written along
with it. The existence of an object proves nothing. Its bytes are a pure function of the ranks' reports and of the
newest commit, so a coordinator that died midway and its successor write equal bytes.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from raycheck.bucket.format.document import FORMAT_VERSION, Document, load
from raycheck.bucket.format.label import NoteValue, is_name
from raycheck.bucket.format.object_keys import component_prefix, index_key, metadata_key, shard_key
from raycheck.errors import CorruptError

MAX_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardRecord(Document):
    """An object that one rank wrote, with its size in bytes and the CRC-32 of all of it."""

    component: str
    rank: int
    size_bytes: int
    crc32: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Blob(Document):
    """An object that the coordinator wrote, with its size in bytes and its CRC-32."""

    size_bytes: int
    crc32: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Component(Document):
    """A stock DCP directory.

    checkpoint: the checkpoint directory that contains it: this one or, by reference, an earlier one or a borrowed one.
    """

    name: str
    checkpoint: str
    metadata: Blob
    shards: tuple[ShardRecord, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class RankRecord(Document):
    """The cost of the save for one rank.

    blocked_s: seconds for which training waited, including the upload for a shard that was copied in slices. staged_s:
    seconds from the same moment until the state was copied, including copies that devices made while training
    continued. upload_s: seconds of the upload, including checksums. size_bytes: bytes uploaded.
    """

    rank: int
    blocked_s: float
    staged_s: float = 0.0
    upload_s: float
    size_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest(Document):
    """A checkpoint, except the places of its tensors' bytes, which its index has.

    partial: the partial restores (restore(only=..., skip=...)) from which this checkpoint descends. Such a restore is
    not repeated, so that a restart does not discard what was trained since. trained_s: the seconds of training in this
    state, over all attempts, without lost work and the time of saves. began_at: the time at which the run's first
    attempt began, None when it is not known. rolling: only the newest few rolling checkpoints stay, see Retention.
    by_notice: it was saved because a node was about to be removed. drifted: in words, what was not equal on all ranks
    that had it; the checkpoint has the first rank's copy. settings: the user's choices, in words, so that a restart can
    report what has changed. name, note, expire_after_s: see Label; the checkpoint's entry in `latest` states its
    current name and expiry. replaces: the checkpoint of the same step and attempt whose place this one takes, see
    FORMAT.md, step 17; None for most.
    """

    is_long: ClassVar[bool] = True
    when_true: ClassVar[frozenset[str]] = frozenset(
        {"name", "note", "expire_after_s", "by_notice", "replaces", "drifted"}
    )

    format_version: int = FORMAT_VERSION
    key: str
    step: int
    attempt: int
    save: int
    epoch: int
    samples: int
    world_size: int
    restored_from: str | None
    partial: tuple[str, ...] = ()
    trained_s: float = 0.0
    began_at: float | None = None
    rolling: bool = False
    by_notice: bool = False
    drifted: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    name: str | None = None
    note: Mapping[str, NoteValue] = field(default_factory=dict)
    expire_after_s: float | None = None
    replaces: str | None = None
    metrics: Mapping[str, float]
    index: Blob
    components: tuple[Component, ...]
    ranks: tuple[RankRecord, ...]

    def __post_init__(self) -> None:
        if self.name is not None and not is_name(self.name):
            raise CorruptError(f"the manifest of {self.key} calls it {self.name!r}, which cannot be a name")
        if self.expire_after_s is not None and not self.expire_after_s > 0:
            raise CorruptError(f"the manifest of {self.key} has it expire before its commit")

    @property
    def size_bytes(self) -> int:
        shards = sum(shard.size_bytes for component in self.components for shard in component.shards)
        return self.index.size_bytes + sum(component.metadata.size_bytes for component in self.components) + shards

    @property
    def refs(self) -> tuple[str, ...]:
        return tuple(sorted({component.checkpoint for component in self.components} - {self.key}))

    def objects(self) -> Iterator[tuple[str, Blob | ShardRecord]]:
        """Yield (key, size and checksum) of every object that this checkpoint needs, except the manifest itself."""
        yield index_key(self.key), self.index
        for component in self.components:
            yield metadata_key(component.checkpoint, component.name), component.metadata
            for shard in component.shards:
                yield shard_key(component.checkpoint, component.name, shard.rank), shard

    def prefixes(self) -> dict[str, str]:
        """Return the prefix of each component's DCP directory, by the component's name."""
        return {component.name: component_prefix(component.checkpoint, component.name) for component in self.components}


def load_manifest(data: bytes, *, what: str) -> Manifest:
    manifest = load(Manifest, data, what=what, max_bytes=MAX_BYTES)
    try:
        tuple(manifest.objects())
    except ValueError as error:
        raise CorruptError(f"{what}: {error}") from None
    return manifest
