"""The read side of a run: what is in the bucket, and is it whole. Never writes (I8), imports neither torch nor ray.

A reader needs no lease: on a missing object it reads `latest` again. Gone from the live list means evicted (start
again on the head), still listed means damage.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from raycheck.bucket.document_reading import again_if_corrupt, read_document
from raycheck.bucket.format import object_keys
from raycheck.bucket.format.checksum import crc32
from raycheck.bucket.format.index import Index
from raycheck.bucket.format.index_codec import load_index
from raycheck.bucket.format.latest import MAX_BYTES as MAX_LATEST
from raycheck.bucket.format.latest import Entry, Latest, load_latest
from raycheck.bucket.format.manifest import MAX_BYTES as MAX_MANIFEST
from raycheck.bucket.format.manifest import Manifest, load_manifest
from raycheck.bucket.format.object_keys import CheckpointName
from raycheck.bucket.store import Store
from raycheck.bucket.store.interface import MAX_WHOLE_BYTES
from raycheck.bucket.verify import Finding, verify
from raycheck.errors import CorruptError, DamagedError, NotFoundError, StoreError


@dataclass(frozen=True, kw_only=True, slots=True)
class Documents:
    """Manifest and index of a checkpoint, as bytes."""

    manifest: bytes
    index: bytes


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A committed checkpoint: its entry in `latest`, and what lies behind it. documents: as somebody else has read
    them, checked all the same."""

    store: Store
    entry: Entry
    documents: Documents | None = None

    @property
    def step(self) -> int:
        """The number of optimizer steps completed in it."""
        return self.entry.step

    @property
    def metrics(self) -> Mapping[str, float]:
        """The metrics that `latest` repeats: the first 32, and of older checkpoints fewer when it grows full. The
        manifest has all of them."""
        return self.entry.metrics

    def read_documents(self) -> Documents:
        """For others. Not checked. Raises DamagedError, or NotFoundError when evicted."""
        keys = {
            object_keys.manifest_key(self.entry.key): MAX_MANIFEST,
            object_keys.index_key(self.entry.key): MAX_WHOLE_BYTES,
        }
        manifest, index = (_get_live(self.store, self.entry.key, key, bound) for key, bound in keys.items())
        return Documents(manifest=manifest, index=index)

    def read_manifest(self) -> Manifest:
        """Read and checked against the checksum in `latest`. Raises DamagedError, or NotFoundError when evicted."""
        key = object_keys.manifest_key(self.entry.key)
        handed = self.documents.manifest if self.documents else None
        data = self._right(key, handed, None, self.entry.manifest_crc32, who="latest")
        manifest = load_manifest(data, what=f"{self.store.uri}: {key}")
        if manifest.key != self.entry.key:
            raise CorruptError(f"{self.store.uri}: {key} is the manifest of {manifest.key}")
        return manifest

    def read_index(self, manifest: Manifest, *, values: bool = True) -> Index:
        """Read and checked against size and checksum in the manifest. values: False leaves them out."""
        key = object_keys.index_key(self.entry.key)
        handed = self.documents.index if self.documents else None
        data = self._right(key, handed, manifest.index.size_bytes, manifest.index.crc32, who="the manifest")
        return load_index(data, what=f"{self.store.uri}: {key}", values=values)

    def verify(self, *, reads: bool = True) -> Iterator[Finding]:
        """Read every object of the checkpoint and compare size and checksum. Yields one finding per object.

        reads: False compares sizes only.
        """
        return verify(
            self.store,
            self.entry.key,
            read_manifest=self.read_manifest,
            read_index=partial(self.read_index, values=False),
            reads=reads,
        )

    def _right(self, key: str, handed: bytes | None, size: int | None, crc: int, *, who: str) -> bytes:
        """The bytes of a document. size: None when it is not known."""
        at_hand = [] if handed is None else [handed]
        most = MAX_MANIFEST if size is None else min(max(size, 0), MAX_WHOLE_BYTES)

        def read() -> bytes:
            data = at_hand.pop() if at_hand else _get_live(self.store, self.entry.key, key, most)
            if size in (None, len(data)) and crc32(data) == crc:
                return data
            what = "checksum" if size is None or size == len(data) else f"size ({len(data)})"
            raise DamagedError(f"{self.store.uri}: {key} has another {what} than {who} says")

        return again_if_corrupt(read)


def read_latest(store: Store) -> Latest:
    """`latest` as it stands. Raises NotFoundError when there is no run here."""
    try:
        return read_document(store, object_keys.LATEST_KEY, load_latest, max_bytes=MAX_LATEST)[0]
    except NotFoundError:
        raise no_run(store) from None


def no_run(store: Store) -> NotFoundError:
    """The error for a missing `latest`, which also says whether checkpoints lie there without it."""
    names: list[CheckpointName] = []
    with suppress(StoreError):  # who may not list is told the rest
        names = directories(store)
    if names:
        return NotFoundError(
            f"{store.uri}: no run here: latest is missing, though {len(names)} checkpoints lie here, the last of them "
            f"{names[-1]}. If it was deleted, put it back (bucket versioning), or stop the run and rebuild it: "
            f"raycheck repair '{store.uri}'"
        )
    return NotFoundError(f"{store.uri}: no run here (no object named latest). Give the storage path and the run's name")


def directories(store: Store) -> list[CheckpointName]:
    """The checkpoints that have a directory, listed by `latest` or not, in the order of their saves."""
    return sorted(
        name for text in store.list_names(object_keys.CHECKPOINTS_PREFIX) if (name := CheckpointName.parse(text))
    )


def _get_live(store: Store, name: str, key: str, max_bytes: int) -> bytes:
    try:
        return store.get(key, max_bytes).data
    except NotFoundError:
        raise missing(store, name, key) from None
    except CorruptError as error:
        raise DamagedError(str(error)) from None


def missing(store: Store, name: str, key: str) -> NotFoundError | DamagedError:
    """Step 25: what it means that `key` of checkpoint `name` is not there: dropped meanwhile, or damage."""
    if read_latest(store).entry(name) is None:
        return NotFoundError(f"{store.uri}: checkpoint {name} was dropped by retention; open the run again")
    return DamagedError(f"{store.uri}: {key} is missing although latest lists its checkpoint")
