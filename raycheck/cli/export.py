"""`raycheck export-hf`: writes a checkpoint of a run as a Hugging Face directory."""

import time
from typing import Annotated

import typer

from raycheck.bucket.store.address import shown_uri
from raycheck.cli.options import Json, Step, Storage, Text, Uri, out, print_json, print_table, settings_of
from raycheck.cli.progress_bar import progress_bar
from raycheck.views.in_words import size


def export_hf(  # noqa: PLR0917  typer makes options of them
    uri: Uri,
    to: Annotated[str, typer.Argument(help="A new or empty folder, or the URI of a free place in a bucket.")],
    at: Step = None,
    entry: Annotated[str | None, typer.Option(help="The model's name in the state, when there are several.")] = None,
    files: Annotated[
        list[str] | None,
        typer.Option(help="A tokenizer or processor to write too, by its name in the state; default: all. Repeatable."),
    ] = None,
    merge_lora: Annotated[
        bool, typer.Option("--merge-lora", help="Merge a LoRA adapter into its model; default: write the adapter only.")
    ] = False,
    dtype: Annotated[str | None, typer.Option(help="Convert floating-point weights, e.g. to bfloat16.")] = None,
    config_from: Annotated[
        str | None, typer.Option(help="A folder with the config.json of a model that was saved without one.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show which files would be written.")] = False,
    as_json: Json = False,
    storage: Storage = None,
) -> None:
    """Write a checkpoint as a Hugging Face directory.

    The checkpoint is the head, or the one of --at.
    """
    from raycheck.run import export_hf as export

    began = time.monotonic()
    with progress_bar() as progress:
        written = export(
            uri,
            to,
            storage=settings_of(storage),
            at=at,
            entry=entry,
            files=files or None,
            merge_lora=merge_lora,
            dtype=dtype,
            config_from=config_from,
            dry_run=dry_run,
            progress=progress,
        )
    seconds = time.monotonic() - began
    if as_json:
        print_json({"dest": written.uri, "files": dict(written.files), "bytes": written.size_bytes, "seconds": seconds})
        return
    print_table(("file", "size"), [(name, size(count)) for name, count in written.files.items()])
    what = f"{len(written.files)} files, {size(written.size_bytes)}"
    how = "would be written to" if dry_run else f"{seconds:.1f} s in"
    out.print(Text(f"{what}, {how} {shown_uri(written.uri)}"))
