"""`raycheck import`: creates a run from a checkpoint that another program wrote."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from raycheck.bucket.store.address import shown_uri
from raycheck.cli.options import DryRun, Json, Storage, Text, out, print_json, print_table, settings_of
from raycheck.cli.progress_bar import progress_bar
from raycheck.views.in_words import size

if TYPE_CHECKING:
    from raycheck.catalog.importing.import_checkpoint import Imported


def import_(  # noqa: PLR0917  typer makes options of them
    source: Annotated[str, typer.Argument(help="A checkpoint: a folder or file, here or in a bucket.")],
    to: Annotated[str, typer.Argument(help="The new run, e.g. s3://bucket/runs/my-run")],
    kind: Annotated[
        str | None,
        typer.Option(
            "--as", help="Read it as dcp, huggingface, torch, lightning or fsdp; default: judge by its files."
        ),
    ] = None,
    entries: Annotated[
        list[str] | None,
        typer.Option(
            "--entry", help="NAME=KEY: take the part KEY of the source as the entry NAME, and no others. Repeatable."
        ),
    ] = None,
    step: Annotated[
        int | None, typer.Option(help="The optimizer steps that are done; default: as the source says.")
    ] = None,
    skip_values: Annotated[
        bool, typer.Option("--skip-values", help="Leave out values of a DCP directory that only pickle could make.")
    ] = False,
    keep_names: Annotated[
        bool, typer.Option("--keep-names", help="Keep a 'module.' before all names: it is the model's own, not DDP's.")
    ] = False,
    dry_run: DryRun = False,
    as_json: Json = False,
    storage: Storage = None,
) -> None:
    """Create a new run from a checkpoint of torch, Hugging Face, Lightning, or Ray Train.

    A torch DCP directory is imported completely; from other sources only the weights are imported, and what is left out
    is listed by name. The run's checkpoint is restored like any other. The source stays unchanged.
    """
    from raycheck.catalog.importing.import_checkpoint import import_checkpoint

    with progress_bar() as progress:
        done = import_checkpoint(
            source,
            to,
            kind=kind,
            entries=_entries(entries),
            step=step,
            skip_values=skip_values,
            keep_names=keep_names,
            storage=settings_of(storage),
            dry_run=dry_run,
            progress=progress,
        )
    if as_json:
        print_json(asdict(done))
    else:
        _print(done, dry_run=dry_run)


def _entries(given: list[str] | None) -> dict[str, str] | None:
    """Return the key in the source for each entry. A name alone means the part of that name."""
    pairs = [item.partition("=") for item in given or ()]
    return {name: key if mark else name for name, mark, key in pairs} or None


def _print(done: "Imported", *, dry_run: bool) -> None:
    rows = [(entry.name, entry.kind, entry.num_tensors, size(entry.size_bytes)) for entry in done.entries]
    print_table(("entry", "kind", "tensors", "size"), rows)
    for note in done.notes:
        out.print(Text(note))
    for name in done.left_out:
        out.print(Text(f"left out: {name}"))
    where = f"{done.checkpoint} in {shown_uri(done.uri)}" if done.checkpoint else f"into {shown_uri(done.uri)}"
    what = "would be imported" if dry_run else "imported" if done.is_new else "was imported before"
    out.print(Text(f"{done.kind}, step {done.step}, {size(done.size_bytes)}: {what}: {where}"))
