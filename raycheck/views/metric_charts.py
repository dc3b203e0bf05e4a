"""Computes the charts of metrics over all steps: of one run or of several, linear or logarithmic, smoothed or not.

A run has one line, across its attempts, and one for each part that the run went back behind. A line has at most two
points, the least and the greatest value, for each of NUM_COLUMNS equal parts of the steps, so no spike is left out.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from raycheck.views.attempts import MetricLine
from raycheck.views.charts import CHART_HEIGHT, LEFT, RIGHT, WIDTH, Tick

MAX_CHARTS = 24
"""The maximum number of charts in one view; the page's search finds the other metrics."""
NUM_COLUMNS = 400
SMOOTH_PARTS = 1000
"""Smoothing decays once for each of this many equal parts of the steps, however many steps have a value."""
Point = tuple[int, float]


@dataclass(frozen=True, slots=True)
class CurvePath:
    """A line of a chart.

    run: the place of its run among those of the chart. points, places: steps and values, and where they are drawn.
    is_faint: these are the unsmoothed values behind a smoothed line.
    """

    run: int
    label: str
    is_abandoned: bool
    is_faint: bool
    points: tuple[Point, ...]
    places: tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class MetricChart:
    """A metric of one or several runs over steps. notes: what is not drawn, in words. first, last: the steps' range."""

    name: str
    paths: tuple[CurvePath, ...]
    steps: tuple[Tick, ...]
    values: tuple[Tick, ...]
    notes: tuple[str, ...]
    first: int
    last: int


def metric_chart(
    name: str, runs: Sequence[tuple[str, Sequence[MetricLine]]], *, is_log: bool = False, smooth: float = 0.0
) -> MetricChart | None:
    """Return the chart of a metric, or None if it has no value that can be drawn.

    runs: the label and the pieces of the curve of each run. smooth: from 0, not at all, to below 1.
    """
    found, left_out = [], 0
    for place, (label, lines) in enumerate(runs):
        for is_abandoned, points in _lines(lines):
            drawn = [(step, value) for step, value in points if math.isfinite(value) and (value > 0 or not is_log)]
            left_out += len(points) - len(drawn)
            if drawn:
                found.append((place, label, is_abandoned, drawn))
    if not found:
        return None
    first, last = min(points[0][0] for *_, points in found), max(points[-1][0] for *_, points in found)
    span = max(1, last - first)
    drawings = []
    for place, label, is_abandoned, points in found:
        if smooth:
            drawings.append((place, label, is_abandoned, True, _thinned(points, first, span)))
        line = smoothed(points, smooth, span) if smooth else points
        drawings.append((place, label, is_abandoned, False, _thinned(line, first, span)))
    values = [value for *_, points in drawings for _, value in points]
    low, high = min(values), max(values)
    shares = _Shares(low, high, is_log=is_log)
    paths = tuple(
        CurvePath(place, label, is_abandoned, is_faint, tuple(points),
             tuple((_x((step - first) / span), shares.y(value)) for step, value in points))
        for place, label, is_abandoned, is_faint, points in drawings
    )  # fmt: skip
    steps = tuple(Tick(_x(share), str(round(first + share * (last - first)))) for share in (0, 0.25, 0.5, 0.75, 1))
    ticks = tuple(Tick(shares.y(value), _short(value)) for value in _ticks(low, high, is_log=is_log))
    notes = (f"{left_out} values are not {'positive' if is_log else 'finite'} and not drawn",) if left_out else ()
    return MetricChart(name, paths, steps, ticks, notes, first, last)


def _x(share: float) -> float:
    return LEFT + share * (WIDTH - LEFT - RIGHT)


@dataclass(frozen=True, slots=True)
class _Shares:
    low: float
    high: float
    is_log: bool

    def __init__(self, low: float, high: float, *, is_log: bool) -> None:
        object.__setattr__(self, "low", math.log10(low) if is_log else low)
        object.__setattr__(self, "high", math.log10(high) if is_log else high)
        object.__setattr__(self, "is_log", is_log)

    def y(self, value: float) -> float:
        """Return where a value is drawn."""
        height = math.log10(value) if self.is_log else value
        share = 0.5 if self.high == self.low else (height - self.low) / (self.high - self.low)
        return 10 + (1 - share) * (CHART_HEIGHT - 40)


def _lines(lines: Sequence[MetricLine]) -> Iterable[tuple[bool, list[Point]]]:
    """Yield the run's own line, and each part that it went back behind, joined to where it left."""
    own = sorted(
        point for line in lines if not line.is_abandoned for point in zip(line.steps, line.values, strict=True)
    )
    if own:
        yield False, own
    for line in lines:
        if line.is_abandoned:
            before = [point for other in lines if other.attempt <= line.attempt and not other.is_abandoned
                      for point in zip(other.steps, other.values, strict=True) if point[0] < line.steps[0]]  # fmt: skip
            yield True, [*([max(before)] if before else []), *zip(line.steps, line.values, strict=True)]


def smoothed(points: Sequence[Point], weight: float, span: int) -> list[Point]:
    """Return an exponential moving average, without the bias to its first value. span: the steps of the whole chart."""
    total = share = 0.0
    found, before = [], points[0][0]
    for step, value in points:
        decay = weight ** ((step - before) / span * SMOOTH_PARTS)
        total, share, before = total * decay + value, share * decay + 1.0, step
        found.append((step, total / share))
    return found


def _thinned(points: Sequence[Point], first: int, span: int) -> list[Point]:
    found: list[Point] = []
    for _, column in groupby(points, key=lambda point: (point[0] - first) * NUM_COLUMNS // span):
        own = list(column)
        found += sorted({min(own, key=lambda point: point[1]), max(own, key=lambda point: point[1])})
    return found if found[-1] == points[-1] else [*found, points[-1]]


def _short(value: float) -> str:
    """Return a number in few characters, since a narrow screen has little room: 81.2k, 2.5e-4."""
    for unit, factor in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if factor * 10 <= abs(value) < 1e12:
            return f"{value / factor:.4g}{unit}"
    if 0 < abs(value) < 1e-3:
        digits, power = f"{value:.3e}".split("e")
        return f"{float(digits):g}e{int(power)}"
    return f"{value:.4g}"


def _ticks(low: float, high: float, *, is_log: bool) -> list[float]:
    """Return at most six round values between two."""
    if low == high:
        return [low]
    if is_log and high / low >= 100:
        powers = range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1)
        return [10.0**power for power in powers][:: max(1, len(powers) // 6 + 1 if len(powers) > 6 else 1)]
    unit = 10.0 ** math.floor(math.log10((high - low) / 4)) if math.isfinite(high - low) else math.inf
    if not unit or not math.isfinite(unit):
        return [low, high]
    step = next(unit * factor for factor in (1, 2, 5, 10) if (high - low) / (unit * factor) <= 5)
    return [number * step for number in range(math.ceil(low / step), math.floor(high / step) + 1)]
