"""Watches a live run with a few small requests per look; the history is read only when it has changed.

A look is one GET of `latest`. While the run may be alive, a look also makes one GET of the record of a driver's end,
one listing of the checkpoint directories, and one listing of the directory of a save under way. During a save, and
before the first commit of an attempt, it also makes one GET of the record of a slow rank.
"""

from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from raycheck.bucket.attempt_records import read_record, read_slow
from raycheck.bucket.document_reading import again_if_corrupt
from raycheck.bucket.format.latest import Latest
from raycheck.bucket.format.object_keys import CHECKPOINTS_PREFIX, CheckpointName, checkpoint_prefix
from raycheck.bucket.pages import Pages, read_readable
from raycheck.bucket.reading import Checkpoint, get_latest, no_run_error
from raycheck.bucket.run_status import status_of
from raycheck.bucket.store import Store
from raycheck.errors import CorruptError, DeniedError, NotFoundError
from raycheck.views.history import RunHistory, read_history, slow_now

if TYPE_CHECKING:
    from raycheck.bucket.history.facts import Facts

MAX_GAPS = 5
"""How many of the newest commits the speed is averaged over."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveUnderWay:
    """The objects in the bucket of a save that is not committed yet.

    key: the checkpoint's name. objects, size_bytes: number and size so far. An object appears only when its upload has
    ended, so a large one appears all at once. expected_objects, expected_bytes: what the head's save wrote, usually the
    same for the next save; None without a head. A failed save looks like this until the next one.
    """

    key: str
    step: int
    objects: int
    size_bytes: int
    expected_objects: int | None
    expected_bytes: int | None

    @property
    def share(self) -> float | None:
        """Return the uploaded share, between 0 and 1, or None if unknown."""
        return None if not self.expected_bytes else min(1.0, self.size_bytes / self.expected_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class LiveRun:
    """A run at one moment.

    step: the head's, None without a head; the bucket has no later step. steps_per_s: steps per second over the newest
    commits of the live attempt, including saves; None before its second commit. committed_at: unix seconds of the
    head's commit. save: the save under way, None if there is none or it cannot be listed.
    """

    history: RunHistory
    step: int | None
    steps_per_s: float | None
    committed_at: float | None
    save: SaveUnderWay | None


class RunWatch:
    """A watch on one run, whose `look` is called repeatedly and raises NotFoundError if there is no run."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._pages = Pages(store)
        self._version: str | None = None
        self._history: RunHistory | None = None
        self._segments: dict[str, Facts] = {}  # of its history, by key
        self._expected: tuple[str, int, int] | None = None

    def look(self) -> LiveRun:
        """Return the current state of the run."""
        try:
            body, got, lost = read_readable(partial(again_if_corrupt, partial(get_latest, self._store)), self._pages)
        except NotFoundError:
            raise no_run_error(self._store) from None
        if self._history is None or got.version != self._version:
            self._history = read_history(self._store, body, now=got.at, read=self._segments, lost=lost)
            self._version = got.version
        elif self._history.status.state in ("running", "silent"):
            with suppress(DeniedError):
                record = read_record(self._store, body.attempt.number)
                if record is not None:  # its driver gave up, which `latest` does not show
                    self._history = read_history(self._store, read=self._segments)
        self._history = history = self._aged(self._history, body, got.at)
        head = next((commit for commit in history.commits if commit.is_head), None)
        save = self._save(body) if history.status.state in ("running", "silent") else None
        return LiveRun(
            history=self._slow(history, has_save=save is not None),
            step=None if head is None else head.step,
            steps_per_s=_steps_per_s(history),
            committed_at=None if head is None else head.at,
            save=save,
        )

    def _slow(self, history: RunHistory, *, has_save: bool) -> RunHistory:
        """Return the history with the rank that is slow now. It is read only while a save or a restore may last."""
        attempt, slow = history.attempts[-1], None
        if has_save or not (attempt.commits or attempt.resume):
            slow = slow_now(read_slow(self._store, attempt.number), history.status, attempt)
        return replace(history, slow=slow)

    def _aged(self, history: RunHistory, body: Latest, now: float) -> RunHistory:
        """Return the history with its state re-evaluated, as it depends on the time. An ended run stays ended."""
        if history.status.state in ("running", "silent"):
            return replace(history, status=status_of(body, None, now=max(now, history.status.now)))
        return replace(history, status=replace(history.status, now=max(now, history.status.now)))

    def _save(self, body: Latest) -> SaveUnderWay | None:
        """Return the newest save of the live attempt if it is in the bucket and newer than all commits."""
        keys = [*(entry.key for entry in body.newest), *(entry.key for entry in body.newest_evicted)]
        known = [name for key in keys if (name := CheckpointName.parse(key))]
        number = body.attempt.number
        newest = max((name.save for name in known if name.attempt == number), default=0)
        with suppress(DeniedError):
            found = map(CheckpointName.parse, self._store.list_names(CHECKPOINTS_PREFIX))
            later = [name for name in found if name and name.attempt == number and name.save > newest]
            if later:
                name = max(later)
                sizes = [item.size_bytes for item in self._store.list_objects(checkpoint_prefix(str(name)))]
                objects, size = self._expectation(body)
                return SaveUnderWay(
                    key=str(name),
                    step=name.step,
                    objects=len(sizes),
                    size_bytes=sum(sizes),
                    expected_objects=objects,
                    expected_bytes=size,
                )
        return None

    def _expectation(self, body: Latest) -> tuple[int | None, int | None]:
        """Return how many objects and bytes the head's own save wrote."""
        entry = None if body.head is None else body.entry(body.head)
        if entry is None:
            return None, None
        if self._expected is None or self._expected[0] != entry.key:
            with suppress(NotFoundError, CorruptError, DeniedError):
                own = checkpoint_prefix(entry.key)
                found = [
                    item.size_bytes
                    for key, item in Checkpoint(self._store, entry).read_manifest().objects()
                    if key.startswith(own)
                ]
                self._expected = entry.key, len(found), sum(found)
        if self._expected is None:
            return None, None
        return self._expected[1:]


def _steps_per_s(history: RunHistory) -> float | None:
    commits = history.attempts[-1].commits[-MAX_GAPS - 1 :]
    if len(commits) < 2 or commits[-1].at <= commits[0].at:
        return None
    return (commits[-1].step - commits[0].step) / (commits[-1].at - commits[0].at)
