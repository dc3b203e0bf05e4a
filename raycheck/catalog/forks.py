"""Creates a run from another run's checkpoint. Within one bucket this copies no tensor."""

from uuid import uuid4

from raycheck.bucket.choice import entry_at
from raycheck.bucket.format.latest import Latest
from raycheck.bucket.protocol.sharing.fork import Forked, fork
from raycheck.bucket.store import open_store
from raycheck.show_progress import ShowProgress, show_nothing
from raycheck.storage_settings import StorageSettings


def fork_run(
    source: str,
    to: str,
    at: int | str | None = None,
    *,
    copy: bool = False,
    dry_run: bool = False,
    storage: StorageSettings | None = None,
    progress: ShowProgress = show_nothing,
) -> Forked:
    """Create a run at `to` from a checkpoint of the run at `source`. Training started there resumes from it.

    Within one bucket the new run uses the tensors where they are, and the other run keeps them as long as they are
    used, whatever it drops. Into another bucket they are copied. Do nothing if the run at `to` exists.

    source, to: URIs of runs. at: a step, a name, or a checkpoint's key; None: the head. copy: copy the tensors also
    within one bucket, so that the runs are independent. dry_run: make every check, and write nothing. storage: the
    settings for both, where the environment and the URIs have none. progress: called with the bytes that are copied,
    and their total. Raises NotFoundError when there is no such checkpoint, ConfigError when the run at `to` has begun
    without a checkpoint, CorruptError for copied bytes that differ from their checksums.
    """
    store = open_store(source, storage)

    def chosen(body: Latest) -> str:
        return entry_at(store, body, at).key

    return fork(
        store,
        open_store(to, storage),
        run_id=uuid4().hex,
        key=chosen,
        copies=copy,
        is_dry=dry_run,
        progress=progress,
    )
