"""Makes tiny real checkpoints for the bucket's tests, drivers as the protocol sees them, and stores around stores.

A checkpoint here has all objects that ranks and coordinator write, only small: one tensor, one component, one shard of
64 bytes per rank.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from functools import cache
from typing import Any

from raycheck.bucket.format import object_keys
from raycheck.bucket.format.checksum import crc32
from raycheck.bucket.format.document import dump, seal
from raycheck.bucket.format.index import Chunk, Index, Tensor, index_of
from raycheck.bucket.format.index_codec import dump_index
from raycheck.bucket.format.latest import Attempt, Entry, Latest
from raycheck.bucket.format.manifest import Blob, Component, Manifest, RankRecord, ShardRecord
from raycheck.bucket.protocol import claim as claims
from raycheck.bucket.protocol import commit
from raycheck.bucket.protocol.claim import Identity
from raycheck.bucket.protocol.removal.exported_directories import ExportRecord
from raycheck.bucket.protocol.resume import parse_resume
from raycheck.bucket.protocol.swap import Register
from raycheck.bucket.protocol.write_once import put_once, write_manifest
from raycheck.bucket.reading import read_latest
from raycheck.bucket.store import Store
from raycheck.bucket.store.memory import MemoryStore
from raycheck.settings import Retention

SHARD_BYTES = 64


def write_checkpoint(
    store: Store,
    *,
    attempt: int,
    save: int,
    step: int | None = None,
    world_size: int = 1,
    base: Manifest | None = None,
    rolling: bool = False,
    by_notice: bool = False,
    began_at: float | None = None,
    trained_s: float = 0.0,
    name: str | None = None,
    expire_after_s: float | None = None,
    replaces: str | None = None,
    index: Index | None = None,
) -> Manifest:
    """Write every object of one save, steps 13 to 16, and commit nothing. base: refer to the components of this one.
    index: another one than tiny_index.

    name, expire_after_s: those that the save gives its checkpoint. replaces: see Manifest.
    """
    step = 10 * save if step is None else step
    key = str(object_keys.CheckpointName(attempt=attempt, save=save, step=step))
    component = "train" if base is None else "head"
    shards = []
    for rank in range(world_size):
        shard = object_keys.shard_key(key, component, rank)
        data = hashlib.blake2b(shard.encode(), digest_size=SHARD_BYTES).digest()
        store.put(shard, data)
        shards.append(ShardRecord(component=component, rank=rank, size_bytes=len(data), crc32=crc32(data)))
    own = Component(
        name=component,
        checkpoint=key,
        metadata=_put(store, object_keys.metadata_key(key, component), f"metadata of {key}".encode()),
        shards=tuple(shards),
    )
    manifest = Manifest(
        key=key,
        step=step,
        attempt=attempt,
        save=save,
        epoch=0,
        samples=8 * step,
        world_size=world_size,
        restored_from=None,
        rolling=rolling,
        by_notice=by_notice,
        began_at=began_at,
        trained_s=trained_s,
        name=name,
        expire_after_s=expire_after_s,
        replaces=replaces,
        metrics={"loss": 1.0 / (1 + step)},
        index=_put(
            store, object_keys.index_key(key), dump_index(index) if index else _tiny_index_bytes(component, world_size)
        ),
        components=(own, *(base.components if base else ())),
        ranks=tuple(
            RankRecord(rank=rank, blocked_s=0.1, upload_s=0.2, size_bytes=SHARD_BYTES) for rank in range(world_size)
        ),
    )
    write_manifest(store, manifest)
    return manifest


def tiny_index(component: str = "train", world_size: int = 1) -> Index:
    """Make the index of one float32 tensor, with four elements on each rank."""
    return index_of(
        [Tensor(name="model.w", dtype="float32", shape=(4 * world_size,), path=("model", "w"))],
        [
            Chunk(
                tensor=0,
                component=component,
                rank=rank,
                offsets=(4 * rank,),
                sizes=(4,),
                record_offset=0,
                record_size=SHARD_BYTES,
                payload_offset=16,
                payload_size=16,
                crcs=(7,),
            )
            for rank in range(world_size)
        ],
        values={"step": 1},
        rank_values=[{"rank": rank} for rank in range(world_size)],
    )


@cache
def _tiny_index_bytes(component: str, world_size: int) -> bytes:
    return dump_index(tiny_index(component, world_size))


def _put(store: Store, key: str, data: bytes) -> Blob:
    put_once(store, key, data)
    return Blob(size_bytes=len(data), crc32=crc32(data))


class Driver:
    """Acts as one start of a driver's coordinator: with its own view of `latest`, and no memory of earlier starts."""

    def __init__(self, store: Store, owner: str = "ann", coordinator: str = "c1") -> None:
        self.store = store
        self.register = Register(store)
        self.me = Identity(owner=owner, coordinator=f"{owner}-{coordinator}")

    def claim(self, group: str, *, resume: str | int = "auto", world_size: int = 1) -> tuple[Attempt, Entry | None]:
        claimed = claims.claim(
            self.register,
            self.me,
            group=group,
            world_size=world_size,
            resume=parse_resume(resume),
            run_id="run-of-a-test",
        )
        return claimed.attempt, claimed.entry

    def take_over(self, group: str) -> Attempt:
        return claims.take_over(self.register, self.me, group=group)

    def commit(
        self, manifest: Manifest, *, keep_last: int | None = 10, may_move_name: bool = False, **rules: Any
    ) -> Entry | None:
        """Commit what write_checkpoint has written: `dump` is pure, so it gives the manifest's bytes again."""
        rules = Retention(keep_last=keep_last, **rules)
        return commit.commit(
            self.register,
            self.me,
            manifest,
            dump(manifest),
            rules,
            at=_time_of(self.store),
            may_move_name=may_move_name,
        )

    def save(self, attempt: int, save: int, *, keep_last: int | None = 10, rules: Any = None, **more: Any) -> Manifest:
        """Write and commit a checkpoint; the commit must be this save's first. rules: other settings of Retention."""
        manifest = write_checkpoint(self.store, attempt=attempt, save=save, **more)
        assert self.commit(manifest, keep_last=keep_last, **rules or {})
        return manifest

    def finish(self, group: str) -> Latest:
        return commit.finish(self.register, self.me, group=group)

    def look(self) -> Latest:
        found = self.register.read()
        assert found is not None
        return found[0]


class Around:
    """Wraps a store. A test overrides the one verb that it wants to go wrong."""

    def __init__(self, inner: Store) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def _time_of(store: Any) -> float | None:
    """Return the time that a store in memory would say, also one that is wrapped; None for others.

    The coordinator has it from the answers to its documents, and then commits without reading `latest`.
    """
    while store is not None and not isinstance(store, MemoryStore):
        store = vars(store).get("inner") or getattr(vars(store).get("world"), "inner", None)
    return None if store is None else store._now()


def everything(store: Store) -> dict[str, bytes]:
    """Return the bytes of all objects of the run, by key."""
    return {item.key: store.get(item.key).data for item in store.list_objects("")}


def latest_tree(store: Store) -> dict[str, Any]:
    """Read `latest` as plain JSON, for a test that edits it without the protocol."""
    tree: dict[str, Any] = json.loads(store.get(object_keys.LATEST_KEY).data)
    return tree


def sealed(tree: Mapping[str, Any]) -> bytes:
    """Write a document's tree as bytes, with the right checksum."""
    return resealed(json.dumps({name: value for name, value in tree.items() if name != "crc32"}))


def resealed(text: str) -> bytes:
    """Put the right checksum into the text of a document that was edited."""
    return seal(re.sub(r',\s*"crc32": "[0-9a-f]{8}"\s*\}\s*$', "}", text).encode())


def put_latest_tree(store: Store, tree: Mapping[str, Any]) -> None:
    store.put(object_keys.LATEST_KEY, sealed(tree))


def write_export(
    store: Store, place: str, checkpoint: str, *, run_id: str | None = None, by_training: bool = True
) -> ExportRecord:
    """Write the files that an export of this checkpoint leaves at `place`, with other weights."""
    files = {
        "model-00001-of-00001.safetensors": b"w" * 50,
        "config.json": b"{}",
        object_keys.EXPORT_ENDS[0]: b'{"map": 1}',
    }
    record = ExportRecord(
        run_id=run_id or read_latest(store).run_id,
        checkpoint=checkpoint,
        by_training=by_training,
        last=object_keys.EXPORT_ENDS[0],
        files={name: len(data) for name, data in files.items()},
    )
    for name, data in {object_keys.EXPORT_RECORD: dump(record), **files}.items():
        store.put(object_keys.export_key(place, name), data)
    return record
