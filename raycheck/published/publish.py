"""Publishes the model of a committed checkpoint, or a directory, as the next version of a series. Step 43.

The publisher keeps the newest version in a local folder, as every reader does. It exports the checkpoint next to it,
compares the two, and stores the patches, or all files when that is due. What it has exported is the base of the next
patch.
"""

import hashlib
import os
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

from raycheck.bucket.format.checksum import crc32
from raycheck.bucket.format.document import dump
from raycheck.bucket.format.latest import Latest
from raycheck.bucket.format.object_keys import (
    PUBLISHED_PREFIX,
    VERSION_RECORD,
    CheckpointName,
    is_file_name,
    version_directory,
    version_key,
)
from raycheck.bucket.local_files import READ_BYTES, file_crc32, sync_files
from raycheck.bucket.protocol.write_once import put_once
from raycheck.bucket.reading import Checkpoint, read_newest
from raycheck.bucket.store import Got, Store
from raycheck.bucket.store.interface import Written
from raycheck.bucket.store.local import LocalStore
from raycheck.bucket.store.open import open_near
from raycheck.errors import ConfigError, ConflictError, CorruptError, FencedError, NotFoundError, RaycheckError
from raycheck.host import version_copies
from raycheck.huggingface.export import export_hf
from raycheck.log import event, logger
from raycheck.published.element_patch import zstd
from raycheck.published.file_patch import have_equal_heads, patch_files
from raycheck.published.pull import pull
from raycheck.published.records import (
    RESERVED,
    PatchFile,
    PublishedVersion,
    Reader,
    VersionFile,
    VersionRecord,
    Versions,
)
from raycheck.published.series import Series, kept
from raycheck.published.version_folder import LocalVersion, VersionFolder, typed_errors
from raycheck.published.weights_file import WEIGHTS, mapped
from raycheck.settings import Publish

MOST_WRITTEN = 32
DIRECTORY_TRIES = 5
"""How often a directory is published again because somebody else was quicker."""
SMALL_BYTES = 64 * 1024 * 1024
"""Up to here, the files of a version are uploaded while the newest state of the series and the run is read."""
FILES_AT_ONCE = 4
"""How many files are uploaded at a time. Each of them may be sent in several parts at a time."""


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


@dataclass(frozen=True, kw_only=True, slots=True)
class _Source:
    """What is published.

    store: of the run. checkpoint: its key; None: it is of none. write: writes its files into the root of a store.
    committed_at: when the checkpoint was committed; None: it may be older than what is published. attempt,
    on_published: see publish_directory.
    """

    store: Store
    checkpoint: str | None
    step: int
    write: Callable[[LocalStore], None]
    committed_at: float | None = None
    attempt: int | None = None
    on_published: Callable[[Published], None] | None = None


@dataclass(frozen=True, slots=True)
class _KnownVersions:
    """A list of versions, to which the next one is added.

    run_id: of the run that publishes. found: what is in the store; None: nothing. versions: those of this run.
    """

    run_id: str
    found: tuple[Versions, Got] | None
    versions: Versions | None


_WRITTEN: dict[str, _KnownVersions] = {}
"""The lists that this process has written for directories, by the series' URI, so that they need not be read again."""


def publish(checkpoint: Checkpoint, options: Publish, *, by_training: bool = False) -> Published | None:
    """Publish a checkpoint. Return None if it is the newest version already.

    by_training: refuse, with ConflictError, a checkpoint that was committed before the newest version's: a task may be
    repeated late, and by a driver that is no longer in charge. Raises ConfigError for a place with something else.
    """
    key = checkpoint.entry.key

    def write(local: LocalStore) -> None:
        export_hf(checkpoint, local, options, stem=f"model-{key}")

    entry = checkpoint.entry
    before = entry.committed_at if by_training else None
    source = _Source(store=checkpoint.store, checkpoint=key, step=entry.step, write=write, committed_at=before)
    return _publish_next(source, options)


def publish_directory(
    store: Store,
    directory: Path,
    options: Publish,
    *,
    step: int,
    attempt: int | None = None,
    on_published: Callable[[Published], None] | None = None,
) -> Published:
    """Publish the Hugging Face directory at a local path, as a version of the run at `store`.

    Its weights are in one file: a program that opens several files while a version appears must not mix two versions.
    attempt: of the run, for which this is done. on_published: called as soon as readers can have the version, before
    older ones are deleted. Raises ConfigError for any other directory, and for a place with something else; FencedError
    if another attempt has claimed the run since.
    """
    files = _files_in(directory)

    def write(local: LocalStore) -> None:
        for path in files:
            with typed_errors(path), mapped(path) as data:
                local.put_parts(path.name, _parts(data, READ_BYTES), len(data))

    source = _Source(store=store, checkpoint=None, step=step, write=write, attempt=attempt, on_published=on_published)
    done = _publish_next(source, options)
    assert done is not None, "only a checkpoint can be published already"
    return done


def _files_in(directory: Path) -> list[Path]:
    with typed_errors(directory):
        found = sorted(directory.iterdir())
        odd = [path for path in found if not path.is_file() or not is_file_name(path.name) or path.name in RESERVED]
    if odd:
        raise ConfigError(f"{odd[0]} is not a file that can be published: give a directory with a model's files only")
    count = sum(path.name.endswith(WEIGHTS) for path in found)
    if count != 1:
        raise ConfigError(
            f"{directory} has {count} files *{WEIGHTS}: give a directory with all weights in one, such as PEFT's "
            "save_pretrained writes for an adapter, or commit a checkpoint and publish that"
        )
    return found


def _publish_next(source: _Source, options: Publish) -> Published | None:
    zstd()  # raises before anything is read
    series = series_of(source.store, options)
    place = options.cache or _folder_of(series)
    folder = VersionFolder(Path(place), keep=1, is_private=options.cache is None)
    with folder.writing(wait=True):
        known = _WRITTEN.pop(series.uri, None)
        if source.checkpoint is not None:
            known = _read_versions(source, series, options)
            if _is_published(source, series, known.versions, options):
                return None
            return _publish_after(known, source, options, series, folder)
        for _ in range(DIRECTORY_TRIES):
            try:
                found = known or _read_versions(source, series, options)
                return _publish_after(found, source, options, series, folder)
            except FencedError:
                raise
            except ConflictError as error:  # somebody else has published since
                known, conflict = None, error
        raise conflict


def _read_versions(source: _Source, series: Series, options: Publish) -> _KnownVersions:
    found, run = source.store.both(series.read, partial(read_newest, source.store))
    _check_attempt(source, run)
    versions = _of_this_run(series, found[0], run.run_id, options) if found is not None else None
    return _KnownVersions(run.run_id, found, versions)


def _is_published(source: _Source, series: Series, versions: Versions | None, options: Publish) -> bool:
    """Return whether a checkpoint is the newest version. Raises ConflictError for a task that is late."""
    checkpoint, before = source.checkpoint, source.committed_at
    assert checkpoint is not None, "the caller has checked"
    if versions is None:
        return False
    newest = versions.newest
    if newest.checkpoint == checkpoint and not options.whole:
        return True
    if before is not None and (
        newest.published_at > before if newest.checkpoint is None else _name(checkpoint) < _name(newest.checkpoint)
    ):
        what = newest.checkpoint or f"a directory of step {newest.step}"
        raise ConflictError(
            f"{series}: {what} is published, which is newer than {checkpoint}; this one is not published any more"
        )
    return False


def _check_attempt(source: _Source, run: Latest) -> None:
    if source.attempt not in (None, run.attempt.number):
        raise FencedError(
            f"{source.store}: attempt {run.attempt.number} has claimed the run; attempt {source.attempt} is over"
        )


def _publish_after(
    known: _KnownVersions, source: _Source, options: Publish, series: Series, folder: VersionFolder
) -> Published:
    """Publish the version after those of a list."""
    versions = known.versions
    base = None if versions is None or options.whole else _base(series, folder, versions)
    try:
        return _publish(source, options, series, folder, known=known, base=base)
    finally:
        if base is not None:
            base.release()


def series_of(store: Store, options: Publish) -> Series:
    """Return the series to which the run at `store` publishes."""
    series = Series(store, PUBLISHED_PREFIX) if options.to is None else Series(open_near(options.to, store.uri), "")
    return replace(series, copies=version_copies(series.uri))


def _of_this_run(series: Series, versions: Versions, run_id: str, options: Publish) -> Versions | None:
    """Return the list if the next version belongs to it; None if it is of a run that was here before.

    Raises ConfigError if it is of another run, or of other weights of this one.
    """
    if versions.run_id != run_id:
        if series.prefix:
            return None
        raise ConfigError(f"{series}: the versions there are of another run; publish to another place")
    given = {"entry": options.entry, "dtype": _dtype(options), "merge_lora": options.merge_lora}
    for name, value in given.items():
        if value != getattr(versions, name):
            raise ConfigError(
                f"{series}: it has versions with {name}={getattr(versions, name)!r}, and this one has {value!r}; "
                "publish with the same, or to another place"
            )
    return versions


def _base(series: Series, folder: VersionFolder, versions: Versions) -> LocalVersion | None:
    """Return the newest version, locked, so that the next one can be a patch of it; None if it cannot be had."""
    for is_last in (False, True):
        have = folder.newest()
        try:
            is_newest = have is not None and have.record.directory == versions.newest.directory
            if is_newest and have is not None and _is_intact(have):
                found, have = have, None
                return found
            if is_last:
                return None
            pull(series, folder, versions, None if is_newest else have)
        except (CorruptError, NotFoundError):  # then the next version is whole, and nobody needs what is damaged
            return None
        finally:
            if have is not None:
                have.release()
    return None


def _is_intact(version: LocalVersion) -> bool:
    """Return whether all files have their checksums: patches of anything else would fit nobody's."""
    with typed_errors(version.path):
        paths = {version.path / name: file for name, file in version.record.files.items()}
        return all(path.is_file() and file_crc32(path) == file.crc32 for path, file in paths.items())


def _publish(
    source: _Source,
    options: Publish,
    series: Series,
    folder: VersionFolder,
    *,
    known: _KnownVersions,
    base: LocalVersion | None,
) -> Published:
    versions = known.versions
    number = known.found[0].newest.number + 1 if known.found else 1
    with folder.building() as place, ThreadPoolExecutor(1) as background:
        made = place / "new"
        made.mkdir()
        local = _NewFiles(made)
        source.write(local)
        flushed = background.submit(sync_files, made)  # it takes as long as the comparison
        put = _Upload(series, version_directory(number, uuid4().hex[:8]))
        files, fetched, patch_bytes = _with_patches(put, local, base, versions, options)
        record = VersionRecord(
            directory=put.directory,
            checkpoint=source.checkpoint,
            step=source.step,
            base=base.record.directory if base is not None and patch_bytes is not None else None,
            files=files,
        )
        published_at, readers, run = put.rest(made, record, fetched, source.store)
        _check_attempt(source, run)
        if run.run_id != known.run_id:
            raise ConflictError(f"{source.store}: another run was begun here meanwhile")
        version = PublishedVersion(
            directory=put.directory,
            number=number,
            checkpoint=record.checkpoint,
            step=record.step,
            base=record.base,
            is_whole=all(file.is_stored for file in files.values()),
            whole_bytes=sum(file.size_bytes for file in files.values()),
            patch_bytes=patch_bytes or 0,
            record_crc32=crc32(dump(record)),
            published_at=published_at,
        )
        new, gone = _with(versions, version, readers, options, run.run_id)
        now = series.add(new, known.found[1] if known.found else None)
        if source.checkpoint is None:
            _remember(series, _KnownVersions(run.run_id, now, now[0]))
        series.copies.announce()
        done = Published(uri=series.uri, version=version, bytes_written=put.size_bytes, dropped=gone)
        if source.on_published is not None:
            source.on_published(done)
        try:  # it is published, whatever becomes of what follows: the next one makes up for it
            with typed_errors(made):
                flushed.result()
            folder.show(made, record)
            series.delete_unlisted(new)
        except RaycheckError as error:
            what = "a version is published, but older ones could not be deleted yet"
            logger.warning(event(what, cause=error, run=series.store.uri))
    return done


def _remember(series: Series, written: _KnownVersions) -> None:
    _WRITTEN[series.uri] = written
    for uri in list(_WRITTEN)[:-MOST_WRITTEN]:
        _WRITTEN.pop(uri, None)  # another thread may have taken it


def _with(
    versions: Versions | None,
    version: PublishedVersion,
    readers: Mapping[str, Reader],
    options: Publish,
    run_id: str,
) -> tuple[Versions, tuple[int, ...]]:
    """Return the list with another version, and the numbers of those that are not in it any more."""
    new = Versions(
        run_id=run_id,
        series=versions.series if versions else uuid4().hex,
        entry=options.entry,
        dtype=_dtype(options),
        merge_lora=options.merge_lora,
        versions=(*versions.versions, version) if versions else (version,),
    )
    leased = [reader.directory for reader in readers.values() if reader.until > version.published_at]
    left = kept(new, keep_last=options.keep_last, leased=leased)
    gone = {item.number for item in new.versions} - {item.number for item in left}
    return replace(new, versions=left), tuple(sorted(gone))


def _with_patches(
    put: "_Upload", local: "_NewFiles", base: LocalVersion | None, versions: Versions | None, options: Publish
) -> tuple[dict[str, VersionFile], Collection[str], int | None]:
    """Decide where the bytes of each file are, and store the patches.

    Return the files, those that a reader of the base fetches as a whole, and all bytes that it fetches; None if there
    are no patches.
    """
    made, files = local.folder, dict(sorted(local.files.items()))
    whole_bytes = sum(file.size_bytes for file in files.values())
    patched = _patched(put, base, made, files) if base is not None else None
    stored, patch_bytes, fetched = list(files), None, list(files)
    if patched is None and base is not None:
        put.forget_copies()
    if patched is not None and base is not None:
        before = base.record.files
        files |= patched
        fetched = [
            name
            for name, file in files.items()
            if name not in patched and not (name in before and file.has_bytes_of(before[name]))
        ]
        patch_bytes = put.size_bytes + sum(files[name].size_bytes for name in fetched)
        if not _is_due(versions, options, patch_bytes, whole_bytes):
            stored = fetched
    files |= {name: replace(files[name], is_stored=True) for name in stored}
    return files, fetched, patch_bytes


class _NewFiles(LocalStore):
    """The folder into which a version is exported. files: what was written, with the checksums of these bytes.

    The files are not read again for it, so that one which the disk has damaged does not fit its record.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder), str(folder), flushes=False)
        self.folder = folder
        self.files: dict[str, VersionFile] = {}

    def put_parts(self, key: str, parts: Iterable[memoryview], size_bytes: int) -> None:
        size = seen = 0

        def noted() -> Iterator[memoryview]:
            nonlocal size, seen
            for part in parts:
                size, seen = size + len(part), crc32(part, seen)
                yield part

        super().put_parts(key, noted(), size_bytes)
        self.files[key] = VersionFile(size_bytes=size, crc32=seen, is_stored=False)

    def put_if_absent(self, key: str, data: bytes) -> Written:
        written = super().put_if_absent(key, data)
        self.files[key] = VersionFile(size_bytes=len(data), crc32=crc32(data), is_stored=False)
        return written


class _Upload:
    """What is written into the directory of a new version. size_bytes: so far.

    What a reader of the version before fetches is copied to where readers are, too.
    """

    def __init__(self, series: Series, directory: str) -> None:
        self.size_bytes = 0
        self.directory = directory
        self._series = series
        self.forget_copies()

    def forget_copies(self) -> None:
        self._series.copies.begin(self.directory)

    def patch(self, name: str, data: bytes) -> PatchFile:
        self._series.copies.add(name, memoryview(data))
        self._put(name, memoryview(data))
        self.size_bytes += len(data)
        return PatchFile(name=name, size_bytes=len(data), crc32=crc32(data))

    def rest(
        self, folder: Path, record: VersionRecord, fetched: Collection[str], run: Store
    ) -> tuple[float, Mapping[str, Reader], Latest]:
        """Write the files that are stored as a whole, and the record, several at a time.

        fetched: those of which there are copies. Return the store's time, the readers of the series, and the `latest`
        of the run, both as they are now.
        """
        store, copies, data = self._series.store, self._series.copies, dump(record)
        stored = [folder / name for name, file in record.files.items() if file.is_stored]
        for path in stored:
            if path.name in fetched:
                with mapped(path) as whole:
                    copies.add(path.name, whole)
        copies.add(VERSION_RECORD, memoryview(data))
        size = sum(file.size_bytes for file in record.files.values() if file.is_stored)
        while len(stored) > FILES_AT_ONCE or (stored and size > SMALL_BYTES):
            store.together(*(partial(self._put_file, path) for path in stored[:FILES_AT_ONCE]))
            del stored[:FILES_AT_ONCE]
        calls: list[Callable[[], Any]] = [partial(self._put_file, path) for path in stored]
        calls += [partial(self._put_record, data), self._series.readers, partial(read_newest, run)]
        *_, at, readers, newest = store.together(*calls)
        self.size_bytes += size
        return at, readers, newest

    def _put_file(self, path: Path) -> None:
        with mapped(path) as data:
            self._put(path.name, data)

    def _put_record(self, data: bytes) -> float:
        """Write the record. Return the store's time."""
        store, key = self._series.store, version_key(self._series.prefix, self.directory, VERSION_RECORD)
        at = put_once(store, key, data)
        return at if at is not None else store.get(key).at

    def _put(self, name: str, data: memoryview) -> None:
        store = self._series.store
        part = store.part_bytes(len(data))
        store.put_parts(version_key(self._series.prefix, self.directory, name), _parts(data, part), len(data))


def _parts(data: memoryview, size_bytes: int) -> Iterator[memoryview]:
    return (data[at : at + size_bytes] for at in range(0, max(1, len(data)), size_bytes))


def _patched(
    put: _Upload, base: LocalVersion, made: Path, files: Mapping[str, VersionFile]
) -> dict[str, VersionFile] | None:
    """Write the patches of all weights' files. Return these files with their patches.

    Return None if the base has other tensors, or if the patches become as large as the files.
    """
    before, now = (sorted(name for name in names if name.endswith(WEIGHTS)) for names in (base.record.files, files))
    if len(before) != len(now):
        return None
    pairs = [(base.path / old, made / new) for old, new in zip(before, now, strict=True)]
    if not all(have_equal_heads(old, new) for old, new in pairs):
        return None
    left = sum(files[name].size_bytes for name in now)
    patched = {}
    for old, new in pairs:
        patches: list[PatchFile] = []
        for data in patch_files(old, new):
            left -= len(data)
            if left <= 0:
                return None
            patches.append(put.patch(f"{new.name}.patch-{len(patches) + 1:05d}", data))
        patched[new.name] = replace(files[new.name], base=old.name, patches=tuple(patches))
    return patched


def _is_due(versions: Versions | None, options: Publish, patch_bytes: int, whole_bytes: int) -> bool:
    """Return whether a version that has patches has to be whole, too.

    It has to be for the sake of new readers, which fetch the newest whole version and all patches after it.
    """
    if versions is None or (whole := versions.newest_whole) is None:
        return True
    since = [version for version in versions.versions if version.number > whole.number]
    chain = patch_bytes + sum(version.patch_bytes for version in since)
    return len(since) + 1 >= options.whole_every or chain >= whole_bytes


def _folder_of(series: Series) -> str:
    """Return the folder for this series on this machine. It may be deleted at any time: the next publish fetches."""
    place = hashlib.sha256(series.uri.encode()).hexdigest()[:16]
    return f"{tempfile.gettempdir()}/raycheck-published-{os.getuid()}-{place}"


def _dtype(options: Publish) -> str | None:
    return None if options.dtype is None else str(options.dtype).removeprefix("torch.")


def _name(key: str) -> CheckpointName:
    name = CheckpointName.parse(key)
    assert name is not None, "a committed checkpoint has a name, and a listed one is checked"
    return name
