"""The attempts of a run, their commits and their metrics, read by history.py and drawn by charts.py."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from raycheck.bucket.attempt_records import ResumeRecord

Ending = Literal[
    "live", "finished", "preempted", "failed", "resized", "restarted", "driver lost", "gave up", "by hand", "unknown"
]


CommitState = Literal["kept", "damaged", "dropped", "deleted"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Commit:
    """A commit of a run, and what became of its checkpoint.

    key: the checkpoint's name. at: the time of the commit in unix seconds, by the bucket's clock; of a commit that is
    only known to have been dropped, the time of that. is_head: the next start restores it. is_by_notice: it was saved
    because of a preemption notice. is_rolling, is_pinned, name, damaged, metrics, scores: from its entry in `latest`.
    state: "kept" and "damaged" are live, "dropped" may still be readable for a few minutes, and of "deleted" nothing is
    left. why: the reason for "dropped" or "deleted", "" if it is not known. dropped_at: when that was, in unix seconds.
    is_abandoned: the run went back behind it, so it is not in the past of the newest attempt.
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
    state: CommitState = "kept"
    why: str = ""
    dropped_at: float | None = None
    is_abandoned: bool = False

    @property
    def is_live(self) -> bool:
        """Return whether `latest` lists its checkpoint."""
        return self.state in ("kept", "damaged")


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricLine:
    """A metric over the steps of one attempt, in order: a piece of the curve.

    steps, values: one value per step; not every step needs to have one. times: when each step ended, in unix seconds by
    the bucket's clock, None where it is not known. is_abandoned: the run went back behind these steps, so they are not
    in the past of the newest attempt. continues: the attempt and the step of the checkpoint from which these steps were
    trained, or, of steps that were abandoned, of the last step of the same attempt that was not; None for a fresh
    start, and if it is not known.
    """

    name: str
    attempt: int
    is_abandoned: bool
    steps: tuple[int, ...]
    values: tuple[float, ...]
    times: tuple[float | None, ...]
    continues: tuple[int, int] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptHistory:
    """An attempt: one life of the worker group.

    number: its fencing token. world_size: its ranks; 0 for a change by hand (a rewind, a repair; the
    beginning of a fork or an import, which is attempt 0), and if it is unknown. began_at, ended_at:
    unix seconds by the bucket's clock; ended_at is None while nothing shows that it has ended. ending: why it ended, in
    a word or two ("driver lost": killed, or replaced by another driver); cause: the text of its record. restored: the
    checkpoint from which it started, None for a fresh start. last_save: the number of its last save. restore_s: seconds
    that its slowest rank took to restore. start_step: the step from which it continued. lost_steps, lost_s: steps and
    seconds of training lost at the end of the previous attempt. These four are None if unknown. commits: all its
    commits, in order. resume: the record of its start, None if there is none. last_seen_at: the last sign of life that
    the bucket has: its last commit or row of metrics, or its start. A dead attempt trained until then, and perhaps a
    little longer; ended_at is when somebody noticed. first_step_at: when the first step ended of which the history has
    the metrics, None if it has none.
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
    last_seen_at: float | None = None
    first_step_at: float | None = None

    @property
    def workers(self) -> str:
        """Return in words how many workers it had and, if that was another number, how many there were before it."""
        before = 0 if self.resume is None else self.resume.world_size_before
        changed = f", {before} before" if before not in (0, self.world_size) else ""
        if not self.world_size:
            return "by hand" if self.ending == "by hand" else "unknown"
        return f"{self.world_size}{changed}"
