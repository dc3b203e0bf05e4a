"""Computes the positions of a chart's bars, dots, and lines. drawing.py writes them as SVG; no markup is made here."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from raycheck.views.attempts import AttemptHistory, Commit

WIDTH = 900.0
LEFT, RIGHT = 70.0, 16.0
ROW = 22.0
TOP = 26.0
CHART_HEIGHT = 220.0
MAX_METRICS = 12
NUM_TICKS = 5


@dataclass(frozen=True, slots=True)
class Tick:
    """A labeled position on an axis, in units of the drawing."""

    at: float
    text: str


@dataclass(frozen=True, slots=True)
class Dot:
    """A commit on a chart, at x, y."""

    x: float
    y: float
    commit: Commit


@dataclass(frozen=True, slots=True)
class Bar:
    """An attempt on the timeline.

    x, y, width: its position. restore_width: the part at the left that was the restore. lost_width: the part at the
    right that was trained and lost. dots: its commits.
    """

    attempt: AttemptHistory
    x: float
    y: float
    width: float
    restore_width: float
    lost_width: float
    dots: tuple[Dot, ...]


@dataclass(frozen=True, slots=True)
class Timeline:
    """A drawing of a run's attempts, over time or over steps. height: the drawing's height; its width is WIDTH."""

    title: str
    height: float
    bars: tuple[Bar, ...]
    ticks: tuple[Tick, ...]


def timeline_of(attempts: Sequence[AttemptHistory], *, until: float) -> Timeline:
    """Return the attempts over time: one row per attempt, oldest on top. until: the end of the axis, unix s."""
    start = attempts[0].began_at
    stop = max(until, start + 1.0)
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
    return Timeline("Attempts over time", _height(attempts), tuple(bars), tuple(_time_ticks(start, stop, x)))


def steps_of(attempts: Sequence[AttemptHistory]) -> Timeline:
    """Return the attempts over steps: each from its first step to its last known step.

    The steps lost, from the next attempt's record, are the right end of a bar. Attempts by hand train nothing and have
    no row. Causes are left out because errors contain hosts, paths, and times.
    """
    spans = []
    for place, attempt in enumerate(attempts):
        after = next((item for item in attempts[place + 1 :] if item.world_size), None)
        begin = attempt.start_step or 0
        ends = [begin, *(commit.step for commit in attempt.commits)]
        kept = ends[-1] if after is None or after.start_step is None else after.start_step
        if after is not None and after.lost_steps is not None:
            ends.append(kept + after.lost_steps)
        if attempt.world_size:
            lost = 0 if after is None else after.lost_steps or 0
            spans.append((replace(attempt, cause=""), begin, max(ends), lost))
    last = max((end for _, _, end, _ in spans), default=0)
    scale = (WIDTH - LEFT - RIGHT) / max(1, last)
    bars = []
    for place, (attempt, begin, end, lost) in enumerate(spans):
        y, left = TOP + place * ROW, LEFT + begin * scale
        width = max(2.0, (end - begin) * scale)
        dots = tuple(Dot(LEFT + commit.step * scale, y + ROW / 2, commit) for commit in attempt.commits)
        bars.append(Bar(attempt, left, y, width, 0.0, min(width, lost * scale), dots))
    ticks = [Tick(LEFT + share * (WIDTH - LEFT - RIGHT), str(round(share * last))) for share in (0, 0.25, 0.5, 0.75, 1)]
    return Timeline("Attempts over steps", _height(bars), tuple(bars), tuple(ticks))


def _height(rows: Sequence[object]) -> float:
    return TOP + len(rows) * ROW + 8


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
    """A metric over steps. branches: one line of points per attempt, starting where that attempt resumed."""

    name: str
    branches: tuple[tuple[Dot, ...], ...]
    steps: tuple[Tick, ...]
    values: tuple[Tick, ...]


def curves_of(attempts: Sequence[AttemptHistory]) -> tuple[Curve, ...]:
    """Return a chart for each metric and score of the commits, sorted by name, at most MAX_METRICS."""
    by_key = {commit.key: commit for attempt in attempts for commit in attempt.commits}
    names = sorted({name for commit in by_key.values() for name in _values(commit)})
    found = []
    for name in names[:MAX_METRICS]:
        lines = []
        for attempt in attempts:
            line = [commit for commit in attempt.commits if name in _values(commit)]
            origin = by_key.get(attempt.restored or "")
            if line and origin is not None and name in _values(origin):
                line = [origin, *line]
            if line:
                lines.append(line)
        if lines:
            found.append(_curve(name, lines))
    return tuple(found)


def _values(commit: Commit) -> Mapping[str, float]:
    both = {**commit.metrics, **commit.scores}
    return {name: value for name, value in both.items() if math.isfinite(value)}


def _curve(name: str, lines: Sequence[Sequence[Commit]]) -> Curve:
    steps = [commit.step for line in lines for commit in line]
    values = [_values(commit)[name] for line in lines for commit in line]
    low, high = min(values), max(values)
    first, last = min(steps), max(steps)

    def place(commit: Commit) -> Dot:
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
