"""One object copied from checkpoint to checkpoint, in one bucket or across two, and verified on the way."""

from collections.abc import Iterator

from raycheck.bucket.document_reading import again_if_corrupt
from raycheck.bucket.format.checksum import crc32
from raycheck.bucket.format.manifest import Blob, ShardRecord
from raycheck.bucket.store import Store
from raycheck.errors import CorruptError


def copy_object(source: Store, key: str, record: Blob | ShardRecord, target: Store, new_key: str) -> None:
    """Raises CorruptError when its bytes are twice not what the record says, NotFoundError when it is not there."""
    again_if_corrupt(lambda: _copy(source, key, record, target, new_key))


def _copy(source: Store, key: str, record: Blob | ShardRecord, target: Store, new_key: str) -> None:
    size, step = record.size_bytes, target.part_bytes(record.size_bytes)
    seen = 0

    def parts() -> Iterator[memoryview]:
        nonlocal seen
        for start in range(0, size, step):
            data = source.get_range(key, start, min(start + step, size))
            seen = crc32(data, seen)
            yield memoryview(data)

    target.put_parts(new_key, parts(), size)
    if seen != record.crc32:
        raise CorruptError(f"{source.uri}: {key} has checksum {seen:08x}, its manifest says {record.crc32:08x}")
