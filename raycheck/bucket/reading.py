"""Reads a run: `latest`, and a checkpoint's documents and objects. Never writes (I8), imports neither torch nor ray.

A reader needs no lease: if an object is missing, it reads `latest` again. A checkpoint that is no longer in the live
list was evicted, and the reader starts again with the head. One that is still listed is damaged.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol, TypeVar

from raycheck.bucket.document_reading import again_if_corrupt, read_quickly
from raycheck.bucket.format import object_keys
from raycheck.bucket.format.checksum import crc32
from raycheck.bucket.format.index import Index
from raycheck.bucket.format.index_codec import load_index
from raycheck.bucket.format.latest import MAX_BYTES as MAX_LATEST
from raycheck.bucket.format.latest import Entry, Latest, PageRef, load_latest
from raycheck.bucket.format.manifest import MAX_BYTES as MAX_MANIFEST
from raycheck.bucket.format.manifest import Manifest, load_manifest
from raycheck.bucket.format.object_keys import CheckpointName
from raycheck.bucket.pages import Pages, read_answer, read_readable, read_whole
from raycheck.bucket.store import Got, Store
from raycheck.bucket.store.interface import MAX_WHOLE_BYTES, Buffer
from raycheck.bucket.verify import Finding, verify
from raycheck.errors import CorruptError, DamagedError, NotFoundError, RaycheckError, StoreError

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Documents:
    """The manifest and the index of a checkpoint, as bytes."""

    manifest: bytes
    index: bytes


class RangeReader(Protocol):
    """A reader of byte ranges of objects by their keys, such as a store."""

    def get_range(self, key: str, start: int, stop: int) -> Buffer: ...


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A committed checkpoint, to read.

    entry: its entry in `latest`. documents: its manifest and index as another rank read them, whose checksums are
    checked here too; None: read them from the store. shards: the source of its shards' bytes; None: the store. parsed:
    its manifest and index, if they have been read and checked already.
    """

    store: Store
    entry: Entry
    documents: Documents | None = None
    shards: RangeReader | None = None
    parsed: tuple[Manifest, Index] | None = field(default=None, compare=False, repr=False)

    def read_documents(self) -> Documents:
        """Read manifest and index to pass them to other ranks, unchecked.

        Raises DamagedError, or NotFoundError when the checkpoint was evicted.
        """
        name = self.entry.key
        manifest, index = self.store.together(
            partial(_get_live, self.store, name, object_keys.manifest_key(name), MAX_MANIFEST),
            partial(_get_live, self.store, name, object_keys.index_key(name), MAX_WHOLE_BYTES),
        )
        return Documents(manifest=manifest, index=index)

    def read_once(self) -> "Checkpoint":
        """Read manifest and index. Return the checkpoint with them: nothing reads or checks them a second time.

        Raises the errors of read_index.
        """
        manifest = self.read_manifest()
        return replace(self, parsed=(manifest, self.read_index(manifest)))

    def read_manifest(self) -> Manifest:
        """Read the manifest and check it against the checksum in `latest`.

        Raises DamagedError, or NotFoundError when the checkpoint was evicted.
        """
        if self.parsed is not None:
            return self.parsed[0]
        return self.parse_manifest(self.read_manifest_bytes())

    def parse_manifest(self, data: bytes) -> Manifest:
        """Parse the result of `read_manifest_bytes`. Raises CorruptError for the manifest of another checkpoint."""
        key = object_keys.manifest_key(self.entry.key)
        manifest = load_manifest(data, what=f"{self.store}: {key}")
        if manifest.key != self.entry.key:
            raise CorruptError(f"{self.store}: {key} is the manifest of {manifest.key}")
        return manifest

    def read_manifest_bytes(self) -> bytes:
        """Read the manifest's bytes and check them against the checksum in `latest`. Raises the errors of
        read_manifest."""
        key = object_keys.manifest_key(self.entry.key)
        given = self.documents.manifest if self.documents else None
        return self._checked(key, given, size=None, crc=self.entry.manifest_crc32, said_by="latest")

    def read_index(self, manifest: Manifest, *, values: bool = True) -> Index:
        """Read the index and check it against size and checksum in the manifest.

        values: False leaves out the values, for callers that need only the tensors' places. Raises the errors of
        read_manifest, and CorruptError when it names a component that the manifest does not.
        """
        if self.parsed is not None:
            return self.parsed[1]
        key = object_keys.index_key(self.entry.key)
        given = self.documents.index if self.documents else None
        size, crc = manifest.index.size_bytes, manifest.index.crc32
        data = self._checked(key, given, size=size, crc=crc, said_by="the manifest")
        index = load_index(data, what=f"{self.store}: {key}", values=values)
        known = {component.name for component in manifest.components}
        for item in index.plan.objects:
            if item.component not in known:  # no reader would know where its bytes are
                raise CorruptError(f"{self.store}: {key} names the component {item.component[:100]!r}, and the "
                                   "manifest does not")  # fmt: skip
        return index

    def verify(self, *, reads: bool = True) -> Iterator[Finding]:
        """Read every object of the checkpoint, compare size and checksum, and yield one finding per object.

        reads: False compares sizes only.
        """
        return verify(
            self.store,
            self.entry.key,
            read_manifest=self.read_manifest,
            read_index=partial(self.read_index, values=False),
            reads=reads,
            why_missing=partial(why_missing, self.store, self.entry.key),
        )

    def _checked(self, key: str, given: bytes | None, *, size: int | None, crc: int, said_by: str) -> bytes:
        """Return the bytes of a document, checked: the given ones, or the stored ones if none are given or they are
        wrong.

        size: None when it is not known. said_by: the document that states size and checksum, for the error.
        """
        at_hand = [] if given is None else [given]
        most = MAX_MANIFEST if size is None else min(max(size, 0), MAX_WHOLE_BYTES)

        def read() -> bytes:
            data = at_hand.pop() if at_hand else _get_live(self.store, self.entry.key, key, most)
            if size in (None, len(data)) and crc32(data) == crc:
                return data
            what = "checksum" if size is None or size == len(data) else f"size ({len(data)})"
            raise DamagedError(f"{self.store}: {key} has another {what} than {said_by} says")

        return again_if_corrupt(read)


def read_latest(store: Store) -> Latest:
    """Read the whole body of `latest`, with its pages, and write nothing (I8).

    Raises NotFoundError, which says what exists instead, when there is no run; CorruptError when a page is lost.
    """
    return read_latest_at(store)[0]


def read_latest_at(store: Store) -> tuple[Latest, float]:
    """Read the whole body of `latest`, and the store's time, in unix seconds. Raises the errors of read_latest."""
    body, got = read_whole(partial(_newest, store), Pages(store))
    return body, got.at


def read_readable_at(store: Store) -> tuple[Latest, float, tuple[PageRef, ...]]:
    """Read `latest`, those of its pages that can be read, and the store's time. See pages.read_readable."""
    body, got, lost = read_readable(partial(_newest, store), Pages(store))
    return body, got.at, lost


def get_whole(store: Store) -> tuple[Latest, Got]:
    """Read the whole body of `latest`, and the response. Raises NotFoundError when there is no `latest`."""
    return read_whole(lambda: again_if_corrupt(lambda: get_latest(store)), Pages(store))


def read_newest(store: Store) -> Latest:
    """Read `latest` alone, without its pages: enough for what concerns the newest checkpoints and the attempts.

    Raises NotFoundError, which says what exists instead, when there is no run.
    """
    return read_newest_at(store)[0]


def read_newest_at(store: Store) -> tuple[Latest, float]:
    """Read what `read_newest` returns, and the store's time, in unix seconds. Raises its errors."""
    body, got = _newest(store)
    return body, got.at


def ask_latest(store: Store, question: Callable[[Latest], T]) -> T:
    """Return the answer of the run's `latest` to a question; its pages are read if the answer depends on them.

    Raises the errors of read_latest.
    """
    return read_answer(partial(_newest, store), Pages(store), question)[0]


def _newest(store: Store) -> tuple[Latest, Got]:
    try:
        return again_if_corrupt(lambda: get_latest(store))
    except NotFoundError:
        raise no_run_error(store) from None


def get_latest(store: Store) -> tuple[Latest, Got]:
    """GET `latest` once and parse it. Return the body, without its pages, and the response.

    All reads of `latest` use this, except a repair, which continues with a body that cannot be read. Raises
    NotFoundError, and CorruptError, on which no caller may act before a second reading (again_if_corrupt).
    """
    got = store.get(object_keys.LATEST_KEY, MAX_LATEST)
    return load_latest(got.data, what=f"{store}: {object_keys.LATEST_KEY}"), got


def peek_latest(store: Store) -> Latest:
    """Read the whole body of `latest` in the store's cheapest way, without the store's time.

    Raises the errors of get_latest, but CorruptError only after a second reading.
    """
    body = read_quickly(store, object_keys.LATEST_KEY, load_latest, max_bytes=MAX_LATEST)
    return read_latest(store) if body.all_pages else body


def no_run_error(store: Store) -> NotFoundError:
    """Make the error for a missing `latest`. It also states whether there are checkpoints without it."""
    with suppress(StoreError):  # without permission to list, the error says only that `latest` is missing
        if names := list_directories(store):
            return lost_run_error(store, names)
    return NotFoundError(
        f"{store}: no run here (no object named latest). Give the storage path and the run's name; the runs in a "
        f"folder are listed by raycheck runs '{store}'"
    )


def lost_run_error(store: Store, names: Sequence[CheckpointName]) -> NotFoundError:
    """Make the error for a missing `latest` where the directories `names` exist, in the order of their saves."""
    return NotFoundError(
        f"{store}: no run here: latest is missing, though {len(names)} checkpoints are here, the last of them "
        f"{names[-1]}. If it was deleted, put it back (bucket versioning), or stop the run and rebuild it: "
        f"raycheck repair '{store}'"
    )


def list_directories(store: Store) -> list[CheckpointName]:
    """List the checkpoints that have a directory, whether or not `latest` names them, in the order of their saves."""
    return sorted(
        name for text in store.list_names(object_keys.CHECKPOINTS_PREFIX) if (name := CheckpointName.parse(text))
    )


def _get_live(store: Store, name: str, key: str, max_bytes: int) -> bytes:
    try:
        return store.get(key, max_bytes).data
    except NotFoundError:
        raise missing_error(store, name, key) from None
    except CorruptError as error:
        raise DamagedError(str(error)) from None


def missing_error(store: Store, name: str, key: str) -> NotFoundError | CorruptError:
    """Make the error for a missing object `key` of checkpoint `name`. Step 25.

    It is a NotFoundError when the checkpoint was dropped, a CorruptError when the run whose directory it uses is not
    where it was, and otherwise a DamagedError. key: the object's key, or a text that contains it.
    """
    entry, body = ask_latest(store, lambda body: (body.entry(name), body))
    if entry is None:
        return NotFoundError(f"{store}: checkpoint {name} was dropped by retention; open the run again")
    if moved := _moved(store, body, name, key):
        return CorruptError(moved)
    return DamagedError(f"{store}: {key} is missing although latest lists its checkpoint")


def why_missing(store: Store, name: str, key: str) -> str:
    """Return the reason for a missing object `key` of checkpoint `name` if a run was moved; otherwise "".

    This is for a report, which omits what cannot be determined.
    """
    with suppress(RaycheckError):
        return _moved(store, read_latest(store), name, key)
    return ""


def _moved(store: Store, body: Latest, name: str, key: str) -> str:
    """Return in words that the run whose `key` checkpoint `name` uses is not where it was; "" when that is not the
    reason.

    Someone has moved one of the two by hand. That is not damage: a mark would remain in `latest` after they are put
    back.
    """
    entry = body.entry(name)
    for directory in entry.refs if entry else ():
        way, _ = object_keys.split_directory(directory)
        if way and object_keys.checkpoint_prefix(directory) in key:
            lender = store.beside(way)
            loan = next((loan for loan in body.loans if loan.source == way), None)
            try:
                other = read_latest(lender)
            except NotFoundError:
                what = f"there is no run at {lender}"
            else:
                if loan is None or other.run_id == loan.run_id:
                    return ""
                what = f"at {lender} there is a different run now"
            return (
                f"{store}: {directory}, a directory that checkpoint {name} uses, is not there: {what}. This run or "
                "that one was moved or deleted by hand. Put it back; then 'raycheck fork --copy' makes a run in "
                "another place that uses none. If it is gone, go back with 'raycheck rewind' to a checkpoint that does "
                "not use it"
            )
    return ""
