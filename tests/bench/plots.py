"""Pictures of a run, from its JSON alone: shares of the raw throughput, steps beside uploads, goals met and missed."""

from pathlib import Path
from typing import Any

from tests.bench.report import ABOUT, Document

OURS, PEERS, MISSED = "#2c7fb8", "#bbbbbb", "#d7301f"


def write_plots(doc: Document, folder: Path) -> list[Path]:
    """The files written. Raises ImportError without matplotlib (`pip install 'raycheck[bench]'`)."""
    import matplotlib as mpl

    mpl.use("Agg")
    folder.mkdir(parents=True, exist_ok=True)
    drawn = {"throughput": _throughput(doc), "training": _training(doc), "goals": _goals(doc)}
    paths = []
    for name, figure in drawn.items():
        if figure is not None:
            paths.append(folder / f"{name}.png")
            figure.savefig(paths[-1], dpi=120, bbox_inches="tight")
    return paths


def _throughput(doc: Document) -> Any:
    """Save and load as shares of the raw client, both engines and the peers."""
    import matplotlib.pyplot as plt

    if not {"R2", "R3"} <= doc.keys() or doc["R2"]["value"] is None or doc["R3"]["value"] is None:
        return None
    figure, axes = plt.subplots(1, 2, figsize=(11, 3.5), sharex=True)
    for axis, key, title in zip(axes, ("R2", "R3"), ("save", "load"), strict=True):
        ours = {
            f"raycheck, {engine}": doc[row]["details"] for engine, row in (("fast", key), ("fsspec", f"{key}.fsspec"))
        }
        shares = {name: details["few large"] for name, details in ours.items()} | doc[key]["peers"]
        colors = [OURS if name in ours else PEERS for name in shares]
        axis.barh(list(shares), list(shares.values()), color=colors)
        axis.axvline(doc[key]["goal"], color="black", linewidth=1)
        axis.axvline(doc[f"{key}.fsspec"]["goal"], color="black", linewidth=1, linestyle=":")
        axis.invert_yaxis()
        axis.set_title(f"{title}: share of the raw client (few large tensors)")
    figure.tight_layout()
    return figure


def _training(doc: Document) -> Any:
    """Mean step while uploading over mean step without."""
    import matplotlib.pyplot as plt

    if "R9" not in doc or doc["R9"]["value"] is None:
        return None
    details = doc["R9"]["details"] | doc["R9.fsspec"]["details"] | doc["R9"]["peers"]
    found = {name: value for name, value in details.items() if not name.endswith("MB/s")}
    figure, axis = plt.subplots(figsize=(7, 3.5))
    axis.barh(
        list(found), list(found.values()), color=[PEERS if name in doc["R9"]["peers"] else OURS for name in found]
    )
    axis.axvline(1.0, color="black", linewidth=1)
    axis.invert_yaxis()
    axis.set_title("mean step while uploading / without")
    return figure


def _goals(doc: Document) -> Any:
    """How far each value is on the good side of its goal, on a logarithmic scale."""
    import matplotlib.pyplot as plt

    rows = [(key, entry) for key, entry in doc.items() if key != ABOUT and entry["value"] is not None]
    labels = [f"{key} {entry['what']}" for key, entry in rows]
    distances = [_distance(entry) for _, entry in rows]
    figure, axis = plt.subplots(figsize=(8, 0.35 * len(rows) + 1))
    axis.barh(labels, distances, color=[OURS if entry["is_met"] else MISSED for _, entry in rows])
    axis.axvline(0.0, color="black", linewidth=1)
    axis.invert_yaxis()
    axis.set_title("better than its goal, in factors of ten (missed: left)")
    return figure


def _distance(entry: dict[str, Any]) -> float:
    """0 at the goal. A count of nothing, whose goal is nothing, is at it; values and goals of 0 count as 0.1."""
    import math

    value, goal = max(entry["value"], 0.1), max(entry["goal"], 0.1)
    return math.log10(value / goal if entry["bound"] == "at least" else goal / value)
