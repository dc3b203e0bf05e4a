"""Computes the values that each view shows, using raycheck's public interface. The templates render them as HTML.

Every function here blocks while it reads from the bucket; server.py calls them in threads.
"""

import json
import posixpath
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote

import raycheck
from raycheck import Run, StorageSettings
from raycheck.catalog import RunFolder
from raycheck.errors import ConfigError, NotFoundError, RaycheckError
from raycheck.terminal import printable_lines
from raycheck.values import RunSummary
from raycheck.views.charts import RIGHT, WIDTH, timeline_of
from raycheck.views.context_pool import ContextPool
from raycheck.views.in_words import PRICE, goodput_text, monthly_cost, short_number
from raycheck.views.measured import measured_of
from raycheck.views.metric_charts import MAX_CHARTS, MetricChart, RunCurve, metric_chart
from raycheck.views.tensors import with_moments

if TYPE_CHECKING:
    from raycheck.values import CommittedCheckpoint
    from raycheck.views.history import RunHistory

MAX_ROWS = 2000
"""The maximum number of rows in one table; the search finds other tensors."""
MAX_RUNS = 8
"""The maximum number of runs in one chart."""
MAX_COLUMNS = 4
"""The maximum number of metrics with a column of their own, by which a table can be sorted."""
MAX_SAMPLE_BYTES = 64 * 1024 * 1024
MAX_VALUE_TEXT = 4000


@dataclass(frozen=True, kw_only=True)
class PageScope:
    """The page's location and options, fixed at its start.

    prefix: the folder of runs, or one run. price: dollars per GiB and month. can_edit: whether the views offer actions.
    """

    prefix: str
    storage: StorageSettings | None = None
    price: float = PRICE
    can_edit: bool = False

    @cached_property
    def folder(self) -> RunFolder:
        """The client for all views."""
        return RunFolder(self.prefix, self.storage)

    def run(self, name: str) -> Run:
        """Read the run at `name` under the prefix, in its current state; "" is the run at the prefix itself.

        Raises NotFoundError, including for a name that leads out of the prefix.
        """
        self.uri(name)  # refuses a name that leads out
        return self.folder.run(*(name.split("/") if name else ()))

    def may_have(self, name: str) -> bool:
        """Return whether a run may have this name, that is, whether the name stays under the prefix."""
        try:
            self.uri(name)
        except NotFoundError:
            return False
        return True

    def name_of(self, uri: str) -> str | None:
        """Return the name of the run with this URI, "" for the prefix itself, or None if it is not under the prefix.

        Only the texts are compared; nothing is opened. The query is ignored, because it only says how to reach the
        bucket.
        """
        base, wanted = _address(self.prefix), _address(uri)
        if wanted == base:
            return ""
        return unquote(wanted.removeprefix(f"{base}/")) if wanted.startswith(f"{base}/") else None

    def shown(self, uri: str) -> tuple[str, str | None]:
        """Return the displayed form of a run's URI, and the run's name on this page or None."""
        name = self.name_of(uri)
        return name or _address(uri), name

    def uri(self, name: str) -> str:
        """Return the URI of the run at `name`, with the prefix's query at its end.

        Special characters in a name are escaped, so that no name leads out of the prefix or adds settings. Raises
        NotFoundError for a name that would lead out.
        """
        base, mark, query = self.prefix.partition("?")
        parts = name.split("/") if name else []
        if any(part in ("", ".", "..") or "\0" in part for part in parts):
            raise NotFoundError(f"{name!r} is not a run under {base}")
        steps = [quote(part, safe="", errors="surrogateescape") for part in parts]
        return ("/".join([base.rstrip("/"), *steps]) if steps else base) + mark + query


def _address(uri: str) -> str:
    """Return a URI without its settings, which may be private."""
    return uri.partition("?")[0].rstrip("/")


def runs_view(place: PageScope) -> dict[str, Any]:
    """Return the values of the list of runs."""
    found = place.folder.runs()
    itself = _address(place.prefix)
    forks: dict[str, list[str]] = {}
    for run in found:
        if run.parent is not None:
            forks.setdefault(_address(run.parent), []).append(run.name)
    rows = [
        {
            "run": run,
            "seen": _last_seen(run),
            "link": "" if _address(run.uri) == itself else run.name,
            "cost": monthly_cost(run.size_bytes, place.price),
            "parent": None if run.parent is None else place.shown(run.parent),
            "forks": [(name, name) for name in forks.get(_address(run.uri), ())],
        }
        for run in found
    ]
    total = sum(run.size_bytes for run in found)
    return {
        "rows": rows,
        "metrics": columns_of([run.metrics for run in found]),
        "total_bytes": total,
        "total_cost": monthly_cost(total, place.price),
        "old_s": None,
    }


def _last_seen(run: RunSummary) -> tuple[float, float] | None:
    """Return when a run's last sign of life was, and the time of the listing; None if there was no sign."""
    if run.idle_s is None:
        return None
    now = time.time() if run.committed_at is None or run.age_s is None else run.committed_at + run.age_s
    return now - run.idle_s, now


def columns_of(found: Iterable[Mapping[str, float]]) -> tuple[str, ...]:
    """Return the metrics that get a column of a table, by name: those that most rows have, at most MAX_COLUMNS."""
    counts = Counter(name for metrics in found for name in metrics)
    return tuple(sorted(sorted(counts, key=lambda name: (-counts[name], name))[:MAX_COLUMNS]))


@dataclass(frozen=True, kw_only=True)
class ChartOptions:
    """Options for a chart of metrics. smooth: from 0 to below 1. only: a part of the names of the metrics to show."""

    is_log: bool = False
    smooth: float = 0.0
    only: str = ""


def charts_view(found: Sequence[tuple[str, "RunHistory"]], options: ChartOptions) -> dict[str, Any]:
    """Return the charts of the metrics of runs, at most MAX_CHARTS, each with the values that the crosshair shows."""
    names = sorted({metric for _, history in found for metric in history.metrics if options.only in metric})
    charts = []
    for metric in names[:MAX_CHARTS]:
        curves = [RunCurve(label, history.curve(metric)) for label, history in found]
        chart = metric_chart(metric, curves, is_log=options.is_log, smooth=options.smooth)
        if chart is not None:
            charts.append((chart, crosshair(chart)))
    return {"charts": charts, "options": options, "num_metrics": len(names), "max_charts": MAX_CHARTS}


def crosshair(chart: MetricChart) -> str:
    """Return the values of a chart as JSON, for static/page.js."""
    lines = [
        {
            "run": path.run,
            "label": printable_lines(", ".join(path.words)),
            "steps": [step for step, _ in path.points[path.is_joined :]],
            "values": [short_number(value) for _, value in path.points[path.is_joined :]],
        }
        for path in chart.paths
        if not path.is_faint
    ]
    ends = {"first": chart.first, "last": chart.last, "left": chart.left, "right": WIDTH - RIGHT}
    return json.dumps({**ends, "lines": lines})


def compare_view(place: PageScope, *names: str, options: ChartOptions) -> dict[str, Any]:
    """Return the metrics of several runs, one over the other. A run that cannot be read is left out, and says why.

    Raises ConfigError above MAX_RUNS.
    """
    if len(names) > MAX_RUNS:
        raise ConfigError(f"{len(names)} runs are chosen: one chart shows at most {MAX_RUNS}")
    with ContextPool(max(1, len(names)), thread_name_prefix="raycheck-compare") as pool:
        answers = list(zip(names, pool.map(lambda name: _history_or_error(place, name), names), strict=True))
    found = [(name, answer) for name, answer in answers if not isinstance(answer, RaycheckError)]
    labels = [name or "run" for name, _ in found]
    return {
        "names": [name for name, _ in found],
        "labels": labels,
        "missing": [(name, str(answer)) for name, answer in answers if isinstance(answer, RaycheckError)],
        **charts_view(list(zip(labels, (history for _, history in found), strict=True)), options),
    }


def _history_or_error(place: PageScope, name: str) -> "RunHistory | RaycheckError":
    try:
        return place.run(name).history()
    except RaycheckError as error:
        return error


def run_view(place: PageScope, name: str, options: ChartOptions = ChartOptions()) -> dict[str, Any]:
    """Return the values of a run's view."""
    run = place.run(name)
    history = run.history()
    kept = run.kept(history)
    measured = measured_of(history)
    columns = columns_of(measured.values())
    return {
        "name": name,
        "run": run,
        "uri": _address(place.uri(name)),
        "history": history,
        "timeline": timeline_of(history.attempts, until=history.until),
        **charts_view([("", history)], options),
        "kept": kept,
        "published": run.published(),
        "reasons": {item.key: item for item in kept.decisions},
        "shares": {item.key: item.shares_with for item in run.checkpoints},
        "freed": sum(item.size_bytes for item in kept.decisions if not item.is_kept),
        "commits": tuple(reversed(history.commits))[:MAX_ROWS],
        "metrics": columns,
        "has_others": any(values.keys() - set(columns) for values in measured.values()),
        "measured_of": measured,
        "goodput": goodput_text(history.goodput, history.goodput_limit),
        "parent": None if history.parent is None else place.shown(history.parent),
        "users": [place.shown(_beside(place.uri(name), way)) for way in sorted(run.lent)],
    }


def values_of(item: "CommittedCheckpoint") -> dict[str, float]:
    """Return the metrics of a checkpoint; a score takes the place of a metric of the same name."""
    return {**item.metrics, **item.scores}


def _beside(uri: str, way: str) -> str:
    """Return the URI of the run at the relative path `way` ("../other") from the run at `uri`."""
    scheme, mark, path = _address(uri).partition("://")
    steps = [
        quote(step, safe="", errors="surrogateescape") for step in way.split("/")
    ]  # a path consists of names, not URIs
    return f"{scheme}{mark}{posixpath.normpath('/'.join([path, *steps]))}"


def freed_view(place: PageScope, name: str) -> dict[str, Any]:
    """Return what a prune and a sweep of the run would free, without writing anything."""
    run = place.run(name)
    plans = {"prune": run.prune(dry_run=True), "sweep": run.sweep(dry_run=True)}
    later = {kind: sum(item.size_bytes for item in plan if item.wait_s) for kind, plan in plans.items()}
    return {
        "name": name,
        "uri": _address(place.uri(name)),
        "plans": plans,
        "totals": {kind: sum(item.size_bytes for item in plan) for kind, plan in plans.items()},
        "later": later,
        "max_rows": MAX_ROWS,
    }


def live_version(place: PageScope, name: str) -> int:
    """Return the number of writes of the run's `latest`; a page with another number is out of date."""
    return place.run(name).num_writes


def checkpoint_view(place: PageScope, name: str, at: str, *, search: str = "") -> dict[str, Any]:
    """Return the values of a checkpoint's view."""
    run = place.run(name)
    checkpoint = run.at(at)
    seen = _opened(checkpoint)
    details = seen.details(values=True)
    tensors = [item for item in seen.tensors() if search in item.name]
    rows = with_moments(tensors)
    return {
        "name": name,
        "uri": _address(place.uri(name)),
        "checkpoint": checkpoint,
        "details": details,
        "shared_bytes": max(0, checkpoint.size_bytes - details.own_bytes),
        "tensors": rows[:MAX_ROWS],
        "num_left_out": max(0, len(rows) - MAX_ROWS),
        "num_tensors": len(tensors),
        "search": search,
        "reason": _reason(run, checkpoint),
        "measured": values_of(checkpoint) or dict(details.metrics),
        "others": _others(run, checkpoint),
        "values": _values(details.values),
        "rank_values": [_values(values) for values in details.rank_values],
    }


def _reason(run: Run, checkpoint: "CommittedCheckpoint") -> str:
    """Return why the next commit would keep or drop a checkpoint, by the settings of the newest one."""
    if checkpoint.damaged:
        return f"DAMAGED: {checkpoint.damaged}"
    try:
        kept = run.kept(None if run.head is None else _opened(run.head).details())
    except RaycheckError as error:  # the newest checkpoint has the rules; the view of this one needs no other
        return f"unknown: {error}"
    found = next((item for item in kept.decisions if item.key == checkpoint.key), None)
    if found is None:
        return "unknown"
    return found.reason if found.is_kept else f"nothing: {found.reason}"


def _others(run: Run, checkpoint: "CommittedCheckpoint") -> list[tuple["CommittedCheckpoint", str]]:
    """Return at most MAX_ROWS other checkpoints, each with "older" or "newer". The one before this comes first."""
    keys = [item.key for item in run.checkpoints]
    place = keys.index(checkpoint.key) if checkpoint.key in keys else len(keys)
    older, newer = run.checkpoints[:place], run.checkpoints[place + 1 :]
    return ([(item, "older") for item in reversed(older)] + [(item, "newer") for item in newer])[:MAX_ROWS]


def _values(values: Mapping[str, Any]) -> dict[str, str]:
    """Return the values of each entry as text, truncated if long."""
    texts = {name: repr(tree) for name, tree in values.items()}
    return {name: text[:MAX_VALUE_TEXT] + " ..." * (len(text) > MAX_VALUE_TEXT) for name, text in texts.items()}


def tensor_view(place: PageScope, name: str, at: str, tensor: str, *, max_bytes: int | None = None) -> dict[str, Any]:
    """Return the values of a tensor's view, with sampled elements. Raises ConfigError above MAX_SAMPLE_BYTES."""
    if max_bytes is not None and max_bytes > MAX_SAMPLE_BYTES:
        raise ConfigError(f"max_bytes={max_bytes}: one view reads at most {MAX_SAMPLE_BYTES} bytes")
    checkpoint = place.run(name).at(at)
    seen = _opened(checkpoint)
    summary = next((item for item in seen.tensors() if item.name == tensor), None)
    if summary is None:
        raise NotFoundError(f"{checkpoint.key} has no tensor {tensor!r}")
    sample = seen.sample(tensor, max_bytes=max_bytes)
    return {
        "name": name,
        "checkpoint": checkpoint,
        "tensor": summary,
        "sample": sample,
        "hottest": max((value for line in sample.heat for value in line if value is not None), default=0.0),
        "budget": MAX_SAMPLE_BYTES,
    }


def diff_view(place: PageScope, name: str, before: str, after: str, *, tensor: str = "") -> dict[str, Any]:
    """Return the values of the comparison of two checkpoints, from the older to the newer, in whichever order they are
    given. tensor: a tensor whose elements to read and compare."""
    run = place.run(name)
    committed = {item.key: number for number, item in enumerate(run.checkpoints)}
    pair = sorted((run.at(before), run.at(after)), key=lambda item: committed.get(item.key, -1))
    with ContextPool(2, thread_name_prefix="raycheck-diff") as pool:
        ours, theirs = pool.map(_opened, pair)
    found = ours.diff(theirs)
    changed = [item for item in found.tensors if item.change != "equal"]
    moved = ours.compare_values(theirs, tensor, max_bytes=MAX_SAMPLE_BYTES) if tensor else None
    return {
        "name": name,
        "diff": found,
        "pair": pair,
        "changed": changed[:MAX_ROWS],
        "num_changed": len(changed),
        "moved": moved,
    }


def _opened(checkpoint: "CommittedCheckpoint") -> "CommittedCheckpoint":
    """Return a checkpoint whose documents are read. Checkpoints never change, so recent ones are cached."""
    return _remembered(checkpoint.uri, checkpoint.key, checkpoint.committed_at, _Asked(checkpoint))


class _Asked:
    """A wrapper that is equal to every other, so that a checkpoint is not part of the cache's key."""

    def __init__(self, checkpoint: "CommittedCheckpoint") -> None:
        self.checkpoint = checkpoint

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Asked)

    def __hash__(self) -> int:
        return 0


@lru_cache(maxsize=8)
def _remembered(uri: str, key: str, committed_at: float, asked: _Asked) -> "CommittedCheckpoint":
    del uri, key, committed_at
    return asked.checkpoint.opened()


def version() -> str:
    """Return raycheck's version for the page footer."""
    return str(raycheck.__version__)
