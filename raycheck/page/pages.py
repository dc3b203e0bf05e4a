"""Makes the values that each view shows, by raycheck's public interface. The templates make HTML of them.

Every function here blocks while it reads from the bucket; server.py calls them in threads.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote

import raycheck
from raycheck import ConfigError, NotFoundError, Run, StorageSettings, list_runs, open_run
from raycheck.page.charts import curves_of, timeline_of
from raycheck.views.tensors import with_moments

if TYPE_CHECKING:
    from raycheck.run import CommittedCheckpoint
    from raycheck.views.tensors import TensorSummary

GIB = 2**30
MAX_ROWS = 2000
"""How many tensors one view lists at most; the search finds the others."""
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

    def run(self, name: str) -> Run:
        """Open the run that lies at `name` below the prefix; "" is the run at the prefix itself.

        Raises NotFoundError, also for a name that leads out of the prefix.
        """
        return open_run(self.uri(name), self.storage)

    def name_of(self, uri: str) -> str | None:
        """Return the name of the run with this URI, "" for the prefix itself; None when it is not below the prefix.

        The texts are compared, and nothing is opened. A query says how a bucket is reached, and does not count.
        """
        base, wanted = (text.partition("?")[0].rstrip("/") for text in (self.prefix, uri))
        if wanted == base:
            return ""
        return unquote(wanted.removeprefix(f"{base}/")) if wanted.startswith(f"{base}/") else None

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


def runs_view(place: PageScope) -> dict[str, Any]:
    """Return what the list of runs shows."""
    found = list_runs(place.prefix, place.storage)
    itself = place.prefix.partition("?")[0].rstrip("/")
    rows = [
        {
            "run": run,
            "link": "" if run.uri.partition("?")[0].rstrip("/") == itself else run.name,
            "cost": run.size_bytes / GIB * place.price,
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
    history, kept = run.history(), run.kept()
    reasons = {item.entry.key: item for item in kept.decisions}
    return {
        "name": name,
        "run": run,
        "uri": place.uri(name).partition("?")[0],
        "history": history,
        "timeline": timeline_of(history),
        "curves": curves_of(history),
        "kept": kept,
        "reasons": reasons,
        "freed": sum(item.entry.size_bytes for item in kept.decisions if not item.is_kept),
        "commits": tuple(reversed(history.commits)),
    }


def live_version(place: PageScope, name: str) -> int:
    """Return the number of writes of the run's `latest`: a page that shows another one is out of date."""
    return place.run(name).latest.counter


def checkpoint_view(place: PageScope, name: str, at: str, *, search: str = "") -> dict[str, Any]:
    """Return what the view of a checkpoint shows."""
    run = place.run(name)
    checkpoint = run.at(at)
    manifest = checkpoint.manifest()
    tensors = [item for item in _tensors(checkpoint) if search in item.name]
    index = checkpoint.index(manifest)
    own = sum(
        shard.size_bytes for part in manifest.components if part.checkpoint == manifest.key for shard in part.shards
    )
    return {
        "name": name,
        "uri": place.uri(name).partition("?")[0],
        "entry": checkpoint.entry,
        "manifest": manifest,
        "own_bytes": own,
        "shared_bytes": max(0, checkpoint.entry.size_bytes - own),
        "tensors": with_moments(tensors)[:MAX_ROWS],
        "num_tensors": len(tensors),
        "search": search,
        "others": [item.entry for item in run.checkpoints if item.entry.key != checkpoint.entry.key],
        "values": _values(index.values),
        "rank_values": [_values(values) for values in index.rank_values],
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
    summary = next((item for item in _tensors(checkpoint) if item.name == tensor), None)
    if summary is None:
        raise NotFoundError(f"{checkpoint.entry.key} has no tensor {tensor!r}")
    sample = checkpoint.sample(tensor, max_bytes=max_bytes)
    most = max(sample.counts, default=0)
    heat = [value for line in sample.heat for value in line if value is not None]
    return {
        "name": name,
        "entry": checkpoint.entry,
        "tensor": summary,
        "sample": sample,
        "most": most,
        "hottest": max(heat, default=0.0),
        "budget": MAX_SAMPLE_BYTES,
    }


def diff_view(place: PageScope, name: str, before: str, after: str) -> dict[str, Any]:
    """Return what the comparison of two checkpoints shows."""
    run = place.run(name)
    found = run.at(before).diff(run.at(after))
    changed = [item for item in found.tensors if item.change != "equal"]
    return {"name": name, "diff": found, "changed": changed[:MAX_ROWS], "num_changed": len(changed)}


def _tensors(checkpoint: "CommittedCheckpoint") -> "tuple[TensorSummary, ...]":
    """Return the tensors of a checkpoint. Checkpoints never change, so those looked at last are remembered."""
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
def _remembered(uri: str, key: str, crc: int, asked: _Asked) -> "tuple[TensorSummary, ...]":
    del uri, key, crc
    return asked.checkpoint.tensors()


def version() -> str:
    """Return raycheck's version, for the foot of the page."""
    return str(raycheck.__version__)
