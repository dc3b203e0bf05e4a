"""The list of published versions: read, extended by compare-and-swap, shortened by retention.

The list is the only object of a series that changes. A version is published when the list names it. What the list does
not name is deleted afterwards, so a reader that finds an object missing reads the list again. Steps 43 and 45.
"""

import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from raycheck.bucket.document_reading import read_document
from raycheck.bucket.format.document import dump
from raycheck.bucket.format.object_keys import (
    PUBLISHED_PREFIX,
    reader_key,
    readers_prefix,
    version_key,
    version_number,
    versions_key,
)
from raycheck.bucket.protocol.removal.prune_and_sweep import delete_objects
from raycheck.bucket.store import Got, Store
from raycheck.bucket.store.address import join_uri
from raycheck.errors import ConflictError, CorruptError, NotFoundError, StoreError
from raycheck.host import VersionCopies
from raycheck.published.records import (
    MAX_READER_BYTES,
    MAX_VERSIONS_BYTES,
    PublishedVersion,
    Reader,
    Versions,
    load_reader,
    load_versions,
)

SWAP_DEADLINE_S = 60.0
MOST_VERSIONS = 1000
"""In the list, which may have 1 MiB."""
LEASE_S = 600.0
"""How long the record of a reader counts."""


@dataclass(frozen=True, slots=True)
class Series:
    """A place in a store where versions are published.

    prefix: of all its keys. copies: where files of versions are looked for before they are read from the store.
    """

    store: Store
    prefix: str
    copies: VersionCopies = field(default_factory=VersionCopies, compare=False)

    def __str__(self) -> str:
        return f"{self.store}: {versions_key(self.prefix)}"

    @classmethod
    def at(cls, store: Store) -> "Series":
        """Return the series of the run at `store`, or else the one that was published to this place itself."""
        here = cls(store, "")
        return here if here.read() is not None else cls(store, PUBLISHED_PREFIX)

    @property
    def uri(self) -> str:
        """Return the address of the place."""
        return join_uri(self.store.uri, self.prefix.rstrip("/")) if self.prefix else self.store.uri

    def key(self, version: PublishedVersion, file: str) -> str:
        return version_key(self.prefix, version.directory, file)

    def read(self) -> tuple[Versions, Got] | None:
        """Read the list. Return None when nothing is published."""
        try:
            return read_document(self.store, versions_key(self.prefix), load_versions, max_bytes=MAX_VERSIONS_BYTES)
        except NotFoundError:
            return None

    def add(self, new: Versions, found: Got | None) -> tuple[Versions, Got]:
        """Replace the list that was `found` by `new`, whose last version is the new one. Return what is there then.

        An unclear response is judged by its effect. Raises ConflictError when somebody else has published, StoreError
        when the outcome stays unknown.
        """
        data, deadline = dump(new), time.monotonic() + SWAP_DEADLINE_S
        while True:
            try:
                if found is None:
                    done = self.store.put_if_absent(versions_key(self.prefix), data)
                else:
                    done = self.store.put_if_match(versions_key(self.prefix), data, found.version)
                return new, Got(data, done.version, done.at)
            except (ConflictError, StoreError) as error:
                now = self.read()
                if now is not None and new.newest.directory in {version.directory for version in now[0].versions}:
                    return now
                if (now and now[1].version) != (found and found.version):
                    raise ConflictError(
                        f"{self}: somebody else has published version {now[0].newest.number if now else 0} meanwhile; "
                        f"version {new.newest.number}, of step {new.newest.step}, is not published"
                    ) from None
                if time.monotonic() > deadline:
                    raise StoreError(f"{self} could not be replaced in {SWAP_DEADLINE_S:.0f} s ({error})") from error
                time.sleep(0.5)

    def readers(self) -> dict[str, Reader]:
        """Read the records of all readers, also of those that do not count any more, by their keys."""
        found = {}
        for item in self.store.list_objects(readers_prefix(self.prefix)):
            with suppress(NotFoundError, CorruptError):
                found[item.key] = read_document(self.store, item.key, load_reader, max_bytes=MAX_READER_BYTES)[0]
        return found

    def lease(self, name: str, reader: Reader) -> None:
        """Write the record of the reader of this name."""
        self.store.put(reader_key(self.prefix, name), dump(reader))

    def end_lease(self, name: str) -> None:
        self.store.delete(reader_key(self.prefix, name))

    def delete_unlisted(self, listed: Versions) -> None:
        """Delete the directories that the list does not name, and records of readers that ended long ago.

        A directory with a higher number than the newest version may be one that somebody is about to publish.
        """
        names = {version.directory for version in listed.versions}
        for name in self.store.list_names(self.prefix):
            number = version_number(name)
            if number is not None and number <= listed.newest.number and name not in names:
                keys = [item.key for item in self.store.list_objects(version_key(self.prefix, name, ""))]
                delete_objects(self.store, keys)
        for key, reader in self.readers().items():
            if reader.until + LEASE_S < listed.newest.published_at:
                self.store.delete(key)


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishedVersions:
    """What is published of a run.

    versions: oldest first. readers: those whose records count, with the directory of the version that each one has.
    """

    versions: tuple[PublishedVersion, ...]
    readers: Mapping[str, str]

    @classmethod
    def of(cls, store: Store) -> "PublishedVersions | None":
        """Read what is published of the run at `store`; None if nothing is."""
        series = Series(store, PUBLISHED_PREFIX)
        found = series.read()
        if found is None:
            return None
        start, end = len(readers_prefix(series.prefix)), -len(".json")
        readers = {key[start:end]: one.directory for key, one in series.readers().items() if one.until > found[1].at}
        return cls(versions=found[0].versions, readers=readers)


def kept(versions: Versions, *, keep_last: int, leased: Collection[str] = ()) -> tuple[PublishedVersion, ...]:
    """Return the versions that stay, in their order.

    These are the newest `keep_last`, those that readers have, and all since the newest whole version before the first
    of these. leased: the directories of the versions that readers have.
    """
    listed = versions.versions
    first = max(0, len(listed) - keep_last)
    first = min([first, *(at for at, version in enumerate(listed) if version.directory in leased)])
    wholes = [at for at, version in enumerate(listed[: first + 1]) if version.is_whole]
    start = max(wholes, default=0)
    if len(listed) - start > MOST_VERSIONS:  # more than the list can name: whoever reads the oldest fetches a whole one
        newer = range(len(listed) - MOST_VERSIONS, len(listed))
        start = next((at for at in newer if listed[at].is_whole), newer.start)
    return listed[start:]
