"""From staged shards to a committed checkpoint, as the workers and the coordinator do it, but without Ray."""

from collections.abc import Sequence
from dataclasses import dataclass

from raycheck.bucket import commit as protocol
from raycheck.bucket import layout
from raycheck.bucket.catalog import Checkpoint, read_latest
from raycheck.bucket.checksum import crc32
from raycheck.bucket.commit import Identity, Register
from raycheck.bucket.index import dump_index, load_index, merge, uncovered
from raycheck.bucket.manifest import Blob, Component, Manifest, RankRecord, ShardRecord
from raycheck.bucket.store import Store
from raycheck.bucket.store.base import MAX_CONDITIONAL_BYTES
from raycheck.shards.dcp import dcp_metadata
from raycheck.shards.stager import Staged
from raycheck.shards.state import COMPONENT, Progress, TrainState
from tests.invariants import assert_invariants

ME = Identity(owner="driver", coordinator="coordinator")


@dataclass(frozen=True, kw_only=True, slots=True)
class Uploaded:
    """What a rank hands in: its shard's record and its section of the index, encoded."""

    record: ShardRecord
    section: bytes


def claimed(store: Store, *, world_size: int, save: int = 1, step: int = 1) -> str:
    """Claim the run with the first save of a group, and name the save that may be uploaded now."""
    group = f"group-of-{world_size}"
    found = Register(store).read()
    if found is not None and found[0].attempt.group == group:
        attempt = found[0].attempt
    else:
        attempt, _ = protocol.claim(
            Register(store), ME, group=group, world_size=world_size, resume="auto", run_id="run"
        )
    return str(layout.CheckpointName(step=step, attempt=attempt.number, save=save))


def upload(store: Store, staged: Staged, *, name: str, rank: int) -> Uploaded:
    """One rank's part: durable when it returns."""
    key = layout.shard_key(name, COMPONENT, rank)
    store.put_parts(key, staged.parts(store.part_bytes(staged.size_bytes)), staged.size_bytes)
    record = ShardRecord(component=COMPONENT, rank=rank, size_bytes=staged.size_bytes, crc32=staged.crc32)
    return Uploaded(record=record, section=dump_index(staged.section()))


def committed(store: Store, name: str, uploads: Sequence[Uploaded], *, progress: Progress) -> Checkpoint:
    """The coordinator's part: index, `.metadata`, manifest, and the commit. Every invariant holds afterwards."""
    index = merge([load_index(item.section, what=f"report of rank {rank}") for rank, item in enumerate(uploads)])
    assert uncovered(index) == [], (uncovered(index), [(c.rank,index.tensors[c.tensor].name,c.offsets,c.sizes) for c in index.chunks])
    shards = tuple(item.record for item in uploads)
    parsed = layout.CheckpointName.parse(name)
    assert parsed is not None
    metadata = _put(store, layout.metadata_key(name, COMPONENT), dcp_metadata(index, COMPONENT))
    manifest = Manifest(
        key=name,
        step=parsed.step,
        attempt=parsed.attempt,
        save=parsed.save,
        epoch=progress.epoch,
        samples=progress.samples,
        world_size=len(uploads),
        restored_from=None,
        metrics={},
        index=_put(store, layout.index_key(name), dump_index(index)),
        components=(Component(name=COMPONENT, checkpoint=name, metadata=metadata, shards=shards),),
        ranks=tuple(
            RankRecord(rank=rank, blocked_s=0.0, upload_s=0.0, size_bytes=shard.size_bytes)
            for rank, shard in enumerate(shards)
        ),
    )
    data = protocol.write_manifest(store, manifest)
    assert protocol.commit(Register(store), ME, manifest, data, keep_last=10)
    body = read_latest(store)
    entry = body.entry(name)
    assert entry is not None
    assert_invariants(store, before=body)
    return Checkpoint(store, entry)


def save(store: Store, staged: Sequence[Staged], *, save: int = 1, progress: Progress | None = None) -> Checkpoint:
    """All of it, for ranks that live in this process."""
    progress = progress or Progress(step=save)
    name = claimed(store, world_size=len(staged), save=save, step=progress.step)
    uploads = [upload(store, shard, name=name, rank=rank) for rank, shard in enumerate(staged)]
    return committed(store, name, uploads, progress=progress)


def save_state(store: Store, state: dict[str, object], *, save_number: int = 1, step: int = 1) -> Checkpoint:
    """A world of one."""
    progress = Progress(step=step)
    staged = TrainState(state, rank=0, world_size=1).stage(progress)
    return save(store, [staged], save=save_number, progress=progress)


def restore_state(checkpoint: Checkpoint, state: dict[str, object]) -> None:
    TrainState(state, rank=0, world_size=1).apply(checkpoint)


def shard_bytes(staged: Staged) -> bytes:
    """The whole object that an upload would send."""
    return b"".join(bytes(part) for part in staged.parts(1 << 20))


def _put(store: Store, key: str, data: bytes) -> Blob:
    if len(data) <= MAX_CONDITIONAL_BYTES:
        protocol.put_once(store, key, data)
    else:
        store.put(key, data)
    return Blob(size_bytes=len(data), crc32=crc32(data))
