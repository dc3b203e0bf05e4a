"""Deletes checkpoints and runs by hand."""

from raycheck.bucket.protocol import delete
from raycheck.bucket.protocol.delete import DeletedRun
from raycheck.bucket.protocol.prune_and_sweep import GRACE_S, prune
from raycheck.bucket.protocol.swap import Register
from raycheck.bucket.run_status import read_status
from raycheck.bucket.store import open_store
from raycheck.errors import ConfigError
from raycheck.run import open_run
from raycheck.storage_settings import StorageSettings


def delete_checkpoint(
    uri: str, at: int | str, *, grace_s: float = GRACE_S, storage: StorageSettings | None = None
) -> str:
    """Delete a checkpoint of the run at `uri`, also a pinned or named one. Returns its key.

    It is no longer listed or restored at once. Its objects go `grace_s` seconds later, so that whoever reads it now can
    end: with the next prune of the training, or of `raycheck prune`. What other checkpoints or runs use of it stays.
    at: a step, a name, or a key. Raises NotFoundError when there is none, ConfigError for the head.
    """
    key = open_run(uri, storage).at(at).entry.key
    register = Register(open_store(uri, storage))
    delete.delete_checkpoint(register, key)
    if not grace_s:
        prune(register, grace_s=0.0)
    return key


def delete_run(
    uri: str,
    *,
    live: bool = False,
    keep_shared: bool = False,
    keep_exports: bool = False,
    storage: StorageSettings | None = None,
) -> DeletedRun:
    """Delete the run at `uri`, with all that lies in its folder. May be repeated.

    live: also when it seems to be running; that training ends with FencedError. keep_shared: what other runs use stays
    until they have dropped it; without it a run that others use is refused. keep_exports: leave `exports/` alone.
    Raises NotFoundError when there is no run, ConfigError when it is refused.
    """
    store = open_store(uri, storage)
    status = read_status(store)
    if status.state in ("running", "silent") and not live:
        raise ConfigError(f"{uri}: it is {status.text}. Stop it first, or delete it all the same with --live")
    return delete.delete_run(Register(store), keeps_shared=keep_shared, keeps_exports=keep_exports)
