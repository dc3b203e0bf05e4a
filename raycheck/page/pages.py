"""Makes the values that each view shows, by raycheck's public interface. The templates make HTML of them.

Every function here blocks while it reads from the bucket; server.py calls them in threads.
"""

import posixpath
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote

import raycheck
from raycheck import Run, StorageSettings, list_runs, open_run
from raycheck.errors import ConfigError, NotFoundError
from raycheck.views.charts import curves_of, timeline_of
from raycheck.views.difference import compare_indexes
from raycheck.views.in_words import goodput_text
from raycheck.views.tensor_change import compare_tensor
from raycheck.views.tensor_sample import MAX_BYTES, sample_tensor
from raycheck.views.tensors import summarize_tensors, with_moments

if TYPE_CHECKING:
    from raycheck.bucket.format.index import Index
    from raycheck.bucket.format.manifest import Manifest
    from raycheck.run import CommittedCheckpoint
    from raycheck.views.tensors import TensorSummary

GIB = 2**30
MAX_ROWS = 2000
"""How many tensors one view lists at most; the search finds the others."""
MAX_OPENED = 64
MAX_SAMPLE_BYTES = 64 * 1024 * 1024
MAX_VALUE_TEXT = 4000


@dataclass(frozen=True, kw_only=True)
class PageScope:
    """Holds where the page looks, fixed when it starts.

    prefix: the folder of runs, or one run. price: dollars for a GiB and month. can_edit: whether the views offer acts.
    """

    prefix: str
    storage: StorageSettings | None = None
    price: float = 0.023
    can_edit: bool = False
    _last_runs: "OrderedDict[str, Run]" = field(default_factory=OrderedDict, compare=False, repr=False)
    """Runs that were looked at last, by name: their connections serve the next look, too."""

    def run(self, name: str) -> Run:
        """Read the run that lies at `name` below the prefix, as it is now; "" is the run at the prefix itself.

        Raises NotFoundError, also for a name that leads out of the prefix.
        """
        uri = self.uri(name)  # refuses a name that leads out
        known = self._last_runs.pop(name, None)
        run = open_run(uri, self.storage) if known is None else known.reopened()
        self._last_runs[name] = run
        while len(self._last_runs) > MAX_OPENED:
            with suppress(KeyError):  # another thread may have done so
                self._last_runs.popitem(last=False)
        return run

    def name_of(self, uri: str) -> str | None:
        """Return the name of the run with this URI, "" for the prefix itself; None when it is not below the prefix.

        The texts are compared, and nothing is opened. A query says how a bucket is reached, and does not count.
        """
        base, wanted = _address(self.prefix), _address(uri)
        if wanted == base:
            return ""
        return unquote(wanted.removeprefix(f"{base}/")) if wanted.startswith(f"{base}/") else None

    def shown(self, uri: str) -> tuple[str, str | None]:
        """Return how a run's address is shown, and the name under which the page has the run; None if it has not."""
        name = self.name_of(uri)
        return name or _address(uri), name

    def uri(self, name: str) -> str:
        """Return the address of the run at `name`. A query of the prefix stays at its end.

        A name is no part of an address: what has a meaning there is written out, so that no name leads out of the
        prefix or says how a bucket is reached. Raises NotFoundError for one that would.
        """
        base, mark, query = self.prefix.partition("?")
        parts = name.split("/") if name else []
        if any(part in ("", ".", "..") or "\0" in part for part in parts):
            raise NotFoundError(f"{name!r} is no run below {base}")
        steps = [quote(part, safe="", errors="surrogateescape") for part in parts]
        return ("/".join([base.rstrip("/"), *steps]) if steps else base) + mark + query


def _address(uri: str) -> str:
    """Return an address without its settings: they may be nobody else's business."""
    return uri.partition("?")[0].rstrip("/")


def runs_view(place: PageScope) -> dict[str, Any]:
    """Return what the list of runs shows."""
    found = list_runs(place.prefix, place.storage)
    itself = _address(place.prefix)
    forks: dict[str, list[str]] = {}
    for run in found:
        if run.parent is not None:
            forks.setdefault(_address(run.parent), []).append(run.name)
    rows = [
        {
            "run": run,
            "link": "" if _address(run.uri) == itself else run.name,
            "cost": run.size_bytes / GIB * place.price,
            "parent": None if run.parent is None else place.shown(run.parent),
            "forks": [(name, name) for name in forks.get(_address(run.uri), ())],
        }
        for run in found
    ]
    return {
        "rows": rows,
        "total_bytes": sum(run.size_bytes for run in found),
        "total_cost": sum(run.size_bytes for run in found) / GIB * place.price,
    }


def run_view(place: PageScope, name: str) -> dict[str, Any]:
    """Return what the view of a run shows."""
    run = place.run(name)
    history = run.history()
    kept = run.kept(history)
    reasons = {item.entry.key: item for item in kept.decisions}
    return {
        "name": name,
        "run": run,
        "uri": _address(place.uri(name)),
        "history": history,
        "timeline": timeline_of(history.attempts, until=history.until),
        "curves": curves_of(history.attempts),
        "kept": kept,
        "reasons": reasons,
        "freed": sum(item.entry.size_bytes for item in kept.decisions if not item.is_kept),
        "commits": tuple(reversed(history.commits)),
        "goodput": goodput_text(history.goodput, history.goodput_limit),
        "parent": None if history.parent is None else place.shown(history.parent),
        "users": [place.shown(_beside(place.uri(name), way)) for way in sorted(run.lent)],
    }


def _beside(uri: str, way: str) -> str:
    """Return the address of the run at `way` ("../other") from the run at `uri`."""
    scheme, mark, path = _address(uri).partition("://")
    steps = [quote(step, safe="", errors="surrogateescape") for step in way.split("/")]  # a way has names, no address
    return f"{scheme}{mark}{posixpath.normpath('/'.join([path, *steps]))}"


def freed_view(place: PageScope, name: str) -> dict[str, Any]:
    """Return what the view of deletes shows: what a prune and a sweep of the run would free. Writes nothing."""
    run = place.run(name)
    plans = {"prune": run.plan_prune(), "sweep": run.plan_sweep()}
    return {
        "name": name,
        "uri": _address(place.uri(name)),
        "plans": plans,
        "totals": {kind: sum(item.size_bytes for item in plan) for kind, plan in plans.items()},
        "max_rows": MAX_ROWS,
    }


def live_version(place: PageScope, name: str) -> int:
    """Return the number of writes of the run's `latest`: a page that shows another one is out of date."""
    return place.run(name).latest.counter


def checkpoint_view(place: PageScope, name: str, at: str, *, search: str = "") -> dict[str, Any]:
    """Return what the view of a checkpoint shows."""
    run = place.run(name)
    entry = run.at(at).entry
    seen = _opened(run.at(at))
    tensors = [item for item in seen.tensors if search in item.name]
    own = sum(
        shard.size_bytes
        for part in seen.manifest.components
        if part.checkpoint == seen.manifest.key
        for shard in part.shards
    )
    return {
        "name": name,
        "uri": _address(place.uri(name)),
        "entry": entry,
        "manifest": seen.manifest,
        "own_bytes": own,
        "shared_bytes": max(0, entry.size_bytes - own),
        "tensors": with_moments(tensors)[:MAX_ROWS],
        "num_tensors": len(tensors),
        "search": search,
        "others": [item.entry for item in run.checkpoints if item.entry.key != entry.key],
        "values": _values(seen.index.values),
        "rank_values": [_values(values) for values in seen.index.rank_values],
    }


def _values(values: Mapping[str, Any]) -> dict[str, str]:
    """Return the values of each entry as text, cut where it is long."""
    texts = {name: repr(tree) for name, tree in values.items()}
    return {name: text[:MAX_VALUE_TEXT] + " ..." * (len(text) > MAX_VALUE_TEXT) for name, text in texts.items()}


def tensor_view(place: PageScope, name: str, at: str, tensor: str, *, max_bytes: int | None = None) -> dict[str, Any]:
    """Return what the view of a tensor shows: a sample of its values. Raises ConfigError above MAX_SAMPLE_BYTES."""
    if max_bytes is not None and max_bytes > MAX_SAMPLE_BYTES:
        raise ConfigError(f"max_bytes={max_bytes}: one view reads at most {MAX_SAMPLE_BYTES} bytes")
    checkpoint = place.run(name).at(at)
    seen = _opened(checkpoint)
    summary = next((item for item in seen.tensors if item.name == tensor), None)
    if summary is None:
        raise NotFoundError(f"{checkpoint.entry.key} has no tensor {tensor!r}")
    most = MAX_BYTES if max_bytes is None else max_bytes
    return {
        "name": name,
        "entry": checkpoint.entry,
        "tensor": summary,
        "sample": sample_tensor(checkpoint.store, seen.manifest, seen.index, tensor, max_bytes=most),
        "budget": MAX_SAMPLE_BYTES,
    }


def diff_view(place: PageScope, name: str, before: str, after: str, *, tensor: str = "") -> dict[str, Any]:
    """Return what the comparison of two checkpoints shows. tensor: one whose values are read and compared."""
    run = place.run(name)
    two = run.at(before), run.at(after)
    ours, theirs = run.store.together(partial(_opened, two[0]), partial(_opened, two[1]))
    found = compare_indexes(ours.index, theirs.index, names=(two[0].entry.key, two[1].entry.key))
    changed = [item for item in found.tensors if item.change != "equal"]
    moved = None
    if tensor:
        old, new = (ours.manifest, ours.index), (theirs.manifest, theirs.index)
        moved = compare_tensor(run.store, old, new, tensor, max_bytes=MAX_SAMPLE_BYTES)
    return {
        "name": name,
        "diff": found,
        "changed": changed[:MAX_ROWS],
        "num_changed": len(changed),
        "moved": moved,
    }


@dataclass(frozen=True, slots=True)
class _Opened:
    """Holds what a checkpoint's documents say. Checkpoints never change, so those looked at last are remembered."""

    manifest: "Manifest"
    index: "Index"
    tensors: "tuple[TensorSummary, ...]"


def _opened(checkpoint: "CommittedCheckpoint") -> _Opened:
    """Return what a checkpoint's documents say, which are read once, and both at a time."""
    return _remembered(checkpoint.store.uri, checkpoint.entry.key, checkpoint.entry.manifest_crc32, _Asked(checkpoint))


class _Asked:
    """Carries a checkpoint past the cache: equal to every other, so that the other arguments alone are the key."""

    def __init__(self, checkpoint: "CommittedCheckpoint") -> None:
        self.checkpoint = checkpoint

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Asked)

    def __hash__(self) -> int:
        return 0


@lru_cache(maxsize=8)
def _remembered(uri: str, key: str, crc: int, asked: _Asked) -> _Opened:
    del uri, key, crc
    whole = replace(asked.checkpoint, documents=asked.checkpoint.read_documents())
    manifest = whole.manifest()
    index = whole.index(manifest)
    return _Opened(manifest, index, summarize_tensors(manifest, index))


def version() -> str:
    """Return raycheck's version, for the foot of the page."""
    return str(raycheck.__version__)
