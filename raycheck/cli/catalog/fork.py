"""The command that creates a run from another run's checkpoint."""

from dataclasses import asdict
from typing import Annotated

import typer

from raycheck.bucket.protocol.sharing.new_run import look_at_place
from raycheck.bucket.protocol.swap import Register
from raycheck.bucket.store import open_store
from raycheck.bucket.store.address import shown_uri
from raycheck.catalog.forks import fork_run
from raycheck.cli.options import DryRun, Json, Step, Storage, Text, Uri, out, print_json, settings_of
from raycheck.run import open_run
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
    settings = settings_of(storage)
    if dry_run:
        run = open_run(source, settings)
        checkpoint = run.head_or(at)
        moves = copy or open_store(to, settings).way_to(run.store) is None
        is_new = look_at_place(Register(open_store(to, settings)))[0] is None
        found = {"source": checkpoint.entry.key, "size_bytes": checkpoint.entry.size_bytes, "copies": moves}
        if as_json:
            print_json(found | {"is_new": is_new})
        elif not is_new:
            out.print(Text(f"{shown_uri(to)} already exists; nothing would be done"))
        else:
            how = "would be copied" if moves else "would stay where they are"
            out.print(Text(f"{checkpoint.entry.key}: {size(checkpoint.entry.size_bytes)} {how}"))
        return
    done = fork_run(source, to, at, copy=copy, storage=settings)
    if as_json:
        print_json(asdict(done))
    elif not done.is_new:
        out.print(Text(f"{shown_uri(to)} already exists, with {done.key}; nothing was done"))
    else:
        sizes = f"{size(done.copied_bytes)} copied, {size(done.borrowed_bytes)} used where they are"
        out.print(Text(f"{shown_uri(to)} starts with {done.key}, from {done.source}: {sizes}"))
