"""Creates a new run from an archive. This is the public `unpack`.

The archive is streamed: nothing is stored locally. The run exists only after the archive's last byte has been read and
verified (I1, I3), so a crash leaves no run. The objects of an interrupted try stay under a name used by nothing else
(I2).
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO
from uuid import uuid4

from raycheck.bucket.document_reading import again_if_corrupt
from raycheck.bucket.format.checksum import crc32
from raycheck.bucket.format.index_codec import load_index
from raycheck.bucket.format.manifest import MAX_BYTES as MAX_MANIFEST
from raycheck.bucket.format.manifest import Blob, Manifest, load_manifest
from raycheck.bucket.format.object_keys import INDEX, MANIFEST, CheckpointName
from raycheck.bucket.protocol.sharing.new_run import (
    Origin,
    begin_run,
    first_entry,
    first_manifest,
    look_at_place,
    reserve_name,
)
from raycheck.bucket.protocol.swap import Register
from raycheck.bucket.protocol.write_once import write_manifest
from raycheck.bucket.store import Store, open_store
from raycheck.bucket.store.interface import MAX_WHOLE_BYTES, Buffer
from raycheck.bucket.store.read_ahead import checked, put_stream
from raycheck.catalog.archive.files import ArchiveStream, Place, opened
from raycheck.catalog.archive.layout import (
    MAX_RECORD,
    RECORD,
    Archived,
    ArchiveRecord,
    Member,
    archived,
    load_record,
    members_of,
)
from raycheck.catalog.archive.tar import BLOCK, END, TarReader
from raycheck.errors import ConfigError, CorruptError
from raycheck.show_progress import ShowProgress, show_nothing
from raycheck.storage_settings import StorageSettings


def unpack(
    file: str | IO[bytes],
    to: str,
    *,
    dry_run: bool = False,
    storage: StorageSettings | None = None,
    progress: ShowProgress = show_nothing,
) -> Archived:
    """Create a new run from an archive written by `pack`. The next training at `to` resumes from its checkpoint.

    The archive is streamed: nothing is stored locally, and memory stays bounded. All of it is verified before the run
    exists. If this call is interrupted, there is no run, and the call can be repeated.

    file: the archive's path or URI, or a binary stream that is open for reading; compressed or not. to: the new run's
    URI. dry_run: verify the archive, and write nothing. storage: the settings for the bucket of `to`, and for `file` in
    the same kind of store. progress: called with the bytes that are unpacked, and their total.

    Raises ConfigError if there is a run at `to`, and CorruptError if anything in the archive is missing, changed, out
    of order, or added.
    """
    source = Place.of(file, storage, beside=to) if isinstance(file, str) else file
    return unpack_into(
        Register(open_store(to, storage)), source, run_id=uuid4().hex, dry_run=dry_run, progress=progress
    )


def unpack_into(
    register: Register,
    source: Place | IO[bytes],
    *,
    run_id: str,
    dry_run: bool = False,
    progress: ShowProgress = show_nothing,
) -> Archived:
    """Create the run `run_id` at the register's place. Other arguments are as for `unpack`."""
    store = register.store
    existing, save = look_at_place(register)
    if existing is not None:
        raise ConfigError(f"{store}: there is already a run. Choose a free place for the new one")
    target = None if dry_run else _Target(store=store, run_id=run_id, save=save)

    def once() -> tuple[Archived, Manifest]:
        with opened(source) as stream:
            return _Unpacking(stream, progress).run(target)

    # Data from a pipe cannot be read again.
    done, manifest = again_if_corrupt(once) if isinstance(source, Place) else once()
    if target is None:
        return done
    entry = first_entry(manifest, write_manifest(store, manifest))
    body = begin_run(register, entry, manifest, run_id=run_id, verb="unpack")
    if body.run_id != run_id:
        raise ConfigError(
            f"{store}: another run was created there in the meantime. Choose a free place for the new one"
        )
    return done


@dataclass(frozen=True, kw_only=True, slots=True)
class _Target:
    """The directory of the new run into which objects are unpacked. save: the lowest save number that it may have."""

    store: Store
    run_id: str
    save: int

    def reserve(self, record: ArchiveRecord, step: int) -> CheckpointName:
        """Return the name of the checkpoint, which no other unpacking uses. May be called again."""
        origin = Origin(run_id=self.run_id, uri=record.uri, source_run_id=record.run_id, checkpoint=record.checkpoint)
        return reserve_name(self.store, origin, step=step, save=self.save)


class _Unpacking:
    """The reading of one archive from beginning to end, which verifies all of it."""

    def __init__(self, stream: ArchiveStream, progress: ShowProgress) -> None:
        self._stream = stream
        self._progress = progress
        self._tar = TarReader(stream)
        self._folder = ""
        self._taken = 0

    def run(self, target: _Target | None) -> tuple[Archived, Manifest]:
        """Write the checkpoint's objects to `target` unless it is None. Returns the manifest in the new run."""
        what = self._stream.what
        record = load_record(b"".join(self._tar.content(self._first())), what=f"{what}: the record")
        manifest = self._manifest(record)
        self._check_size(record)
        name = (
            CheckpointName(step=manifest.step, attempt=0, save=1)
            if target is None
            else target.reserve(record, manifest.step)
        )
        new = first_manifest(manifest, name, restored_from=f"{record.uri} {record.checkpoint}")
        for member, (key, _) in zip(record.members[1:], new.objects(), strict=True):
            chunks: Iterator[Buffer] = self._verified(member, record.size_bytes)
            if member.name == INDEX:
                chunks = self._parsed(chunks)
            if target is not None:
                put_stream(target.store, key, chunks, member.size_bytes)
            else:
                deque(chunks, maxlen=0)  # reads them all
        self._tar.check_end()
        return archived(manifest, record), new

    def _first(self) -> int:
        """Start reading the record, which names the folder of all members. Returns its size in bytes."""
        found, size = self._tar.next_file(RECORD)
        self._folder, _, name = found.partition("/")
        if name != RECORD or CheckpointName.parse(self._folder) is None or not 0 < size <= MAX_RECORD:
            raise CorruptError(
                f"{self._stream.what} is not an archive of raycheck: it begins with {found[:120]!r} of {size} bytes, "
                f"not with {RECORD} in a folder that is named as a checkpoint"
            )
        return size

    def _parsed(self, chunks: Iterator[Buffer]) -> Iterator[Buffer]:
        """Yield the index. Raises CorruptError if it is not an index."""
        data = b"".join(chunks)
        load_index(data, what=f"{self._stream.what}: the index", values=True)
        yield data

    def _manifest(self, record: ArchiveRecord) -> Manifest:
        what = f"{self._stream.what}: the manifest"
        if record.checkpoint != self._folder:
            raise CorruptError(f"{what}: the record is for {record.checkpoint}, but is in the folder {self._folder!r}")
        first = next(iter(record.members), None)
        if first is None or first.name != MANIFEST or not 0 <= first.size_bytes <= MAX_MANIFEST:
            raise CorruptError(f"{what} is not the first file in the record, or is too large")
        data = b"".join(self._verified(first))
        manifest = load_manifest(data, what=what)
        members = members_of(manifest, Blob(size_bytes=len(data), crc32=crc32(data)), what=what)
        if manifest.key != self._folder or members != record.members or manifest.index.size_bytes > MAX_WHOLE_BYTES:
            raise CorruptError(f"{what} and the record list different objects")
        return manifest

    def _check_size(self, record: ArchiveRecord) -> None:
        """Raise CorruptError, before anything is written, if a file is shorter than the contents that it states."""
        least = sum(BLOCK + member.size_bytes for member in record.members) + len(END)
        if self._stream.size_bytes is not None and self._stream.size_bytes < least:
            raise CorruptError(
                f"{self._stream.what} has {self._stream.size_bytes} bytes, fewer than the {least} that it must have: "
                "it was cut short"
            )

    def _verified(self, member: Member, total: int | None = None) -> Iterator[Buffer]:
        """Read a member. Raises CorruptError, at the latest after its last byte, if it is not the expected one.

        total: the bytes of all members, if progress is reported.
        """
        name, size = self._tar.next_file(member.name)
        if (name, size) != (f"{self._folder}/{member.name}", member.size_bytes):
            raise CorruptError(
                f"{self._stream.what}: {name[:120]!r} of {size} bytes is in place of {member.name} of "
                f"{member.size_bytes} bytes"
            )
        what = f"{self._stream.what}: {member.name}"
        for chunk in checked(self._tar.content(size), member.crc32, what=what):
            self._taken += len(chunk)
            if total is not None:
                self._progress(self._taken, total)
            yield chunk
