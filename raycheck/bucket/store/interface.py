"""What a store must do, in object words. Keys are relative to the store's root and never begin with "/".

Errors are the same from every backend: NotFoundError (the object is not there), ConflictError (a condition was
refused), StoreError (anything else; after it a write may or may not have been applied). Nothing here retries a
conditional write: the caller judges by effect.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from raycheck.errors import ConfigError, CorruptError

MAX_CONDITIONAL_BYTES = 1024 * 1024
MAX_WHOLE_BYTES = 1 << 30
"""What is read whole is at most an index. In a hostile bucket any name may hold more than a reader has memory."""
Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class Got:
    """Body and version (etag or generation, opaque) from ONE response, and the store's own clock (seconds) then, or a
    moment later. Never a host's clock: ages are differences of this one."""

    data: bytes
    version: str
    at: float


@dataclass(frozen=True, slots=True)
class Listed:
    key: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Range:
    """Bytes start..stop of an object, with their CRC-32."""

    key: str
    start: int
    stop: int
    crc: int


@dataclass(frozen=True, slots=True)
class Upload:
    """An object that was begun in parts and not finished. No reader sees it, and it is paid for until it is aborted."""

    key: str
    id: str


class Store(ABC):
    """Objects under one root. Safe to use from several threads; after a fork, one behind a network refuses."""

    uri: str

    @abstractmethod
    def get(self, key: str, max_bytes: int = MAX_WHOLE_BYTES) -> Got:
        """The whole object. Raises NotFoundError, and CorruptError, without reading on, above `max_bytes`.

        Where the store says the checksum of what it holds, the bytes have it: others are asked for again, and are a
        StoreError in the end.
        """

    @abstractmethod
    def get_range(self, key: str, start: int, stop: int) -> Buffer:
        """Exactly the bytes start..stop, not to be written to. Raises NotFoundError, and CorruptError when the object
        is shorter."""

    @abstractmethod
    def head(self, key: str) -> int:
        """Size in bytes. Raises NotFoundError."""

    @abstractmethod
    def list_objects(self, prefix: str) -> Iterator[Listed]:
        """Every object whose key begins with `prefix` (which ends in "/"), in no promised order."""

    @abstractmethod
    def list_names(self, prefix: str) -> list[str]:
        """The names directly under `prefix` (which ends in "/") that have objects below them, as `ls` would show."""

    @abstractmethod
    def put(self, key: str, data: Buffer) -> None:
        """Write one object whole: a reader sees the old bytes or the new ones. Returns when it is durable."""

    @abstractmethod
    def put_parts(self, key: str, parts: Iterable[memoryview], size_bytes: int) -> None:
        """Write one object from `parts`, pulled just ahead of the send; all but the last are `part_bytes` long.

        When it raises, no object exists and no request that reads a part is still under way: the buffer behind the
        parts may be used again.
        """

    @abstractmethod
    def part_bytes(self, size_bytes: int) -> int:
        """How long the parts of an object of this size should be."""

    def put_assembled(self, key: str, parts: Iterable[Range | memoryview], size_bytes: int) -> bool:
        """Write one object from ranges of others, which the store copies itself, and from parts that are sent to it;
        all but the last have at least MIN_PART_BYTES. Whether it did: a store that cannot, or that does not prove by
        their CRC-32 what bytes it has copied, has written nothing. Any other failure is False as well."""
        del key, parts, size_bytes
        return False

    @abstractmethod
    def put_if_absent(self, key: str, data: bytes) -> None:
        """Create, or raise ConflictError when the object exists. One single-part PUT of at most 1 MiB."""

    @abstractmethod
    def put_if_match(self, key: str, data: bytes, version: str) -> None:
        """Replace that very version, or raise ConflictError. One single-part PUT of at most 1 MiB."""

    @abstractmethod
    def delete(self, key: str) -> None:
        """Remove; removing what is not there is fine."""

    def list_uploads(self, prefix: str) -> Iterator[Upload]:
        """Every unfinished multipart upload below `prefix` (which ends in "/"), those still under way included.

        By default there is nothing to list: a resumable session of Google's is known by its own address only, and no
        request drops Azure's uncommitted blocks; both services discard them after a week.
        """
        del prefix
        return iter(())

    def upload_bytes(self, upload: Upload) -> int:
        """What an unfinished upload holds; 0 when it is gone."""
        del upload
        return 0

    def abort_upload(self, upload: Upload) -> None:
        """End one of `list_uploads` for good, and free what it holds; aborting what is gone is fine."""
        del upload


def check_process(uri: str, opened_in: int) -> None:
    """Contract of each store with threads, which a fork leaves behind: a request of the child would wait for ever."""
    if os.getpid() != opened_in:
        raise ConfigError(
            f"{uri}: it was opened before this process was forked; open it anew in here, for a dataset in its "
            "__getitem__ or in the DataLoader's worker_init_fn"
        )


def check_conditional_size(key: str, data: bytes) -> None:
    if len(data) > MAX_CONDITIONAL_BYTES:
        # s3fs drops If-Match once a body goes multipart, and Ceph RGW ignores conditions on completion.
        raise ConfigError(f"{key}: {len(data)} bytes; a conditional write carries at most {MAX_CONDITIONAL_BYTES}")


def check_whole(uri: str, key: str, size_bytes: int, max_bytes: int) -> None:
    """Contract of get."""
    if size_bytes > max_bytes:
        raise CorruptError(f"{uri}: {key} has {size_bytes} bytes, more than the {max_bytes} that it may have")


class ChangedError(Exception):
    """The bytes that came are not those whose checksum the store says. They may be right the next time."""

    def __init__(self) -> None:
        super().__init__("what came is not what the store says it has: bytes were changed on their way")


def check_length(uri: str, key: str, data: Buffer, start: int, stop: int) -> Buffer:
    """Contract of get_range: a store that clamps a range at the object's end must not pass for a short tensor."""
    if len(data) != stop - start:
        raise CorruptError(f"{uri}: {key} ends before byte {stop}: got {len(data)} of {stop - start} bytes")
    return data
