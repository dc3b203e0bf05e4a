"""The attempts of a run and their commits, read by history.py and drawn by charts.py."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from raycheck.bucket.attempt_records import ResumeRecord

Ending = Literal[
    "live", "finished", "preempted", "failed", "resized", "restarted", "driver lost", "gave up", "by hand", "unknown"
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Commit:
    """A commit of a run whose checkpoint still exists.

    key: the checkpoint's name. at: the time of the commit in unix seconds, by the bucket's clock. is_head: the next
    start restores it. is_by_notice: it was saved because of a preemption notice. is_rolling, is_pinned, name, damaged,
    metrics, scores: from its entry in `latest`.
    """

    key: str
    step: int
    at: float
    size_bytes: int
    is_head: bool
    is_by_notice: bool
    is_rolling: bool
    is_pinned: bool
    name: str | None
    damaged: str | None
    metrics: Mapping[str, float]
    scores: Mapping[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptHistory:
    """An attempt: one life of the worker group.

    number: its fencing token. world_size: its ranks; 0 for a change by hand (a rewind, a repair). began_at, ended_at:
    unix seconds by the bucket's clock; ended_at is None while nothing shows that it has ended. ending: why it ended, in
    a word or two ("driver lost": killed, or replaced by another driver); cause: the text of its record. restored: the
    checkpoint from which it started, None for a fresh start. last_save: the number of its last save. restore_s: seconds
    that its slowest rank took to restore. start_step: the step from which it continued. lost_steps, lost_s: steps and
    seconds of training lost at the end of the previous attempt. These four are None if unknown. commits: its commits
    that still exist, in order. resume: the record of its start, None if there is none.
    """

    number: int
    world_size: int
    began_at: float
    ended_at: float | None
    ending: Ending
    cause: str
    restored: str | None
    restore_s: float | None
    start_step: int | None
    lost_steps: int | None
    lost_s: float | None
    commits: tuple[Commit, ...]
    last_save: int = 0
    resume: ResumeRecord | None = None
