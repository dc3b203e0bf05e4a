"""Defines the documents of a series of published versions. All of them are hostile until they are loaded."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from raycheck.bucket.format.document import FORMAT_VERSION, Document, load
from raycheck.bucket.format.object_keys import CheckpointName, is_file_name, version_number
from raycheck.errors import CorruptError

MAX_VERSIONS_BYTES = 1024 * 1024
MAX_RECORD_BYTES = 16 * 1024 * 1024
MAX_READER_BYTES = 64 * 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishedVersion(Document):
    """One line of the list: a version, and what it takes to have it.

    number: counts the versions of a series from 1. directory: where its files are. checkpoint, step: what was
    published. base: the number of the version that its patches change; None: it has no patches. is_whole: all its files
    are stored. whole_bytes: the size of all its files. patch_bytes: the size of what a reader of the base fetches.
    record_crc32: the checksum of its record. published_at: in unix seconds by the store's clock.
    """

    number: int
    directory: str
    checkpoint: str
    step: int
    base: int | None
    is_whole: bool
    whole_bytes: int
    patch_bytes: int
    record_crc32: int
    published_at: float

    def __post_init__(self) -> None:
        if version_number(self.directory) != self.number:
            raise CorruptError(f"version {self.number} is in {self.directory!r}, which is not its directory")
        if CheckpointName.parse(self.checkpoint) is None:
            raise CorruptError(f"version {self.number} is of {self.checkpoint!r}, which is not a checkpoint's name")
        if self.base is not None and self.base >= self.number:
            raise CorruptError(f"version {self.number} is based on version {self.base}, which is not older")
        if self.base is None and not self.is_whole:
            raise CorruptError(f"version {self.number} is neither whole nor a patch")


@dataclass(frozen=True, kw_only=True, slots=True)
class Versions(Document):
    """The `versions.json` of a series: the versions that can be read, oldest first.

    run_id: the run whose weights these are. series: a random name of this series; numbers count within it.
    """

    format_version: int = FORMAT_VERSION
    run_id: str
    series: str
    versions: tuple[PublishedVersion, ...]

    def __post_init__(self) -> None:
        if not self.versions:
            raise CorruptError("the list of versions is empty")
        if any(one.number >= other.number for one, other in pairwise(self.versions)):
            raise CorruptError("the versions are not in order")

    @property
    def newest(self) -> PublishedVersion:
        return self.versions[-1]


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

    def has_bytes_of(self, other: "VersionFile") -> bool:
        return (self.size_bytes, self.crc32) == (other.size_bytes, other.crc32)


@dataclass(frozen=True, kw_only=True, slots=True)
class VersionRecord(Document):
    """The `version.json` of a version: its files, and where their bytes are. See PublishedVersion for other fields."""

    format_version: int = FORMAT_VERSION
    series: str
    number: int
    checkpoint: str
    step: int
    base: int | None
    files: Mapping[str, VersionFile]

    def __post_init__(self) -> None:
        names = [*self.files]
        for file in self.files.values():
            names += [file.base] if file.base is not None else []
            names += [patch.name for patch in file.patches]
        odd = [name for name in names if not is_file_name(name)]
        if odd:
            raise CorruptError(f"a version's record lists {odd[0]!r}, which is not a file's name")


@dataclass(frozen=True, kw_only=True, slots=True)
class Reader(Document):
    """The record of a reader, which keeps the versions that it still needs.

    name: whoever reads, such as its host. number: the version that it has. until: when the record ceases to count, in
    unix seconds by the store's clock.
    """

    format_version: int = FORMAT_VERSION
    name: str
    series: str
    number: int
    until: float

    def counts(self, versions: Versions, now: float) -> bool:
        """Return whether the record keeps versions of this list. now: in unix seconds by the store's clock."""
        return self.series == versions.series and self.until > now


def load_versions(data: bytes, *, what: str) -> Versions:
    return load(Versions, data, what=what, max_bytes=MAX_VERSIONS_BYTES)


def load_record(data: bytes, *, what: str) -> VersionRecord:
    return load(VersionRecord, data, what=what, max_bytes=MAX_RECORD_BYTES)


def load_reader(data: bytes, *, what: str) -> Reader:
    return load(Reader, data, what=what, max_bytes=MAX_READER_BYTES)
