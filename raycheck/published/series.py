"""The list of published versions: read, extended by compare-and-swap, shortened by retention.

The list is the only object of a series that changes. A version is published when the list names it. What the list does
not name is deleted afterwards, so a reader that finds an object missing reads the list again. Steps 44 and 46.
"""

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

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
from raycheck.bucket.store import Got, Store
from raycheck.errors import ConflictError, CorruptError, NotFoundError, StoreError
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
LEASE_S = 600.0
"""How long the record of a reader counts."""


@dataclass(frozen=True, slots=True)
class Series:
    """A place in a store where versions are published. prefix: of all its keys."""

    store: Store
    prefix: str

    def __str__(self) -> str:
        return f"{self.store}: {versions_key(self.prefix)}"

    @classmethod
    def at(cls, store: Store) -> "Series":
        """Return the series of the run at `store`, or else the one that was published to this place itself."""
        here = cls(store, "")
        return here if here.read() is not None else cls(store, PUBLISHED_PREFIX)

    def key(self, version: PublishedVersion, file: str) -> str:
        return version_key(self.prefix, version.directory, file)

    def read(self) -> tuple[Versions, Got] | None:
        """Read the list. Return None when nothing is published."""
        try:
            return read_document(self.store, versions_key(self.prefix), load_versions, max_bytes=MAX_VERSIONS_BYTES)
        except NotFoundError:
            return None

    def add(self, new: Versions, found: Got | None) -> None:
        """Replace the list that was `found` by `new`, whose last version is the new one.

        An unclear response is judged by its effect. Raises ConflictError when somebody else has published, StoreError
        when the outcome stays unknown.
        """
        data, deadline = dump(new), time.monotonic() + SWAP_DEADLINE_S
        while True:
            try:
                if found is None:
                    self.store.put_if_absent(versions_key(self.prefix), data)
                else:
                    self.store.put_if_match(versions_key(self.prefix), data, found.version)
                return  # noqa: TRY300  the two writes are one statement
            except (ConflictError, StoreError) as error:
                now = self.read()
                if now is not None and now[0].newest.directory == new.newest.directory:
                    return
                if (now and now[1].version) != (found and found.version):
                    raise ConflictError(
                        f"{self}: somebody else has published version {now[0].newest.number if now else 0} meanwhile; "
                        f"version {new.newest.number} of {new.newest.checkpoint} is not published"
                    ) from None
                if time.monotonic() > deadline:
                    raise StoreError(f"{self} could not be replaced in {SWAP_DEADLINE_S:.0f} s ({error})") from error
                time.sleep(0.5)

    def readers(self) -> tuple[Reader, ...]:
        """Read the records of all readers, also of those that do not count any more."""
        found = []
        for item in self.store.list_objects(readers_prefix(self.prefix)):
            with suppress(NotFoundError, CorruptError):
                found.append(read_document(self.store, item.key, load_reader, max_bytes=MAX_READER_BYTES)[0])
        return tuple(found)

    def lease(self, reader: Reader) -> None:
        """Write the record of a reader."""
        self.store.put(reader_key(self.prefix, reader.name), dump(reader))

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
                for item in list(self.store.list_objects(version_key(self.prefix, name, ""))):
                    self.store.delete(item.key)
        for reader in self.readers():
            if reader.until + LEASE_S < listed.newest.published_at:
                self.end_lease(reader.name)


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishedVersions:
    """What is published of a run.

    versions: oldest first. readers: those whose records count, with the number of the version that each one has.
    """

    versions: tuple[PublishedVersion, ...]
    readers: Mapping[str, int]

    @classmethod
    def of(cls, store: Store) -> "PublishedVersions | None":
        """Read what is published of the run at `store`; None if nothing is."""
        series = Series(store, PUBLISHED_PREFIX)
        found = series.read()
        if found is None:
            return None
        readers = {one.name: one.number for one in series.readers() if one.counts(found[0], found[1].at)}
        return cls(versions=found[0].versions, readers=readers)


def kept(versions: Sequence[PublishedVersion], *, keep_last: int, leased: Sequence[int] = ()) -> list[PublishedVersion]:
    """Return the versions that stay, in their order: what somebody needs to have one of the newest `keep_last`.

    These are the patches since the newest whole version before them. leased: the versions that readers have; what
    leads on from them stays too.
    """
    first = min([version.number for version in versions[-keep_last:]] + [number + 1 for number in leased])
    wholes = [version.number for version in versions if version.is_whole and version.number <= first]
    start = max(wholes, default=versions[0].number)
    return [version for version in versions if version.number >= start]


def patches_since(versions: Versions, number: int) -> list[PublishedVersion] | None:
    """Return the versions whose patches lead from version `number` to the newest one; None if no patches do."""
    after = [version for version in versions.versions if version.number > number]
    bases = [number, *(version.number for version in after)]
    if any(version.base != base for version, base in zip(after, bases, strict=False)):
        return None
    return after


def newest_whole(versions: Versions) -> PublishedVersion | None:
    """Return the newest version that is whole; None if there is none, which only a foreign writer leaves behind."""
    return next((version for version in reversed(versions.versions) if version.is_whole), None)


def with_version(found: Versions | None, version: PublishedVersion, *, run_id: str, series: str) -> Versions:
    """Return the list with another version."""
    if found is None:
        return Versions(run_id=run_id, series=series, versions=(version,))
    return replace(found, versions=(*found.versions, version))
