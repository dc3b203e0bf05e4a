"""Copies a run, or one of its checkpoints, to another place: the public `copy_run`.

The copy of a run is the same run in another place. It is a mirror: each repeated copy brings it up to date with its
source, until someone trains on it (step 38). The copy of one checkpoint is a new run that starts with it, like a fork
(step 30). Either copy may stop anywhere and be repeated: only what is missing is copied.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from threading import Event
from uuid import uuid4

from raycheck.bucket.choice import entry_at
from raycheck.bucket.format import object_keys
from raycheck.bucket.format.latest import Entry, Latest
from raycheck.bucket.format.manifest import Manifest
from raycheck.bucket.format.object_keys import CheckpointName
from raycheck.bucket.protocol.object_copy import DroppedError, Job, ObjectCopier
from raycheck.bucket.protocol.sharing.new_run import (
    Origin,
    begin_run,
    first_entry,
    first_manifest,
    look_at_place,
    reserve_name,
)
from raycheck.bucket.protocol.swap import Register
from raycheck.bucket.protocol.write_once import write_manifest
from raycheck.bucket.reading import Checkpoint, read_latest
from raycheck.bucket.store import Store, open_store
from raycheck.bucket.store.address import bare_uri
from raycheck.catalog.copier import MirrorCopier, check_places, check_source
from raycheck.errors import ConfigError, DamagedError, NotFoundError
from raycheck.show_progress import ProgressTally, ShowProgress, show_nothing
from raycheck.storage_settings import StorageSettings


@dataclass(frozen=True, kw_only=True, slots=True)
class CopiedRun:
    """The result of a copy, or its preview.

    uri, run_id, head: the copy's; "" and None in the preview of a new run. copied: the size in bytes of each checkpoint
    that is copied now, by key; one that was partly copied before counts whole. present: those that existed before.
    dropped: those that the source dropped in the meantime. sent_bytes: bytes sent through this process. in_store_bytes:
    bytes copied inside the store. found_bytes: bytes that existed before.
    """

    uri: str
    run_id: str
    head: str | None
    copied: Mapping[str, int] = field(default_factory=dict)
    present: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    sent_bytes: int = 0
    in_store_bytes: int = 0
    found_bytes: int = 0


def copy_run(
    source: str,
    to: str,
    *,
    at: int | str | None = None,
    dry_run: bool = False,
    from_storage: StorageSettings | None = None,
    to_storage: StorageSettings | None = None,
    progress: ShowProgress = show_nothing,
    stop: Event | None = None,
) -> CopiedRun:
    """Copy a run, or one of its checkpoints, to another place, in any two of the stores.

    The copy needs a bounded amount of memory, about 400 MB. Repeat it to continue an interrupted copy, or to bring one
    up to date.

    source, to: URIs of runs. `to` must be free, or an earlier copy of this run on which nobody has trained.
    at: copy only the newest checkpoint of this step, or the one with this name or key, into a new run. None: the run.
    dry_run: make every check, and write nothing.
    from_storage, to_storage: the settings for the two buckets.
    progress: called with the bytes that are copied, and their total.
    stop: when it is set, the copy ends soon with StoppedError.

    Raises ConfigError if `to` is unsuitable, NotFoundError if there is nothing to copy, and DamagedError for a damaged
    checkpoint of the source, after all others are copied.
    """
    one, other = open_store(source, from_storage), open_store(to, to_storage)
    stop = Event() if stop is None else stop
    if dry_run:
        return _planned(one, other, at)
    if at is not None:
        return _copy_checkpoint(one, other, at, ProgressTally(progress), stop)
    copier = MirrorCopier(one, other, stop=stop, progress=progress)
    body = copier.run()
    copier.delete_dropped()
    return result_of(copier, body)


def _planned(source: Store, target: Store, at: int | str | None) -> CopiedRun:
    """Return the result that a copy would have. Raises the errors that it would raise before its first write."""
    if at is None:
        body, entries = MirrorCopier(source, target, stop=Event()).missing()
        if body.head is None:
            raise NotFoundError(f"{source}: the run has no committed checkpoint to copy")
        sizes = {entry.key: entry.size_bytes for entry in entries}
        return CopiedRun(uri=target.uri, run_id=body.run_id, head=body.head, copied=sizes)
    check_places(source, target)
    entry = _chosen(source, read_latest(source), at)
    existing, _ = look_at_place(Register(target))
    if existing is not None:
        head = _copied_head(existing, target, source, entry)
        return CopiedRun(uri=target.uri, run_id=existing.run_id, head=head.key, present=(head.key,))
    return CopiedRun(uri=target.uri, run_id="", head=None, copied={entry.key: entry.size_bytes})


def result_of(copier: MirrorCopier, body: Latest) -> CopiedRun:
    """Return the result of a copier. Raises DamagedError, which names them, if it had to leave out checkpoints."""
    report, objects = copier.report, copier.objects
    if report.damaged:
        said = "".join(f"\n  {why}" for why in report.damaged.values())
        raise DamagedError(f"{objects.source}: {len(report.damaged)} damaged checkpoints were not copied:{said}")
    return CopiedRun(
        uri=objects.target.uri,
        run_id=body.run_id,
        head=body.head,
        copied=dict(report.copied),
        present=tuple(report.present),
        dropped=tuple(report.dropped),
        sent_bytes=objects.sent_bytes,
        in_store_bytes=objects.in_store_bytes,
        found_bytes=objects.found_bytes,
    )


def _copy_checkpoint(source: Store, target: Store, at: int | str, tally: ProgressTally, stop: Event) -> CopiedRun:
    """Create a new run at the target with a copy of one checkpoint. Step 30."""
    check_places(source, target)
    lender = read_latest(source)
    entry = _chosen(source, lender, at)
    tally.expect(entry.size_bytes)
    checkpoint, register = Checkpoint(source, entry), Register(target)
    existing, save = look_at_place(register)
    if existing is not None:
        head = _copied_head(existing, target, source, entry)
        return CopiedRun(uri=target.uri, run_id=existing.run_id, head=head.key, present=(head.key,))
    old = checkpoint.read_manifest()
    objects = ObjectCopier(source, target, stop=stop, progress=tally.add)
    origin = Origin(run_id="", uri=bare_uri(source.uri), source_run_id=lender.run_id, checkpoint=old.key)
    new, there = _name_for(objects, old, origin, save, restored_from=_origin(source, entry))
    pairs = zip(old.objects(), new.objects(), strict=True)
    jobs = [Job(key=key, new_key=new_key, record=record) for (key, record), (new_key, _) in pairs]
    try:
        objects.copy_objects(old.key, jobs, there, trusts=False)
    except DroppedError:
        raise NotFoundError(f"{source}: checkpoint {old.key} was dropped while it was copied") from None
    data = write_manifest(target, new)
    body = begin_run(register, first_entry(new, data, of=entry), new, run_id=uuid4().hex, verb="copy")
    if body.head != new.key or not _was_copied(Checkpoint(target, _head(body, target)), source, entry):
        raise ConfigError(f"{target}: another run was created there in the meantime; choose a free place")
    return CopiedRun(
        uri=target.uri,
        run_id=body.run_id,
        head=body.head,
        copied={new.key: new.size_bytes},
        sent_bytes=objects.sent_bytes,
        in_store_bytes=objects.in_store_bytes,
        found_bytes=objects.found_bytes,
    )


def _name_for(
    objects: ObjectCopier, old: Manifest, origin: Origin, save: int, *, restored_from: str
) -> tuple[Manifest, dict[str, int]]:
    """Return the new checkpoint's manifest, and the sizes of its objects left by an earlier try.

    The last try's name is reused if it was reserved for the same copy and all objects under it are correct. Another
    copy of the checkpoint may be writing there; it writes the same bytes. save: the lowest save number that no
    directory has.
    """
    last = CheckpointName(step=old.step, attempt=0, save=max(1, save - 1))
    prefix, mark = object_keys.checkpoint_prefix(str(last)), object_keys.origin_key(str(last))
    there = {item.key: item.size_bytes for item in objects.target.list_objects(prefix)}
    records = dict(first_manifest(old, last, restored_from=restored_from).objects())
    found = there.keys() - {mark}
    can_go_on = mark in there and all(key in records and objects.is_right(key, records[key]) for key in found)
    name = reserve_name(objects.target, origin, step=old.step, save=last.save if can_go_on else save)
    return first_manifest(old, name, restored_from=restored_from), there if name == last else {}


def _chosen(source: Store, body: Latest, at: int | str) -> Entry:
    check_source(source.uri, body)
    entry = entry_at(source, body, at)
    if entry.damaged:
        raise DamagedError(f"{source}: {entry.key} is damaged: {entry.damaged}")
    return entry


def _head(body: Latest, target: Store) -> Entry:
    entry = None if body.head is None else body.entry(body.head)
    if entry is None:
        raise ConfigError(f"{target}: a run has begun there, without a checkpoint. Give a free place")
    return entry


def _copied_head(body: Latest, target: Store, source: Store, entry: Entry) -> Entry:
    """Return the head of the run at the target. Raises ConfigError if it is not a copy of that checkpoint."""
    head = _head(body, target)
    if not _was_copied(Checkpoint(target, head), source, entry):
        raise ConfigError(f"{target}: there is another run already ({body.run_id}); give a free place")
    return head


def _was_copied(copy: Checkpoint, source: Store, entry: Entry) -> bool:
    return copy.read_manifest().restored_from == _origin(source, entry)


def _origin(source: Store, entry: Entry) -> str:
    uri = bare_uri(source.uri)
    return f"{uri} {entry.key} {entry.manifest_crc32:08x}"
