"""Verifies that a checkpoint is complete: reads and compares every object, and locates damage down to the sub-block.

It writes nothing (I8), and needs no torch.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial

from raycheck.bucket.format import object_keys
from raycheck.bucket.format.checksum import READS, SUB_BLOCK, crc32
from raycheck.bucket.format.index import Chunk, Index
from raycheck.bucket.format.manifest import Manifest, ShardRecord
from raycheck.bucket.store import Store
from raycheck.errors import CorruptError, NotFoundError

READ_BYTES = 16 * 1024 * 1024
MISSING = "missing"


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """The result for one object.

    problem: empty when size and checksum are right. where: for a damaged shard, its rank and component, and the tensors
    and sub-blocks that have changed.
    """

    key: str
    size_bytes: int
    problem: str = ""
    where: tuple[str, ...] = ()


def verify(
    store: Store,
    name: str,
    *,
    read_manifest: Callable[[], Manifest],
    read_index: Callable[[Manifest], Index],
    reads: bool,
    why_missing: Callable[[str], str] = lambda _: "",
) -> Iterator[Finding]:
    """Yield one finding per object of the checkpoint `name`.

    reads: False compares sizes only. why_missing: returns what is known about a missing object, by its key.
    """
    key = object_keys.manifest_key(name)
    try:
        manifest = read_manifest()
    except (NotFoundError, CorruptError) as error:  # an unreachable store proves nothing
        yield Finding(key=key, size_bytes=0, problem=str(error))
        return
    yield Finding(key=key, size_bytes=store.head(key))
    index = cache(partial(read_index, manifest))
    for key, record in manifest.objects():
        try:
            found, problem = _compare(store, key, record.size_bytes, record.crc32 if reads else None)
        except CorruptError as error:  # not a file, or one that has shrunk since
            found, problem = None, str(error)
        except NotFoundError:  # it was deleted between two requests
            found, problem = None, MISSING
        where: tuple[str, ...] = ()
        if problem == MISSING and (why := why_missing(key)):
            problem = f"{MISSING}: {why}"
        elif problem and isinstance(record, ShardRecord):
            where = _where(store, index, key, record, found or 0)
        yield Finding(key=key, size_bytes=record.size_bytes, problem=problem, where=where)


def _compare(store: Store, key: str, size: int, crc: int | None) -> tuple[int | None, str]:
    """Compare an object with its size and checksum. Return its size, None when it is missing, and the problem.

    Each wrong response is requested again before it counts, since it may be corrupted on the way. crc: None to compare
    sizes only.
    """
    found = next((found for _ in range(READS - 1) if (found := _size(store, key)) == size), None)
    found = _size(store, key) if found is None else found
    if found is None:
        return found, MISSING
    if found != size:
        return found, f"has {found} bytes, the manifest says {size}"
    total = crc
    for _ in range(READS if crc is not None else 0):
        total = 0
        for start in range(0, size, READ_BYTES):
            total = crc32(store.get_range(key, start, min(start + READ_BYTES, size)), total)
        if total == crc:
            break
    return found, "" if total == crc else f"has checksum {total:08x}, the manifest says {crc:08x}"


def _size(store: Store, key: str) -> int | None:
    try:
        return store.head(key)
    except NotFoundError:
        return None


def _where(
    store: Store, index_of: Callable[[], Index], key: str, shard: ShardRecord, size_bytes: int
) -> tuple[str, ...]:
    """Name the damaged tensors of a shard, in the order of their bytes."""
    whose = f"rank {shard.rank}, component {shard.component}"
    try:
        index = index_of()
    except (NotFoundError, CorruptError):
        return (f"{whose}: the index that describes it is damaged too",)
    found = []
    for chunk in _chunks(index, shard):
        bad = list(_bad_blocks(store, key, chunk, size_bytes))
        if bad:
            blocks = f"{len(bad)} of {len(chunk.crcs)} sub-blocks, the first one {bad[0]}"
            found.append(f"{whose}: tensor {index.tensors[chunk.tensor].name} at {list(chunk.offsets)}: {blocks}")
    return tuple(found) or (f"{whose}: no tensor, but the bytes between them, which only stock torch reads",)


def _chunks(index: Index, shard: ShardRecord) -> list[Chunk]:
    """Return the boxes in the shard, each place once."""
    found: dict[int, Chunk] = {}
    for number in range(len(index.tensors)):
        for chunk in index.chunks_of(number):
            if (chunk.component, chunk.rank) == (shard.component, shard.rank):
                found.setdefault(chunk.payload_offset, chunk)
    return [found[place] for place in sorted(found)]


def _bad_blocks(store: Store, key: str, chunk: Chunk, size_bytes: int) -> Iterator[int]:
    stop = chunk.payload_offset + chunk.payload_size
    for number, start in enumerate(range(chunk.payload_offset, stop, SUB_BLOCK)):
        end = min(start + SUB_BLOCK, stop)
        if end > size_bytes or all(crc32(store.get_range(key, start, end)) != chunk.crcs[number] for _ in range(READS)):
            yield number
