"""Copies the objects of checkpoints from one store to another: verified on both sides, several at a time, in bounded
memory.

Bytes are compared with the manifest's checksum while they stream, and the last part of an object is sent only if all of
them were right. So an object that exists in the target has the right bytes, provided that they arrived unchanged. The
target proves that by stating a checksum; otherwise the new object is read. The manifest is written last, so its
existence proves that its objects exist too. Between buckets that are reached through the same client, S3 copies within
the service and proves the result by CRC-32. GCS copies within the service what was read and found right, instead of
receiving the bytes.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from threading import Condition, Event, Lock
from typing import TypeVar

from raycheck.bucket.document_reading import again_if_corrupt
from raycheck.bucket.format import object_keys
from raycheck.bucket.format.checksum import READS, crc32
from raycheck.bucket.format.manifest import Blob, Manifest, ShardRecord
from raycheck.bucket.format.object_keys import CheckpointName
from raycheck.bucket.protocol.write_once import put_once
from raycheck.bucket.reading import Checkpoint, missing_error
from raycheck.bucket.store import Store
from raycheck.bucket.store.address import shown_uri
from raycheck.bucket.store.interface import Buffer, Range
from raycheck.bucket.store.part_sizes import MAX_COPIED_BYTES, MIN_PART_BYTES
from raycheck.errors import (
    ConfigError,
    CorruptError,
    DamagedError,
    NotFoundError,
    SaveFailedError,
    StoppedError,
    StoreError,
)

AT_ONCE = 4
"""The number of objects of a checkpoint that are copied at a time."""
READ_BYTES = 16 * 1024 * 1024
OBJECT_BYTES = 6 * 16 * 1024 * 1024
"""The most memory that copying one large object takes: about six parts of 16 MiB."""
ROOM_BYTES = 4 * OBJECT_BYTES
"""The memory for all objects that are being copied, of all checkpoints together."""
LOOK_EVERY_S = 0.2
"""How often the main thread, the only one to receive Ctrl-C, wakes while other threads copy."""
T = TypeVar("T")


class DroppedError(Exception):
    """The source dropped the checkpoint while it was being copied."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One object to copy. key, new_key: its keys in the source and in the target."""

    key: str
    new_key: str
    record: Blob | ShardRecord


class _Room:
    """A number of bytes, from which each copy takes what it needs and later returns it. Used by several threads."""

    def __init__(self, size_bytes: int) -> None:
        self._left = size_bytes
        self._changed = Condition()

    @contextmanager
    def taken(self, size_bytes: int, is_over: Callable[[], bool]) -> Iterator[None]:
        """Wait for this many bytes, and hold them. Raises StoppedError as soon as the copy is over."""
        with self._changed:
            while self._left < size_bytes:
                self._changed.wait(LOOK_EVERY_S)
                if is_over():
                    raise StoppedError
            self._left -= size_bytes
        try:
            yield
        finally:
            with self._changed:
                self._left += size_bytes
                self._changed.notify_all()


@dataclass(frozen=True, kw_only=True, slots=True)
class CopiedCheckpoint:
    """The result of copying a checkpoint. keys: its objects, complete in the target. is_new: some were not there
    before."""

    keys: frozenset[str]
    is_new: bool


def copy_objects(
    source: Store, target: Store, name: str, jobs: list[Job], *, progress: Callable[[int], None] = lambda _: None
) -> None:
    """Copy objects of checkpoint `name` to new keys that are still free, several at a time.

    Raises DamagedError, which names the object, if it is missing or its bytes differ from its record twice in a row;
    NotFoundError when the source has dropped the checkpoint.
    """
    try:
        ObjectCopier(source, target, stop=Event(), progress=progress).copy_objects(name, jobs, {})
    except DroppedError:
        raise NotFoundError(f"{source}: checkpoint {name} was dropped while it was copied") from None


class ObjectCopier:
    """A copier of objects between two stores, which counts bytes. Several threads may use it.

    sent_bytes: sent through this process. in_store_bytes: copied within the store. found_bytes: already there, and
    right. progress: called with each number of bytes completed, from several threads.
    """

    def __init__(
        self, source: Store, target: Store, *, stop: Event, progress: Callable[[int], None] = lambda _: None
    ) -> None:
        self.source, self.target = source, target
        self.sent_bytes = self.in_store_bytes = self.found_bytes = 0
        self._stop, self._progress, self._lock = stop, progress, Lock()
        self._room = _Room(ROOM_BYTES)

    def copy_checkpoint(self, checkpoint: Checkpoint, done: Collection[str], gives_up: Event) -> CopiedCheckpoint:
        """Copy a checkpoint under its own name, its manifest last and byte for byte.

        done: the keys that are known to be complete in the target. gives_up: setting it ends the copy with
        StoppedError. Raises DroppedError, DamagedError (which names the object), StoreError, StoppedError.
        """
        try:
            data = checkpoint.read_manifest_bytes()
        except NotFoundError:
            raise DroppedError from None
        manifest = checkpoint.parse_manifest(data)
        check_own_directories(checkpoint.store.uri, manifest.key, manifest.refs)
        there = self._sizes(manifest)
        key = object_keys.manifest_key(manifest.key)
        jobs = [Job(key=key, new_key=key, record=record) for key, record in manifest.objects() if key not in done]
        keys = frozenset(job.key for job in jobs)
        if key in there and self._holds(key, data):
            self._count(found=sum(job.record.size_bytes for job in jobs))
            return CopiedCheckpoint(keys=keys, is_new=False)
        is_new = self.copy_objects(manifest.key, jobs, there, gives_up=gives_up)
        try:
            put_once(self.target, key, data)
        except SaveFailedError as error:
            raise CorruptError(f"{error}. Another run's manifest is there: copy to a free place") from None
        return CopiedCheckpoint(keys=keys, is_new=is_new)

    def copy_objects(
        self,
        name: str,
        jobs: list[Job],
        there: Mapping[str, int],
        *,
        trusts: bool = True,
        gives_up: Event | None = None,
    ) -> bool:
        """Copy the objects of checkpoint `name`, except those that are in the target and right. Return whether any was
        copied.

        there: the sizes of the objects in the target. trusts: trust a checksum that the target states; False where an
        object there may come from another source, and is read instead. gives_up: setting it ends the copy with
        StoppedError.
        """
        fails = Event()
        ends = (self._stop, fails) if gives_up is None else (self._stop, fails, gives_up)

        def is_over() -> bool:
            return any(event.is_set() for event in ends)

        if len(jobs) < 2:
            return any(self._copy(name, job, there.get(job.new_key), trusts, is_over) for job in jobs)
        pool = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="raycheck-copy")
        try:
            return any(
                _finished([pool.submit(self._copy, name, job, there.get(job.new_key), trusts, is_over) for job in jobs])
            )
        except BaseException:  # including an interrupt: no thread outlives this call
            fails.set()
            raise
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def is_right(self, key: str, record: Blob | ShardRecord) -> bool:
        """Read an object of the target. Return whether it has the size and checksum of `record`."""
        try:
            if all(self.target.head(key) != record.size_bytes for _ in range(READS)):
                return False
            return any(self._crc_of(key, record) == record.crc32 for _ in range(READS))
        except (NotFoundError, CorruptError):
            return False

    def _copy(self, name: str, job: Job, size_there: int | None, trusts: bool, is_over: Callable[[], bool]) -> bool:
        """Copy one object, unless it is there. Return whether it was copied."""
        size = job.record.size_bytes
        if size < 0:
            raise DamagedError(f"{self.source}: the manifest of {name} gives {job.key} a size of {size} bytes")
        with self._room.taken(min(size, OBJECT_BYTES), is_over):
            if size_there == size and ((trusts and self._is_proven(job)) or self.is_right(job.new_key, job.record)):
                self._count(found=size)
                return False
            if size >= MIN_PART_BYTES and self._copied_in_store(name, job, is_over):
                self._count(in_store=size)
                return True
            again_if_corrupt(lambda: self._stream(name, job, is_over))
            if not (self._is_proven(job) or self.is_right(job.new_key, job.record)):
                raise StoreError(f"{self.target}: {job.new_key} does not have the bytes that were written; try again")
        with self._lock:
            self.sent_bytes += size
        return True

    def _stream(self, name: str, job: Job, is_over: Callable[[], bool]) -> None:
        record = job.record
        if record.size_bytes == 0 and record.crc32:
            raise DamagedError(
                f"{self.source}: {job.key} is empty, but its manifest gives the checksum {record.crc32:08x}"
            )
        shown = 0

        def parts() -> Iterator[memoryview]:
            nonlocal shown
            stop = 0
            for part in self._parts(name, job, self.target.part_bytes(record.size_bytes), is_over):
                stop += len(part)
                if stop > shown:  # a second reading is not progress
                    self._progress(stop - shown)
                    shown = stop
                yield part

        self.target.put_parts(job.new_key, parts(), record.size_bytes)

    def _parts(self, name: str, job: Job, step: int, is_over: Callable[[], bool]) -> Iterator[memoryview]:
        """Yield the bytes of an object, `step` at a time, the last ones only if all had the manifest's checksum."""
        record, crc = job.record, 0
        for start in range(0, record.size_bytes, step):
            if is_over():
                raise StoppedError
            stop = min(start + step, record.size_bytes)
            data = self._read(name, job.key, start, stop)
            crc = crc32(data, crc)
            if stop == record.size_bytes and crc != record.crc32:  # before the object can appear
                raise DamagedError(
                    f"{self.source}: {job.key} has checksum {crc:08x}, but its manifest says {record.crc32:08x}"
                )
            yield memoryview(data)

    def _read(self, name: str, key: str, start: int, stop: int) -> Buffer:
        try:
            return self.source.get_range(key, start, stop)
        except NotFoundError:
            error = missing_error(self.source, name, key)
            raise DroppedError if isinstance(error, NotFoundError) else error from None
        except CorruptError as error:  # shorter than it was
            raise DamagedError(str(error)) from None

    def _copied_in_store(self, name: str, job: Job, is_over: Callable[[], bool]) -> bool:
        """Let the store copy an object within the service. Return whether it has, and has proven the bytes."""
        size = job.record.size_bytes

        def ranges() -> Iterator[Range]:
            start = 0
            while start < size:
                if is_over():
                    raise StoppedError
                left = size - start
                stop = size if left < MAX_COPIED_BYTES + MIN_PART_BYTES else start + MAX_COPIED_BYTES
                yield Range(job.key, start, stop)
                start = stop

        if self.target.put_assembled(job.new_key, ranges(), size, job.record.crc32, source=self.source):
            return True
        with suppress(CorruptError):  # the bytes are read once more before they count as damaged
            parts = self._parts(name, job, READ_BYTES, is_over)
            return self.target.put_copied(job.new_key, parts, size, source=self.source, source_key=job.key)
        return False

    def _is_proven(self, job: Job) -> bool:
        try:
            return self.target.states_checksum(job.new_key)
        except NotFoundError:
            return False

    def _crc_of(self, key: str, record: Blob | ShardRecord) -> int:
        crc, step = 0, min(16 * 1024 * 1024, max(record.size_bytes, 1))
        for start in range(0, record.size_bytes, step):
            if self._stop.is_set():
                raise StoppedError
            crc = crc32(self.target.get_range(key, start, min(start + step, record.size_bytes)), crc)
        return crc

    def _sizes(self, manifest: Manifest) -> dict[str, int]:
        """List the objects of a checkpoint that the target has, including those in directories to which it refers."""
        found: dict[str, int] = {}
        for name in (manifest.key, *manifest.refs):
            prefix = object_keys.checkpoint_prefix(name)
            found |= {item.key: item.size_bytes for item in self.target.list_objects(prefix)}
        return found

    def _holds(self, key: str, data: bytes) -> bool:
        try:
            return self.target.get(key, len(data)).data == data
        except (NotFoundError, CorruptError):
            return False

    def _count(self, *, found: int = 0, in_store: int = 0) -> None:
        with self._lock:
            self.found_bytes += found
            self.in_store_bytes += in_store
        self._progress(found + in_store)


def check_own_directories(uri: str, name: str, directories: Iterable[str]) -> None:
    """Raise ConfigError when checkpoint `name` uses directories of other runs.

    A copy does not have those runs next to it. Their contents have to be written into a directory of the copy, under a
    manifest with other bytes, as a fork does.
    """
    foreign = [directory for directory in directories if CheckpointName.parse(directory) is None]
    if foreign:
        raise ConfigError(
            f"{shown_uri(uri)}: {name} uses {foreign[0]}, which belongs to another run, and cannot be copied as it is. "
            f"'raycheck cp --at {name}' makes a separate run from it, anywhere"
        )


def _finished(running: Iterable[Future[T]]) -> list[T]:
    """Wait for all of these, and return their results. Raises the error of the first one that failed."""
    running = list(running)
    left = set(running)
    while left:
        done, left = wait(left, timeout=LOOK_EVERY_S, return_when=FIRST_EXCEPTION)
        for future in done:
            future.result()
    return [future.result() for future in running]
