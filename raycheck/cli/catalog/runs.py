"""The command that lists the runs of a bucket. It writes nothing (I8)."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Annotated, cast, get_args

import typer
from rich.console import Console

from raycheck.bucket.run_status import ago
from raycheck.bucket.store.address import shown_uri
from raycheck.catalog.listing import DEPTH, RunState, RunSummary, Sort, list_runs
from raycheck.cli.options import Json, Price, Storage, Text, out, print_json, print_table, settings_of
from raycheck.errors import ConfigError
from raycheck.views.in_words import PRICE, counted, monthly_cost, short_number, size

STATES = tuple(name for literal in get_args(RunState) for name in get_args(literal))
IN_TROUBLE = ("lost", "damaged", "newer", "unreadable")


def runs(
    prefix: Annotated[str, typer.Argument(help="Where the runs are, e.g. s3://bucket/runs, or one run.")],
    *,
    depth: Annotated[int, typer.Option(help="How many folders deep a run may be below it.")] = DEPTH,
    sort: Annotated[str, typer.Option(help="age (newest commit first), name or size (largest first).")] = "age",
    state: Annotated[
        list[str] | None,
        typer.Option(metavar="STATE", help=f"Only these: {', '.join(STATES)}. Repeatable."),
    ] = None,
    price_per_gib_month: Price = PRICE,
    as_json: Json = False,
    storage: Storage = None,
) -> None:
    """List the runs in a bucket: the state, last step, size, and storage cost of each.

    Nothing in a run is listed; only its pointer `latest` and the record of its attempt are read. The exit code is 1 if
    a run's `latest` is lost or damaged.
    """
    if unknown := set(state or ()) - set(STATES):
        raise ConfigError(f"--state {min(unknown)}: give one of {', '.join(STATES)}")
    with _progress() as on_look:
        every = list_runs(prefix, settings_of(storage), depth=depth, sort=cast("Sort", sort), on_look=on_look)
    found = [run for run in every if not state or run.state in state]
    if as_json:
        print_json(
            {
                "prefix": prefix,
                "price_per_gib_month": price_per_gib_month,
                "runs": [asdict(run) | _costs(run, price_per_gib_month) for run in found],
            }
        )
    elif every and not found:
        out.print(
            Text(f"{shown_uri(prefix)}: no run here has the state {' or '.join(state or ())} ({len(every)} others)")
        )
    elif not found:
        out.print(Text(f"{shown_uri(prefix)}: no runs here or in the folders under it (--depth {depth})"))
    else:
        _print_table(found, price_per_gib_month)
    if any(run.state in ("lost", "damaged") for run in every):
        raise typer.Exit(1)


def _print_table(found: Sequence[RunSummary], price: float) -> None:
    rows = []
    for run in found:
        cost = _costs(run, price)
        is_readable = run.state not in IN_TROUBLE
        cells = (
            run.name,
            f"{run.state}, resumable" if run.is_resumable else run.state,
            "" if run.step is None else run.step,
            "" if run.age_s is None else f"{ago(run.age_s)} ago",
            _range(size(run.size_bytes), size(run.max_size_bytes)) if is_readable else "",
            _range(f"{cost['cost_per_month']:.2f}", f"{cost['max_cost_per_month']:.2f}") if is_readable else "",
            "  ".join(f"{name} {short_number(value)}" for name, value in sorted(run.metrics.items())),
            shown_uri(run.parent or ""),
        )
        rows.append(cells)
    print_table(("run", "state", "step", "committed", "size", "a month", "metrics", "from"), rows)
    troubled = [run for run in found if run.state in (*IN_TROUBLE, "deleted")]
    for run in troubled:
        out.print(Text(f"\n{run.name}: {run.text}"))
    least, most = (sum(sizes) for sizes in zip(*((run.size_bytes, run.max_size_bytes) for run in found), strict=True))
    total = _range(size(least), size(most))
    cost_of_all = _range(f"{monthly_cost(least, price):.2f}", f"{monthly_cost(most, price):.2f}")
    out.print(
        Text(
            f"\n{counted(len(found), 'run')}, {total}; {cost_of_all} a month, assuming {price:g} per GiB and month "
            "(--price-per-gib-month) for the bytes of live checkpoints only"
        )
    )


def _costs(run: RunSummary, price: float) -> dict[str, float]:
    return {
        "cost_per_month": monthly_cost(run.size_bytes, price),
        "max_cost_per_month": monthly_cost(run.max_size_bytes, price),
    }


def _range(least: str, most: str) -> str:
    return least if least == most else f"{least} to {most}"


@contextmanager
def _progress() -> Iterator[Callable[[int, int], None]]:
    """Show the listing's progress on stderr if it is a terminal."""
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield lambda *_: None
        return
    with console.status("") as status:
        yield lambda looked, found: status.update(Text(f"{found} runs in {looked} folders"))
