"""Describes the attempts of a run and their commits, as history.py reads them and charts.py draws them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Ending = Literal[
    "live", "finished", "preempted", "failed", "resized", "restarted", "driver lost", "gave up", "by hand", "unknown"
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Commit:
    """Describes one commit of a run whose checkpoint is still there.

    key: the checkpoint's name. at: the time of the commit in unix seconds, by the bucket's clock. is_head: the next
    start restores it. is_by_notice: it was saved because a node was about to go. is_rolling, is_pinned, name, damaged,
    metrics, scores: as its entry in `latest` has them.
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
    """Describes one life of the worker group.

    number: its fencing token. world_size: its ranks; 0 for a change by hand (a rewind, a repair). began_at, ended_at:
    unix seconds by the bucket's clock; ended_at is None while nothing says that it has ended. ending: why it ended, in
    a word or two ("driver lost": killed, or replaced by another driver); cause: in the words of its record. restored:
    the checkpoint with which it began, None for a fresh start. restore_s: seconds that its slowest rank took to
    restore. start_step: the step with which it went on. lost_steps, lost_s: steps and seconds of training that the end
    of the attempt before lost. These four are None where they are not known. commits: those of its commits that are
    still there, in their order.
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
