"""Writes charts as SVG for the page and for notebooks. Every text is escaped and made safe to display.

Colors are attributes, which a style sheet can override; the page's does so for dark mode. So a drawing also works
without a style sheet, in a notebook for example. Names come from a bucket, where any writer can choose them.
"""

from collections.abc import Sequence
from html import escape
from itertools import groupby

from raycheck.terminal import printable_lines
from raycheck.views.charts import CHART_HEIGHT, ROW, WIDTH, Bar, Dot, Row, Tick, Timeline
from raycheck.views.in_words import short_number
from raycheck.views.metric_charts import CurvePath, MetricChart

TEXT, GRID, BAR, COMMIT, HEAD, RESTORE, LOST = (
    "#6b7280",
    "#d5d9de",
    "#a9c4e4",
    "#1f3a5f",
    "#c2410c",
    "#7a6bb8",
    "#b3261e",
)
BRANCHES = ("#0b5cad", HEAD, "#1d7a3e", RESTORE, "#8a5a00", LOST)
EDGES = {
    "failed": LOST,
    "gave up": LOST,
    "preempted": "#8a5a00",
    "driver lost": "#8a5a00",
    "finished": "#1d7a3e",
}
MAP_ROW = 12.0
BINS_HEIGHT = 200.0
DOT_GAP = 8.0
"""A line has a dot for each of its values, which says it, if they are at least so far apart on average."""
_LOST_PATTERN = (
    '<defs><pattern id="lost" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    f'<rect class="hatch" width="3" height="6" fill="{LOST}"/></pattern></defs>'
)


def text_of(value: object) -> str:
    """Return a value as text that is safe in HTML: escaped, with direction marks and control characters written out."""
    return escape(printable_lines(str(value)))


def element(name: str, *children: str, **attributes: object) -> str:
    """Return an HTML or SVG element. children: markup. attributes: any text; "_" in a name stands for "-", and a
    trailing "_" is dropped. Attributes that are None are left out."""
    said = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{text_of(_short(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return f"<{name}{said}>{''.join(children)}</{name}>" if children else f"<{name}{said}/>"


def _short(value: object) -> object:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else value


def _svg(height: float, title: str, *children: str) -> str:
    size = f"0 0 {WIDTH:.0f} {_short(height)}"
    return element("svg", *children, xmlns="http://www.w3.org/2000/svg", class_="chart", viewBox=size, role="img",
                   aria_label=title, font_family="system-ui, sans-serif", font_size=11)  # fmt: skip


def _label(at: float, y: float, text: str, *, anchor: str, kind: str = "tick") -> str:
    return element("text", text_of(text), class_=kind, x=at, y=y, text_anchor=anchor, fill=TEXT)


def _line(x1: float, x2: float, y1: float, y2: float) -> str:
    return element("line", class_="grid", x1=x1, x2=x2, y1=y1, y2=y2, stroke=GRID)


def _title(text: str) -> str:
    return element("title", text_of(text))


def _tick_labels(ticks: Sequence[Tick], y: float) -> list[str]:
    """Label an axis from left to right. On a narrow screen, every other label in the middle of five is left out."""
    found, end = [], len(ticks) - 1
    for place, tick in enumerate(ticks):
        anchor = "start" if not place else "end" if place == end else "middle"
        is_odd = place % 2 == 1 and place != end and end > 2
        found.append(_label(tick.at, y, tick.text, anchor=anchor, kind="tick odd" if is_odd else "tick"))
    return found


def timeline_svg(timeline: Timeline) -> str:
    """Draw the attempts of a run with their commits."""
    ticks = [_line(tick.at, tick.at, 22, timeline.height) for tick in timeline.ticks]
    ticks += _tick_labels(timeline.ticks, 17)
    rows = map(_row_label, timeline.rows)
    return _svg(timeline.height, timeline.title, _LOST_PATTERN, *ticks, *rows, *map(_attempt, timeline.bars))


def _row_label(row: Row) -> str:
    """Return the numbers of a row's attempts and, if they all had as many, of their workers."""
    first, last = row.attempts[0].number, row.attempts[-1].number
    sizes = {attempt.world_size for attempt in row.attempts}
    workers = f" \u00d7{sizes.pop()}" if len(sizes) == 1 and 0 not in sizes else ""
    numbers = text_of(first if first == last else f"{first}\u2013{last}")
    parts = [numbers, element("tspan", workers, class_="odd")] if first != last and workers else [numbers, workers]
    return element("text", *parts, class_="row", x=row.x - 8, y=row.y + 15, text_anchor="end", fill=TEXT)


def _attempt(bar: Bar) -> str:
    attempt, y, height = bar.attempt, bar.y + 4, ROW - 8
    cause = f" ({attempt.cause})" if attempt.cause else ""
    kind = f"attempt ending-{attempt.ending.replace(' ', '-')}"
    edge = EDGES.get(attempt.ending)
    workers = f", {attempt.world_size} workers" if attempt.world_size else ""
    about = _title(f"attempt {attempt.number}{workers}: {attempt.ending}{cause}")
    parts = [
        element(
            "rect",
            about,
            class_=kind,
            x=bar.x,
            y=y,
            width=bar.width,
            height=height,
            rx=2,
            fill=BAR,
            stroke=edge,
            stroke_width=edge and 2,
        )
    ]
    if bar.dead_width > 0:
        at, told = bar.x + bar.width, _title("dead: nothing trained until the next attempt began")
        parts.append(element("line", told, class_="dead", x1=at, x2=at + bar.dead_width, y1=y + height / 2,
                             y2=y + height / 2, stroke=LOST, stroke_width=2, stroke_dasharray="3 5"))  # fmt: skip
    if bar.starting_width > 0:
        told = _title("starting: no sign of training yet")
        parts.append(element("rect", told, class_="starting", x=bar.x, y=y, width=bar.starting_width,
                             height=height, fill=GRID))  # fmt: skip
    if bar.restore_width > 0:
        told = _title(f"restore: {short_number(attempt.restore_s or 0.0)} s")
        parts.append(
            element(
                "rect",
                told,
                class_="restore",
                x=bar.x + bar.starting_width,
                y=y,
                width=bar.restore_width,
                height=height,
                fill=RESTORE,
            )
        )
    if bar.lost_width > 0:
        at = bar.x + bar.width - bar.lost_width
        told = _title("trained and lost, or left by going back")
        parts.append(element("rect", told, fill="url(#lost)", x=at, y=y, width=bar.lost_width, height=height))
    return element("g", *parts, *map(_commit, bar.dots))


def _commit(dot: Dot) -> str:
    commit = dot.commit
    kind = "commit" + " head" * commit.is_head + " damaged" * (commit.damaged is not None)
    kind += " notice" * commit.is_by_notice
    color = LOST if commit.damaged is not None else HEAD if commit.is_head else COMMIT
    told = commit.key + (f", named {commit.name}" if commit.name else "")
    if commit.is_by_notice:  # a diamond, recognizable without its color
        told, turn = f"{told}, saved because a node was about to go", f"rotate(45 {_short(dot.x)} {_short(dot.y)})"
        return element("rect", _title(told), class_=kind, x=dot.x - 4, y=dot.y - 4, width=8.0, height=8.0, fill=color,
                       transform=turn)  # fmt: skip
    return element("circle", _title(told), class_=kind, cx=dot.x, cy=dot.y, r=4, fill=color)


def metric_svg(chart: MetricChart) -> str:
    """Draw a metric over all steps: a color per run, dashed where the run went back, faint behind a smoothed line."""
    parts = [
        _line(chart.left, WIDTH, tick.at, tick.at) + _label(chart.left - 8, tick.at + 4, tick.text, anchor="end")
        for tick in chart.values
    ]
    parts += _tick_labels(chart.steps, CHART_HEIGHT - 6)
    for path in chart.paths:
        number = path.run % len(BRANCHES)
        drawn = [(x, y, point) for (x, y), point in zip(path.places, path.points, strict=True) if y is not None]
        parts += _polylines(path, chart.name)
        is_sparse = bool(drawn) and drawn[-1][0] - drawn[0][0] >= DOT_GAP * (len(drawn) - 1)
        if is_sparse and not path.is_faint:
            parts += [_point((x, y), point, number) for x, y, point in drawn[path.is_joined :]]
        if not path.is_faint:
            parts += [_undrawn(x, point) for (x, y), point in zip(path.places, path.points, strict=True) if y is None]
    return _svg(CHART_HEIGHT, f"{chart.name} over steps", *parts)


def _polylines(path: CurvePath, name: str) -> list[str]:
    """Draw a path as one line, or as several if values in between cannot be drawn. A line of one point is a dot."""
    number = path.run % len(BRANCHES)
    opacity = 0.3 if path.is_faint else 0.6 if path.is_abandoned else None
    told = _title(", ".join(path.words) or name)
    found = []
    for is_drawn, places in groupby(path.places, key=lambda place: place[1] is not None):
        points = " ".join(f"{_short(x)},{_short(y)}" for x, y in places) if is_drawn else ""
        if points:
            found.append(element("polyline", told, class_=f"branch branch-{number}",
                                 points=points if " " in points else f"{points} {points}", fill="none",
                                 stroke=BRANCHES[number], stroke_width=1.5, stroke_linecap="round",
                                 stroke_opacity=opacity,
                                 stroke_dasharray="4 3" if path.is_abandoned else None))  # fmt: skip
    return found


def _undrawn(x: float, point: tuple[int, float]) -> str:
    told = _title(f"step {point[0]}: {short_number(point[1])}")
    return element("line", told, class_="undrawn", x1=x, x2=x, y1=CHART_HEIGHT - 30, y2=CHART_HEIGHT - 24, stroke=LOST,
                   stroke_width=2)  # fmt: skip


def _point(place: tuple[float, float], point: tuple[int, float], number: int) -> str:
    told = _title(f"step {point[0]}: {short_number(point[1])}")
    return element("circle", told, class_=f"point point-{number}", cx=place[0], cy=place[1], r=3.5,
                   fill=BRANCHES[number])  # fmt: skip


def histogram_svg(name: str, edges: Sequence[float], counts: Sequence[int]) -> str:
    """Draw a histogram. edges: one more than counts. counts: not empty."""
    most, width = max(counts) or 1, (WIDTH - 20) / len(counts)
    parts = []
    for place, count in enumerate(counts):
        height = (BINS_HEIGHT - 40) * count / most
        told = _title(f"{short_number(edges[place])} to {short_number(edges[place + 1])}: {count}")
        parts.append(
            element(
                "rect",
                told,
                class_="bin",
                x=10 + place * width,
                y=BINS_HEIGHT - 24 - height,
                width=width - 1,
                height=height,
                fill=BRANCHES[0],
            )
        )
    ends = [Tick(10, short_number(edges[0])), Tick(WIDTH - 10, short_number(edges[-1]))]
    parts += [
        _label(tick.at, BINS_HEIGHT - 5, tick.text, anchor=anchor)
        for tick, anchor in zip(ends, ("start", "end"), strict=True)
    ]
    parts.append(_label(WIDTH / 2, BINS_HEIGHT - 5, f"at most {most} in a bar", anchor="middle"))
    return _svg(BINS_HEIGHT, f"Histogram of {name}", *parts)


def heat_svg(name: str, heat: Sequence[Sequence[float | None]]) -> str:
    """Draw a heat map of mean absolute values over a tensor's rows and columns. heat: not empty; None was not read."""
    hottest = max((value for line in heat for value in line if value is not None), default=0.0)
    width = (WIDTH - 20) / len(heat[0])
    parts = []
    for row, line in enumerate(heat):
        for column, value in enumerate(line):
            share = 0.0 if not value or not hottest else value / hottest
            kind = {"class_": "unread", "fill": "none"} if value is None else {"class_": "heat", "fill": BRANCHES[0]}
            parts.append(
                element(
                    "rect",
                    x=10 + column * width,
                    y=row * MAP_ROW,
                    width=width,
                    height=MAP_ROW,
                    fill_opacity=None if value is None else f"{share:.3f}",
                    **kind,
                )
            )
    title = f"Mean absolute values of {name}; the largest is {short_number(hottest)}"
    return _svg(MAP_ROW * len(heat) + 8, title, *parts)
