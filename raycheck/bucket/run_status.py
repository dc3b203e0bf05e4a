"""How a run stands, as far as its bucket can prove it: finished, given up by its driver, or going on, perhaps.

An end is a fact in `latest` (step 33), and so is a driver's word that it gave up, in the attempt's record. Nothing says
that a driver was killed; then there is only the time since the last claim or commit, by the store's clock. Never writes
(I8).
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from raycheck.bucket.attempt_records import AttemptRecord, read_record
from raycheck.bucket.document_reading import read_document
from raycheck.bucket.format import object_keys
from raycheck.bucket.format.latest import MAX_BYTES, Latest, load_latest
from raycheck.bucket.format.object_keys import CheckpointName
from raycheck.bucket.store import Store

SILENT_S = 1800.0
SILENT_GAPS = 3
"""No commit for longer than both of these, the second in longest gaps between commits so far, is worth saying."""

State = Literal["finished", "died", "running", "silent", "idle"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Status:
    """finished: the live attempt came to the end of training. died: its driver gave the run up, is_final: because
    another start would end alike. running: there was a claim or commit lately. silent: there was none for long: it
    died, or is between commits. idle: no worker group has claimed it since it was rewound, repaired or copied.

    at: when that was, or the newest sign of life. now: when it was asked. text: all of it in words."""

    state: State
    text: str
    at: float
    now: float
    is_final: bool = False


def read_status(store: Store) -> Status:
    """Of the run in `store`. Raises NotFoundError when there is none."""
    body, got = read_document(store, object_keys.LATEST_KEY, load_latest, max_bytes=MAX_BYTES)
    return status_of(body, read_record(store, body.attempt.number), now=got.at)


def status_of(body: Latest, record: AttemptRecord | None, *, now: float) -> Status:
    """record: of the live attempt. now: by the store's clock."""
    attempt = body.attempt
    if body.finished is not None and body.is_finished:
        head = body.entry(body.head or "")
        what = f"at step {head.step}" if head else "with nothing committed"
        text = f"finished {what}, {ago(now - body.finished.at)} ago"
        return Status(state="finished", text=text, at=body.finished.at, now=now)
    if not attempt.world_size or not attempt.number:
        text = "idle: nobody has started it since it was rewound, repaired or copied"
        return Status(state="idle", text=text, at=attempt.claimed_at, now=now)
    if record is not None:
        text = f"died {ago(now - record.ended_at)} ago, its driver gave up: {record.cause}"
        return Status(state="died", text=text, at=record.ended_at, is_final=record.is_final, now=now)
    commits = [entry.committed_at for entry in body.live if _attempt_of(entry.key) == attempt.number]
    signs = [attempt.claimed_at, *sorted(commits)]
    silent_s = now - signs[-1]
    last = f"{'last commit' if commits else 'it was claimed'} {ago(silent_s)} ago"
    if silent_s > max(SILENT_S, SILENT_GAPS * max((b - a for a, b in pairwise(signs)), default=0.0)):
        text = f"no sign of life for {ago(silent_s)} (died, or between commits)"
        return Status(state="silent", text=text, at=signs[-1], now=now)
    return Status(state="running", text=f"running, as far as the bucket tells: {last}", at=signs[-1], now=now)


def _attempt_of(key: str) -> int | None:
    name = CheckpointName.parse(key)
    return None if name is None else name.attempt


def ago(seconds: float) -> str:
    """Whole units are enough for people."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"
