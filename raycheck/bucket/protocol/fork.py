"""Begins a run from another run's checkpoint. Step 30. Bytes are copied, so that no run ever refers to another.

The copy gets a name of attempt 0, which no live attempt can have. `latest` is created last; a crash before that leaves
a run that does not exist yet, and the next try takes the next save number.
"""

from dataclasses import replace

from raycheck.bucket.format.checksum import crc32
from raycheck.bucket.format.manifest import Manifest
from raycheck.bucket.format.object_keys import CheckpointName
from raycheck.bucket.protocol.commit import write_manifest
from raycheck.bucket.protocol.new_run import begin_run, first_manifest, look_at_place
from raycheck.bucket.protocol.swap import Register
from raycheck.bucket.protocol.write_once import copy_object
from raycheck.bucket.reading import Checkpoint, read_latest
from raycheck.bucket.store import Store
from raycheck.errors import ConfigError, NotFoundError


def fork(source: Store, target: Store, *, run_id: str) -> None:
    """Copy the head of the run at `source` into a new run at `target`.

    Does nothing when that run exists already, so that a script may be submitted twice. run_id: the new run's. Raises
    NotFoundError when the source has no checkpoint, CorruptError when its bytes differ from their checksums, and
    ConfigError when the new run has begun without a checkpoint.
    """
    register = Register(target)
    existing, save = look_at_place(register)
    if existing is not None and existing.head is None:
        raise ConfigError(f"{target.uri}: the run has begun already, without a checkpoint. Give it another name")
    if existing is not None:
        return
    body = read_latest(source)
    entry = None if body.head is None else body.entry(body.head)
    if entry is None:
        raise NotFoundError(f"{source.uri}: the run has no committed checkpoint to begin from")
    name = CheckpointName(step=entry.step, attempt=0, save=save)
    manifest = _copy(Checkpoint(source, entry), target, name)
    data = write_manifest(target, manifest)
    copied = replace(
        entry,
        key=manifest.key,
        refs=(),
        manifest_crc32=crc32(data),
        pinned=False,
        expires_at=None,
        damaged=None,
        rolling=False,
    )
    begin_run(register, copied, manifest, run_id=run_id, verb="fork")


def _copy(checkpoint: Checkpoint, target: Store, name: CheckpointName) -> Manifest:
    old = checkpoint.read_manifest()
    new = first_manifest(old, name, restored_from=f"{checkpoint.store.uri} {old.key}")
    for (old_key, record), (new_key, _) in zip(old.objects(), new.objects(), strict=True):
        copy_object(checkpoint.store, old_key, record, target, new_key)
    return new
