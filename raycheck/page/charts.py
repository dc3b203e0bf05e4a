"""Computes where the bars, dots and lines of a chart lie. The templates draw them as SVG; nothing here makes HTML."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from raycheck.views.history import AttemptHistory, Commit, RunHistory

WIDTH = 900.0
LEFT, RIGHT = 70.0, 16.0
ROW = 22.0
TOP = 26.0
CHART_HEIGHT = 220.0
MAX_METRICS = 12
NUM_TICKS = 5


@dataclass(frozen=True, slots=True)
class Tick:
    """Holds a place on an axis, in units of the drawing, and what is written there."""

    at: float
    text: str


@dataclass(frozen=True, slots=True)
class Dot:
    """Holds a commit on a chart. x, y: its place."""

    x: float
    y: float
    commit: "Commit"


@dataclass(frozen=True, slots=True)
class Bar:
    """Holds an attempt on the timeline.

    x, y, width: its place. restore_width: how much of it, from the left, was the restore. lost_width: how much of it,
    at the right, was trained and lost. dots: its commits.
    """

    attempt: "AttemptHistory"
    x: float
    y: float
    width: float
    restore_width: float
    lost_width: float
    dots: tuple[Dot, ...]


@dataclass(frozen=True, slots=True)
class Timeline:
    """Holds a drawing of a run's attempts over time. height: of the drawing; its width is WIDTH."""

    height: float
    bars: tuple[Bar, ...]
    ticks: tuple[Tick, ...]


def timeline_of(history: "RunHistory") -> Timeline:
    """Returns the timeline of a run: one row per attempt, the oldest on top."""
    attempts = history.attempts
    start = attempts[0].began_at
    ends = [history.status.at, *(commit.at for commit in history.commits)]
    ends += [item.ended_at for item in attempts if item.ended_at is not None]
    live = history.status.now if history.status.state == "running" else max(ends)
    stop = max(live, start + 1.0)
    scale = (WIDTH - LEFT - RIGHT) / (stop - start)

    def x(at: float) -> float:
        return LEFT + (min(max(at, start), stop) - start) * scale

    bars = []
    for place, attempt in enumerate(attempts):
        end = attempt.ended_at if attempt.ended_at is not None else stop
        after = attempts[place + 1] if place + 1 < len(attempts) else None
        y, left = TOP + place * ROW, x(attempt.began_at)
        width = max(2.0, x(end) - left)
        lost = 0.0 if after is None or after.lost_s is None else after.lost_s * scale
        dots = tuple(Dot(x(commit.at), y + ROW / 2, commit) for commit in attempt.commits)
        restore = min(width, (attempt.restore_s or 0.0) * scale)
        bars.append(Bar(attempt, left, y, width, restore, min(width, lost), dots))
    return Timeline(TOP + len(attempts) * ROW + 8, tuple(bars), tuple(_time_ticks(start, stop, x)))


def _time_ticks(start: float, stop: float, x: Callable[[float], float]) -> list[Tick]:
    form = "%H:%M:%S" if stop - start < 600 else "%H:%M" if stop - start < 86400 else "%m-%d %H:%M"
    places = [start + (stop - start) * n / NUM_TICKS for n in range(NUM_TICKS + 1)]
    return [Tick(x(at), _date(at, form)) for at in places]


def _date(at: float, form: str) -> str:
    try:
        return datetime.fromtimestamp(at, UTC).strftime(form)
    except (ValueError, OverflowError, OSError):
        return "?"


@dataclass(frozen=True, slots=True)
class Curve:
    """Holds a metric over steps. branches: one line of places per attempt; it begins where that attempt went on."""

    name: str
    branches: tuple[tuple[Dot, ...], ...]
    steps: tuple[Tick, ...]
    values: tuple[Tick, ...]


def curves_of(history: "RunHistory") -> tuple[Curve, ...]:
    """Returns a chart for each metric and score of the commits, by name, at most MAX_METRICS."""
    by_key = {commit.key: commit for commit in history.commits}
    names = sorted({name for commit in history.commits for name in _values(commit)})
    found = []
    for name in names[:MAX_METRICS]:
        lines = []
        for attempt in history.attempts:
            line = [commit for commit in attempt.commits if name in _values(commit)]
            origin = by_key.get(attempt.restored or "")
            if line and origin is not None and name in _values(origin):
                line = [origin, *line]
            if line:
                lines.append(line)
        if lines:
            found.append(_curve(name, lines))
    return tuple(found)


def _values(commit: "Commit") -> Mapping[str, float]:
    both = {**commit.metrics, **commit.scores}
    return {name: value for name, value in both.items() if math.isfinite(value)}


def _curve(name: str, lines: Sequence[Sequence["Commit"]]) -> Curve:
    steps = [commit.step for line in lines for commit in line]
    values = [_values(commit)[name] for line in lines for commit in line]
    low, high = min(values), max(values)
    first, last = min(steps), max(steps)

    def place(commit: "Commit") -> Dot:
        x = LEFT + (commit.step - first) / max(1, last - first) * (WIDTH - LEFT - RIGHT)
        return Dot(x, height(_values(commit)[name]), commit)

    def height(value: float) -> float:
        share = 0.5 if high == low else (value - low) / (high - low)
        return 10 + (1 - share) * (CHART_HEIGHT - 40)

    return Curve(
        name,
        tuple(tuple(place(commit) for commit in line) for line in lines),
        tuple(
            Tick(LEFT + share * (WIDTH - LEFT - RIGHT), str(round(first + share * (last - first))))
            for share in (0, 0.5, 1)
        ),
        tuple(Tick(height(value), f"{value:.4g}") for value in sorted({low, high})),
    )
