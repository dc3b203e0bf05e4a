"""A run's outcome as JSON, as a table for people, and as the block of figures in this folder's README.

The three say the same. A goal that is missed stands in red with its value.
"""

import json
import os
import platform
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.bench.goals import Row
from tests.bench.scale import Bench

Document = dict[str, Any]
PACKAGES = ("torch", "obstore", "s3fs", "aiobotocore", "ray", "isal")
ABOUT = "about"
README = Path(__file__).parent / "README.md"
BEGIN, END = "<!-- figures: written by --write-readme -->", "<!-- end of figures -->"


def document(rows: Sequence[Row], bench: Bench, *, command: str, took_s: float) -> Document:
    """One entry per row by its key, and `about`: machine, placement, server, versions."""
    about = {
        "command": command,
        "scale": bench.scale.name,
        "rounds": bench.scale.rounds,
        "state_bytes": bench.scale.state_bytes,
        "server": bench.server.name,
        "placement": bench.server.placement,
        "machine": f"{os.cpu_count()} cores, {_processor()}, {platform.system()} {platform.release()}",
        "versions": {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}},
        "took_s": took_s,
    }
    return {row.key: row.as_json() for row in rows} | {ABOUT: about}


def print_table(doc: Document) -> None:
    console = Console(width=None if Console().is_terminal else 160)
    about = doc[ABOUT]
    console.print(f"{about['server']}; {about['placement']}; {about['machine']}", highlight=False)
    table = Table()
    for name in ("", "measure", "value", "goal", "low..high", "stock DCP", "peers"):
        table.add_column(name, overflow="fold")
    for key, entry in _entries(doc):
        color = "green" if entry["is_met"] else "red"
        table.add_row(
            key,
            entry["what"],
            f"[{color}]{_number(entry['value'])}[/]",
            _goal(entry),
            _spread(entry),
            _number(entry["today"]),
            _peers(entry),
        )
    console.print(table)
    for key, entry in _entries(doc):
        if entry["note"]:
            console.print(f"{key}: {entry['note']}", highlight=False, markup=False)
    missed = [key for key, entry in _entries(doc) if not entry["is_met"]]
    console.print(f"{len(missed)} of {len(doc) - 1} goals missed or not measured: {', '.join(missed) or 'none'}")


def write_readme(doc: Document, path: Path = README) -> None:
    """Put the figures between the two markers of the README."""
    head, rest = path.read_text().split(BEGIN)
    tail = rest.split(END)[1]
    path.write_text(f"{head}{BEGIN}\n{_markdown(doc)}\n{END}{tail}")


def write_json(doc: Document, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(doc, indent=1) + "\n")


def _markdown(doc: Document) -> str:
    about = doc[ABOUT]
    where = f"`{about['command']}` on {about['machine']}; {about['server']}, {about['placement']}"
    lines = [
        f"{where}; {about['state_bytes'] >> 20} MiB, median of {about['rounds']} rounds (low..high).",
        "",
        "| | measure | value | low..high | goal | stock DCP |",
        "|---|---|---|---|---|---|",
    ]
    for key, entry in _entries(doc):
        value = _number(entry["value"])
        shown = value if entry["is_met"] else f"**{value}** (missed)" if entry["value"] is not None else value
        cells = (key, entry["what"], shown, _spread(entry), _goal(entry), _number(entry["today"]))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _entries(doc: Document) -> list[tuple[str, Any]]:
    return [(key, entry) for key, entry in doc.items() if key != ABOUT]


def _goal(entry: dict[str, Any]) -> str:
    unit = "" if entry["unit"] == "ratio" else f" {entry['unit']}"
    return f"{entry['bound']} {entry['goal']:g}{unit}"


def _spread(entry: dict[str, Any]) -> str:
    spread = entry["spread"]
    return "" if spread is None else f"{_number(spread['low'])}..{_number(spread['high'])}"


def _peers(entry: dict[str, Any]) -> str:
    return "; ".join(f"{name} {_number(value)}" for name, value in entry["peers"].items())


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
