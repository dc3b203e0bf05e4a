"""Finds the exported directories that are this run's own, and deletes old ones on request. Step 34.

Only its record, `raycheck.json`, proves that a directory is this run's. It names the run, the checkpoint, and every
file with its size. It is written before the index, without which no reader starts. A delete marks the record, on
condition of its version, and then removes the index, the other files of the record, and the record last. So a reader
never finds half a model, and a crash at any point leaves a record with which the next prune continues; until then
nobody exports to that place. Nothing that a record does not list is ever deleted.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from raycheck.bucket.document_reading import read_document
from raycheck.bucket.format.document import FORMAT_VERSION, Document, NewerFormatError, dump, load
from raycheck.bucket.format.latest import Latest
from raycheck.bucket.format.object_keys import EXPORT_ENDS, EXPORT_RECORD, CheckpointName, export_key, is_file_name
from raycheck.bucket.store import Store
from raycheck.errors import ConfigError, ConflictError, CorruptError, NotFoundError

MAX_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportRecord(Document):
    """The `raycheck.json` of an exported directory.

    files: the size in bytes of every other file. last: the one of them that was written last, the index. by_training: a
    training run wrote the directory by its settings; False when someone exported it by hand. is_pruned: it is being
    deleted.
    """

    when_true: ClassVar[frozenset[str]] = frozenset({"is_pruned"})

    format_version: int = FORMAT_VERSION
    run_id: str
    checkpoint: str
    by_training: bool
    last: str
    files: Mapping[str, int]
    is_pruned: bool = False

    def __post_init__(self) -> None:
        if CheckpointName.parse(self.checkpoint) is None:
            raise CorruptError(f"an export's record names {self.checkpoint!r}, which is not a checkpoint's name")
        odd = [name for name in self.files if not is_file_name(name) or name == EXPORT_RECORD]
        if odd or self.last not in self.files or self.last not in EXPORT_ENDS:
            raise CorruptError(f"an export's record lists {(odd or [self.last])[0]!r}, which is none of its files")

    @property
    def name(self) -> CheckpointName:
        """Return the checkpoint's name, by which exports are ordered."""
        name = CheckpointName.parse(self.checkpoint)
        assert name is not None, "checked at construction"
        return name


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportedDirectory:
    """A directory as it was found.

    place: its prefix in the store. sizes: the bytes of each file in it, by name. record: None when it is missing or
    cannot be read. version: the version of the record's object.
    """

    place: str
    sizes: Mapping[str, int]
    record: ExportRecord | None
    version: str = ""

    @property
    def size_bytes(self) -> int:
        """Return the bytes that a delete would free."""
        return sum(self.sizes.get(name, 0) for name in (self.record.files if self.record else ()))


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportDecision:
    """The decision whether an exported directory stays, and its reason."""

    directory: ExportedDirectory
    is_kept: bool
    reason: str


def find_exports(store: Store, prefix: str) -> tuple[ExportedDirectory, ...]:
    """Find the directories below `prefix` that have the index or the record of an export, in order of their places."""
    by_place: dict[str, dict[str, int]] = {}
    for item in store.list_objects(prefix):
        place, slash, file = item.key.rpartition("/")
        by_place.setdefault(place + slash, {})[file] = item.size_bytes
    found = []
    for place, sizes in sorted(by_place.items()):
        if place and not sizes.keys().isdisjoint({EXPORT_RECORD, *EXPORT_ENDS}):
            record, version = _record(store, place, sizes)
            found.append(ExportedDirectory(place=place, sizes=sizes, record=record, version=version))
    return tuple(found)


def decide_exports(found: Sequence[ExportedDirectory], body: Latest, *, keep_last: int) -> tuple[ExportDecision, ...]:
    """Decide on each directory.

    Exports of the newest `keep_last` checkpoints stay, as do those of pinned and of named checkpoints, and every
    directory that is not proven to be this run's own, complete and unchanged. body: the run's `latest`.
    """
    doubts = [_doubt(directory, body) for directory in found]
    mine = {  # without those that an earlier prune has begun to delete
        one.record.name
        for one, doubt in zip(found, doubts, strict=True)
        if one.record and doubt is None and not one.record.is_pruned
    }
    newest = set(sorted(mine)[-keep_last:])
    spared = {entry.key: f"is named {entry.name}" for entry in body.live if entry.name is not None}
    spared |= {entry.key: "is pinned" for entry in body.live if entry.pinned}
    return tuple(
        _decision(directory, doubt, newest, spared, keep_last) for directory, doubt in zip(found, doubts, strict=True)
    )


def prune_exports(store: Store, prefix: str, body: Latest, *, keep_last: int) -> tuple[str, ...]:
    """Delete the directories that `decide_exports` does not keep. Return their places.

    body: the run's `latest`, read before.
    """
    decisions = decide_exports(find_exports(store, prefix), body, keep_last=keep_last)
    going = [item.directory for item in decisions if not item.is_kept]
    return tuple(directory.place for directory in going if _delete(store, directory))


def check_not_being_pruned(store: Store, place: str) -> None:
    """Raise ConfigError when a delete of this place has started and not ended: it would also delete files of a new
    export.

    Raises NewerFormatError when only a newer raycheck can read the record.
    """
    try:
        record, _ = read_document(store, export_key(place, EXPORT_RECORD), load_export_record, max_bytes=MAX_BYTES)
    except NewerFormatError:
        raise
    except (NotFoundError, CorruptError):
        return
    if record.is_pruned:
        raise ConfigError(
            f"{store}: {place} is being pruned, or a prune was interrupted: 'raycheck prune-exports' completes it"
        )


def _decision(
    directory: ExportedDirectory,
    doubt: str | None,
    newest: set[CheckpointName],
    spared: Mapping[str, str],
    keep_last: int,
) -> ExportDecision:
    record = directory.record
    if record is None or doubt is not None:
        return ExportDecision(directory=directory, is_kept=True, reason=doubt or "not proven to be raycheck's")
    if record.is_pruned:
        return ExportDecision(directory=directory, is_kept=False, reason="an earlier prune did not end")
    if record.checkpoint in spared:
        return ExportDecision(directory=directory, is_kept=True, reason=f"its checkpoint {spared[record.checkpoint]}")
    if record.name in newest:
        return ExportDecision(directory=directory, is_kept=True, reason=f"among the newest {keep_last}")
    return ExportDecision(directory=directory, is_kept=False, reason=f"not among the newest {keep_last}")


def _doubt(directory: ExportedDirectory, body: Latest) -> str | None:
    """Return why a directory must not be touched, or None if a training of this run wrote it and it is complete."""
    record, sizes = directory.record, directory.sizes
    if record is None:
        return "it has no record of raycheck's" if EXPORT_RECORD not in sizes else "its record cannot be read"
    if record.run_id != body.run_id:
        return "it is of another run"
    if not record.by_training:
        return "it was exported by hand"
    if record.is_pruned:
        return None
    if record.last not in sizes:
        return "it is incomplete: it is being written, or its export died"
    if any(sizes.get(name) != size for name, size in record.files.items()):
        return "its files are not those that were exported"
    return None


def _delete(store: Store, directory: ExportedDirectory) -> bool:
    """Delete a directory. Return False when someone else has changed its record in the meantime."""
    record, key = directory.record, export_key(directory.place, EXPORT_RECORD)
    assert record is not None, "a directory without a record is kept"
    if not record.is_pruned:
        try:
            store.put_if_match(key, dump(replace(record, is_pruned=True)), directory.version)
        except (ConflictError, NotFoundError):
            return False
    for name in _last_first(record):
        store.delete(export_key(directory.place, name))
    store.delete(key)
    return True


def _last_first(record: ExportRecord) -> Iterable[str]:
    return sorted(record.files, key=lambda name: name != record.last)


def _record(store: Store, place: str, sizes: Mapping[str, int]) -> tuple[ExportRecord | None, str]:
    if sizes.get(EXPORT_RECORD, MAX_BYTES + 1) > MAX_BYTES:
        return None, ""
    key = export_key(place, EXPORT_RECORD)
    try:
        record, got = read_document(store, key, load_export_record, max_bytes=MAX_BYTES)
    except (NotFoundError, CorruptError):
        return None, ""
    return record, got.version


def load_export_record(data: bytes, *, what: str) -> ExportRecord:
    return load(ExportRecord, data, what=what, max_bytes=MAX_BYTES)
