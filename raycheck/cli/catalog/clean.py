"""The command that frees an amount of space in a folder of runs."""

from dataclasses import asdict
from typing import Annotated

import typer

from raycheck.bucket.protocol.removal.prune_and_sweep import GRACE_S
from raycheck.bucket.store.address import shown_uri
from raycheck.catalog.free_space import Cleaned, plan_clean
from raycheck.catalog.listing import DEPTH
from raycheck.cli.catalog.delete import Yes, confirm
from raycheck.cli.options import (
    DryRun,
    Grace,
    Json,
    Storage,
    Text,
    Uri,
    bytes_of,
    out,
    print_json,
    print_table,
    settings_of,
)
from raycheck.cli.progress_bar import progress_bar
from raycheck.views.in_words import size, time_of


def clean(  # noqa: PLR0917  typer makes options of them
    prefix: Uri,
    free: Annotated[str, typer.Option(help="How much space to free, e.g. 50GB.")],
    yes: Yes = False,
    dry_run: DryRun = False,
    depth: Annotated[int, typer.Option(min=0, help="How many folders deep runs may be.")] = DEPTH,
    grace: Grace = GRACE_S,
    as_json: Json = False,
    storage: Storage = None,
) -> None:
    """Free space: drop the oldest checkpoints of all runs under a prefix that nothing needs, until it is enough.

    What prunes and sweeps would delete goes first. The head, the newest, the best, pinned and named checkpoints of a
    run stay, as does what other runs use or what is being exported. Running training is left alone. It shows what would
    go, and asks before it does it. Exit code 1: some run could not be read or changed; the others were.
    """
    with progress_bar("runs") as progress:
        plan = plan_clean(
            prefix,
            bytes_of(free, option="--free"),
            depth=depth,
            grace_s=grace,
            storage=settings_of(storage),
            progress=progress,
        )
    done = plan.cleaned
    if not as_json:
        _print_plan(done)
    if not dry_run:
        word = shown_uri(prefix).rstrip("/").rpartition("/")[2]
        confirm(_sum_of(done), word, yes=yes)
        with progress_bar("runs") as progress:
            done = plan.carry_out(progress)
    if as_json:
        print_json(asdict(done) | {"freed_bytes": done.freed_bytes})
    else:
        out.print(Text(f"{_sum_of(done)} would be deleted" if dry_run else _said(done, grace)))
        for name, problem in done.problems.items():
            out.print(Text(f"{name}: {problem}"))
    if done.problems:
        raise typer.Exit(1)


def _print_plan(plan: Cleaned) -> None:
    rows = [
        (
            item.run,
            item.name,
            "" if item.committed_at is None else time_of(item.committed_at),
            size(item.size_bytes),
            item.reason,
            f"in {item.wait_s:.0f} s" if item.wait_s else "now",
        )
        for item in plan.freed
    ]
    print_table(("run", "what", "committed", "frees", "why", "when"), rows)
    for name, why in plan.left_alone.items():
        out.print(Text(f"{name} is left alone: {why}"))


def _sum_of(done: Cleaned) -> str:
    num_runs = len({item.uri for item in done.freed})
    num_listed = sum(item.committed_at is not None for item in done.freed)
    listed = f"{num_listed} listed checkpoint{'s' * (num_listed != 1)}"
    return f"{size(done.freed_bytes)} ({listed}) in {num_runs} run{'s' * (num_runs != 1)}"


def _said(done: Cleaned, grace_s: float) -> str:
    later = sum(item.size_bytes for item in done.freed if not item.is_deleted)
    said = f"{size(done.freed_bytes - later)} deleted"
    if not later:
        return said
    return (
        f"{said}; {size(later)} dropped, and deleted after {grace_s:.0f} s for readers: by training, by raycheck "
        f"prune, or by this command with --free {later}"
    )
