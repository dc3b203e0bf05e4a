"""Defines what a store must do. Keys are relative to the store's root and never begin with "/".

A key that begins with "../" is outside of the root, in the same bucket: in another run, from which this one was forked.
Such keys are only read. To write in the other run, open its store with `beside`.

Every backend raises the same errors: NotFoundError (the object does not exist), ConflictError (a condition was
refused), StoreError (anything else; after it a write may or may not have been applied). No store repeats a conditional
write that may have been applied: the caller reads again, and judges by the effect.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from posixpath import relpath
from typing import TypeVar, cast

from raycheck.bucket.store.address import folder_uri, shown_uri, uri_beside
from raycheck.bucket.store.bucket_rules import BucketRules
from raycheck.bucket.store.request_window import FIRST, RequestWindow, window_of
from raycheck.errors import ConfigError, CorruptError

MAX_CONDITIONAL_BYTES = 1024 * 1024
MAX_WHOLE_BYTES = 1 << 30
"""Nothing larger than an index is read whole. In a hostile bucket any object may be larger than a reader's memory."""
READS_IN_FLIGHT = 8
"""The fewest ranged reads of a bucket that a window makes at a time."""
Buffer = bytes | bytearray | memoryview
T = TypeVar("T")
U = TypeVar("U")


@dataclass(frozen=True, slots=True)
class Got:
    """An object's bytes and its version, both from ONE response, and the time of that response.

    version: an ETag or a generation, only to be compared. at: seconds, by the store's own clock, since ages are
    differences of these times and never of a host's clock.
    """

    data: bytes
    version: str
    at: float


@dataclass(frozen=True, slots=True)
class Written:
    """The response to a conditional write: the version of the object that it made, and the time of the response.

    version, at: as in Got. A later `put_if_match` with this version replaces exactly the bytes that were written.
    """

    version: str
    at: float


@dataclass(frozen=True, slots=True)
class Listed:
    """One object of a listing: its key and its size."""

    key: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Range:
    """The bytes start..stop of an object."""

    key: str
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Upload:
    """An unfinished multipart upload. No reader sees it, and its bytes are billed until it is aborted."""

    key: str
    id: str


class Store(ABC):
    """The objects below one root. Several threads may use it. In a forked child process, a remote store refuses to
    work."""

    uri: str

    def __str__(self) -> str:
        """Return the URI as messages show it, without settings. So messages name a store, never its `uri`."""
        return shown_uri(self.uri)

    @property
    def bucket_id(self) -> Hashable:
        """Return a value that is equal for stores in one bucket, reached in the same way; None if unknown."""
        return None

    @property
    def root_path(self) -> str:
        """Return the path of the root in its bucket, which neither begins nor ends with "/"."""
        return ""

    def beside(self, way: str) -> "Store":
        """Return the store of another run in this bucket, at the relative path `way` ("../other") from the root.

        Raises ConfigError when the path leaves the bucket.
        """
        return self._rerooted(way, uri_beside(self.uri, way))

    def below(self, name: str) -> "Store":
        """Return the store of the folder `name` in this one. The name may contain any character but a slash.

        Raises ConfigError for a name that leads elsewhere.
        """
        if name in ("", ".", "..") or "/" in name:  # clients resolve dots
            raise ConfigError(f"{self}: {name!r} is not a folder's name")
        return self._rerooted(name, folder_uri(self.uri, name))

    def _rerooted(self, way: str, uri: str) -> "Store":
        """Return this store with another root, through the same client.

        Otherwise a listing of a thousand runs would open a thousand clients, each with its own connections and
        credentials. way: the relative path from this root to the other one, in the form of a key. uri: the other
        root's. Raises ConfigError when the path leaves the bucket, or the store has no such places.
        """
        del uri
        raise ConfigError(f"{self}: {way} cannot be reached from here")

    def way_to(self, other: "Store") -> str | None:
        """Return the relative path from this root to the root of `other`, such as "../other".

        Return None when they are in different buckets, or when one is inside the other.
        """
        if self.bucket_id is None or self.bucket_id != other.bucket_id:
            return None
        way = relpath(f"/{other.root_path}", f"/{self.root_path}")
        return way if way.startswith("../") and not way.endswith("..") else None

    @abstractmethod
    def get(self, key: str, max_bytes: int = MAX_WHOLE_BYTES) -> Got:
        """Read the whole object. Raises NotFoundError, and CorruptError, without reading further, above `max_bytes`.

        Where the store states the checksum of the object, the bytes are compared with it. Bytes that differ are
        requested again; if they still differ in the end, a StoreError is raised.
        """

    def get_data(self, key: str, max_bytes: int = MAX_WHOLE_BYTES) -> bytes:
        """Read the whole object as `get` does, and return only its bytes, for readers of very many small documents.

        A store may do this more cheaply, without a comparison with the checksum that it states: a document contains its
        own checksum. Raises the errors of `get`.
        """
        return self.get(key, max_bytes).data

    @abstractmethod
    def get_range(self, key: str, start: int, stop: int) -> Buffer:
        """Read exactly the bytes start..stop; nobody may write to the result.

        Raises NotFoundError, and CorruptError when the object is shorter.
        """

    def signed_address(self, key: str, valid_s: int) -> str:
        """Return an HTTP address at which anyone may read the object for `valid_s` seconds. Sends no request.

        The address expires earlier if the credentials that sign it do. Raises ConfigError where no address can be
        signed.
        """
        del key, valid_s
        raise ConfigError(f"{self}: only s3:// with credentials signs addresses")

    @property
    def reads(self) -> RequestWindow:
        """Return the window for ranged reads of this bucket, which all its stores in this process share."""
        return window_of(self.bucket_id, "reads", least=READS_IN_FLIGHT, first=FIRST)

    @abstractmethod
    def head(self, key: str) -> int:
        """Return the object's size in bytes. Raises NotFoundError."""

    @abstractmethod
    def list_objects(self, prefix: str) -> Iterator[Listed]:
        """Yield every object whose key begins with `prefix` (which ends in "/"), in any order."""

    @abstractmethod
    def list_names(self, prefix: str) -> list[str]:
        """Return the names directly under `prefix` (which ends in "/") that have objects below them, like `ls`."""

    def list_folders(self, prefix: str) -> Iterator[str]:
        """Yield the names that `list_names` returns, as they arrive, so that a caller can stop.

        Where a store has folders, names without objects below them may also be included.
        """
        return iter(self.list_names(prefix))

    @abstractmethod
    def put(self, key: str, data: Buffer) -> None:
        """Write one object whole: a reader sees either the old bytes or the new ones. Return when it is durable."""

    @abstractmethod
    def put_parts(self, key: str, parts: Iterable[memoryview], size_bytes: int) -> None:
        """Write one object from `parts`. Each is pulled shortly before it is sent; all but the last are `part_bytes`
        long.

        If this raises, no object exists, and no request that reads a part is still in progress: the buffer behind the
        parts may be used again.
        """

    @abstractmethod
    def part_bytes(self, size_bytes: int) -> int:
        """Return the size in bytes that the parts of an object of this size should have."""

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

        crc: the CRC-32 of the whole object. It is compared with the CRC-32 of the copied ranges before the object
        appears. source: the store of the ranges; None: this one. Return False if nothing was written: the store cannot
        copy, or does not prove by a CRC-32 which bytes it has copied, or something else has failed.
        """
        del key, parts, size_bytes, crc, source
        return False

    def put_copied(
        self, key: str, parts: Iterable[Buffer], size_bytes: int, *, source: "Store", source_key: str
    ) -> bool:
        """Write one object by having the store copy another one, `source_key` of `source`, whose bytes are `parts`.

        This is for a store that cannot prove which bytes it has copied: the caller reads them, and the iterable raises
        when they are wrong. What the store states about both objects is compared with a checksum of what was read.
        Return False if nothing proven was written, often without reading a part: then write the object in another way.
        """
        del key, parts, size_bytes, source, source_key
        return False

    def states_checksum(self, key: str) -> bool:
        """Return whether the store has compared the whole object, as received, with a checksum that was sent along.

        Raises NotFoundError.
        """
        del key
        return False

    def unchecked_writes(self, key: str) -> tuple[str, ...]:
        """Return which writes the store does not compare with the checksum that is sent along: "objects", "parts".

        It is tried with other bytes than the checksum's, at `key`, where nothing may be left to lose. Nothing stays
        there but an object that was accepted, which the caller deletes.
        """
        del key
        return ()

    @abstractmethod
    def put_if_absent(self, key: str, data: bytes) -> Written:
        """Create the object, or raise ConflictError when it exists. Sends one PUT of at most 1 MiB, in one part."""

    @abstractmethod
    def put_if_match(self, key: str, data: bytes, version: str) -> Written:
        """Replace only that version, or raise ConflictError. Sends one PUT of at most 1 MiB, in one part."""

    @abstractmethod
    def delete(self, key: str) -> None:
        """Remove the object. It is not an error if it does not exist."""

    def together(self, *calls: Callable[[], T]) -> list[T]:
        """Make calls that do not depend on each other, and return their results in the same order.

        A remote store makes them concurrently, and waits for all of them before it raises the first error. By default
        they are made one after another, until the first error.
        """
        return [call() for call in calls]

    def both(self, first: Callable[[], T], second: Callable[[], U]) -> tuple[T, U]:
        """Make two calls `together`, and return their results."""
        one, other = self.together(first, second)
        return cast("T", one), cast("U", other)

    def list_uploads(self, prefix: str) -> Iterator[Upload]:
        """Yield every unfinished multipart upload below `prefix` (which ends in "/"), including those still in
        progress.

        By default there is nothing to list. Google knows a resumable session only by its own address, and Azure has no
        request that drops uncommitted blocks; both services discard them after a week.
        """
        del prefix
        return iter(())

    def begin_upload(self, key: str) -> Upload | None:
        """Begin a multipart upload that nobody continues, as a writer that is killed leaves one behind.

        Return None where unfinished uploads are not listed.
        """
        del key
        return None

    def upload_bytes(self, upload: Upload) -> int:
        """Return how many bytes an unfinished upload has stored; 0 when it no longer exists."""
        del upload
        return 0

    def abort_upload(self, upload: Upload) -> None:
        """End one of `list_uploads` permanently, and free its storage. It is not an error if it no longer exists."""
        del upload

    @property
    def endpoint(self) -> str:
        """Return where requests are sent, in words; "" for a store without a network."""
        return ""

    def bucket_rules(self, key: str) -> BucketRules:
        """Return what the bucket does on its own, as far as the credentials may know it. Sends a few small requests.

        key: of a scratch object that may be written and deleted. Raises ConfigError if there is no such bucket.
        """
        del key
        return BucketRules()


def check_process(uri: str, opened_in: int) -> None:
    """Raise ConfigError in a forked child. It has none of the store's threads, so a request would wait forever."""
    if os.getpid() != opened_in:
        raise ConfigError(
            f"{shown_uri(uri)}: it was opened before this process was forked; open it again in here, for a dataset in "
            "its __getitem__ or in the DataLoader's worker_init_fn"
        )


def check_conditional_size(key: str, data: bytes) -> None:
    """Raise ConfigError for a body that is too large for a conditional write."""
    if len(data) > MAX_CONDITIONAL_BYTES:
        # s3fs drops If-Match once a body goes multipart, and Ceph RGW ignores conditions on completion.
        raise ConfigError(f"{key}: {len(data)} bytes; a conditional write carries at most {MAX_CONDITIONAL_BYTES}")


def check_whole(uri: str, key: str, size_bytes: int, max_bytes: int) -> None:
    """Raise CorruptError for an object that is larger than `get` may read."""
    if size_bytes > max_bytes:
        raise CorruptError(
            f"{shown_uri(uri)}: {key} has {size_bytes} bytes, more than the {max_bytes} that it may have"
        )


class ChangedError(Exception):
    """The received bytes do not have the checksum that the store states. They may be right the next time."""

    def __init__(self) -> None:
        super().__init__(
            "the received bytes do not have the checksum that the store states: they were changed on the way"
        )


def check_length(uri: str, key: str, data: Buffer, start: int, stop: int) -> Buffer:
    """Return `data`, or raise CorruptError when a range is short: a store may truncate a range at the object's end."""
    if len(data) != stop - start:
        raise CorruptError(f"{shown_uri(uri)}: {key} ends before byte {stop}: got {len(data)} of {stop - start} bytes")
    return data
