"""The command `history`: everything that a run was, whatever of it still exists. It writes nothing (I8)."""

import csv
import math
import sys
from dataclasses import asdict
from typing import Annotated, Any

import typer

from raycheck.bucket.store.address import shown_uri
from raycheck.cli.options import Json, Storage, Text, Uri, out, print_json, print_table, settings_of
from raycheck.errors import ConfigError
from raycheck.run import open_run
from raycheck.terminal import printable
from raycheck.values import AttemptHistory, RunHistory
from raycheck.views.history import COLUMNS, column_of
from raycheck.views.in_words import counted, short_number, size, time_of
from raycheck.views.measured import measured_of


def history(
    uri: Uri,
    as_json: Json = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print the metrics of all steps as CSV.")] = False,
    storage: Storage = None,
) -> None:
    """Show all attempts and commits of a run, with what became of each, and the metrics of its steps."""
    if as_json and as_csv:
        raise ConfigError("give only one of --json and --csv")
    found = open_run(uri, settings_of(storage)).history()
    if as_csv:
        _print_csv(found)
    elif as_json:
        print_json(_facts(found))
    else:
        _print_tables(found)
    for problem in found.problems:
        print(printable(f"raycheck: {problem}"), file=sys.stderr)  # noqa: T201  not among the data


def _print_tables(found: RunHistory) -> None:
    measured = measured_of(found)
    for attempt in found.attempts:
        ranks = counted(attempt.world_size, "rank") if attempt.world_size else attempt.workers
        end = attempt.ending + (f": {attempt.cause}" if attempt.cause else "")
        out.print(
            Text(f"attempt {attempt.number}, {ranks}, {_origin(found, attempt)}, {time_of(attempt.began_at)}; {end}")
        )
        rows = []
        for commit in attempt.commits:
            state = commit.state + (f": {commit.damaged or commit.why}" if commit.damaged or commit.why else "")
            values = sorted(measured[commit.key].items())
            metrics = "  ".join(f"{name} {short_number(value)}" for name, value in values)
            branch = "abandoned" if commit.is_abandoned else ""
            rows.append((commit.step, commit.key, size(commit.size_bytes), time_of(commit.at), state, branch, metrics))
        if rows:
            print_table(("step", "checkpoint", "size", "committed", "state", "", "metrics"), rows)
        out.print(Text(""))
    thinned = f", older ones one per {found.every} steps" if found.every > 1 else ""
    attempts, commits = counted(len(found.attempts), "attempt"), counted(len(found.commits), "commit")
    out.print(Text(f"{attempts}, {commits}, metrics of {counted(len(found.rows()), 'step')}{thinned} (--csv)"))


def _origin(found: RunHistory, attempt: AttemptHistory) -> str:
    if not attempt.number:
        return f"forked from {shown_uri(found.parent)}" if found.parent else "brought from elsewhere"
    return f"from {attempt.restored}" if attempt.restored else "fresh start"


def _facts(found: RunHistory) -> dict[str, Any]:
    return {
        "run": found.uri,
        "run_id": found.run_id,
        "state": found.status.state,
        "attempts": [
            {name: value for name, value in asdict(item).items() if name not in ("commits", "resume")}
            for item in found.attempts
        ],
        "commits": [asdict(commit) for commit in found.commits],
        "every": found.every,
        "rows": [{name: _json(value) for name, value in row.items()} for row in found.rows()],
        "problems": list(found.problems),
    }


def _json(value: float | bool | None) -> float | int | bool | str | None:
    """Return text for the numbers that JSON cannot express: NaN, Infinity, -Infinity. null means that there is none."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def _print_csv(found: RunHistory) -> None:
    """Print a line per step. Numbers are exact, and a metric that a step did not have is empty."""
    names = [*COLUMNS, *map(column_of, found.metrics)]
    header = list(map(printable, names))
    if len(set(header)) < len(names):  # a name has a control character, and another one the text that is shown for it
        header = [printable(name.replace("\\", "\\\\")) for name in names]
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(header)
    for row in found.rows():
        writer.writerow(["" if (value := row.get(name)) is None else value for name in names])
