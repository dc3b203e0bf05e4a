"""Defines the documents of a series of published versions. Step 42. All of them are hostile until they are loaded."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

from raycheck.bucket.format.document import FORMAT_VERSION, Document, load
from raycheck.bucket.format.object_keys import VERSION_RECORD, CheckpointName, is_file_name, version_number
from raycheck.errors import CorruptError

MAX_VERSIONS_BYTES = 1024 * 1024
MAX_RECORD_BYTES = 16 * 1024 * 1024
MAX_READER_BYTES = 64 * 1024
MAX_OVERHEAD_BYTES = 1024 * 1024
"""How much larger than its file the patches of a file may be: headers."""
RECORD_FILE = "raycheck-version.json"
"""The record of a version in a local folder."""
RESERVED = (VERSION_RECORD, RECORD_FILE)


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishedVersion(Document):
    """One line of the list: a version, and what it takes to have it.

    directory: where its files are; no two versions have the same. number: counts the versions of a series from 1.
    checkpoint, step: what was published; no checkpoint for a directory that was published by itself. base: the
    directory of the version that its patches change; None: it has no patches. is_whole: all its files are stored.
    whole_bytes: the size of all its files. patch_bytes: the size of what a reader of the base fetches. record_crc32:
    the checksum of its record. published_at: in unix seconds by the store's clock.
    """

    directory: str
    number: int
    checkpoint: str | None
    step: int
    base: str | None
    is_whole: bool
    whole_bytes: int
    patch_bytes: int
    record_crc32: int
    published_at: float

    def __post_init__(self) -> None:
        if self.number < 1 or version_number(self.directory) != self.number:
            raise CorruptError(f"version {self.number} is in {self.directory!r}, which is not its directory")
        if self.checkpoint is not None and CheckpointName.parse(self.checkpoint) is None:
            raise CorruptError(f"version {self.number} is of {self.checkpoint!r}, which is not a checkpoint's name")
        if self.base is not None and (version_number(self.base) or self.number) >= self.number:
            raise CorruptError(f"version {self.number} is based on {self.base!r}, which is not an older version")
        if self.base is None and not self.is_whole:
            raise CorruptError(f"version {self.number} is neither whole nor a patch")
        if min(self.whole_bytes, self.patch_bytes) < 0:
            raise CorruptError(f"version {self.number} has a negative size")


@dataclass(frozen=True, kw_only=True, slots=True)
class Versions(Document):
    """The `versions.json` of a series: the versions that can be read, oldest first.

    run_id: the run whose weights these are. series: a random name of this series. entry, dtype, merge_lora: what is
    published of each checkpoint, see ExportOptions.
    """

    format_version: int = FORMAT_VERSION
    run_id: str
    series: str
    entry: str | None
    dtype: str | None
    merge_lora: bool
    versions: tuple[PublishedVersion, ...]

    def __post_init__(self) -> None:
        if not self.versions:
            raise CorruptError("the list of versions is empty")
        if any(one.number >= other.number for one, other in pairwise(self.versions)):
            raise CorruptError("the versions are not in order")

    @property
    def newest(self) -> PublishedVersion:
        return self.versions[-1]

    @property
    def newest_whole(self) -> PublishedVersion | None:
        """Return the newest whole version; None if there is none, which only a foreign writer leaves behind."""
        return next((version for version in reversed(self.versions) if version.is_whole), None)

    def up_to(self, wanted: int | str) -> "Versions | None":
        """Return the list as if one version were the newest; None if it is not listed. wanted: number or directory."""
        for at, version in enumerate(self.versions, 1):
            if wanted in (version.number, version.directory):
                return replace(self, versions=self.versions[:at])
        return None

    def patches_from(self, directory: str) -> list[PublishedVersion] | None:
        """Return the versions whose patches lead from the version in `directory` to the newest one, which may be none.

        Return None if no patches lead there.
        """
        way: list[PublishedVersion] = []
        needed: str | None = self.newest.directory
        for version in reversed(self.versions):
            if needed in (directory, None) or version.directory != needed:
                break
            way.insert(0, version)
            needed = version.base
        return way if needed == directory else None


@dataclass(frozen=True, kw_only=True, slots=True)
class PatchFile(Document):
    """One safetensors file with patches of tensors."""

    name: str
    size_bytes: int
    crc32: int


@dataclass(frozen=True, kw_only=True, slots=True)
class VersionFile(Document):
    """One file of a version.

    is_stored: it is in the version's directory as a whole. base: the file of the base version that `patches` turn into
    this one; None: there are no patches. A file that is neither stored nor patched has the bytes of the base's file of
    this name.
    """

    size_bytes: int
    crc32: int
    is_stored: bool
    base: str | None = None
    patches: tuple[PatchFile, ...] = ()

    def __post_init__(self) -> None:
        if min(self.size_bytes, *(patch.size_bytes for patch in self.patches), 0) < 0:
            raise CorruptError("a file has a negative size")
        if sum(patch.size_bytes for patch in self.patches) > self.size_bytes + MAX_OVERHEAD_BYTES:
            raise CorruptError("the patches of a file are larger than the file")

    def has_bytes_of(self, other: "VersionFile") -> bool:
        return (self.size_bytes, self.crc32) == (other.size_bytes, other.crc32)


@dataclass(frozen=True, kw_only=True, slots=True)
class VersionRecord(Document):
    """The `version.json` of a version: its files, and where their bytes are. See PublishedVersion for other fields."""

    format_version: int = FORMAT_VERSION
    directory: str
    checkpoint: str | None
    step: int
    base: str | None
    files: Mapping[str, VersionFile]

    def __post_init__(self) -> None:
        names = [*self.files]
        for file in self.files.values():
            names += [file.base] if file.base is not None else []
            names += [patch.name for patch in file.patches]
        odd = [name for name in names if not is_file_name(name) or name in RESERVED]
        if odd:
            raise CorruptError(f"a version's record lists {odd[0]!r}, which is not one of its files")
        if version_number(self.directory) is None:
            raise CorruptError(f"a version's record says that it is in {self.directory!r}")

    def is_of(self, version: PublishedVersion) -> bool:
        """Return whether this is the record of the version in the list."""
        mine = (self.directory, self.checkpoint, self.step, self.base)
        return mine == (version.directory, version.checkpoint, version.step, version.base)


@dataclass(frozen=True, kw_only=True, slots=True)
class Reader(Document):
    """The record of a reader, which keeps the versions that it still needs.

    directory: the version that it has, or begins with. until: when the record ceases to count, in unix seconds by the
    store's clock.
    """

    format_version: int = FORMAT_VERSION
    directory: str
    until: float


def load_versions(data: bytes, *, what: str) -> Versions:
    return load(Versions, data, what=what, max_bytes=MAX_VERSIONS_BYTES)


def load_record(data: bytes, *, what: str) -> VersionRecord:
    return load(VersionRecord, data, what=what, max_bytes=MAX_RECORD_BYTES)


def load_reader(data: bytes, *, what: str) -> Reader:
    return load(Reader, data, what=what, max_bytes=MAX_READER_BYTES)
