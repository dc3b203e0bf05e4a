"""Renders a run, a checkpoint, and a history as HTML for notebooks, and has the tables of the other views.

The pictures are the page's (drawing.py). A run and a checkpoint are shown without times, so the output of a notebook
kept in a repository changes only when the run does. A history has times.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from raycheck.bucket.format.latest import Entry, Latest
from raycheck.views.attempts import AttemptHistory, MetricLine
from raycheck.views.charts import steps_of, timeline_of
from raycheck.views.drawing import element, metric_svg, text_of, timeline_svg
from raycheck.views.in_words import short_number, size, time_of
from raycheck.views.metric_charts import RunCurve, metric_chart

MAX_ROWS = 200
"""The maximum number of rows of a table in a notebook; a line after them says how many are left out."""


@dataclass(frozen=True, slots=True)
class Picture:
    """HTML for a notebook, with escaped texts."""

    html: str

    def _repr_html_(self) -> str:
        return self.html


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a table. A cell is any value that `str` accepts; None is an empty cell."""
    head = element("tr", *(element("th", text_of(name)) for name in columns))
    lines = [element("tr", *map(_cell, row)) for row in rows[:MAX_ROWS]]
    more = element("p", f"{len(rows) - MAX_ROWS} more are not shown.") if len(rows) > MAX_ROWS else ""
    return element("table", element("thead", head), element("tbody", *(lines or [""]))) + more


def _cell(value: object) -> str:
    return element("td", "" if value is None else text_of(value))


def run_html(uri: str, body: Latest) -> str:
    """Return a run from its `latest`: its URI and its checkpoints, newest first."""
    state = "finished" if body.is_finished else "deleted" if body.deleted_at is not None else "not finished"
    facts = (_address(uri), state, f"attempt {body.attempt.number}", f"head {body.head or 'none'}")
    columns = ("step", "checkpoint", "name", "size", "shares with", "stays", "metrics")
    return words(*facts) + table(columns, [_checkpoint_row(entry, body.head) for entry in reversed(body.live)])


def checkpoint_html(uri: str, entry: Entry) -> str:
    """Return a checkpoint from its entry in `latest`."""
    columns = ("step", "checkpoint", "name", "size", "shares with", "stays", "metrics")
    return words(_address(uri)) + table(columns, [_checkpoint_row(entry, None)])


def _checkpoint_row(entry: Entry, head: str | None) -> tuple[object, ...]:
    stays = ["head"] * (entry.key == head) + ["pinned"] * entry.pinned + ["rolling"] * entry.rolling
    stays += ["drifted"] * entry.drifted
    stays += [f"DAMAGED: {entry.damaged}"] if entry.damaged else []
    metrics = [f"{name} {short_number(value)}" for name, value in sorted({**entry.metrics, **entry.scores}.items())]
    shares = ", ".join(entry.refs) or None
    return entry.step, entry.key, entry.name, size(entry.size_bytes), shares, ", ".join(stays), ", ".join(metrics)


Curves = Mapping[str, Sequence[MetricLine]]
"""The pieces of each metric's curve, by its name."""


def history_html(facts: Iterable[str], attempts: Sequence[AttemptHistory], curves: Curves, *, until: float) -> str:
    """Return a run's history: its attempts over time, why each ended, and its metrics over steps.

    facts: texts about the whole run. until: the end of the time axis, unix seconds.
    """
    columns = ("attempt", "workers", "began", "ended", "why", "restored", "restore", "lost before")
    rows = []
    for item in reversed(attempts):
        number, ranks, why, restored = _attempt_row(item)
        ended = None if item.ended_at is None else time_of(item.ended_at)
        restore = None if item.restore_s is None else f"{item.restore_s:.2f} s"
        rows.append((number, ranks, time_of(item.began_at), ended, why, restored, restore, _lost(item, has_s=True)))
    drawing = timeline_svg(timeline_of(attempts, until=until))
    return words(*facts) + drawing + table(columns, rows) + _charts(curves)


def steps_html(attempts: Sequence[AttemptHistory], curves: Curves) -> str:
    """Return a run's attempts over steps: where each resumed, and the steps trained and lost.

    It has no times, and only the kind of each ending, because errors contain hosts, paths, and times.
    """
    shown = [replace(item, cause="") for item in reversed(attempts)]
    rows = [(*_attempt_row(item), _lost(item, has_s=False)) for item in shown]
    columns = ("attempt", "workers", "why it ended", "restored", "lost before")
    return timeline_svg(steps_of(attempts)) + table(columns, rows) + _charts(curves)


def _attempt_row(item: AttemptHistory) -> tuple[object, object, str, str]:
    why = item.ending + (f": {item.cause}" if item.cause else "")
    return item.number, item.workers, why, item.restored or "fresh start"


def _lost(item: AttemptHistory, *, has_s: bool) -> str | None:
    if item.lost_steps is None:
        return None
    return f"{item.lost_steps} steps" + (f", {item.lost_s:.1f} s" if has_s and item.lost_s is not None else "")


def _charts(curves: Curves) -> str:
    charts = (metric_chart(name, [RunCurve("", lines)]) for name, lines in curves.items())
    return "".join(words(chart.name, *chart.notes) + metric_svg(chart) for chart in charts if chart is not None)


def words(*facts: str) -> str:
    """Return a paragraph of facts."""
    return element("p", text_of("; ".join(facts)))


def _address(uri: str) -> str:
    """Return a URI without its settings, which say how to reach the bucket and may be private."""
    return uri.partition("?")[0]
