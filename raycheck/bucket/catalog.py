"""The read side of a run: what is in the bucket, and is it whole. Never writes (I8), imports neither torch nor ray.

A reader needs no lease: on a missing object it reads `latest` again. Gone from the live list means evicted (start
again on the head), still listed means damage.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from raycheck.bucket import layout
from raycheck.bucket.checksum import crc32
from raycheck.bucket.index import Index
from raycheck.bucket.index_file import load_index
from raycheck.bucket.latest import Entry, Latest, load_latest
from raycheck.bucket.layout import CheckpointName
from raycheck.bucket.manifest import Manifest, load_manifest
from raycheck.bucket.store import Store
from raycheck.errors import CorruptError, NotFoundError

READ_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One object that was verified. `problem` is empty when size and checksum are right."""

    key: str
    size_bytes: int
    problem: str


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

    def read_documents(self) -> Documents:
        """For others. Not checked. Raises CorruptError, or NotFoundError when evicted."""
        keys = layout.manifest_key(self.entry.key), layout.index_key(self.entry.key)
        manifest, index = (_get_live(self.store, self.entry.key, key) for key in keys)
        return Documents(manifest=manifest, index=index)

    def manifest(self) -> Manifest:
        """Read and checked against the checksum in `latest`. Raises CorruptError, or NotFoundError when evicted."""
        key = layout.manifest_key(self.entry.key)
        data = self.documents.manifest if self.documents else _get_live(self.store, self.entry.key, key)
        if crc32(data) != self.entry.manifest_crc32:
            raise CorruptError(f"{self.store.uri}: {key} has another checksum than latest says")
        manifest = load_manifest(data, what=f"{self.store.uri}: {key}")
        if manifest.key != self.entry.key:
            raise CorruptError(f"{self.store.uri}: {key} is the manifest of {manifest.key}")
        return manifest

    def index(self, manifest: Manifest) -> Index:
        """Read and checked against the checksum in the manifest."""
        key = layout.index_key(self.entry.key)
        data = self.documents.index if self.documents else _get_live(self.store, self.entry.key, key)
        if len(data) != manifest.index.size_bytes or crc32(data) != manifest.index.crc32:
            raise CorruptError(f"{self.store.uri}: {key} is not what the manifest says (size or checksum)")
        return load_index(data, what=f"{self.store.uri}: {key}")

    def verify(self, *, reads: bool = True) -> Iterator[Finding]:
        """Read every object of the checkpoint and compare size and checksum. Yields one finding per object.

        reads: False compares sizes only.
        """
        key = layout.manifest_key(self.entry.key)
        try:
            manifest = self.manifest()
        except (NotFoundError, CorruptError) as error:  # a store that is away proves nothing
            yield Finding(key=key, size_bytes=0, problem=str(error))
            return
        yield Finding(key=key, size_bytes=self.store.head(key), problem="")
        for key, record in manifest.objects():
            yield Finding(
                key=key,
                size_bytes=record.size_bytes,
                problem=self._problem(key, record.size_bytes, record.crc32 if reads else None),
            )

    def _problem(self, key: str, size: int, crc: int | None) -> str:
        try:
            there = self.store.head(key)
        except NotFoundError:
            return "missing"
        if there != size:
            return f"has {there} bytes, the manifest says {size}"
        if crc is None:
            return ""
        total = 0
        for start in range(0, size, READ_BYTES):
            total = crc32(self.store.get_range(key, start, min(start + READ_BYTES, size)), total)
        return "" if total == crc else f"has checksum {total:08x}, the manifest says {crc:08x}"


def read_latest(store: Store) -> Latest:
    """`latest` as it stands. Raises NotFoundError when there is no run here."""
    try:
        got = store.get(layout.LATEST_KEY)
    except NotFoundError:
        raise NotFoundError(
            f"{store.uri}: no run here (no object named latest). Give the storage path and the run's name"
        ) from None
    return load_latest(got.data, what=f"{store.uri}: latest")


def directories(store: Store) -> list[CheckpointName]:
    """The checkpoints that have a directory, listed by `latest` or not, in the order of their saves."""
    return sorted(name for text in store.list_names(layout.CHECKPOINTS_PREFIX) if (name := CheckpointName.parse(text)))


def _get_live(store: Store, name: str, key: str) -> bytes:
    try:
        return store.get(key).data
    except NotFoundError:
        raise missing(store, name, key) from None


def missing(store: Store, name: str, key: str) -> NotFoundError | CorruptError:
    """Step 25: what it means that `key` of checkpoint `name` is not there: dropped meanwhile, or damage."""
    if read_latest(store).entry(name) is None:
        return NotFoundError(f"{store.uri}: checkpoint {name} was dropped by retention; open the run again")
    return CorruptError(f"{store.uri}: {key} is missing although latest lists its checkpoint")
