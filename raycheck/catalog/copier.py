"""Makes a mirror show what its source has: copies what is missing, swaps the mirror's `latest`, deletes what is gone.

One round reads the mirror, then the source; opens the mirror for the source's newest attempt; copies the head first, so
that there is soon something to restore, then the other checkpoints, several at a time; and shows the source as it was
read. Whatever fails, the mirror still shows a complete earlier state. The next round continues from there.
"""

import time
from collections.abc import Callable, Collection
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from threading import Event

from raycheck.bucket.attempt_records import MAX_BYTES as MAX_RECORD
from raycheck.bucket.attempt_records import load_record, load_resume
from raycheck.bucket.document_reading import read_document
from raycheck.bucket.format import object_keys
from raycheck.bucket.format.latest import Entry, Latest
from raycheck.bucket.history.segments import copy_segments
from raycheck.bucket.protocol.object_copy import (
    LOOK_EVERY_S,
    CopiedCheckpoint,
    DroppedError,
    ObjectCopier,
    check_own_directories,
)
from raycheck.bucket.protocol.removal.prune_and_sweep import GRACE_S, prune
from raycheck.bucket.protocol.sharing.mirror import (
    check_forward,
    check_mirror,
    look_at_mirror,
    open_mirror,
    original,
    show,
)
from raycheck.bucket.protocol.swap import Register
from raycheck.bucket.reading import Checkpoint
from raycheck.bucket.store import Store
from raycheck.bucket.store.address import bare_uri, overlap, shown_uri
from raycheck.errors import ConfigError, ConflictError, CorruptError, DamagedError, NotFoundError
from raycheck.show_progress import ProgressTally, ShowProgress, show_nothing

CHECKPOINTS_AT_ONCE = 8
"""How many checkpoints are copied at a time, since copying a small one is mostly waiting for responses. object_copy.py
bounds the memory of all."""
_ROUNDS = 20
"""How often a copy restarts because the source dropped its head in the meantime."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceBody:
    """The source's body as its training wrote it, and the time of the response by its store and by this host's
    monotonic clock."""

    body: Latest
    at: float
    read_at: float


@dataclass(kw_only=True, slots=True)
class RoundReport:
    """The results of one copier's rounds, by checkpoint.

    copied: with its size in bytes. present: existed before. dropped: dropped by the source while it was copied.
    damaged: what is wrong with it. deleted: deleted from the mirror.
    """

    copied: dict[str, int] = field(default_factory=dict)
    present: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    damaged: dict[str, str] = field(default_factory=dict)
    deleted: list[str] = field(default_factory=list)


class MirrorCopier:
    """The copier of one run to one place, which works in rounds."""

    def __init__(
        self,
        source: Store,
        target: Store,
        *,
        stop: Event,
        progress: ShowProgress = show_nothing,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        check_places(source, target)
        self.report = RoundReport()
        self._tally = ProgressTally(progress)
        self.objects = ObjectCopier(source, target, stop=stop, progress=self._tally.add)
        self._source, self._target = Register(source), Register(target)
        self._uri = bare_uri(source.uri)
        self._stop, self._monotonic = stop, monotonic
        self._done: set[str] = set()  # keys of objects that are complete in the target
        self._begun: set[str] = set()  # directories in the target that may contain a part of a checkpoint
        self._records: set[str] = set()  # keys of attempts' records that are in the target or cannot be read
        self._segments: frozenset[str] | None = None  # keys of the history's segments that were copied

    def read_source(self) -> SourceBody:
        """Read the source. Raises NotFoundError without a run, ConfigError for one that cannot be copied: a mirror that
        is not complete, a run that was deleted, or one that uses directories of others."""
        read_at = self._monotonic()
        body, got = self._source.read_existing()
        check_source(self.objects.source.uri, body)
        for entry in body.live:
            check_own_directories(self.objects.source.uri, entry.key, entry.refs)
        if body.mirror is not None and body.is_mirror and (body.mirror.missing or body.head is None):
            raise ConfigError(
                f"{self.objects.source}: this copy of {body.mirror.source} is not complete; repeat 'raycheck cp' "
                "into it first, or copy from there"
            )
        return SourceBody(body=original(body), at=got.at, read_at=read_at)

    def missing(self) -> tuple[Latest, list[Entry]]:
        """Return the source's body, and its checkpoints that the mirror does not list. Writes nothing.

        Raises ConfigError when the target is not a place for this mirror.
        """
        mine, _ = look_at_mirror(self._target)
        body = self.read_source().body
        if mine is not None:
            check_mirror(self.objects.target.uri, mine, body)
            check_forward(self.objects.target.uri, mine, body)
        listed = set() if mine is None else {entry.key for entry in mine.live}
        return body, [entry for entry in _head_first(body) if entry.key not in listed]

    def run(self) -> Latest:
        """Go through rounds until the mirror shows a state of the source. Returns the mirror's body.

        Raises DamagedError when the source's head is damaged; damage of other checkpoints is only reported.
        """
        for _ in range(_ROUNDS):
            mine, state = self._begin()
            shown = self._copy_round(mine, state.body)
            if shown is not None:
                self.copy_records()
                return shown
        raise ConflictError(f"{self.objects.source}: its head was dropped {_ROUNDS} times while it was copied")

    def _begin(self) -> tuple[Latest, SourceBody]:
        """Read mirror and source, and open the mirror."""
        mine, names = look_at_mirror(self._target)  # before the source, which then cannot be older
        state = self.read_source()
        if mine is not None:
            check_mirror(self.objects.target.uri, mine, state.body)
            check_forward(self.objects.target.uri, mine, state.body)
        elif state.body.head is None:
            raise NotFoundError(f"{self.objects.source}: the run has no committed checkpoint to copy")
        self._begun |= {str(name) for name in names}
        return self._target.pages.whole(open_mirror(self._target, state.body, uri=self._uri)), state

    def _copy_round(self, mine: Latest, body: Latest) -> Latest | None:
        """Copy what the mirror lacks of `body`. Returns the mirror's body, or None if the source's head is gone."""
        listed = {entry.key for entry in mine.live}
        wanted = [entry for entry in _head_first(body) if entry.key not in listed and not self._is_bad(entry)]
        self._tally.expect(sum(entry.size_bytes for entry in wanted))
        if wanted and wanted[0].key == body.head:
            if not self._copy_all(wanted[:1]):
                self._refuse_damaged_head(wanted[0].key)
                return None
            if wanted[1:]:
                self._show(body, coming={entry.key for entry in wanted})
                self._copy_all(wanted[1:])
        else:
            self._copy_all(wanted)
        if body.head not in listed and body.head is not None:
            self._refuse_damaged_head(body.head)
        return self._show(body, coming=())

    def _is_bad(self, entry: Entry) -> bool:
        return bool(entry.damaged) or entry.key in self.report.damaged

    def _refuse_damaged_head(self, key: str) -> None:
        if key in self.report.damaged:
            raise DamagedError(f"the head {key} cannot be copied: {self.report.damaged[key]}")

    def _copy_all(self, entries: list[Entry]) -> bool:
        """Copy checkpoints and record the results. Returns whether all are complete in the target.

        Several are copied at a time, but never two that need the same directory, so that nothing is copied twice.
        """
        waiting, running = list(entries), dict[Future[CopiedCheckpoint], Entry]()
        settled: set[str] = set()
        gives_up = Event()
        is_whole = True
        pool = ThreadPoolExecutor(CHECKPOINTS_AT_ONCE, thread_name_prefix="raycheck-mirror")
        try:
            while waiting or running:
                for entry in _able(waiting, running.values(), settled):
                    waiting.remove(entry)
                    self._begun.update((entry.key, *entry.refs))
                    checkpoint = Checkpoint(self.objects.source, entry)
                    future = pool.submit(self.objects.copy_checkpoint, checkpoint, frozenset(self._done), gives_up)
                    running[future] = entry
                for future in wait(running, timeout=LOOK_EVERY_S, return_when=FIRST_COMPLETED).done:
                    entry = running.pop(future)
                    is_whole = self._note(entry, future) and is_whole
                    settled.update((entry.key, *entry.refs))
        except BaseException:  # also on an interrupt: no thread outlives this call
            gives_up.set()
            raise
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
        return is_whole

    def _note(self, entry: Entry, future: Future[CopiedCheckpoint]) -> bool:
        """Record the result of copying a checkpoint. Returns whether it is complete in the target."""
        try:
            copied = future.result()
        except DroppedError:
            self.report.dropped.append(entry.key)
            return False
        except DamagedError as error:
            self.report.damaged[entry.key] = str(error)
            return False
        self._done |= copied.keys
        if copied.is_new:
            self.report.copied[entry.key] = entry.size_bytes
        else:
            self.report.present.append(entry.key)
        return True

    def _show(self, body: Latest, *, coming: set[str] | tuple[()]) -> Latest:
        whole = {*self.report.copied, *self.report.present}
        shown = show(self._target, body, uri=self._uri, whole=whole, coming=coming, directories=self._begun)
        shown = self._target.pages.whole(shown)
        self._begun -= {item.key for item in shown.evicted}
        return shown

    def copy_records(self) -> None:
        """Copy the records of attempts and the segments of the history that the mirror lacks. What cannot be read is
        left out."""
        source, target = self.objects.source, self.objects.target
        body = self._source.newest
        assert body is not None, "a round has read it"
        self._segments = copy_segments(source, target, body.run_id, self._segments)
        number = self._target.read_existing()[0].attempt.number
        wanted = {item.key for item in source.list_objects(object_keys.ATTEMPTS_PREFIX)} - self._records
        if not wanted:
            return
        self._records |= {item.key for item in target.list_objects(object_keys.ATTEMPTS_PREFIX)}
        for key in sorted(wanted - self._records):
            of = object_keys.attempt_of(key)
            if of is None or of >= number:  # the number may belong to an attempt on the mirror
                continue
            try:
                load = load_record if object_keys.is_attempt_key(key) else load_resume
                _, got = read_document(source, key, load, max_bytes=MAX_RECORD)
                target.put_if_absent(key, got.data)
            except (NotFoundError, CorruptError, ConflictError):
                continue
            finally:
                self._records.add(key)

    def delete_dropped(self, *, grace_s: float = GRACE_S) -> None:
        """Delete from the mirror what its source has dropped, after the grace period for readers."""
        self.report.deleted.extend(prune(self._target, grace_s=grace_s))


def check_source(uri: str, body: Latest) -> None:
    """Raise ConfigError if the run at `uri`, with this body, was deleted."""
    if body.deleted_at is not None:
        raise ConfigError(
            f"{shown_uri(uri)}: this run was deleted; there is nothing to copy. Its mirrors stay as they are"
        )


def check_places(source: Store, target: Store) -> None:
    """Raise ConfigError if source and target are the same place, or one is inside the other."""
    if overlap(source.uri, target.uri):
        raise ConfigError(f"{target} is {source} itself, or one of them is inside the other")


def _able(waiting: list[Entry], running: Collection[Entry], settled: Collection[str]) -> list[Entry]:
    """Return the entries that may be copied now: none of their directories is being copied for another one."""
    found: list[Entry] = []
    for entry in waiting:
        busy = {name for other in (*running, *found) for name in (other.key, *other.refs)} - set(settled)
        if len(running) + len(found) < CHECKPOINTS_AT_ONCE and busy.isdisjoint((entry.key, *entry.refs)):
            found.append(entry)
    return found


def _head_first(body: Latest) -> list[Entry]:
    """Return the live entries: the head first, then the others, newest first."""
    others = [entry for entry in body.live if entry.key != body.head]
    return [entry for entry in body.live if entry.key == body.head] + others[::-1]
