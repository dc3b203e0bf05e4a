"""Deletes checkpoints and runs by hand, and previews what that would delete."""

from dataclasses import dataclass

from raycheck.bucket.format.latest import Entry, Hold
from raycheck.bucket.format.object_keys import EXPORTS_PREFIX
from raycheck.bucket.protocol.removal import delete
from raycheck.bucket.protocol.removal.delete import DeletedRun
from raycheck.bucket.protocol.removal.prune_and_sweep import GRACE_S, prune
from raycheck.bucket.protocol.swap import Register
from raycheck.bucket.run_status import read_status
from raycheck.bucket.store import Store, open_store
from raycheck.bucket.store.address import shown_uri
from raycheck.errors import ConfigError, NotFoundError
from raycheck.run import open_run
from raycheck.show_progress import ProgressTally, ShowProgress, show_nothing
from raycheck.storage_settings import StorageSettings


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedDelete:
    """What deleting a run would delete at most. holds: the runs that use directories of it, which stay."""

    num_objects: int
    size_bytes: int
    holds: tuple[Hold, ...] = ()


def delete_checkpoint(
    uri: str,
    at: int | str,
    *,
    grace_s: float = GRACE_S,
    storage: StorageSettings | None = None,
    progress: ShowProgress = show_nothing,
) -> str:
    """Delete a checkpoint of the run at `uri`, even a pinned or named one. Returns its key.

    It is no longer listed or restored at once. Its objects go `grace_s` seconds later, so that whoever reads it now can
    end: with the next prune of the training, or of `raycheck prune`. What other checkpoints or runs use of it stays.
    at: a step, a name, or a key. progress: called with the number of objects that are deleted. Raises NotFoundError
    when there is none, ConfigError for the head.
    """
    key = open_run(uri, storage).at(at).entry.key
    register = Register(open_store(uri, storage))
    body = delete.delete_checkpoint(register, key)
    if not grace_s:
        others = frozenset(item.key for item in body.evicted) - {key}  # whose readers keep their grace period
        prune(register, grace_s=0.0, spare=others, tally=ProgressTally(progress))
    return key


def plan_delete_checkpoint(uri: str, at: int | str, *, storage: StorageSettings | None = None) -> Entry:
    """Return the entry that `delete_checkpoint` would delete. Writes nothing, and raises the same errors."""
    run = open_run(uri, storage)
    entry = run.at(at).entry
    delete.check_checkpoint(run.store.uri, run.latest, entry.key)
    return entry


def delete_run(
    uri: str,
    *,
    live: bool = False,
    keep_shared: bool = False,
    keep_exports: bool = False,
    lost: bool = False,
    storage: StorageSettings | None = None,
    progress: ShowProgress = show_nothing,
) -> DeletedRun:
    """Delete the run at `uri` and everything in its folder. May be repeated.

    live: also when it seems to be running; that training ends with FencedError. keep_shared: what other runs use stays
    until they have dropped it; without it a run that others use is refused. keep_exports: leave `exports/` alone. lost:
    also when `latest` is missing: then nobody can say what the checkpoints there were for, and whether a training goes
    on. progress: called with the number of objects that are deleted. Raises NotFoundError when there is no run,
    ConflictError when somebody starts it at this moment, and ConfigError when it is refused, also since another run
    lies in its folder.
    """
    store = open_store(uri, storage)
    register = Register(store)
    if lost:
        delete.check_folder(store)
        delete.mark_lost(Register(store))
    counter = register.read_existing()[0].counter  # before the check: a later write stops the delete
    _refuse_running(uri, store, live=live)
    return delete.delete_run(
        register,
        keeps_shared=keep_shared,
        keeps_exports=keep_exports,
        only_at=None if live else counter,
        tally=ProgressTally(progress),
    )


def plan_delete_run(
    uri: str,
    *,
    live: bool = False,
    keep_shared: bool = False,
    keep_exports: bool = False,
    lost: bool = False,
    storage: StorageSettings | None = None,
    progress: ShowProgress = show_nothing,
) -> PlannedDelete:
    """Return what `delete_run` would delete. Writes nothing, and raises what it would raise before its first write.

    progress: called with the number of objects that were listed.
    """
    store = open_store(uri, storage)
    holds: tuple[Hold, ...] = ()
    try:
        run = open_run(uri, storage)
    except NotFoundError:
        if not lost:
            raise
        delete.check_lost(store)
    else:
        _refuse_running(uri, store, live=live)
        delete.check_users(store, run.latest, keeps_shared=keep_shared)
        holds = delete.users_of(store, run.latest)
    tally, num_objects, size_bytes = ProgressTally(progress), 0, 0
    for item in store.list_objects(""):
        delete.check_in_run(store, item.key)
        tally.add(1)
        if not (keep_exports and item.key.startswith(EXPORTS_PREFIX)):
            num_objects, size_bytes = num_objects + 1, size_bytes + item.size_bytes
    return PlannedDelete(num_objects=num_objects, size_bytes=size_bytes, holds=holds)


def _refuse_running(uri: str, store: Store, *, live: bool) -> None:
    status = read_status(store)
    if status.state in ("running", "silent") and not live:
        raise ConfigError(f"{shown_uri(uri)}: it is {status.text}. Stop it first, or delete it anyway with --live")
