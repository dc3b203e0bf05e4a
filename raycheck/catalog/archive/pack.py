"""Packs one checkpoint into one tar file. This is the public `pack`.

The archive is streamed: nothing is stored locally. Every byte is verified against the checkpoint's manifest on its way,
and a file with any wrong byte never appears.
"""

from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import IO

from raycheck.bucket.document_reading import again_if_corrupt
from raycheck.bucket.format.checksum import crc32
from raycheck.bucket.format.document import dump
from raycheck.bucket.format.manifest import Blob, Manifest, load_manifest
from raycheck.bucket.format.object_keys import MANIFEST
from raycheck.bucket.reading import Checkpoint, missing_error, read_latest
from raycheck.bucket.store import open_store
from raycheck.bucket.store.interface import Buffer
from raycheck.bucket.store.read_ahead import Spans, checked, read_ahead
from raycheck.catalog.archive.files import Place, check_free, compressed, write_file
from raycheck.catalog.archive.layout import (
    MAX_RECORD,
    RECORD,
    Archived,
    ArchiveRecord,
    archived,
    members_of,
)
from raycheck.catalog.archive.tar import TarStream
from raycheck.catalog.stored_objects import StoredObject, checkpoint_at, stored_objects
from raycheck.errors import ConfigError, NotFoundError
from raycheck.show_progress import ShowProgress, show_nothing
from raycheck.storage_settings import StorageSettings


def pack(
    source: str,
    to: str | IO[bytes],
    *,
    at: int | str | None = None,
    zstd: bool = False,
    dry_run: bool = False,
    storage: StorageSettings | None = None,
    progress: ShowProgress = show_nothing,
) -> Archived:
    """Pack a checkpoint into one tar file, which GNU tar and Python's tarfile read too.

    `tar x` creates a stock DCP directory for each component. Data that the checkpoint shares with others is packed in
    full. Nothing is stored locally, and memory stays bounded.

    source: a run's URI. to: the path or URI of a file that does not exist yet, or a binary stream that is open for
    writing. at: which checkpoint: a step, a checkpoint's name, or None for the head. zstd: compress the archive, for
    a local file or a stream; needs the package zstandard. dry_run: read what would be packed, and write nothing.
    storage: the settings for the source's bucket, and for `to` in the same kind of store. progress: called with the
    bytes that are packed, and their total.

    Raises NotFoundError if there is no such checkpoint or retention drops it in the meantime, and CorruptError if bytes
    differ from what was saved; then no file appears.
    """
    store = open_store(source, storage)
    body = read_latest(store)
    place = Place.of(to, storage, beside=source) if isinstance(to, str) else None
    if place is not None:
        check_free(place)
    packing = _Packing.of(checkpoint_at(store, body, at), run_id=body.run_id)
    if dry_run:
        return archived(packing.manifest, packing.record)
    size_bytes = packing.tar.size_bytes

    def write() -> None:
        told = 0

        def counted(chunks: Iterable[Buffer]) -> Iterator[Buffer]:
            nonlocal told
            for chunk in chunks:
                told += len(chunk)
                progress(told, size_bytes)
                yield chunk

        chunks = counted(packing.tar.chunks(packing.contents()))
        chunks = compressed(chunks) if zstd else chunks
        if place is not None:
            write_file(place, chunks, None if zstd else size_bytes)
        elif not isinstance(to, str):
            for chunk in chunks:
                to.write(chunk)
            to.flush()

    if place is None:
        write()  # data written to a pipe cannot be written again
    else:
        again_if_corrupt(write)
    return archived(packing.manifest, packing.record)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Packing:
    """The contents of an archive of `checkpoint`.

    manifest: the checkpoint's. texts: the bytes of the record and of the manifest, by member. objects: the other
    members, in the record's order.
    """

    checkpoint: Checkpoint
    manifest: Manifest
    record: ArchiveRecord
    texts: dict[str, bytes]
    objects: tuple[StoredObject, ...]

    @staticmethod
    def of(checkpoint: Checkpoint, *, run_id: str) -> "_Packing":
        data = checkpoint.read_manifest_bytes()
        manifest = load_manifest(data, what=f"{checkpoint.store}: {checkpoint.entry.key}")
        record = ArchiveRecord(
            uri=str(checkpoint.store),
            run_id=run_id,
            checkpoint=manifest.key,
            members=members_of(
                manifest,
                Blob(size_bytes=len(data), crc32=crc32(data)),
                what=f"{checkpoint.store}: the manifest of {manifest.key}",
            ),
        )
        text = dump(record)
        if len(text) > MAX_RECORD:
            raise ConfigError(f"{manifest.key} has too many objects for an archive: {len(record.members)}")
        objects = tuple(stored_objects(checkpoint, manifest))
        texts = {RECORD: text, MANIFEST: data}
        return _Packing(checkpoint=checkpoint, manifest=manifest, record=record, texts=texts, objects=objects)

    @property
    def tar(self) -> TarStream:
        sizes = {RECORD: len(self.texts[RECORD])} | {item.name: item.size_bytes for item in self.record.members}
        return TarStream(
            sizes={f"{self.record.checkpoint}/{name}": size for name, size in sizes.items()},
            modified_at=int(self.checkpoint.entry.committed_at),
        )

    def contents(self) -> Iterator[Iterable[Buffer]]:
        """Yield each member's bytes. Raises CorruptError, before the end, if any byte differs from the saved one."""
        yield from ([text] for text in self.texts.values())
        spans = [Spans(item.store, item.key, 0, item.size_bytes) for item in self.objects]
        with closing(read_ahead(span for own in spans for span in own)) as ahead:
            for item, own in zip(self.objects, spans, strict=True):
                yield self._object(item, (next(ahead) for _ in own))

    def _object(self, item: StoredObject, chunks: Iterator[Buffer]) -> Iterator[Buffer]:
        try:
            yield from checked(chunks, item.crc32, what=str(item))
        except NotFoundError:
            raise missing_error(self.checkpoint.store, self.checkpoint.entry.key, item.key) from None
