"""Computes the positions of a chart's bars, dots, and lines. drawing.py writes them as SVG; no markup is made here."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from raycheck.views.attempts import AttemptHistory, Commit

WIDTH = 900.0
LEFT, RIGHT = 84.0, 16.0
ROW = 22.0
TOP = 26.0
CHART_HEIGHT = 300.0
NUM_TICKS = 4
MAX_BAR_ROWS = 16
MAX_DOTS = 400
"""The maximum number of plain commits that are drawn of one attempt."""


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
    right that was trained and lost. dots: its commits. starting_width: the part at the left before the restore, or
    before the first sign of training. dead_width: the time after the bar until the next attempt began, in which nothing
    trained.
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
class Row:
    """A row of the timeline: an attempt, or consecutive ones, if there are too many for a row each.

    x, y: where its first bar begins.
    """

    x: float
    y: float
    attempts: tuple[AttemptHistory, ...]


@dataclass(frozen=True, slots=True)
class Timeline:
    """A drawing of a run's attempts, over time or over steps. height: the drawing's height; its width is WIDTH."""

    title: str
    height: float
    bars: tuple[Bar, ...]
    rows: tuple[Row, ...]
    ticks: tuple[Tick, ...]


def _timeline(title: str, bars: Sequence[Bar], ticks: Sequence[Tick]) -> Timeline:
    """Return the drawing of these bars, in at most MAX_BAR_ROWS rows.

    Consecutive attempts share a row if together they are short, and no longer than necessary. So in a storm of restarts
    the attempts that trained keep a row of their own.
    """
    length, groups = 4.0, [[bar] for bar in bars]
    while len(groups) > MAX_BAR_ROWS:
        length, groups = 2 * length, _grouped(bars, length)
    rows = [
        Row(min(bar.x for bar in group), TOP + place * ROW, tuple(bar.attempt for bar in group))
        for place, group in enumerate(groups)
    ]
    placed = tuple(_placed(bar, row.y) for row, group in zip(rows, groups, strict=True) for bar in group)
    return Timeline(title, TOP + len(rows) * ROW + 8, placed, tuple(rows), tuple(ticks))


def _placed(bar: Bar, y: float) -> Bar:
    return replace(bar, y=y, dots=tuple(replace(dot, y=y + ROW / 2) for dot in _drawn(bar.dots)))


def _grouped(bars: Sequence[Bar], length: float) -> list[list[Bar]]:
    """Return consecutive bars in groups that are at most so long, or have one bar."""
    groups: list[list[Bar]] = []
    left = right = 0.0
    for bar in bars:
        left, right = (min(left, bar.x), max(right, bar.x + bar.width)) if groups else (bar.x, bar.x + bar.width)
        if groups and right - left <= length:
            groups[-1].append(bar)
        else:
            groups.append([bar])
            left, right = bar.x, bar.x + bar.width
    return groups


def _drawn(dots: Sequence[Dot]) -> Sequence[Dot]:
    """Return the dots to draw: of more than MAX_DOTS, one of those at each place, but all that are not plain."""
    if len(dots) <= MAX_DOTS:
        return dots
    newest = {round(dot.x / 2): dot.commit.key for dot in dots if _is_plain(dot.commit)}
    return [dot for dot in dots if not _is_plain(dot.commit) or newest[round(dot.x / 2)] == dot.commit.key]


def _is_plain(commit: Commit) -> bool:
    return not (commit.is_head or commit.damaged or commit.name or commit.is_by_notice)


def timeline_of(attempts: Sequence[AttemptHistory], *, until: float) -> Timeline:
    """Return the attempts over time, oldest on top. until: the end of the axis, unix s."""
    start = min(attempt.began_at for attempt in attempts)
    stop = max(until, start + 1.0)
    scale = (WIDTH - LEFT - RIGHT) / (stop - start)

    def x(at: float) -> float:
        return LEFT + (min(max(at, start), stop) - start) * scale

    commits = {commit.key: commit.at for attempt in attempts for commit in attempt.commits}
    bars = []
    for place, (attempt, successor) in enumerate(_with_successors(attempts)):
        end, lost_from = _trained_until(attempt, successor, commits, stop)
        trained_from = _trained_from(attempt, successor, commits, end)
        left = x(attempt.began_at)
        width = max(2.0, x(end) - left)
        dots = tuple(Dot(x(commit.at), 0.0, commit) for commit in attempt.commits)
        restore = min(width, (attempt.restore_s or 0.0) * scale)
        left_from = _left_from(attempt, attempt.began_at if trained_from is None else trained_from)
        lost_from = min((at for at in (lost_from, left_from) if at is not None), default=None)
        starting = 0.0 if trained_from is None else min(width, max(0.0, x(trained_from) - left)) - restore
        lost = 0.0 if lost_from is None else (end - lost_from) * scale
        dead = 0.0 if place + 1 == len(attempts) else max(0.0, x(attempts[place + 1].began_at) - left - width)
        bars.append(Bar(attempt, left, 0.0, width, restore, min(width, lost), dots, max(0.0, starting), dead))
    return _timeline("Attempts over time", bars, _time_ticks(start, stop, x))


def _left_from(attempt: AttemptHistory, trained_from: float) -> float | None:
    """Return since when an attempt did steps that the run later went back behind; None if its last commit stayed."""
    if not attempt.commits or not attempt.commits[-1].is_abandoned:
        return None
    return max((commit.at for commit in attempt.commits if not commit.is_abandoned), default=trained_from)


def _with_successors(
    attempts: Sequence[AttemptHistory],
) -> Sequence[tuple[AttemptHistory, AttemptHistory | None]]:
    """Return each attempt with the one that continued its work and so shows what was lost, or None.

    Attempts that ended before they had restored are left out, if the record of a later one shows that records exist.
    """
    found: list[tuple[AttemptHistory, AttemptHistory | None]] = []
    following: AttemptHistory | None = None
    for attempt in reversed(attempts):
        found.append((attempt, following))
        if following is None or not _never_restored(attempt, following):
            following = attempt
    return found[::-1]


def _trained_from(
    attempt: AttemptHistory, successor: AttemptHistory | None, commits: Mapping[str, float], end: float
) -> float | None:
    """Return when training began, or None if that is not known; `end` if nothing shows that it ever did."""
    resume = attempt.resume
    at = None if resume is None else commits.get(resume.restored or "")
    if at is not None and resume is not None and resume.since_commit_s is not None:
        return at + resume.since_commit_s
    if attempt.first_step_at is not None:
        return attempt.first_step_at
    if resume is not None or attempt.commits or not attempt.world_size:
        return None
    if successor is None or successor.lost_s is None or _never_restored(attempt, successor):
        return end
    return end - successor.lost_s


def _never_restored(attempt: AttemptHistory, successor: AttemptHistory) -> bool:
    """Return whether an attempt ended before all its ranks had restored. What its successor lost was trained before."""
    has_signs = attempt.resume is not None or attempt.first_step_at is not None or attempt.commits
    return not has_signs and attempt.number > 1 and attempt.world_size > 0 and successor.resume is not None


def _trained_until(
    attempt: AttemptHistory, successor: AttemptHistory | None, commits: Mapping[str, float], stop: float
) -> tuple[float, float | None]:
    """Return when an attempt's training ended, and from when on it was lost; None if nothing is known to be lost.

    An attempt is over in the bucket when somebody noticed. A dead driver's training ended at its last sign of life, or
    a little later; what is known to be lost follows the checkpoint that its successor restored.
    """
    if not attempt.world_size:
        return attempt.began_at, None
    end = attempt.ended_at if attempt.ended_at is not None else stop
    if successor is None or _never_restored(attempt, successor):
        return end, None
    own = {commit.key for commit in attempt.commits}
    kept_at = commits[successor.restored] if successor.restored in own else None
    last_seen_at = attempt.began_at if attempt.last_seen_at is None else attempt.last_seen_at
    seen = min(end, max(attempt.began_at, last_seen_at))
    if successor.lost_s is not None:
        if kept_at is None:
            return end, end - successor.lost_s if successor.lost_s else None
        end = min(end, max(seen, kept_at + successor.lost_s))
        return end, end - successor.lost_s if successor.lost_s else None
    lost_from = seen if kept_at is None else kept_at
    return (seen if attempt.ending == "driver lost" else end), (lost_from if lost_from < seen else None)


def steps_of(attempts: Sequence[AttemptHistory]) -> Timeline:
    """Return the attempts over steps: each from its first step to its last known step.

    The steps lost, from the record of the attempt that continued from it, are the right end of a bar. Attempts by hand
    train nothing and have no row. Causes are left out because errors contain hosts, paths, and times.
    """
    spans = []
    numbers = {commit.key: commit.step for attempt in attempts for commit in attempt.commits}
    for attempt, successor in _with_successors([item for item in attempts if item.world_size]):
        begin = attempt.start_step or numbers.get(attempt.restored or "", 0)
        ends = [begin, *(commit.step for commit in attempt.commits)]
        lost = 0
        if successor is not None and successor.lost_steps is not None and not _never_restored(attempt, successor):
            lost = successor.lost_steps
            ends.append((ends[-1] if successor.start_step is None else successor.start_step) + lost)
        if attempt.commits and attempt.commits[-1].is_abandoned:
            kept = [begin, *(commit.step for commit in attempt.commits if not commit.is_abandoned)]
            lost = max(lost, max(ends) - max(kept))
        spans.append((replace(attempt, cause=""), begin, max(ends), lost))
    last = max((end for _, _, end, _ in spans), default=0)
    scale = (WIDTH - LEFT - RIGHT) / max(1, last)
    bars = []
    for attempt, begin, end, lost in spans:
        width = max(2.0, (end - begin) * scale)
        dots = tuple(Dot(LEFT + commit.step * scale, 0.0, commit) for commit in attempt.commits)
        bars.append(Bar(attempt, LEFT + begin * scale, 0.0, width, 0.0, min(width, lost * scale), dots))
    return _timeline("Attempts over steps", bars, step_ticks(0, last, lambda step: LEFT + step * scale))


def step_ticks(first: int, last: int, x: Callable[[float], float]) -> tuple[Tick, ...]:
    """Return at most NUM_TICKS + 1 different steps of a range. x: where a step is drawn."""
    steps = {round(first + (last - first) * number / NUM_TICKS) for number in range(NUM_TICKS + 1)}
    return tuple(Tick(x(step), str(step)) for step in sorted(steps))


def _time_ticks(start: float, stop: float, x: Callable[[float], float]) -> list[Tick]:
    form = "%H:%M:%S" if stop - start < 600 else "%H:%M" if stop - start < 86400 else "%m-%d %H:%M"
    places = [start + (stop - start) * n / NUM_TICKS for n in range(NUM_TICKS + 1)]
    return [Tick(x(at), _date(at, form, has_tenths=stop - start < 2 * NUM_TICKS)) for at in places]


def _date(at: float, form: str, *, has_tenths: bool) -> str:
    try:
        found = datetime.fromtimestamp(at, UTC)
        return found.strftime(form) + (f".{found.microsecond // 100_000}" if has_tenths else "")
    except (ValueError, OverflowError, OSError):
        return "?"
