"""A checkpoint's manifest: immutable, small, and the only proof that its objects are whole.

It names only durable objects, each with size and checksum (I1); an object's existence proves nothing. Its bytes are
a pure function of the ranks' reports and of the newest commit, so that a coordinator which died half-way and its
successor write the same.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from raycheck.bucket.format.document import FORMAT_VERSION, Document, load
from raycheck.bucket.format.object_keys import component_prefix, index_key, metadata_key, shard_key
from raycheck.errors import CorruptError

MAX_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardRecord(Document):
    """One object written by one rank: its size in bytes and the CRC-32 of all of it."""

    component: str
    rank: int
    size_bytes: int
    crc32: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Blob(Document):
    """Size in bytes and CRC-32 of an object that the coordinator wrote."""

    size_bytes: int
    crc32: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Component(Document):
    """A stock DCP directory. `checkpoint` is the one that holds it: this one, or an earlier one by reference."""

    name: str
    checkpoint: str
    metadata: Blob
    shards: tuple[ShardRecord, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class RankRecord(Document):
    """What the save cost one rank, in seconds and bytes: training blocked, the state copied (from the same moment on,
    with what devices did behind the training), upload (checksums included)."""

    rank: int
    blocked_s: float
    staged_s: float = 0.0
    upload_s: float
    size_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest(Document):
    """Everything about one checkpoint except where each tensor's bytes lie: that is in its index.

    partial: the partial restores (restore(only=..., skip=...)) that this checkpoint descends from: the same one is not
    done twice, so that a restart does not throw away what was trained since. trained_s: seconds of training that stand
    in this state, over all attempts, without what was lost or spent on saves. began_at: when the run's first attempt
    began, None when that is not known. rolling: only the newest few of such stay, see Retention. settings:
    what the user had chosen, in words; read by nobody but to say what has changed.
    """

    is_long: ClassVar[bool] = True

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
    settings: tuple[str, ...] = ()
    metrics: Mapping[str, float]
    index: Blob
    components: tuple[Component, ...]
    ranks: tuple[RankRecord, ...]

    @property
    def size_bytes(self) -> int:
        shards = sum(shard.size_bytes for part in self.components for shard in part.shards)
        return self.index.size_bytes + sum(part.metadata.size_bytes for part in self.components) + shards

    @property
    def refs(self) -> tuple[str, ...]:
        return tuple(sorted({part.checkpoint for part in self.components} - {self.key}))

    def objects(self) -> Iterator[tuple[str, Blob | ShardRecord]]:
        """(key, size and checksum) of every object that this checkpoint needs besides the manifest itself."""
        yield index_key(self.key), self.index
        for part in self.components:
            yield metadata_key(part.checkpoint, part.name), part.metadata
            for shard in part.shards:
                yield shard_key(part.checkpoint, part.name, shard.rank), shard

    def prefixes(self) -> dict[str, str]:
        """Component name to the prefix of its DCP directory."""
        return {part.name: component_prefix(part.checkpoint, part.name) for part in self.components}


def load_manifest(data: bytes, *, what: str) -> Manifest:
    manifest = load(Manifest, data, what=what, max_bytes=MAX_BYTES)
    try:
        tuple(manifest.objects())
    except ValueError as error:
        raise CorruptError(f"{what}: {error}") from None
    return manifest
