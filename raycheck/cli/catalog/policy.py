"""The command that prunes many runs by the rules of a file."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from raycheck.bucket.protocol.removal.prune_and_sweep import GRACE_S
from raycheck.bucket.store.address import shown_uri
from raycheck.catalog import policy as policies
from raycheck.catalog.listing import DEPTH
from raycheck.catalog.policy import PrunedRun
from raycheck.cli.options import DryRun, Grace, Json, Price, Storage, Text, Uri, out, print_json, settings_of, yaml_of
from raycheck.cli.progress_bar import progress_bar
from raycheck.views.in_words import PRICE, monthly_cost, size


def prune_runs(  # noqa: PLR0917  typer makes options of them
    prefix: Uri,
    policy: Annotated[Path, typer.Option(help="A YAML file with the rules.")],
    dry_run: DryRun = False,
    depth: Annotated[int, typer.Option(min=0, help="How many folders deep runs may be.")] = DEPTH,
    grace: Grace = GRACE_S,
    price_per_gib_month: Price = PRICE,
    as_json: Json = False,
    storage: Storage = None,
) -> None:
    """Prune all runs under a prefix by rules: what finished, failed, or abandoned runs keep. Running ones continue.

    Exit code 1: some run could not be pruned; the others were.
    """
    rules = yaml_of(policy, option="--policy")
    with progress_bar("runs") as progress:
        found = policies.prune_runs(
            prefix,
            rules,
            dry_run=dry_run,
            depth=depth,
            grace_s=grace,
            storage=settings_of(storage),
            progress=progress,
        )
    freed = sum(run.freed_bytes for run in found)
    cost = monthly_cost(freed, price_per_gib_month)
    if as_json:
        print_json({"runs": [asdict(run) for run in found], "freed_bytes": freed, "cost_per_month": cost})
    else:
        for run in found:
            out.print(Text(f"{run.name or shown_uri(run.uri)} ({run.state}): {_said(run)}"))
        verb = "would be freed" if dry_run else "freed, now or after the grace period"
        out.print(Text(f"{size(freed)} {verb}: {cost:.2f} a month at {price_per_gib_month} per GiB"))
    if any(run.problem for run in found):
        raise typer.Exit(1)


def _said(run: PrunedRun) -> str:
    if run.rule is None:
        return "no rule, left alone"
    if run.problem:
        return f"rule {run.rule}: {run.problem}"
    if run.is_deleted:
        return f"rule {run.rule}: the whole run, {size(run.freed_bytes)}"
    if not run.names:
        return f"rule {run.rule}: nothing to drop"
    return f"rule {run.rule}: {len(run.names)} checkpoints, {size(run.freed_bytes)}"
