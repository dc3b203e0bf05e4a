"""Starts a run from another run's checkpoint. Step 30.

Within one bucket no byte of a tensor is copied: the new run uses the directories of the other one, which holds them for
it (holds.py). Only manifest and index are written. Into another bucket everything is copied.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from raycheck.bucket.document_reading import read_quickly
from raycheck.bucket.format import object_keys
from raycheck.bucket.format.latest import Entry, Latest, Loan
from raycheck.bucket.format.manifest import Manifest, load_manifest
from raycheck.bucket.format.object_keys import CheckpointName
from raycheck.bucket.protocol.object_copy import Job, copy_objects
from raycheck.bucket.protocol.sharing.holds import Lenders, borrow, confirm, directory_from
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
from raycheck.bucket.store import Store
from raycheck.bucket.store.address import bare_uri
from raycheck.errors import ConfigError, CorruptError, NotFoundError
from raycheck.show_progress import ProgressTally, ShowProgress, show_nothing

MAX_FIRST_MANIFEST = 1024 * 1024
"""A larger manifest is not read to find a fork's origin, which is for listings of very many runs."""
_OWNER = "fork-"  # new_run.py makes it of the verb
"""The start of the name of a fork's first owner. Owners are never removed from `latest`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Forked:
    """The result of a fork, or its preview.

    key: the new run's checkpoint; "" in the preview of a new run. is_new: False when the run existed before. source:
    the checkpoint's key in the other run. copied_bytes, borrowed_bytes: how much is copied, and how much stays where it
    is.
    """

    key: str
    is_new: bool
    source: str = ""
    copied_bytes: int = 0
    borrowed_bytes: int = 0


def fork(
    source: Store,
    target: Store,
    *,
    run_id: str,
    key: str | Callable[[Latest], str] | None = None,
    copies: bool = False,
    is_dry: bool = False,
    progress: ShowProgress = show_nothing,
) -> Forked:
    """Start a new run at `target` from a checkpoint of the run at `source`.

    Do nothing if that run already exists, so that a script can be submitted twice. The source's `latest` is read once.
    run_id: the new run's. key: the checkpoint, or a function that chooses it from the source's body; None: the head.
    copies: copy all bytes, even within one bucket. is_dry: write nothing. progress: called with the bytes that are
    copied, and their total. Raises NotFoundError when the source has no such checkpoint, CorruptError when its bytes
    differ from their checksums, and ConfigError when the new run has started without a checkpoint.
    """
    register = Register(target)
    existing, save = look_at_place(register)
    if existing is not None and existing.head is None:
        raise ConfigError(f"{target}: the run has already started, without a checkpoint. Give it another name")
    if existing is not None:
        return Forked(key=str(existing.head), is_new=False)
    way = None if copies else target.way_to(source)
    lenders = Lenders(target)
    body, way = _body_of(source, lenders, way)
    entry = _wanted(source, body, key(body) if callable(key) else key)
    old = Checkpoint(source, entry).read_manifest()
    directories = set() if way is None else {component.checkpoint for component in old.components}
    borrowed = {directory: directory_from(target, str(way), directory) for directory in directories}
    origin = Origin(run_id=run_id, uri=bare_uri(source.uri), source_run_id=body.run_id, checkpoint=old.key)
    loans: tuple[Loan, ...] = ()
    if way is not None and not is_dry:
        loans = borrow(target, way, directories, run_id=run_id, lenders=lenders)
    if is_dry:
        name = CheckpointName(step=entry.step, attempt=0, save=max(1, save))
    else:
        name = reserve_name(target, origin, step=entry.step, save=save)
    manifest = first_manifest(old, name, restored_from=f"{origin.uri} {old.key}", borrowed=borrowed)
    jobs = _jobs(old, manifest, borrowed)
    copied_bytes = sum(job.record.size_bytes for job in jobs)
    done = Forked(
        key="" if is_dry else manifest.key,
        is_new=True,
        source=entry.key,
        copied_bytes=copied_bytes,
        borrowed_bytes=manifest.size_bytes - copied_bytes,
    )
    if is_dry:
        return done
    copy_objects(source, target, old.key, jobs, progress=ProgressTally(progress, total=copied_bytes).add)
    data = write_manifest(target, manifest)
    made = begin_run(register, first_entry(manifest, data, of=entry), manifest, run_id=run_id, verb="fork", loans=loans)
    confirm(target, made, lenders)
    if made.run_id != run_id:
        return Forked(key=str(made.head), is_new=False)
    return done


def _body_of(source: Store, lenders: Lenders, way: str | None) -> tuple[Latest, str | None]:
    """Return the source's body, and the path to it; None for the path when nothing is to be borrowed.

    The body is read at the end of the path, where its directories will be used; only what cannot be found there is
    copied.
    """
    if way is not None:
        with suppress(NotFoundError):
            return lenders.read(way)[1], way
    return read_latest(source), None


def _wanted(source: Store, body: Latest, key: str | None) -> Entry:
    entry = None if (wanted := key or body.head) is None else body.entry(wanted)
    if entry is None:
        raise NotFoundError(f"{source}: the run has no committed checkpoint{f' {key}' if key else ''} to start from")
    if entry.damaged:
        raise NotFoundError(f"{source}: checkpoint {entry.key} is damaged ({entry.damaged}); choose another one")
    return entry


def _jobs(old: Manifest, manifest: Manifest, borrowed: Mapping[str, str]) -> list[Job]:
    """Return the copies that bring what is not borrowed into the new run."""
    stays = tuple(object_keys.checkpoint_prefix(directory) for directory in borrowed.values())
    pairs = zip(old.objects(), manifest.objects(), strict=True)
    jobs = [Job(key=key, new_key=new_key, record=record) for (key, record), (new_key, _) in pairs]
    return [job for job in jobs if not job.new_key.startswith(stays)]


def origin_of(store: Store, body: Latest) -> str | None:
    """Return the URI of the run from which the run in `store` was forked.

    None for a run that was not forked. `latest` states the origin; of a fork that an older raycheck has made, only the
    manifest of its first checkpoint does, so it is None when that was dropped. body: the run's `latest`. The URI is
    untrusted text from the bucket. Raises StoreError.
    """
    if body.forked_from or not is_fork(body):
        return body.forked_from or None
    for entry in body.live:
        name = CheckpointName.parse(entry.key)
        if name is not None and name.attempt == 0:
            with suppress(NotFoundError, CorruptError):
                key = object_keys.manifest_key(entry.key)
                return origin_in(body, read_quickly(store, key, load_manifest, max_bytes=MAX_FIRST_MANIFEST))
            return None
    return None


def origin_in(body: Latest, first: Manifest) -> str | None:
    """Return the result of `origin_of`, from the manifest of the run's first checkpoint, without a request."""
    if body.forked_from or not is_fork(body):
        return body.forked_from or None
    return (first.restored_from or "").rpartition(" ")[0] or None


def is_fork(body: Latest) -> bool:
    """Return whether the run was forked from another one."""
    return body.first_owner.startswith(_OWNER)
