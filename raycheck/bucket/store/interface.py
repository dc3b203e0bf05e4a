"""Defines what a store must do. Keys are relative to the store's root and never begin with "/".

A key that begins with "../" lies outside of the root, in the same bucket: in another run, which this one was forked
from. Only reads go there. Who has to write in the other run opens its store with `beside`.

Every backend raises the same errors: NotFoundError (the object is not there), ConflictError (a condition was refused),
StoreError (anything else; after it a write may or may not have been applied). No store repeats a conditional write that
may have been applied: the caller reads again, and judges by the effect.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from posixpath import relpath
from typing import TypeVar, cast

from raycheck.bucket.store.address import folder_uri, shown_uri, uri_beside
from raycheck.errors import ConfigError, CorruptError

MAX_CONDITIONAL_BYTES = 1024 * 1024
MAX_WHOLE_BYTES = 1 << 30
"""Nothing larger than an index is read whole. In a hostile bucket any object may exceed a reader's memory."""
Buffer = bytes | bytearray | memoryview
T = TypeVar("T")
U = TypeVar("U")


@dataclass(frozen=True, slots=True)
class Got:
    """Holds an object's bytes and its version, both from ONE response, and the time of that response.

    version: an ETag or a generation, to be compared and nothing else. at: seconds, by the store's own clock, since ages
    are differences of these times and never of a host's clock.
    """

    data: bytes
    version: str
    at: float


@dataclass(frozen=True, slots=True)
class Written:
    """Holds what the answer to a conditional write says: the version of the object that it made, and its own time.

    version, at: as in Got. A later `put_if_match` with this version replaces exactly the bytes that were written.
    """

    version: str
    at: float


@dataclass(frozen=True, slots=True)
class Listed:
    """Describes one object of a listing: its key and its size."""

    key: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Range:
    """The bytes start..stop of an object."""

    key: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Upload:
    """Describes an unfinished multipart upload. No reader sees it, and its bytes are paid for until it is aborted."""

    key: str
    id: str


class Store(ABC):
    """Keeps objects under one root. Several threads may use it. After a fork, a remote store refuses to work."""

    uri: str

    def __str__(self) -> str:
        """Returns the URI as messages show it, without settings. So messages name a store, and never its `uri`."""
        return shown_uri(self.uri)

    @property
    def bucket_id(self) -> Hashable:
        """Returns what is equal for stores in one bucket that are reached in one way; None where that is unknown."""
        return None

    @property
    def root_path(self) -> str:
        """Returns the path of the root in its bucket, which neither begins nor ends with "/"."""
        return ""

    def beside(self, way: str) -> "Store":
        """Returns the store of another run in this bucket, to which `way` ("../other") leads from the root.

        Raises ConfigError when it leads out of the bucket.
        """
        return self._rerooted(way, uri_beside(self.uri, way))

    def below(self, name: str) -> "Store":
        """Returns the store of the folder `name`, which may hold any character but a slash, in this one.

        Raises ConfigError for a name that leads elsewhere.
        """
        if name in ("", ".", "..") or "/" in name:  # clients resolve dots
            raise ConfigError(f"{self}: {name!r} is no folder's name")
        return self._rerooted(name, folder_uri(self.uri, name))

    def _rerooted(self, way: str, uri: str) -> "Store":
        """Returns this store with another root, through the same client: a listing of a thousand runs would otherwise
        open a thousand clients, each with connections and credentials of its own.

        way: leads from this root to the other one, as a key does. uri: the other root's. Raises ConfigError when it
        leads out of the bucket, or the store has no such places.
        """
        del uri
        raise ConfigError(f"{self}: {way} cannot be reached from here")

    def way_to(self, other: "Store") -> str | None:
        """Returns the way from this root to that of `other`, such as "../other".

        Returns None when they are in different buckets, or when one lies inside the other.
        """
        if self.bucket_id is None or self.bucket_id != other.bucket_id:
            return None
        way = relpath(f"/{other.root_path}", f"/{self.root_path}")
        return way if way.startswith("../") and not way.endswith("..") else None

    @abstractmethod
    def get(self, key: str, max_bytes: int = MAX_WHOLE_BYTES) -> Got:
        """Reads the whole object. Raises NotFoundError, and CorruptError, without reading on, above `max_bytes`.

        Where the store states the checksum of the object, the bytes are compared with it. Bytes that differ are asked
        for again; if they still differ in the end, it is a StoreError.
        """

    def get_data(self, key: str, max_bytes: int = MAX_WHOLE_BYTES) -> bytes:
        """Reads the whole object like `get`, and returns its bytes alone, for readers of very many small documents.

        A store may do this in a cheaper way, without a comparison with the checksum that it states: a document has a
        checksum of its own. Raises as `get`.
        """
        return self.get(key, max_bytes).data

    @abstractmethod
    def get_range(self, key: str, start: int, stop: int) -> Buffer:
        """Reads exactly the bytes start..stop; nobody may write to the result. Raises NotFoundError, and CorruptError
        when the object is shorter."""

    def signed_address(self, key: str, valid_s: int) -> str:
        """Returns an HTTP address at which anyone may read the object for `valid_s` seconds; nothing is asked of the
        store. It ends earlier when the credentials that sign it do. Raises ConfigError where no address can be signed.
        """
        del key, valid_s
        raise ConfigError(f"{self}: only s3:// with credentials signs addresses")

    @abstractmethod
    def head(self, key: str) -> int:
        """Returns the object's size in bytes. Raises NotFoundError."""

    @abstractmethod
    def list_objects(self, prefix: str) -> Iterator[Listed]:
        """Yields every object whose key begins with `prefix` (which ends in "/"), in any order."""

    @abstractmethod
    def list_names(self, prefix: str) -> list[str]:
        """Returns the names directly under `prefix` (which ends in "/") that have objects below them, like `ls`."""

    def list_folders(self, prefix: str) -> Iterator[str]:
        """Yields the names that `list_names` returns, as they come, so that a caller can stop.

        Where a store keeps folders, there may also be names without objects below them.
        """
        return iter(self.list_names(prefix))

    @abstractmethod
    def put(self, key: str, data: Buffer) -> None:
        """Writes one object whole: a reader sees the old bytes or the new ones. Returns when it is durable."""

    @abstractmethod
    def put_parts(self, key: str, parts: Iterable[memoryview], size_bytes: int) -> None:
        """Writes one object from `parts`. Each is pulled shortly before it is sent; all but the last are `part_bytes`
        long.

        When this raises, no object exists, and no request that reads a part is still under way: the buffer behind the
        parts may be used again.
        """

    @abstractmethod
    def part_bytes(self, size_bytes: int) -> int:
        """Returns how long the parts of an object of this size should be, in bytes."""

    def put_assembled(
        self,
        key: str,
        parts: Iterable[Range],
        size_bytes: int,
        crc: int,
        *,
        source: "Store | None" = None,
    ) -> bool:
        """Write one object from ranges of others, which the store copies itself. All but the last range have at least
        MIN_PART_BYTES.

        crc: the CRC-32 of the whole object, with which that of the copied ranges is compared before the object appears.
        source: the store of the ranges; None: this one. Return False if nothing was written: the store cannot copy, or
        does not prove by a CRC-32 which bytes it has copied, or something else has failed.
        """
        del key, parts, size_bytes, crc, source
        return False

    def put_copied(
        self, key: str, parts: Iterable[Buffer], size_bytes: int, *, source: "Store", source_key: str
    ) -> bool:
        """Writes one object by having the store copy another one, `source_key` of `source`, whose bytes are `parts`.

        It is for a store that cannot prove by itself which bytes it has copied: the caller reads them, and the iterable
        raises when they are wrong. What the store states of both objects is compared with a checksum of what was read.
        Returns False when nothing that is proven was written, often without reading a part: then write the object in
        another way.
        """
        del key, parts, size_bytes, source, source_key
        return False

    def states_checksum(self, key: str) -> bool:
        """Returns whether the store has compared the whole object, as it came, with a checksum that was sent along.

        Raises NotFoundError.
        """
        del key
        return False

    @abstractmethod
    def put_if_absent(self, key: str, data: bytes) -> Written:
        """Creates the object, or raises ConflictError when it exists. Sends one PUT of at most 1 MiB, in one part."""

    @abstractmethod
    def put_if_match(self, key: str, data: bytes, version: str) -> Written:
        """Replaces that version only, or raises ConflictError. Sends one PUT of at most 1 MiB, in one part."""

    @abstractmethod
    def delete(self, key: str) -> None:
        """Removes the object. That it is not there is no error."""

    def together(self, *calls: Callable[[], T]) -> list[T]:
        """Makes calls that do not depend on each other, and returns their answers in the same order.

        A remote store has them under way at the same time, and waits for all of them before it raises the first error.
        By default they are made one after the other, until the first error.
        """
        return [call() for call in calls]

    def both(self, first: Callable[[], T], second: Callable[[], U]) -> tuple[T, U]:
        """Makes two calls `together`, and returns their answers."""
        one, other = self.together(first, second)
        return cast("T", one), cast("U", other)

    def list_uploads(self, prefix: str) -> Iterator[Upload]:
        """Yields every unfinished multipart upload below `prefix` (which ends in "/"), even one still under way.

        By default there is nothing to list. Google knows a resumable session by its own address only, and Azure has no
        request that drops uncommitted blocks; both services discard them after a week.
        """
        del prefix
        return iter(())

    def upload_bytes(self, upload: Upload) -> int:
        """Returns how many bytes an unfinished upload holds; 0 when it is gone."""
        del upload
        return 0

    def abort_upload(self, upload: Upload) -> None:
        """Ends one of `list_uploads` for good, and frees what it holds. That it is gone is no error."""
        del upload


def check_process(uri: str, opened_in: int) -> None:
    """Raises ConfigError in a forked child. It has none of the store's threads, so a request would wait for ever."""
    if os.getpid() != opened_in:
        raise ConfigError(
            f"{shown_uri(uri)}: it was opened before this process was forked; open it anew in here, for a dataset in "
            "its __getitem__ or in the DataLoader's worker_init_fn"
        )


def check_conditional_size(key: str, data: bytes) -> None:
    """Raises ConfigError for a body that is too large for a conditional write."""
    if len(data) > MAX_CONDITIONAL_BYTES:
        # s3fs drops If-Match once a body goes multipart, and Ceph RGW ignores conditions on completion.
        raise ConfigError(f"{key}: {len(data)} bytes; a conditional write carries at most {MAX_CONDITIONAL_BYTES}")


def check_whole(uri: str, key: str, size_bytes: int, max_bytes: int) -> None:
    """Raises CorruptError for an object that is larger than `get` may read."""
    if size_bytes > max_bytes:
        raise CorruptError(
            f"{shown_uri(uri)}: {key} has {size_bytes} bytes, more than the {max_bytes} that it may have"
        )


class ChangedError(Exception):
    """The bytes that arrived do not have the checksum that the store states. They may be right the next time."""

    def __init__(self) -> None:
        super().__init__("what came does not have the checksum that the store states: bytes were changed on their way")


def check_length(uri: str, key: str, data: Buffer, start: int, stop: int) -> Buffer:
    """Raises CorruptError when a range came back short: a store may cut a range off at the object's end."""
    if len(data) != stop - start:
        raise CorruptError(f"{shown_uri(uri)}: {key} ends before byte {stop}: got {len(data)} of {stop - start} bytes")
    return data
