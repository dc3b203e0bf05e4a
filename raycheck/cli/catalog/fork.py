"""The command that creates a run from another run's checkpoint."""

from dataclasses import asdict
from typing import Annotated

import typer

from raycheck.bucket.store.address import shown_uri
from raycheck.catalog.forks import fork_run
from raycheck.cli.options import DryRun, Json, Step, Storage, Text, Uri, out, print_json, settings_of
from raycheck.cli.progress_bar import progress_bar
from raycheck.views.in_words import size


def fork(  # noqa: PLR0917  typer makes options of them
    source: Uri,
    to: Annotated[str, typer.Argument(metavar="TO", help="Where the new run begins.")],
    at: Step = None,
    copy: Annotated[bool, typer.Option(help="Copy the tensors also within one bucket.")] = False,
    dry_run: DryRun = False,
    as_json: Json = False,
    storage: Storage = None,
) -> None:
    """Create a run from a checkpoint of another one. Within one bucket no tensor is copied.

    The checkpoint is the head, or the one of --at.
    """
    with progress_bar() as progress:
        done = fork_run(source, to, at, copy=copy, dry_run=dry_run, storage=settings_of(storage), progress=progress)
    if as_json:
        print_json(asdict(done))
    elif not done.is_new:
        nothing = "nothing would be done" if dry_run else "nothing was done"
        out.print(Text(f"{shown_uri(to)} already exists, with {done.key}; {nothing}"))
    else:
        sizes = f"{size(done.copied_bytes)} copied, {size(done.borrowed_bytes)} used where they are"
        starts = "would start" if dry_run else f"starts with {done.key},"
        out.print(Text(f"{shown_uri(to)} {starts} from {done.source}: {sizes}"))
