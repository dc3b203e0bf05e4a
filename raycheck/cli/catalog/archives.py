"""Commands that move a checkpoint out of and into a bucket: `pack`, `unpack`, and `download`."""

import sys
from dataclasses import asdict
from typing import IO, Annotated, cast

import typer

from raycheck.bucket.store.address import shown_uri
from raycheck.catalog import download_checkpoint as downloads
from raycheck.catalog.archive import pack as packing
from raycheck.catalog.archive import unpack as unpacking
from raycheck.cli.options import Json, Storage, Text, Uri, complete_step, out, print_json, settings_of
from raycheck.cli.progress_bar import progress_bar
from raycheck.errors import ConfigError
from raycheck.views.in_words import size

Which = Annotated[
    str,
    typer.Argument(
        metavar="STEP", help="A step, a checkpoint's name as ls shows it, or HEAD.", autocompletion=complete_step
    ),
]


def pack(  # noqa: PLR0917  typer makes options of them
    uri: Uri,
    at: Which,
    file: Annotated[str, typer.Argument(help="A new file: a path, a URI in any store, or - for stdout.")],
    zstd: Annotated[bool, typer.Option("--zstd", help="Compress the archive; for a local file or stdout.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be packed.")] = False,
    as_json: Json = False,
    storage: Storage = None,
) -> None:
    """Pack a checkpoint into one tar file.

    `tar x` creates a stock DCP directory for each component, and `raycheck unpack` creates a new run.
    """
    if file == "-" and as_json and not dry_run:
        raise ConfigError("--json prints to stdout, where the archive goes; name a file")
    if file == "-" and sys.stdout.isatty() and not dry_run:
        raise ConfigError("an archive cannot be written to a terminal; redirect stdout, or name a file")
    target: str | IO[bytes] = sys.stdout.buffer if file == "-" else file
    with progress_bar() as progress:
        done = packing.pack(
            uri, target, at=at, zstd=zstd, dry_run=dry_run, storage=settings_of(storage), progress=progress
        )
    if as_json:
        print_json({"file": file, "dry_run": dry_run} | asdict(done))
    elif file != "-" or dry_run:
        what = f"{len(done.members)} members, {size(done.size_bytes)}"
        place = "would be packed" if dry_run else f"in {shown_uri(file)}"
        out.print(Text(f"{done.checkpoint}: {what} {place}"))


def unpack(
    file: Annotated[str, typer.Argument(help="An archive: a path, a URI in any store, or - for stdin.")],
    uri: Annotated[str, typer.Argument(help="The new run's URI, e.g. s3://bucket/runs/my-copy")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only verify the archive; write nothing.")] = False,
    as_json: Json = False,
    storage: Storage = None,
) -> None:
    """Create a new run from an archive.

    The whole archive is verified before the run exists. The next training there resumes from its checkpoint.
    """
    source: str | IO[bytes] = sys.stdin.buffer if file == "-" else file
    with progress_bar() as progress:
        done = unpacking.unpack(source, uri, dry_run=dry_run, storage=settings_of(storage), progress=progress)
    if as_json:
        print_json({"run": uri, "dry_run": dry_run} | asdict(done))
        return
    what = "is intact; nothing was written" if dry_run else f"is the head of the new run {shown_uri(uri)}"
    out.print(Text(f"{done.checkpoint}, step {done.step}, {size(done.size_bytes)}: {what}"))


def download(  # noqa: PLR0917  typer makes options of them
    uri: Uri,
    at: Which,
    folder: Annotated[str, typer.Argument(help="A new or empty folder, or that of an earlier download.")],
    components: Annotated[
        list[str] | None, typer.Option("--component", help="A component to fetch; default: all. Repeatable.")
    ] = None,
    format: Annotated[  # noqa: A002  the option's name
        str, typer.Option(help="dcp: a stock DCP directory per component. safetensors: a file per entry.")
    ] = "dcp",
    as_json: Json = False,
    storage: Storage = None,
) -> None:
    """Fetch a checkpoint into a folder.

    A repeated download fetches only what is missing. `raycheck export-hf` writes a Hugging Face directory.
    """
    with progress_bar() as progress:
        done = downloads.download(
            uri,
            folder,
            at=at,
            components=components or None,
            format=cast("downloads.Format", format),
            storage=settings_of(storage),
            progress=progress,
        )
    if as_json:
        print_json({"folder": folder} | asdict(done))
        return
    total = size(sum(done.files.values()))
    out.print(
        Text(f"{done.checkpoint}: {len(done.files)} files, {total} in {folder}; {size(done.fetched_bytes)} fetched now")
    )
