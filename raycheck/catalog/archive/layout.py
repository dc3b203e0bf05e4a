"""The layout of an archive: one checkpoint in one tar file, whose first member lists the others with size and checksum.

An archive is untrusted until it is verified: only the next member named by the record and the manifest is accepted. So
no foreign name, link, device, sparse map, or size is ever acted on.
"""

from dataclasses import dataclass
from typing import ClassVar

from raycheck.bucket.format.document import FORMAT_VERSION, Document, load
from raycheck.bucket.format.manifest import MAX_BYTES as MAX_MANIFEST
from raycheck.bucket.format.manifest import Blob, Manifest
from raycheck.bucket.format.object_keys import MANIFEST, CheckpointName
from raycheck.catalog.stored_objects import names_in
from raycheck.errors import CorruptError

RECORD = "raycheck-archive.json"
MAX_RECORD = MAX_MANIFEST


@dataclass(frozen=True, kw_only=True, slots=True)
class Member(Document):
    """A member of an archive. name: without the folder, which all members share."""

    name: str
    size_bytes: int
    crc32: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ArchiveRecord(Document):
    """The first member of an archive, which names the others in order.

    uri, run_id, checkpoint: where the checkpoint was stored, the run it belonged to, and its name there.
    """

    is_long: ClassVar[bool] = True

    format_version: int = FORMAT_VERSION
    uri: str
    run_id: str
    checkpoint: str
    members: tuple[Member, ...]

    @property
    def size_bytes(self) -> int:
        """Return the total size of all other members, without headers."""
        return sum(member.size_bytes for member in self.members)


@dataclass(frozen=True, kw_only=True, slots=True)
class Archived:
    """A checkpoint that was packed or unpacked.

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
    """Return the members of this checkpoint in order: manifest, index, and each component's directory.

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
