"""Finds a checkpoint of a run and its objects, wherever they are stored."""

from collections.abc import Iterator
from dataclasses import dataclass

from raycheck.bucket.choice import entry_at
from raycheck.bucket.format.latest import Latest
from raycheck.bucket.format.manifest import Manifest
from raycheck.bucket.format.object_keys import CheckpointName, checkpoint_prefix
from raycheck.bucket.protocol.sharing.new_run import first_manifest
from raycheck.bucket.reading import Checkpoint
from raycheck.bucket.store import Store
from raycheck.errors import CorruptError


@dataclass(frozen=True, slots=True)
class StoredObject:
    """One object: its place, and its size and checksum from the manifest."""

    store: Store
    key: str
    size_bytes: int
    crc32: int

    def __str__(self) -> str:
        return f"{self.store}: {self.key}"


def checkpoint_at(store: Store, body: Latest, at: int | str | None) -> Checkpoint:
    """Return a checkpoint by its step, name or key; the head for None or "HEAD". Raises NotFoundError."""
    return Checkpoint(store, entry_at(store, body, None if at == "HEAD" else at))


def stored_objects(checkpoint: Checkpoint, manifest: Manifest) -> Iterator[StoredObject]:
    """Yield the objects of a checkpoint besides its manifest, in the manifest's order."""
    for key, record in manifest.objects():
        yield StoredObject(checkpoint.store, key, record.size_bytes, record.crc32)


def names_in(manifest: Manifest) -> Iterator[str]:
    """Yield the name of every object besides the manifest below the checkpoint's directory, in the manifest's order.

    A component stored in another checkpoint has the name that it would have in this one.
    """
    name = CheckpointName.parse(manifest.key)
    if name is None:
        raise CorruptError(f"{manifest.key!r} is not a checkpoint's name")
    for key, _ in first_manifest(manifest, name, restored_from="").objects():
        yield key.removeprefix(checkpoint_prefix(manifest.key))
