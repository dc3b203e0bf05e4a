"""Lists the runs under a prefix, each from one GET of its `latest`. Writes nothing (I8).

A folder with a `latest` is a run, and nothing in it is listed. A folder without one is listed, one level of names, and
then its subfolders are checked, down to a bounded depth. A folder without `latest` but with objects in `checkpoints/`
is a run that has lost it. A run that cannot be read is a line of the listing like any other and never aborts it.

Requests: one GET per folder; one listing per folder that is not a run; one more GET for a run that is neither finished
nor idle (the record of its attempt), and one for a fork that still has its first checkpoint (that checkpoint's
manifest).
"""

import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Literal, get_args

from raycheck.bucket.attempt_records import MAX_BYTES as MAX_RECORD
from raycheck.bucket.attempt_records import AttemptRecord, load_record
from raycheck.bucket.document_reading import read_quickly
from raycheck.bucket.format import object_keys
from raycheck.bucket.format.document import NewerFormatError
from raycheck.bucket.format.latest import MAX_METRICS_LISTED, Entry, Latest
from raycheck.bucket.format.object_keys import CheckpointName
from raycheck.bucket.protocol.sharing.fork import origin_of
from raycheck.bucket.reading import get_whole, lost_run_error, peek_latest
from raycheck.bucket.run_status import State, Status, status_of
from raycheck.bucket.store import Store, open_store
from raycheck.bucket.store.address import parse_uri
from raycheck.errors import ConfigError, CorruptError, DeniedError, NotFoundError, RaycheckError
from raycheck.run import Run, read_run
from raycheck.storage_settings import StorageSettings
from raycheck.views.context_pool import ContextPool
from raycheck.views.goodput import goodput_of

DEPTH = 3
AT_ONCE = 128
"""How many requests are in flight at a time."""
MAX_FOLDERS = 100_000
"""The maximum number of folders in one listing: a prefix may have millions of them."""
MAX_DIRECTORIES = 10_000
MAX_TEXT = 2000
"""How many characters of a text from the bucket are kept, so that a malicious run cannot fill the memory."""

RunState = State | Literal["uncommitted", "lost", "damaged", "newer", "unreadable"]
Sort = Literal["age", "name", "size"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSummary:
    """One run of a listing, from its `latest` at one moment.

    uri: the run's address, for every other command. name: the path of the run's folder below the prefix.
    state: "finished", "died" (its driver gave up), "running" (there was a recent claim or commit), "silent" (there was
        none for long), and "idle" (not started since it was rewound, repaired, or copied), as in `raycheck show`;
        "deleted": the rest is kept for runs that use it, or the delete was interrupted; "uncommitted": it has no
        checkpoint and is not running; "lost": it has checkpoints, but `latest` is missing; "damaged": `latest` could
        not be read, twice; "newer": a newer raycheck wrote it; "unreadable": the store refused or failed.
    text: the state as text, with what to do. is_resumable: training has stopped before its end, and the next start
        resumes from `step`.
    step: the head's, None without a head. committed_at, age_s: the time of the newest commit by the store's clock, and
        its age. idle_s: the time since the run's last claim, commit, or end. metrics: those of the head that `latest`
        contains.
    num_checkpoints: how many checkpoints are live. size_bytes, max_size_bytes: how many bytes these keep at least and
        at most. The two are equal if no checkpoint refers to another's directory: `latest` has the size of each
        checkpoint with everything it refers to, but not how much of that is shared. Dropped checkpoints, interrupted
        saves, and exports are not included: `raycheck sweep` and `raycheck prune` find them.
    goodput: the share of the time from the run's start to its newest commit that became lasting training, between 0
        and 1; None if `latest` does not contain it, because an older raycheck wrote it or the head was moved since.
    parent: the address of the run that this one was forked from, as the fork wrote it. None for a run that is not a
        fork, and for a fork by an older raycheck that has dropped the checkpoint from which it started.
    """

    uri: str
    name: str
    state: RunState
    text: str
    is_resumable: bool = False
    run_id: str | None = None
    step: int | None = None
    committed_at: float | None = None
    age_s: float | None = None
    idle_s: float | None = None
    metrics: Mapping[str, float]
    num_checkpoints: int = 0
    size_bytes: int = 0
    max_size_bytes: int = 0
    goodput: float | None = None
    parent: str | None = None


def list_runs(
    prefix: str,
    storage: StorageSettings | None = None,
    *,
    depth: int = DEPTH,
    sort: Sort = "age",
    on_look: Callable[[int, int], None] | None = None,
) -> tuple[RunSummary, ...]:
    """List every run under `prefix`, or the run at `prefix` itself, without listing the runs' objects.

    depth: how many folders deep a run may be below the prefix; 1 for runs directly below it. Folders inside of a run
        are never looked at. sort: "age" (the newest commit first), "name" or "size" (the largest first). on_look:
        called with the number of folders looked at so far, and of runs found.

    Raises StoreError when the prefix itself cannot be read, and ConfigError for more than 100,000 folders. A run below
    it that cannot be read is in the result, and its `state` and `text` say why.
    """
    return RunFolder(prefix, storage).runs(depth=depth, sort=sort, on_look=on_look)


class RunFolder:
    """A folder of runs, which lists and opens them through one client, with its connections and credentials.

    It is for a program that looks into many runs or looks often; `open_run` and `list_runs` open a client each time.

    uri, storage: as for list_runs. Raises ConfigError that says what is wrong with the URI.
    """

    def __init__(self, uri: str, storage: StorageSettings | None = None) -> None:
        self._store = open_store(uri, storage)

    @property
    def uri(self) -> str:
        """Return the folder's URI, with the settings in its query."""
        return self._store.uri

    def runs(
        self, *, depth: int = DEPTH, sort: Sort = "age", on_look: Callable[[int, int], None] | None = None
    ) -> tuple[RunSummary, ...]:
        """List every run in the folder. The arguments and errors are those of list_runs."""
        if depth < 0:
            raise ConfigError(f"depth={depth}: give 0 for the prefix itself, or how many folders deep runs may be")
        if sort not in _SORTS:
            raise ConfigError(f"sort={sort}: give one of {', '.join(get_args(Sort))}")
        found = find_runs(self._store, depth=depth, on_look=on_look)
        return tuple(sorted(found, key=_SORTS[sort]))

    def run(self, *names: str) -> Run:
        """Read the run at this path below the folder, as it is now; the folder itself without names.

        names: the folders on the way, with any character but a slash. Raises NotFoundError if there is no run, and
        ConfigError for a name that leads elsewhere.
        """
        store = self._store
        for name in names:
            store = store.below(name)
        return read_run(store)


def find_runs(
    store: Store, *, depth: int = DEPTH, on_look: Callable[[int, int], None] | None = None
) -> list[RunSummary]:
    """Find the runs under the root of `store`, in no order. See list_runs."""
    return _Search(store).runs(depth, on_look or (lambda *_: None))


_SORTS: Mapping[str, Callable[[RunSummary], tuple[float, str]]] = {
    "age": lambda run: (float("inf") if run.committed_at is None else -run.committed_at, run.name),
    "name": lambda run: (0.0, run.name),
    "size": lambda run: (-float(run.size_bytes), run.name),
}


@dataclass(frozen=True, slots=True)
class _Folder:
    """A folder to check. path: its names under the prefix, none for the prefix itself."""

    store: Store
    path: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        if self.path:
            return "/".join(self.path)
        at = parse_uri(self.store.uri)
        return at.prefix.rpartition("/")[2] or at.bucket

    def below(self, names: Iterable[str]) -> "list[_Folder]":
        return [_Folder(self.store.below(name), (*self.path, name)) for name in names if _is_fit(name)]


class _Search:
    """A search through folders, many at a time, level by level."""

    def __init__(self, store: Store) -> None:
        self._top = _Folder(store)
        self._now: float | None = None  # by the store's clock, from the first response that has it
        self._num_named = 0
        self._lock = threading.Lock()

    def runs(self, depth: int, on_look: Callable[[int, int], None]) -> list[RunSummary]:
        found: list[RunSummary] = []
        num_looked = 1
        seen = self._look(self._top)
        folders = [] if isinstance(seen, RunSummary) else seen
        found += [seen] if isinstance(seen, RunSummary) else []
        with ContextPool(AT_ONCE, thread_name_prefix="raycheck-list") as pool:
            for _ in range(depth):
                below: list[_Folder] = []
                for seen in pool.map(self._look_and_go_on, folders):
                    if isinstance(seen, RunSummary):
                        found.append(seen)
                    else:
                        below += seen
                    num_looked += 1
                    on_look(num_looked, len(found))
                folders = below
        return found

    def _look_and_go_on(self, folder: _Folder) -> RunSummary | list[_Folder]:
        """Check a folder. One that the store refuses is a line of the listing, but an error for the caller's prefix."""
        try:
            return self._look(folder)
        except ConfigError:
            raise
        except RaycheckError as error:
            return _unread(folder, "unreadable", _cut(str(error)))

    def _look(self, folder: _Folder) -> RunSummary | list[_Folder]:
        """Return the run in a folder, or its subfolders."""
        denied: DeniedError | None = None
        try:
            return self._summary(folder)
        except NotFoundError:
            pass
        except DeniedError as error:
            if folder.path:
                raise
            denied = error  # read permissions may start below the prefix
        names = self._names(folder.store)
        if object_keys.CHECKPOINTS_PREFIX.rstrip("/") in names and (lying := _lying(folder.store)):
            if denied:
                raise denied
            return _unread(folder, "lost", str(lost_run_error(folder.store, lying)))
        return folder.below(names)

    def _summary(self, folder: _Folder) -> RunSummary:
        """Return the run in a folder. Raises NotFoundError if there is no `latest`, and StoreError."""
        try:
            body, now = self._read(folder.store)
        except NewerFormatError as error:
            return _unread(folder, "newer", _cut(str(error)))
        except CorruptError as error:
            text = f"{_cut(str(error))}. Here: raycheck repair '{folder.store}'"
            return _unread(folder, "damaged", text)
        status = status_of(body, None, now=now)
        if status.state in ("running", "silent"):
            status = status_of(body, _record(folder.store, body.attempt.number), now=now)
        parent = None
        with suppress(DeniedError):
            parent = origin_of(folder.store, body)
        return _summarize(folder, body, status, parent)

    def _read(self, store: Store) -> tuple[Latest, float]:
        """Return the body of `latest` and the store's time, which is the same moment for all runs but the first."""
        if self._now is None:
            body, got = get_whole(store)
            self._now = got.at
            return body, got.at
        return peek_latest(store), self._now

    def _names(self, store: Store) -> list[str]:
        names = []
        for name in store.list_folders(""):
            names.append(name)
            with self._lock:
                self._num_named += 1
            if self._num_named > MAX_FOLDERS:
                raise ConfigError(
                    f"{self._top.store}: more than {MAX_FOLDERS} folders are here; give a prefix closer to the runs, "
                    "or a smaller depth="
                )
        return names


def _is_fit(name: str) -> bool:
    """Return whether a run may have this name. Clients resolve dots, and `checkpoints` is a folder of a run."""
    return name not in ("", ".", "..") and CheckpointName.parse(name) is None


def _lying(store: Store) -> list[CheckpointName]:
    """Return the checkpoint directories in a folder without `latest`, if one of the newest contains objects."""
    found = islice(store.list_folders(object_keys.CHECKPOINTS_PREFIX), MAX_DIRECTORIES)
    names = sorted(name for text in found if (name := CheckpointName.parse(text)))
    newest = (object_keys.checkpoint_prefix(str(name)) for name in names[:-4:-1])
    return names if any(next(store.list_objects(prefix), None) for prefix in newest) else []


def _record(store: Store, number: int) -> AttemptRecord | None:
    """Return the record of an attempt, or None if there is none or it may not be read: S3 answers "denied" for a
    missing object if the caller may not list."""
    with suppress(NotFoundError, CorruptError, DeniedError):
        return read_quickly(store, object_keys.attempt_key(number), load_record, max_bytes=MAX_RECORD)
    return None


def _summarize(folder: _Folder, body: Latest, status: Status, parent: str | None) -> RunSummary:
    head = None if body.head is None else body.entry(body.head)
    committed_at = max((entry.committed_at for entry in body.newest), default=None)
    state: RunState = status.state
    text = status.text
    if head is None and state not in ("running", "finished", "deleted"):
        state, text = "uncommitted", f"never committed anything; {text}"
    least, most = kept_bytes(body.live)
    return RunSummary(
        uri=folder.store.uri,
        name=folder.name,
        state=state,
        text=_cut(text),
        is_resumable=head is not None and state in ("died", "silent", "idle") and not status.is_final,
        run_id=_cut(body.run_id),
        step=None if head is None else head.step,
        committed_at=committed_at,
        age_s=None if committed_at is None else max(0.0, status.now - committed_at),
        idle_s=max(0.0, status.now - max(status.at, body.attempt.claimed_at, committed_at or 0.0)),
        metrics=_metrics(head),
        num_checkpoints=body.num_live,
        size_bytes=least,
        max_size_bytes=most,
        goodput=_goodput(body, head),
        parent=None if parent is None else _cut(parent),
    )


def _goodput(body: Latest, head: Entry | None) -> float | None:
    said = body.trained
    if said is None or head is None or said.key != head.key:
        return None
    return goodput_of(trained_s=said.trained_s, began_at=said.began_at, committed_at=head.committed_at)


def _cut(text: str) -> str:
    return text[:MAX_TEXT]


def _unread(folder: _Folder, state: RunState, text: str) -> RunSummary:
    return RunSummary(uri=folder.store.uri, name=folder.name, state=state, text=text, metrics={})


def _metrics(head: Entry | None) -> dict[str, float]:
    """Return the metrics of an entry, at most as many as raycheck writes."""
    known = {} if head is None else head.metrics
    return dict(islice(((name, value) for name, value in known.items() if len(name) <= MAX_TEXT), MAX_METRICS_LISTED))


def kept_bytes(live: Iterable[Entry]) -> tuple[int, int]:
    """Return how many bytes these checkpoints keep at least and at most, according to `latest`.

    An entry's size covers everything it needs, including data in other checkpoints' directories. The minimum is the
    size of all entries that need no other directory, plus the largest of the others. The maximum assumes that nothing
    is shared.
    """
    entries = [(entry, max(0, entry.size_bytes)) for entry in live]
    alone = {entry.key: size for entry, size in entries if not entry.refs}
    more = (size - sum(alone.get(ref, 0) for ref in entry.refs) for entry, size in entries if entry.refs)
    return sum(alone.values()) + max([0, *more]), sum(size for _, size in entries)
