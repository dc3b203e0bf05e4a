"""Makes the newest published version in a local folder: from the version that is there, or from a whole one. Step 45.

Whatever is made has the checksums of its record, or is not made. If a patch does not fit, or costs more than a whole
version, the whole one is fetched.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from raycheck.bucket.document_reading import again_if_corrupt
from raycheck.bucket.format.checksum import crc32
from raycheck.bucket.format.object_keys import VERSION_RECORD
from raycheck.bucket.local_files import check_room, clone_file, file_crc32, link_or_clone
from raycheck.bucket.store.interface import Got
from raycheck.bucket.store.read_ahead import Spans, checked, read_ahead
from raycheck.errors import CorruptError, NotFoundError
from raycheck.published.file_patch import apply_patches
from raycheck.published.records import (
    MAX_RECORD_BYTES,
    PublishedVersion,
    VersionFile,
    VersionRecord,
    Versions,
    load_record,
)
from raycheck.published.series import Series, newest_whole, patches_since
from raycheck.published.version_folder import LocalFiles, VersionFolder, typed_errors
from raycheck.published.weights_file import mapped

TRIES = 5
"""How often the list is read again because something that it named was gone."""


@dataclass(slots=True)
class _Made:
    """A version that is being made.

    folder: for its files. files: as the record says. own: the files that are in it, and may be changed. elsewhere: the
    places of the others, which are files of complete versions. changed: the names of tensors that are not those of the
    version it began with; None: all may differ. bytes_fetched: from the bucket.
    """

    folder: Path
    files: Mapping[str, VersionFile] = field(default_factory=dict)
    own: set[str] = field(default_factory=set)
    elsewhere: dict[str, Path] = field(default_factory=dict)
    changed: set[str] | None = field(default_factory=set)
    bytes_fetched: int = 0

    def take(self, name: str, into: Path) -> bool:
        """Move or copy a file to `into`, to be changed. Return False if there is no such file."""
        with typed_errors(into):
            if name in self.own:
                self.own.remove(name)
                (self.folder / name).rename(into)
            elif name in self.elsewhere:
                clone_file(self.elsewhere.pop(name), into)
            else:
                return False
        return True


@dataclass(frozen=True, kw_only=True, slots=True)
class Pulled:
    """What a pull has made.

    began_with: the number of the version that was there; None: no version of this series. changed: the names of the
    tensors that differ from it; None: all may.
    """

    record: VersionRecord
    began_with: int | None
    changed: frozenset[str] | None
    bytes_fetched: int


def pull(series: Series, folder: VersionFolder, found: tuple[Versions, Got]) -> Pulled | None:
    """Make the newest version of the list in `folder`, for which the caller has the lock. Return None if it is there.

    found: the list, as it was just read. Raises CorruptError for a version that is damaged, NotFoundError if versions
    vanish faster than they can be fetched.
    """
    for _ in range(TRIES):
        try:
            return _pull(series, folder, found[0])
        except NotFoundError:
            again = series.read()
            if again is None:
                raise
            if again[0].newest == found[0].newest:
                break  # nobody has replaced it: it is lost
            found = again
    raise CorruptError(f"{series}: version {found[0].newest.number} lacks objects; publish again")


def _pull(series: Series, folder: VersionFolder, versions: Versions) -> Pulled | None:
    have = folder.newest()
    try:
        if have is not None and (have.record.series, have.record.number) == (versions.series, versions.newest.number):
            return None
        way, whole = _cheapest(versions, have)
        with folder.building() as made:
            try:
                return _make(series, folder, made, have=have if whole is None else None, whole=whole, way=way)
            except CorruptError:
                if whole is not None:
                    raise
        # The base is damaged, or the patch: a whole version needs neither.
        whole = newest_whole(versions)
        if whole is None:
            raise CorruptError(f"{series}: no version is whole, and the patches do not fit")
        with folder.building() as made:
            way = patches_since(versions, whole.number) or []
            return _make(series, folder, made, have=None, whole=whole, way=way)
    finally:
        if have is not None:
            have.release()


def _cheapest(versions: Versions, have: LocalFiles | None) -> tuple[list[PublishedVersion], PublishedVersion | None]:
    """Return the versions whose patches are applied, and the whole one that they are applied to; None: to `have`."""
    whole = newest_whole(versions)
    from_whole = (patches_since(versions, whole.number) or []) if whole is not None else []
    is_same = have is not None and have.record.series == versions.series
    from_here = patches_since(versions, have.record.number) if have is not None and is_same else None
    if from_here is None:
        if whole is None:
            raise CorruptError("the list has no whole version: publish one")
        return from_whole, whole
    if whole is None or sum(version.patch_bytes for version in from_here) <= whole.whole_bytes + sum(
        version.patch_bytes for version in from_whole
    ):
        return from_here, None
    return from_whole, whole


def _make(
    series: Series,
    folder: VersionFolder,
    place: Path,
    *,
    have: LocalFiles | None,
    whole: PublishedVersion | None,
    way: list[PublishedVersion],
) -> Pulled:
    made, record = _Made(place), None
    if have is not None:
        made.elsewhere = {name: have.path / name for name in have.record.files}
        record, made.files = have.record, have.record.files
    if whole is not None:
        record = _record(series, whole)
        made.changed = None
        check_room(folder.path, whole.whole_bytes)
        made.folder, made.files, made.own = _new_folder(place, whole), record.files, set(record.files)
        for name, file in record.files.items():
            _fetch(series, whole, name, file, made=made, folder=made.folder)
    for version in way:
        record = _record(series, version)
        _patch(series, version, record.files, made, _new_folder(place, version))
    assert record is not None, "there is a version here, or a whole one"
    for name, file in record.files.items():
        path = made.folder / name
        if name not in made.own:
            with typed_errors(path):
                link_or_clone(made.elsewhere[name], path)
        elif path.stat().st_size != file.size_bytes or file_crc32(path) != file.crc32:
            raise CorruptError(f"{series}: {name} of version {record.number} has another checksum than its record says")
    folder.show(made.folder, record)
    changed = None if made.changed is None else frozenset(made.changed)
    began_with = None if have is None else have.record.number
    return Pulled(record=record, began_with=began_with, changed=changed, bytes_fetched=made.bytes_fetched)


def _new_folder(place: Path, version: PublishedVersion) -> Path:
    path = place / str(version.number)
    with typed_errors(path):
        path.mkdir()
    return path


def _patch(
    series: Series, version: PublishedVersion, files: Mapping[str, VersionFile], made: _Made, folder: Path
) -> None:
    """Turn the files of the version before into those of `version`, in a new folder."""
    own: set[str] = set()
    elsewhere: dict[str, Path] = {}
    for name, file in files.items():
        if file.base is not None:
            if not made.take(file.base, folder / name):
                raise CorruptError(f"{series}: version {version.number} patches {file.base}, which its base lacks")
            with mapped(folder / name, writable=True) as data:
                for patch in file.patches:
                    found = _read(series, version, patch.name, patch.size_bytes, patch.crc32)
                    made.bytes_fetched += patch.size_bytes
                    what = f"{series.store}: {series.key(version, patch.name)}"
                    changed = apply_patches(memoryview(found), data, what=what)
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
            raise CorruptError(f"{series}: version {version.number} keeps {name}, which its base lacks")
    made.folder, made.files, made.own, made.elsewhere = folder, files, own, elsewhere


def _record(series: Series, version: PublishedVersion) -> VersionRecord:
    key = series.key(version, VERSION_RECORD)

    def read() -> VersionRecord:
        data = series.store.get_data(key, MAX_RECORD_BYTES)
        if crc32(data) != version.record_crc32:
            raise CorruptError(f"{series.store}: {key} is not the record that the list of versions names")
        return load_record(data, what=f"{series.store}: {key}")

    return again_if_corrupt(read)


def _fetch(
    series: Series, version: PublishedVersion, name: str, file: VersionFile, *, made: _Made, folder: Path
) -> None:
    """Fetch a file that is stored as a whole into `folder`."""

    def fetch() -> None:
        with typed_errors(folder / name), (folder / name).open("wb") as target:
            for chunk in _stream(series, version, name, file.size_bytes, file.crc32):
                target.write(chunk)
            target.flush()
            os.fsync(target.fileno())

    again_if_corrupt(fetch)
    made.bytes_fetched += file.size_bytes


def _read(series: Series, version: PublishedVersion, name: str, size: int, crc: int) -> bytes:
    return again_if_corrupt(lambda: b"".join(_stream(series, version, name, size, crc)))


def _stream(
    series: Series, version: PublishedVersion, name: str, size: int, crc: int
) -> Iterator[bytes | bytearray | memoryview]:
    key = series.key(version, name)
    return checked(read_ahead(Spans(series.store, key, 0, size)), crc, what=f"{series.store}: {key}")
