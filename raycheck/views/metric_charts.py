"""Computes the charts of metrics over all steps: of one run or of several, linear or logarithmic, smoothed or not.

A run has one line, across its attempts, and one for each part that the run went back behind. A line has at most three
points, the least, the greatest and one undrawn value, for each of NUM_COLUMNS equal parts of the steps, so no spike is
left out. A value that is not finite, or not positive on a logarithmic axis, interrupts its line.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from raycheck.views.attempts import MetricLine
from raycheck.views.charts import CHART_HEIGHT, LEFT, RIGHT, WIDTH, Tick, step_ticks

MAX_CHARTS = 24
"""The maximum number of charts in one view; the page's search finds the other metrics."""
NUM_COLUMNS = 400
SMOOTH_PARTS = 1000
"""Smoothing decays once for each of this many equal parts of the steps, however many steps have a value."""
LETTER = 15.5
"""The width of a digit where the page's letters are largest, on a narrow screen."""
FLAT = 1e-12
"""Values that differ by less than this share of themselves differ by rounding, and are drawn as equal."""
Point = tuple[int, float]


@dataclass(frozen=True, slots=True)
class RunCurve:
    """A metric of one run. lines: the pieces of its curve."""

    label: str
    lines: Sequence[MetricLine]


@dataclass(frozen=True, slots=True)
class CurvePath:
    """A line of a chart.

    run: the place of its run among those of the chart. attempt: the one that did these steps, if the run went back
    behind them; None for the run's own line. is_joined: the first point is the one of another line where this one left
    it. is_faint: these are the unsmoothed values behind a smoothed line. points, places: steps and values, and where
    they are drawn; the height is None for a value that cannot be drawn.
    """

    run: int
    label: str
    attempt: int | None
    is_joined: bool
    is_faint: bool
    points: tuple[Point, ...]
    places: tuple[tuple[float, float | None], ...]

    @property
    def is_abandoned(self) -> bool:
        """Return whether the run went back behind these steps."""
        return self.attempt is not None

    @property
    def words(self) -> tuple[str, ...]:
        """Return what tells this line from the others of its chart: its run, and the attempt that was abandoned."""
        run = (self.label,) if self.label else ()
        return run if self.attempt is None else (*run, f"abandoned attempt {self.attempt}")


@dataclass(frozen=True, slots=True)
class MetricChart:
    """A metric of one or several runs over steps.

    notes: what is not drawn, in words. first, last: the range of steps. left: where the first one is drawn, so that the
    texts of `values` have room.
    """

    name: str
    paths: tuple[CurvePath, ...]
    steps: tuple[Tick, ...]
    values: tuple[Tick, ...]
    notes: tuple[str, ...]
    first: int
    last: int
    left: float


@dataclass(frozen=True, slots=True)
class _Piece:
    """A line before it is drawn; see CurvePath."""

    run: int
    label: str
    attempt: int | None
    is_joined: bool
    points: Sequence[Point]
    is_faint: bool = False


def metric_chart(
    name: str, runs: Sequence[RunCurve], *, is_log: bool = False, smooth: float = 0.0
) -> MetricChart | None:
    """Return the chart of a metric, or None if it has no value.

    smooth: from 0, not at all, to below 1.
    """
    pieces = [piece for place, curve in enumerate(runs) for piece in _pieces(place, curve, is_log=is_log)]
    if not pieces:
        return None
    first, last = min(piece.points[0][0] for piece in pieces), max(piece.points[-1][0] for piece in pieces)
    drawings = list(_drawings(pieces, first, max(1, last - first), is_log=is_log, smooth=smooth))
    drawn = [value for piece in drawings for _, value in piece.points if _can_draw(value, is_log=is_log)]
    heights = _Heights(min(drawn, default=1.0), max(drawn, default=1.0), is_log=is_log)
    at = heights.ticks() if drawn else []
    texts = _texts(at)
    left = max(LEFT, 10 + LETTER * max(map(len, texts), default=0))

    def x(step: float) -> float:
        return left + (step - first) / max(1, last - first) * (WIDTH - left - RIGHT)

    paths = tuple(
        CurvePath(piece.run, piece.label, piece.attempt, piece.is_joined, piece.is_faint, tuple(piece.points),
                  tuple((x(step), heights.y(value) if _can_draw(value, is_log=is_log) else None)
                        for step, value in piece.points))
        for piece in drawings
    )  # fmt: skip
    ticks = tuple(Tick(heights.y(value), text) for value, text in zip(at, texts, strict=True))
    notes = _notes(pieces, is_log=is_log)
    return MetricChart(name, paths, step_ticks(first, last, x), ticks, notes, first, last, left)


def _can_draw(value: float, *, is_log: bool) -> bool:
    return math.isfinite(value) and (value > 0 or not is_log)


def _notes(pieces: Sequence[_Piece], *, is_log: bool) -> tuple[str, ...]:
    """Return in words how many values of which kind are not drawn."""
    values = [value for piece in pieces for _, value in piece.points[piece.is_joined :]]
    kinds = Counter(
        "NaN" if math.isnan(value) else "not positive" if math.isfinite(value) else str(value)
        for value in values
        if not _can_draw(value, is_log=is_log)
    )
    counts = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    return (f"Marked at the lower edge instead of drawn: {counts}",) if counts else ()


def _drawings(pieces: Sequence[_Piece], first: int, span: int, *, is_log: bool, smooth: float) -> Iterator[_Piece]:
    """Yield the lines to draw, each with few points: with smoothing, first the values and then their average."""
    for piece in pieces:
        drawn = [point for point in piece.points if _can_draw(point[1], is_log=is_log)]
        is_smoothed = bool(smooth and drawn)
        averages = dict(smoothed(drawn, smooth, span)) if is_smoothed else {}
        lines = [piece.points, [(step, averages.get(step, value)) for step, value in piece.points]]
        for is_average, points in enumerate(lines if is_smoothed else lines[:1]):
            thin = _thinned(points, first, span, is_log=is_log)
            is_faint = is_smoothed and not is_average
            yield _Piece(piece.run, piece.label, piece.attempt, piece.is_joined, thin, is_faint)


class _Heights:
    """The vertical axis. low, high: the least and the greatest value that is drawn."""

    def __init__(self, low: float, high: float, *, is_log: bool) -> None:
        self.is_log = is_log
        self.low, self.high = low, high
        self.is_flat = high / 2 - low / 2 <= FLAT * max(abs(low), abs(high))

    def y(self, value: float) -> float:
        """Return where a value is drawn."""
        low, high, at = (math.log10(item) if self.is_log else item / 2 for item in (self.low, self.high, value))
        share = 0.5 if self.is_flat else (at - low) / (high - low)
        return 20 + (1 - share) * (CHART_HEIGHT - 50)

    def ticks(self) -> list[float]:
        """Return at most six values with a label, round ones if there are any."""
        return [self.low] if self.is_flat else _ticks(self.low, self.high, is_log=self.is_log)


def _pieces(run: int, curve: RunCurve, *, is_log: bool) -> Iterator[_Piece]:
    """Yield the run's own line, and each part that it went back behind, joined to where it left."""
    of_attempt: dict[int, list[Point]] = defaultdict(list)
    for line in curve.lines:
        of_attempt[line.attempt] += zip(line.steps, line.values, strict=True)
    live = [line for line in curve.lines if not line.is_abandoned]
    own = [point for line in live for point in zip(line.steps, line.values, strict=True)]
    if own:
        yield _Piece(run, curve.label, None, False, sorted(own, key=lambda point: point[0]))
    for line in curve.lines:
        if line.is_abandoned:
            joint = _joint(line, of_attempt)
            before = [joint] if joint is not None and _can_draw(joint[1], is_log=is_log) else []
            points = [*before, *zip(line.steps, line.values, strict=True)]
            yield _Piece(run, curve.label, line.attempt, bool(before), points)


def _joint(line: MetricLine, of_attempt: Mapping[int, Sequence[Point]]) -> Point | None:
    """Return the point that a line continues, or the last one before it; None if there is none."""
    if line.continues is None:
        return None
    attempt, last = line.continues
    return max((point for point in of_attempt.get(attempt, ()) if point[0] <= last), default=None)


def smoothed(points: Sequence[Point], weight: float, span: int) -> list[Point]:
    """Return an exponential moving average, without the bias to its first value. span: the steps of the whole chart.

    A constant stays exactly as it is.
    """
    mean = share = 0.0
    found, before = [], points[0][0]
    for step, value in points:
        share, before = share * weight ** ((step - before) / span * SMOOTH_PARTS) + 1.0, step
        mean = value if share == 1.0 else mean + (value / share - mean / share)
        found.append((step, mean))
    return found


def _thinned(points: Sequence[Point], first: int, span: int, *, is_log: bool) -> list[Point]:
    found: list[Point] = []
    for _, column in groupby(points, key=lambda point: (point[0] - first) * NUM_COLUMNS // span):
        own = list(column)
        drawn = [point for point in own if _can_draw(point[1], is_log=is_log)]
        kept = [point for point in own if not _can_draw(point[1], is_log=is_log)][:1]
        if drawn:
            kept += {min(drawn, key=lambda point: point[1]), max(drawn, key=lambda point: point[1])}
        found += sorted(kept, key=lambda point: point[0])
    return found if found[-1][0] == points[-1][0] else [*found, points[-1]]


def _texts(values: Sequence[float]) -> list[str]:
    """Return numbers in few characters, but in so many that no two are the same."""
    texts: list[str] = []
    for digits in range(4 if len(values) > 1 else 6, 18):
        texts = [_short(value, digits) for value in values]
        if len(set(texts)) == len(texts):
            break
    return texts


def _short(value: float, digits: int) -> str:
    """Return a number in few characters, since a narrow screen has little room: 81.2k, 2.5e-4."""
    for unit, factor in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if factor * 10 <= abs(value) < 1e12:
            return f"{value / factor:.{digits}g}{unit}"
    text = f"{value:.{digits - 1}e}" if 0 < abs(value) < 1e-3 else f"{value:.{digits}g}"
    number, mark, power = text.partition("e")
    return f"{float(number):.{digits}g}e{int(power)}" if mark else text


def _ticks(low: float, high: float, *, is_log: bool) -> list[float]:
    """Return at most six round values between two."""
    if is_log and high / low >= 100:
        powers = range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1)
        return [10.0**power for power in powers][:: max(1, len(powers) // 6 + 1 if len(powers) > 6 else 1)]
    unit = 10.0 ** math.floor(math.log10((high - low) / 4)) if math.isfinite(high - low) else math.inf
    if not unit or not math.isfinite(unit):
        return [low, high]
    step = next(unit * factor for factor in (1, 2, 5, 10) if (high - low) / (unit * factor) <= 5)
    return [number * step for number in range(math.ceil(low / step), math.floor(high / step) + 1)]
