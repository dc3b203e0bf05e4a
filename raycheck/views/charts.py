"""Computes the positions of a chart's bars, dots, and lines. drawing.py writes them as SVG; no markup is made here."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from raycheck.views.attempts import AttemptHistory, Commit

WIDTH = 900.0
LEFT, RIGHT = 84.0, 16.0
ROW = 22.0
TOP = 26.0
CHART_HEIGHT = 220.0
MAX_METRICS = 12
NUM_TICKS = 4


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
    right that was trained and lost. dots: its commits. starting_width: the part at the left before the restore.
    dead_width: the time after the bar until the next attempt began, in which nothing trained.
    """

    attempt: AttemptHistory
    x: float
    y: float
    width: float
    restore_width: float
    lost_width: float
    dots: tuple[Dot, ...]
    starting_width: float = 0.0
    dead_width: float = 0.0


@dataclass(frozen=True, slots=True)
class Timeline:
    """A drawing of a run's attempts, over time or over steps. height: the drawing's height; its width is WIDTH."""

    title: str
    height: float
    bars: tuple[Bar, ...]
    ticks: tuple[Tick, ...]


def timeline_of(attempts: Sequence[AttemptHistory], *, until: float) -> Timeline:
    """Return the attempts over time: one row per attempt, oldest on top. until: the end of the axis, unix s."""
    start = min(attempt.began_at for attempt in attempts)
    stop = max(until, start + 1.0)
    scale = (WIDTH - LEFT - RIGHT) / (stop - start)

    def x(at: float) -> float:
        return LEFT + (min(max(at, start), stop) - start) * scale

    commits = {commit.key: commit.at for attempt in attempts for commit in attempt.commits}
    bars = []
    for place, attempt in enumerate(attempts):
        after = attempts[place + 1] if place + 1 < len(attempts) else None
        end, lost_from = _trained_until(attempt, after, commits, stop)
        trained_from = _trained_from(attempt, commits)
        y, left = TOP + place * ROW, x(attempt.began_at)
        width = max(2.0, x(end) - left)
        dots = tuple(Dot(x(commit.at), y + ROW / 2, commit) for commit in attempt.commits)
        restore = min(width, (attempt.restore_s or 0.0) * scale)
        starting = 0.0 if trained_from is None else min(width, max(0.0, x(trained_from) - left)) - restore
        lost = 0.0 if lost_from is None else (end - lost_from) * scale
        dead = 0.0 if after is None else max(0.0, x(after.began_at) - left - width)
        bars.append(Bar(attempt, left, y, width, restore, min(width, lost), dots, max(0.0, starting), dead))
    return Timeline("Attempts over time", _height(attempts), tuple(bars), tuple(_time_ticks(start, stop, x)))


def _trained_from(attempt: AttemptHistory, commits: Mapping[str, float]) -> float | None:
    """Return when an attempt had restored and training began, or None if that is not known."""
    resume = attempt.resume
    at = None if resume is None else commits.get(resume.restored or "")
    return None if at is None or resume is None or resume.since_commit_s is None else at + resume.since_commit_s


def _trained_until(
    attempt: AttemptHistory, after: AttemptHistory | None, commits: Mapping[str, float], stop: float
) -> tuple[float, float | None]:
    """Return when an attempt's training ended, and from when on it was lost; None if nothing is known to be lost.

    An attempt is over in the bucket when somebody noticed. A dead driver's training ended at its last sign of life, or
    a little later; what is known to be lost follows the checkpoint that the next attempt restored.
    """
    end = attempt.ended_at if attempt.ended_at is not None else stop
    if after is None or not attempt.world_size:
        return end, None
    own = {commit.key for commit in attempt.commits}
    kept_at = commits[after.restored] if after.restored in own else None
    last_seen_at = attempt.began_at if attempt.last_seen_at is None else attempt.last_seen_at
    seen = min(end, max(attempt.began_at, last_seen_at))
    if after.lost_s is not None:
        if kept_at is None:
            return end, end - after.lost_s if after.lost_s else None
        end = min(end, max(seen, kept_at + after.lost_s))
        return end, end - after.lost_s if after.lost_s else None
    lost_from = seen if kept_at is None else kept_at
    return (seen if attempt.ending == "driver lost" else end), (lost_from if lost_from < seen else None)


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
