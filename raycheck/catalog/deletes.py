"""Deletes checkpoints and runs by hand, or reports what that would delete."""

from raycheck.bucket.choice import entry_at
from raycheck.bucket.protocol.removal import delete
from raycheck.bucket.protocol.removal.delete import DeletedRun
from raycheck.bucket.protocol.removal.prune_and_sweep import GRACE_S, prune
from raycheck.bucket.protocol.swap import Register
from raycheck.bucket.reading import ask_latest, read_latest
from raycheck.bucket.run_status import read_status
from raycheck.bucket.store import Store, open_store
from raycheck.bucket.store.address import shown_uri
from raycheck.errors import ConfigError, NotFoundError
from raycheck.show_progress import ProgressTally, ShowProgress, show_nothing
from raycheck.storage_settings import StorageSettings


def delete_checkpoint(
    uri: str,
    at: int | str,
    *,
    grace_s: float = GRACE_S,
    dry_run: bool = False,
    storage: StorageSettings | None = None,
    progress: ShowProgress = show_nothing,
) -> str:
    """Delete a checkpoint of the run at `uri`, even a pinned or named one. Returns its key.

    From then on it is neither listed nor restored. Its objects are deleted `grace_s` seconds later, so that current
    readers can finish, by training's next prune or by `raycheck prune`. Whatever other checkpoints or runs use of it
    stays. at: a step, a name, or a key. dry_run: make every check, and delete nothing. progress: called with the number
    of objects that are deleted. Raises NotFoundError if there is no such checkpoint, ConfigError for the head.
    """
    store = open_store(uri, storage)
    key = ask_latest(store, lambda body: entry_at(store, body, at)).key
    register = Register(store, is_dry=dry_run)
    delete.delete_checkpoint(register, key)
    if not grace_s and not dry_run:
        evicted = register.read_existing()[0].evicted
        others = frozenset(item.key for item in evicted) - {key}  # whose readers keep their grace period
        prune(register, grace_s=0.0, spare=others, tally=ProgressTally(progress))
    return key


def delete_run(
    uri: str,
    *,
    live: bool = False,
    keep_shared: bool = False,
    keep_exports: bool = False,
    lost: bool = False,
    dry_run: bool = False,
    storage: StorageSettings | None = None,
    progress: ShowProgress = show_nothing,
) -> DeletedRun:
    """Delete the run at `uri` and everything in its folder. May be repeated.

    live: delete it even if it seems to be running; its training then ends with FencedError. keep_shared: what other
    runs use stays until they have dropped it; otherwise, a run that others use is refused. keep_exports: leave
    `exports/` and `published/` alone. lost: delete it even if `latest` is missing, when nobody can tell what its
    checkpoints were for or whether it is still training. dry_run: make every check, count what there is, and delete
    nothing. progress: called with the number of objects that are deleted, or counted. Raises NotFoundError if there is
    no run, ConflictError if somebody starts it at this moment, and ConfigError if the delete is refused, for example
    because another run is in its folder.
    """
    store, tally = open_store(uri, storage), ProgressTally(progress)
    if dry_run:
        return _planned(uri, store, tally, live=live, keep_shared=keep_shared, keep_exports=keep_exports, lost=lost)
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
        tally=tally,
    )


def _planned(
    uri: str, store: Store, tally: ProgressTally, *, live: bool, keep_shared: bool, keep_exports: bool, lost: bool
) -> DeletedRun:
    """Return the result that a delete would have. Raises the errors that it would raise before its first write."""
    used_by: tuple[str, ...] = ()
    try:
        body = read_latest(store)
    except NotFoundError:
        if not lost:
            raise
        delete.check_lost(store)
    else:
        _refuse_running(uri, store, live=live)
        delete.check_users(store, body, keeps_shared=keep_shared)
        used_by = delete.users_of(store, body)
    num_objects, size_bytes = delete.check_folder(store, keeps_exports=keep_exports, tally=tally)
    return DeletedRun(is_gone=False, used_by=used_by, num_objects=num_objects, size_bytes=size_bytes)


def _refuse_running(uri: str, store: Store, *, live: bool) -> None:
    status = read_status(store)
    if status.state in ("running", "silent") and not live:
        raise ConfigError(f"{shown_uri(uri)}: it is {status.text}. Stop it first, or delete it anyway with --live")
