"""Publishes the model of a committed checkpoint as the next version of its series. Step 43.

The publisher keeps the newest version in a local folder, as every reader does. It exports the checkpoint next to it,
compares the two, and stores the patches, or all files when that is due. What it has exported is the base of the next
patch.
"""

import hashlib
import os
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from uuid import uuid4

from raycheck.bucket.format.checksum import crc32
from raycheck.bucket.format.document import dump
from raycheck.bucket.format.object_keys import (
    PUBLISHED_PREFIX,
    VERSION_RECORD,
    CheckpointName,
    version_directory,
    version_key,
)
from raycheck.bucket.local_files import file_crc32
from raycheck.bucket.protocol.write_once import put_once
from raycheck.bucket.reading import Checkpoint, read_newest
from raycheck.bucket.store import Got, open_store
from raycheck.bucket.store.address import shown_uri
from raycheck.bucket.store.open import open_near
from raycheck.errors import ConfigError, ConflictError, CorruptError, RaycheckError
from raycheck.huggingface.export import export_hf
from raycheck.log import event, logger
from raycheck.published.element_patch import zstd
from raycheck.published.file_patch import patches_of
from raycheck.published.pull import pull
from raycheck.published.records import PatchFile, PublishedVersion, VersionFile, VersionRecord, Versions
from raycheck.published.series import Series, kept, newest_whole, with_version
from raycheck.published.version_folder import LocalFiles, VersionFolder
from raycheck.published.weights_file import mapped
from raycheck.settings import Publish

WEIGHTS = ".safetensors"


@dataclass(frozen=True, kw_only=True, slots=True)
class Published:
    """A version that was published.

    uri: the place of the series. version: as the list names it. bytes_written: to the bucket. dropped: the numbers of
    versions that retention has dropped for it.
    """

    uri: str
    version: PublishedVersion
    bytes_written: int
    dropped: tuple[int, ...]


def publish(checkpoint: Checkpoint, options: Publish, *, by_training: bool = False) -> Published | None:
    """Publish a checkpoint. Return None if it is the newest version already.

    by_training: refuse, with ConflictError, a checkpoint of an older attempt than the newest version's, which a driver
    that is no longer in charge could publish. Raises ConfigError for a place with weights of another run.
    """
    zstd()  # raises before anything is read
    store = checkpoint.store
    series = Series(store, PUBLISHED_PREFIX) if options.to is None else Series(open_near(options.to, store.uri), "")
    folder = VersionFolder(_folder_of(series, options))
    with folder.writing(wait=True):
        found = series.read()
        versions = found[0] if found else None
        run_id = read_newest(store).run_id
        if versions is not None:
            if versions.run_id != run_id:
                raise ConfigError(f"{series}: the versions there are of another run; publish to another place")
            if versions.newest.checkpoint == checkpoint.entry.key:
                return None
            if by_training and _attempt(checkpoint.entry.key) < _attempt(versions.newest.checkpoint):
                raise ConflictError(
                    f"{series}: {versions.newest.checkpoint} is published, of a newer attempt than "
                    f"{checkpoint.entry.key}, which is not published any more"
                )
        base = None
        if found is not None:
            try:
                pull(series, folder, found)
                base = folder.newest()
            except CorruptError:  # then this version is whole, and readers need nothing of what is damaged
                base = None
        try:
            return _publish(checkpoint, options, series, folder, found=found, base=base, run_id=run_id)
        finally:
            if base is not None:
                base.release()


def _publish(
    checkpoint: Checkpoint,
    options: Publish,
    series: Series,
    folder: VersionFolder,
    *,
    found: tuple[Versions, Got] | None,
    base: LocalFiles | None,
    run_id: str,
) -> Published:
    versions = found[0] if found else None
    number = versions.newest.number + 1 if versions else 1
    directory = version_directory(number, uuid4().hex[:8])
    with folder.building() as place:
        made = place / "new"
        made.mkdir()
        export_hf(checkpoint, open_store(str(made)), options, stem=f"model-{checkpoint.entry.key}")
        put = _Upload(series, directory)
        files = {
            path.name: VersionFile(size_bytes=path.stat().st_size, crc32=file_crc32(path), is_stored=False)
            for path in sorted(made.iterdir())
        }
        whole_bytes = sum(file.size_bytes for file in files.values())
        patched = _patched(put, base, made, files) if base is not None else None
        if patched is not None:
            files |= patched
        equal = _equal(base, files) if patched is not None else frozenset[str]()
        single = [name for name, file in files.items() if file.base is None and name not in equal]
        patch_bytes = put.size_bytes + sum(files[name].size_bytes for name in single)
        is_whole = patched is None or _is_due(versions, options, patch_bytes, whole_bytes)
        stored = list(files) if is_whole else single
        for name in stored:
            files[name] = replace(files[name], is_stored=True)
            put.file(made / name)
        record = VersionRecord(
            series=versions.series if versions else uuid4().hex,
            number=number,
            checkpoint=checkpoint.entry.key,
            step=checkpoint.entry.step,
            base=None if patched is None else number - 1,
            files=files,
        )
        put.record(dump(record))
        version = PublishedVersion(
            number=number,
            directory=directory,
            checkpoint=record.checkpoint,
            step=record.step,
            base=record.base,
            is_whole=is_whole,
            whole_bytes=whole_bytes,
            patch_bytes=0 if patched is None else patch_bytes,
            record_crc32=crc32(dump(record)),
            published_at=put.at,
        )
        shown, dropped = _retained(
            series, with_version(versions, version, run_id=run_id, series=record.series), options
        )
        series.add(shown, found[1] if found else None)
        folder.show(made, record)
    try:
        series.delete_unlisted(shown)
    except RaycheckError as error:  # the version is published; the next one deletes what this one could not
        logger.warning(event("older published versions could not be deleted yet", cause=error, run=series.store.uri))
    return Published(
        uri=f"{shown_uri(series.store.uri)}/{series.prefix}".rstrip("/"),
        version=version,
        bytes_written=put.size_bytes,
        dropped=dropped,
    )


class _Upload:
    """What is written into the directory of a new version. size_bytes: so far. at: the store's time of the record."""

    def __init__(self, series: Series, directory: str) -> None:
        self.size_bytes = 0
        self.at = 0.0
        self._series = series
        self._directory = directory

    def data(self, name: str, data: bytes) -> PatchFile:
        self._put(name, memoryview(data))
        return PatchFile(name=name, size_bytes=len(data), crc32=crc32(data))

    def file(self, path: Path) -> None:
        with mapped(path) as data:
            self._put(path.name, data)

    def record(self, data: bytes) -> None:
        key = version_key(self._series.prefix, self._directory, VERSION_RECORD)
        self.at = put_once(self._series.store, key, data) or time.time()

    def _put(self, name: str, data: memoryview) -> None:
        store = self._series.store
        part = store.part_bytes(len(data))
        parts = (data[at : at + part] for at in range(0, max(1, len(data)), part))
        store.put_parts(version_key(self._series.prefix, self._directory, name), parts, len(data))
        self.size_bytes += len(data)


def _patched(
    put: _Upload, base: LocalFiles, made: Path, files: Mapping[str, VersionFile]
) -> dict[str, VersionFile] | None:
    """Write the patches of all weights' files. Return these files with their patches.

    Return None if the base has other tensors, or if the patches become as large as the files.
    """
    before, now = (sorted(name for name in names if name.endswith(WEIGHTS)) for names in (base.record.files, files))
    if len(before) != len(now):
        return None
    left = sum(files[name].size_bytes for name in now)
    patched = {}
    for old, new in zip(before, now, strict=True):
        found = patches_of(base.path / old, made / new)
        if found is None:
            return None
        patches: list[PatchFile] = []
        for data in found:
            left -= len(data)
            if left <= 0:
                return None
            patches.append(put.data(f"{new}.patch-{len(patches) + 1:05d}", data))
        patched[new] = replace(files[new], base=old, patches=tuple(patches))
    return patched


def _equal(base: LocalFiles | None, files: Mapping[str, VersionFile]) -> frozenset[str]:
    """Return the files that a reader of the base has already, under the same name."""
    before = base.record.files if base is not None else {}
    return frozenset(name for name, file in files.items() if name in before and file.has_bytes_of(before[name]))


def _is_due(versions: Versions | None, options: Publish, patch_bytes: int, whole_bytes: int) -> bool:
    """Return whether a version that has patches has to be whole, too.

    It has to be for the sake of new readers, which fetch the newest whole version and all patches after it.
    """
    if versions is None or (whole := newest_whole(versions)) is None:
        return True
    since = [version for version in versions.versions if version.number > whole.number]
    chain = patch_bytes + sum(version.patch_bytes for version in since)
    return len(since) + 1 >= options.whole_every or chain >= whole_bytes


def _retained(series: Series, versions: Versions, options: Publish) -> tuple[Versions, tuple[int, ...]]:
    """Return the list after retention, and the numbers of the versions that are not in it any more."""
    now = versions.newest.published_at
    leased = [reader.number for reader in series.readers() if reader.series == versions.series and reader.until > now]
    stay = kept(versions.versions, keep_last=options.keep_last, leased=leased)
    gone = {version.number for version in versions.versions} - {version.number for version in stay}
    return replace(versions, versions=tuple(stay)), tuple(sorted(gone))


def _folder_of(series: Series, options: Publish) -> Path:
    """Return the folder for this series on this machine. It may be deleted at any time: the next publish fetches."""
    if options.cache is not None:
        return Path(options.cache)
    place = hashlib.sha256(f"{series.store.uri} {series.prefix}".encode()).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"raycheck-published-{os.getuid()}" / place


def _attempt(key: str) -> int:
    name = CheckpointName.parse(key)
    return name.attempt if name is not None else 0
