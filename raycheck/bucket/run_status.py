"""Determines whether a run has finished, was given up by its driver, or is active, as far as its bucket proves it.

`latest` states that a run has finished (step 33), and the attempt's record states that its driver gave up. Nothing
states that a driver was killed; then there is only the time since the last claim or commit, by the store's clock. This
module never writes (I8).
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from raycheck.bucket.attempt_records import AttemptRecord, read_record
from raycheck.bucket.document_reading import again_if_corrupt
from raycheck.bucket.format.latest import Latest
from raycheck.bucket.format.object_keys import CheckpointName
from raycheck.bucket.reading import get_latest
from raycheck.bucket.store import Store

SILENT_S = 1800.0
SILENT_GAPS = 3
"""A run counts as silent when it has not committed for longer than SILENT_S, and for longer than SILENT_GAPS times the
longest gap between its commits so far."""

State = Literal["finished", "died", "running", "silent", "idle", "deleted"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Status:
    """The state of a run.

    state: "finished": the live attempt reached the end of training. "died": its driver gave up the run. "running":
    there was a recent claim or commit. "silent": there was none for a long time; it died, or is between commits.
    "idle": no worker group has claimed the run since it was rewound, repaired or copied. "deleted": someone has deleted
    the run, and not all of it is gone. is_final: the driver gave up because another start would end in the same way.
    at: the time of the end, or of the newest sign of life. now: the time of the query. text: all of it in words.
    """

    state: State
    text: str
    at: float
    now: float
    is_final: bool = False


def read_status(store: Store) -> Status:
    """Read the state of the run in `store`. Raises NotFoundError when there is none."""
    body, got = again_if_corrupt(lambda: get_latest(store))
    return status_of(body, read_record(store, body.attempt.number), now=got.at)


def status_of(body: Latest, record: AttemptRecord | None, *, now: float) -> Status:
    """Determine the status from a body of `latest`. record: the live attempt's. now: the time by the store's clock."""
    attempt = body.attempt
    if body.deleted_at is not None:
        return Status(state="deleted", text=_of_deleted(body, now), at=body.deleted_at, now=now)
    if body.finished is not None and body.is_finished:
        head = body.entry(body.head or "")
        what = f"at step {head.step}" if head else "with nothing committed"
        text = f"finished {what}, {ago(now - body.finished.at)} ago"
        return Status(state="finished", text=text, at=body.finished.at, now=now)
    if body.mirror is not None and body.is_mirror:
        missing = f"; {body.mirror.missing} checkpoints are still to come" if body.mirror.missing else ""
        text = f"a mirror of {body.mirror.source}, as of write {body.mirror.counter} there{missing}"
        return Status(state="idle", text=text, at=attempt.claimed_at, now=now)
    if not attempt.world_size or not attempt.number:
        text = "idle: nobody has started it since it was rewound, repaired or copied"
        return Status(state="idle", text=text, at=attempt.claimed_at, now=now)
    if record is not None:
        text = f"died {ago(now - record.ended_at)} ago, its driver gave up: {record.cause}"
        return Status(state="died", text=text, at=record.ended_at, is_final=record.is_final, now=now)
    commits = [entry.committed_at for entry in body.newest if _attempt_of(entry.key) == attempt.number]
    signs = [attempt.claimed_at, *sorted(commits)]
    silent_s = now - signs[-1]
    last = f"{'last commit' if commits else 'it was claimed'} {ago(silent_s)} ago"
    if silent_s > max(SILENT_S, SILENT_GAPS * max((b - a for a, b in pairwise(signs)), default=0.0)):
        text = f"no sign of life for {ago(silent_s)} (died, or between commits)"
        return Status(state="silent", text=text, at=signs[-1], now=now)
    return Status(state="running", text=f"running, as far as the bucket shows: {last}", at=signs[-1], now=now)


def _of_deleted(body: Latest, now: float) -> str:
    text = f"deleted {ago(now - (body.deleted_at or now))} ago"
    if not body.holds:
        return f"{text}; the delete was not completed: repeat 'raycheck delete-run'"
    runs = ", ".join(hold.holder for hold in body.holds[:5])
    return (
        f"{text}; kept for other runs, which use checkpoints of it: {runs}. Once they have dropped them, repeat "
        "'raycheck delete-run'"
    )


def _attempt_of(key: str) -> int | None:
    name = CheckpointName.parse(key)
    return None if name is None else name.attempt


def ago(seconds: float) -> str:
    """Return a duration in its largest unit, which is precise enough for people."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"
