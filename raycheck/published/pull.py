"""Makes the newest published version in a local folder: from the version that is there, or from a whole one. Step 44.

Whatever is made has the checksums of its record, or is not made. Only the list is always read from the bucket: of the
files of a version there may be nearer copies. If a patch does not fit, or costs more than a whole version, the whole
one is fetched.
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from raycheck.bucket.document_reading import again_if_corrupt
from raycheck.bucket.format.checksum import crc32
from raycheck.bucket.format.object_keys import VERSION_RECORD
from raycheck.bucket.local_files import check_room, clone_file, file_crc32, link_or_clone
from raycheck.bucket.store.interface import Buffer
from raycheck.bucket.store.read_ahead import Spans, checked, read_ahead
from raycheck.errors import ConfigError, CorruptError, NotFoundError, StoreError
from raycheck.published.file_patch import apply_patches
from raycheck.published.records import (
    MAX_RECORD_BYTES,
    PublishedVersion,
    VersionFile,
    VersionRecord,
    Versions,
    load_record,
)
from raycheck.published.series import Series
from raycheck.published.version_folder import LocalVersion, VersionFolder, typed_errors


@dataclass(frozen=True, slots=True)
class Way:
    """How to make the newest version.

    whole: the version that is fetched first; None: the local one is the base. patches: the versions whose patches are
    applied to it.
    """

    whole: PublishedVersion | None
    patches: list[PublishedVersion]

    @property
    def size_bytes(self) -> int:
        fetched = self.whole.whole_bytes if self.whole is not None else 0
        return fetched + sum(version.patch_bytes for version in self.patches)


@dataclass(frozen=True, kw_only=True, slots=True)
class Pulled:
    """What a pull has made.

    began_with: the directory of the version that was there; None: a whole one was fetched. changed: the names of the
    tensors that differ from it; None: all may.
    """

    record: VersionRecord
    began_with: str | None
    changed: frozenset[str] | None
    bytes_fetched: int


def ways(versions: Versions, have: LocalVersion | None) -> list[Way]:
    """Return the ways to the newest version, the cheapest first. There are none if no version is whole.

    have: the local version. Raises CorruptError if there is no way.
    """
    found = []
    if have is not None and (patches := versions.patches_from(have.record.directory)) is not None:
        found.append(Way(None, patches))
    whole = versions.newest_whole
    if whole is not None and (patches := versions.patches_from(whole.directory)) is not None:
        found.append(Way(whole, patches))
    return sorted(found, key=lambda way: way.size_bytes)


def pull(series: Series, folder: VersionFolder, versions: Versions, have: LocalVersion | None) -> Pulled | None:
    """Make the newest version of the list in `folder`, for which the caller has the lock. Return None if it is there.

    have: the folder's newest version. Raises CorruptError for a version that is damaged or lacks objects; NotFoundError
    if the list does not name the version any more.
    """
    newest = versions.newest
    if have is not None and have.record.directory == newest.directory:
        return None
    failure: CorruptError | NotFoundError | None = None
    for way in ways(versions, have):
        try:
            with folder.building() as place, typed_errors(place):
                return _make(series, folder, place, way, have)
        except (CorruptError, NotFoundError) as error:
            failure = failure or error
    if isinstance(failure, NotFoundError):
        now = series.read()
        if now is not None and newest not in now[0].versions:
            raise failure
    raise CorruptError(
        f"{series}: version {newest.number} cannot be made: {failure or 'no version is whole'}. Publish a whole one: "
        "'raycheck publish --whole'"
    )


@dataclass(slots=True)
class _Made:
    """A version that is being made.

    folder: for its files. files: as the record says. own: the files that are in it, and may be changed. elsewhere: the
    places of the others, which are files of complete versions. changed: the names of tensors that are not those of the
    version it began with; None: all may differ. bytes_fetched: from the bucket, or as copies of what is there.
    """

    folder: Path
    files: Mapping[str, VersionFile] = field(default_factory=dict)
    own: set[str] = field(default_factory=set)
    elsewhere: dict[str, Path] = field(default_factory=dict)
    changed: set[str] | None = field(default_factory=set)
    bytes_fetched: int = 0

    def take(self, name: str, into: Path) -> None:
        """Move or copy a file to `into`, to be changed. Raises CorruptError if there is no such file."""
        if name in self.own:
            self.own.remove(name)
            (self.folder / name).rename(into)
            return
        try:
            clone_file(self.elsewhere.pop(name), into)
        except (KeyError, FileNotFoundError):
            raise CorruptError(f"the base has no file {name}") from None


def _make(series: Series, folder: VersionFolder, place: Path, way: Way, have: LocalVersion | None) -> Pulled:
    made, record = _Made(place), None
    if way.whole is None:
        assert have is not None, "the local version is the base"
        made.elsewhere = {name: have.path / name for name in have.record.files}
        record, made.files = have.record, have.record.files
    else:
        record = _record(series, way.whole)
        made.changed = None
        made.folder, made.files, made.own = _new_folder(place, way.whole), record.files, set(record.files)
        _check_room(folder.path, record.files.values())
        for name, file in record.files.items():
            _fetch(series, way.whole, name, file, made=made, folder=made.folder)
    for version in way.patches:
        record = _record(series, version)
        _patch(series, version, record.files, made, _new_folder(place, version))
    for name, file in record.files.items():
        path = made.folder / name
        if name not in made.own:
            _carry(made.elsewhere[name], path)
        if path.stat().st_size != file.size_bytes or file_crc32(path) != file.crc32:
            raise CorruptError(f"{name} of {record.directory} has another checksum than its record says")
    folder.show(made.folder, record)
    return Pulled(
        record=record,
        began_with=None if way.whole is not None or have is None else have.record.directory,
        changed=None if made.changed is None else frozenset(made.changed),
        bytes_fetched=made.bytes_fetched,
    )


def _new_folder(place: Path, version: PublishedVersion) -> Path:
    path = place / version.directory
    path.mkdir()
    return path


def _check_room(folder: Path, files: Iterable[VersionFile]) -> None:
    try:
        check_room(folder, sum(file.size_bytes for file in files))
    except ConfigError as error:  # there may be room later
        raise StoreError(str(error)) from None


def _carry(source: Path, target: Path) -> None:
    """Have a file of an older version in this one, too."""
    try:
        link_or_clone(source, target)
    except FileNotFoundError:
        raise CorruptError(f"the base has no file {source.name}") from None


def _patch(
    series: Series, version: PublishedVersion, files: Mapping[str, VersionFile], made: _Made, folder: Path
) -> None:
    """Turn the files of the version before into those of `version`, in a new folder."""
    own: set[str] = set()
    elsewhere: dict[str, Path] = {}
    copied = [file for file in files.values() if file.base is not None and file.base not in made.own]
    _check_room(folder, copied)
    for name, file in files.items():
        if file.base is not None:
            made.take(file.base, folder / name)
            for patch in file.patches:
                found = _read(series, version, patch.name, patch.size_bytes, patch.crc32)
                made.bytes_fetched += patch.size_bytes
                what = f"{series.store}: {series.key(version, patch.name)}"
                changed = apply_patches(found, folder / name, what=what)
                if made.changed is not None:
                    made.changed |= changed
            own.add(name)
        elif name in made.files and file.has_bytes_of(made.files[name]):
            if name in made.own:
                made.take(name, folder / name)
                own.add(name)
            else:
                elsewhere[name] = made.elsewhere[name]
        elif file.is_stored:
            _fetch(series, version, name, file, made=made, folder=folder)
            own.add(name)
        else:
            raise CorruptError(f"{version.directory} keeps {name}, which its base lacks")
    made.folder, made.files, made.own, made.elsewhere = folder, files, own, elsewhere


def _record(series: Series, version: PublishedVersion) -> VersionRecord:
    key = series.key(version, VERSION_RECORD)

    def read() -> VersionRecord:
        copy = _copy(series, version, VERSION_RECORD, version.record_crc32)
        data = bytes(copy) if copy is not None else series.store.get_data(key, MAX_RECORD_BYTES)
        record = load_record(data, what=f"{series.store}: {key}")
        if crc32(data) != version.record_crc32 or not record.is_of(version):
            raise CorruptError(f"{series.store}: {key} is not the record that the list of versions names")
        return record

    return again_if_corrupt(read)


def _fetch(
    series: Series, version: PublishedVersion, name: str, file: VersionFile, *, made: _Made, folder: Path
) -> None:
    """Fetch a file that is stored as a whole into `folder`."""

    def fetch() -> None:
        with (folder / name).open("wb") as target:
            for chunk in _stream(series, version, name, file.size_bytes, file.crc32):
                target.write(chunk)
            target.flush()
            os.fsync(target.fileno())

    again_if_corrupt(fetch)
    made.bytes_fetched += file.size_bytes


def _read(series: Series, version: PublishedVersion, name: str, size: int, crc: int) -> bytes:
    return again_if_corrupt(lambda: b"".join(_stream(series, version, name, size, crc)))


def _copy(series: Series, version: PublishedVersion, name: str, crc: int) -> memoryview | None:
    """Return a nearer copy of a file; None if there is none that is intact, so that the bucket is still read twice."""
    copy = series.copies.take(version.directory, name)
    return copy if copy is not None and crc32(copy) == crc else None


def _stream(series: Series, version: PublishedVersion, name: str, size: int, crc: int) -> Iterator[Buffer]:
    copy = _copy(series, version, name, crc)
    if copy is not None:
        return iter((copy,))
    key = series.key(version, name)
    return checked(read_ahead(Spans(series.store, key, 0, size)), crc, what=f"{series.store}: {key}")
