"""Defines an archive: one checkpoint in one tar file, whose first member lists all others with sizes and checksums.

An archive is hostile until it has passed: `read_header` parses one header from a bounded number of bytes, and accepts
nothing but the next member that the record and the manifest name. So no name, link, device, sparse map or size of
anybody's making is ever acted on.
"""

import io
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from raycheck.bucket.format.document import FORMAT_VERSION, Document, load
from raycheck.bucket.format.manifest import MAX_BYTES as MAX_MANIFEST
from raycheck.bucket.format.manifest import Blob, Manifest
from raycheck.bucket.format.object_keys import CheckpointName
from raycheck.catalog.stored_objects import names_in
from raycheck.errors import CorruptError

RECORD = "raycheck-archive.json"
MANIFEST, INDEX = "manifest.json", "index"
BLOCK = 512
END = bytes(2 * BLOCK)
MAX_PADDING = 1 << 20
"""The most zero bytes after the end mark: tar programs fill up a record of 10,240 bytes, or of a size that one asks."""
MAX_RECORD = MAX_MANIFEST
MAX_EXTENDED_HEADER = 4096
"""The most bytes of a pax header, which states names over 100 bytes and sizes of 8 GiB and more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Member(Document):
    """Describes a member of an archive. name: without the folder, which all members share."""

    name: str
    size_bytes: int
    crc32: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ArchiveRecord(Document):
    """Is the first member of an archive. It names the others, in their order.

    uri, run_id, checkpoint: where the checkpoint lay, the run that it was of, and its name there.
    """

    is_long: ClassVar[bool] = True

    format_version: int = FORMAT_VERSION
    uri: str
    run_id: str
    checkpoint: str
    members: tuple[Member, ...]

    @property
    def size_bytes(self) -> int:
        """Returns the bytes of all members but this one, without headers."""
        return sum(member.size_bytes for member in self.members)


@dataclass(frozen=True, kw_only=True, slots=True)
class Archived:
    """Describes a checkpoint that was packed or unpacked.

    checkpoint: its name in the run. members: the archive's members besides its record, and their sizes in bytes.
    size_bytes: the bytes of all members.
    """

    checkpoint: str
    step: int
    members: dict[str, int]
    size_bytes: int


def archived(manifest: Manifest, record: ArchiveRecord) -> Archived:
    members = {member.name: member.size_bytes for member in record.members}
    return Archived(checkpoint=record.checkpoint, step=manifest.step, members=members, size_bytes=record.size_bytes)


def load_record(data: bytes, *, what: str) -> ArchiveRecord:
    record = load(ArchiveRecord, data, what=what, max_bytes=MAX_RECORD)
    if CheckpointName.parse(record.checkpoint) is None:
        raise CorruptError(f"{what} names {record.checkpoint!r}, which is not a checkpoint's name")
    return record


def members_of(manifest: Manifest, document: Blob, *, what: str) -> tuple[Member, ...]:
    """Return the members that hold this checkpoint, in their order: manifest, index, and each component's directory.

    document: size and checksum of the manifest's own bytes. Raises CorruptError when the manifest names two objects of
    one name, or sizes that no object has.
    """
    members = [Member(name=MANIFEST, size_bytes=document.size_bytes, crc32=document.crc32)]
    members += (
        Member(name=name, size_bytes=record.size_bytes, crc32=record.crc32)
        for name, (_, record) in zip(names_in(manifest), manifest.objects(), strict=True)
    )
    names = [member.name for member in members]
    folders = {component.name for component in manifest.components}
    if len(set(names)) < len(names) or folders & {RECORD, *names}:
        raise CorruptError(f"{what} names an object twice")
    if any(member.size_bytes < 0 for member in members):
        raise CorruptError(f"{what} names an object with fewer than 0 bytes")
    return tuple(members)


def header(folder: str, name: str, size_bytes: int, *, at: int) -> bytes:
    """Return a member's header, of one block or with a pax header before it. at: the time that tar shows."""
    info = tarfile.TarInfo(f"{folder}/{name}")
    info.size, info.mtime, info.mode = size_bytes, at, 0o644
    return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "strict")


def padding(size_bytes: int) -> bytes:
    """Return the zeros that fill up a member's last block."""
    return bytes(-size_bytes % BLOCK)


class Headers:
    """Reads the headers of one archive, each of them one that is expected.

    read: returns exactly as many of the archive's next bytes as it is asked for, or raises CorruptError. what: names
    the archive in errors.
    """

    def __init__(self, read: Callable[[int], bytes], *, what: str) -> None:
        self._read = read
        self._what = what

    def first(self) -> tuple[str, int]:
        """Read the header of the record. Returns the folder of all members, and the record's size in bytes."""
        info = self._next(RECORD)
        folder, _, name = info.name.partition("/")
        if name != RECORD or CheckpointName.parse(folder) is None or not 0 < info.size <= MAX_RECORD:
            raise CorruptError(
                f"{self._what} is no archive of raycheck: it begins with {info.name[:120]!r} of {info.size} bytes, not "
                f"with {RECORD} in a folder that is named as a checkpoint"
            )
        return folder, info.size

    def expect(self, folder: str, member: Member) -> None:
        """Read the header of `member`. Raises CorruptError for any other one."""
        info = self._next(member.name)
        if (info.name, info.size) != (f"{folder}/{member.name}", member.size_bytes):
            raise CorruptError(
                f"{self._what}: {info.name[:120]!r} of {info.size} bytes stands where {member.name} of "
                f"{member.size_bytes} bytes must be"
            )

    def _next(self, name: str) -> tarfile.TarInfo:
        data = self._read(BLOCK)
        try:
            info = tarfile.TarInfo.frombuf(data, "utf-8", "strict")
            if info.type == tarfile.XHDTYPE:
                if not 0 < info.size <= MAX_EXTENDED_HEADER:
                    raise CorruptError(f"{self._what}: the header of {name} has {info.size} bytes, too many")
                data += self._read(info.size + len(padding(info.size))) + self._read(BLOCK)
                info = _with_extended_header(data)
        except (tarfile.TarError, ValueError, ArithmeticError, LookupError) as error:
            raise CorruptError(f"{self._what}: no header of {name}, where it must be: {error}") from None
        is_sparse = info.issparse() or any(key.startswith("GNU.sparse") for key in info.pax_headers)
        if info.type not in (tarfile.REGTYPE, tarfile.AREGTYPE) or is_sparse:
            raise CorruptError(f"{self._what}: {info.name[:120]!r} is a link, a folder, or otherwise no plain file")
        return info


def _with_extended_header(data: bytes) -> tarfile.TarInfo:
    """Parse a pax header with the header that follows it. Raises TarError when they are anything else."""
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as archive:
        info = archive.next()
    if info is None or info.offset_data != len(data):
        raise tarfile.ReadError("the header is of another kind")
    return info
