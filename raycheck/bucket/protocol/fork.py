"""Begins a run from another run's checkpoint. Step 30. Bytes are copied, so that no run ever refers to another.

The copy gets a name of attempt 0, which no live attempt can have. `latest` is created last; a crash before that leaves
a run that does not exist yet, and the next try takes the next save number.
"""

from dataclasses import replace

from raycheck.bucket.document_reading import again_if_corrupt
from raycheck.bucket.format.checksum import crc32
from raycheck.bucket.format.latest import Attempt, Entry, Latest
from raycheck.bucket.format.manifest import Manifest
from raycheck.bucket.format.object_keys import CheckpointName
from raycheck.bucket.protocol.commit import write_manifest
from raycheck.bucket.protocol.swap import Register, lost_error
from raycheck.bucket.protocol.write_once import copy_object
from raycheck.bucket.reading import Checkpoint, list_directories, read_latest
from raycheck.bucket.store import Store
from raycheck.errors import ConfigError, NotFoundError


def fork(source: Store, target: Store, *, run_id: str) -> None:
    """Copy the head of the run at `source` into a new run at `target`.

    Does nothing when that run exists already, so that a script may be submitted twice. run_id: the new run's. Raises
    NotFoundError when the source has no checkpoint, CorruptError when its bytes differ from their checksums, and
    ConfigError when the new run has begun without a checkpoint.
    """
    register = Register(target)

    def look() -> tuple[Latest | None, list[CheckpointName]]:
        existing = register.read()
        ours = list_directories(target)
        if existing is None and ours and ours[-1].attempt > 0:
            raise lost_error(target.uri, f"is gone, but there is {ours[-1]}")
        return (existing[0] if existing else None), ours

    existing, ours = again_if_corrupt(look)
    if existing is not None and existing.head is None:
        raise ConfigError(f"{target.uri}: the run has begun already, without a checkpoint. Give it another name")
    if existing is not None:
        return
    body = read_latest(source)
    entry = None if body.head is None else body.entry(body.head)
    if entry is None:
        raise NotFoundError(f"{source.uri}: the run has no committed checkpoint to begin from")
    save = 1 + max((name.save for name in ours), default=0)
    manifest = _copy(Checkpoint(source, entry), target, CheckpointName(step=entry.step, attempt=0, save=save))
    data = write_manifest(target, manifest)

    def create(existing: Latest | None, now: float) -> Latest | None:
        if existing is not None:
            return None
        copied = replace(
            entry,
            key=manifest.key,
            refs=(),
            manifest_crc32=crc32(data),
            committed_at=now,
            pinned=False,
            expires_at=None,
            damaged=None,
            rolling=False,
            name=None,
        )
        return _first_body(copied, manifest, run_id=run_id, now=now)

    register.swap(create, what=f"fork of {source.uri}")


def _first_body(entry: Entry, manifest: Manifest, *, run_id: str, now: float) -> Latest:
    owner = f"fork-{run_id[:11]}"
    attempt = Attempt(
        number=0,
        owner=owner,
        coordinator=owner,
        group=owner,
        world_size=manifest.world_size,
        restore_key=None,
        last_save=manifest.save,
        claimed_at=now,
    )
    return Latest(
        run_id=run_id, counter=0, proven=0, owners=(owner,), attempts=(attempt,), head=entry.key, live=(entry,)
    )


def _copy(checkpoint: Checkpoint, target: Store, name: CheckpointName) -> Manifest:
    old = checkpoint.read_manifest()
    new = replace(
        old,
        key=str(name),
        attempt=0,
        save=name.save,
        restored_from=f"{checkpoint.store.uri} {old.key}",
        partial=(),
        trained_s=0.0,
        began_at=None,
        rolling=False,
        name=None,
        expire_after_s=None,
        components=tuple(replace(component, checkpoint=str(name)) for component in old.components),
    )
    for (old_key, record), (new_key, _) in zip(old.objects(), new.objects(), strict=True):
        copy_object(checkpoint.store, old_key, record, target, new_key)
    return new
