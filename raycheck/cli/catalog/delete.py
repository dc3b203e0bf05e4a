"""Commands that delete a checkpoint or a run."""

import sys
from functools import partial
from typing import Annotated

import typer

from raycheck.bucket.protocol.removal.prune_and_sweep import GRACE_S
from raycheck.bucket.store.address import shown_uri
from raycheck.catalog import deletes
from raycheck.cli.options import At, DryRun, Grace, Json, Storage, Text, Uri, out, print_json, settings_of
from raycheck.cli.progress_bar import progress_bar
from raycheck.errors import ConfigError
from raycheck.run import open_run
from raycheck.views.in_words import size

Yes = Annotated[bool, typer.Option("--yes", help="Do not ask.")]


def delete(  # noqa: PLR0917  typer makes options of them
    uri: Uri,
    at: At,
    yes: Yes = False,
    grace: Grace = GRACE_S,
    dry_run: DryRun = False,
    as_json: Json = False,
    storage: Storage = None,
) -> None:
    """Delete one checkpoint, even a pinned or named one. The head cannot be deleted. Running training continues."""
    settings = settings_of(storage)
    item = open_run(uri, settings).at(at)
    deletes.delete_checkpoint(uri, item.key, dry_run=True, storage=settings)
    kept_by = f"{', pinned' if item.is_pinned else ''}{f', named {item.name}' if item.name else ''}"
    what = f"{item.key} ({size(item.size_bytes)}{kept_by})"
    if not dry_run:
        confirm(what, item.name or str(item.step), yes=yes)
        with progress_bar("objects") as progress:
            deletes.delete_checkpoint(uri, item.key, grace_s=grace, storage=settings, progress=progress)
    if as_json:
        facts = {"is_pinned": item.is_pinned, "name": item.name, "is_deleted": not dry_run}
        print_json({"key": item.key, "size_bytes": item.size_bytes} | facts)
    else:
        out.print(Text(f"{what}: {'would be deleted' if dry_run else 'deleted'}"))


def delete_run(  # noqa: PLR0917  typer makes options of them
    uri: Uri,
    yes: Yes = False,
    live: Annotated[bool, typer.Option("--live", help="Also when it seems to be running; that training ends.")] = False,
    keep_shared: Annotated[
        bool, typer.Option("--keep-shared", help="Keep what other runs use until they have dropped it.")
    ] = False,
    keep_exports: Annotated[bool, typer.Option("--keep-exports", help="Leave exports/ and published/ alone.")] = False,
    lost: Annotated[bool, typer.Option("--lost", help="Also if 'latest' is missing.")] = False,
    dry_run: DryRun = False,
    as_json: Json = False,
    storage: Storage = None,
) -> None:
    """Delete a run. Data that other runs use is kept. Repeat the command after an interruption."""
    delete_it = partial(
        deletes.delete_run,
        uri,
        live=live,
        keep_shared=keep_shared,
        keep_exports=keep_exports,
        lost=lost,
        storage=settings_of(storage),
    )
    if dry_run or not yes:  # otherwise nothing shows what is there
        with progress_bar("objects") as progress:
            plan = delete_it(dry_run=True, progress=progress)
    if dry_run:
        users = ", ".join(plan.used_by)
        if as_json:
            print_json({"objects": plan.num_objects, "size_bytes": plan.size_bytes, "used_by": list(plan.used_by)})
        else:
            shared = f", except what {users} use" if users else ""
            out.print(
                Text(f"{shown_uri(uri)}: {plan.num_objects} objects, {size(plan.size_bytes)} would be deleted{shared}")
            )
        return
    if not yes:
        word = shown_uri(uri).rstrip("/").rpartition("/")[2]
        confirm(f"{shown_uri(uri)} ({plan.num_objects} objects, {size(plan.size_bytes)})", word, yes=yes)
    with progress_bar("objects") as progress:
        done = delete_it(progress=progress)
    if as_json:
        print_json({"is_gone": done.is_gone, "used_by": list(done.used_by)})
    elif done.is_gone:
        out.print(Text(f"{shown_uri(uri)}: deleted"))
    else:
        users = ", ".join(done.used_by)
        out.print(
            Text(f"{shown_uri(uri)}: deleted, except what {users} still use; run this again when they have dropped it")
        )


def confirm(what: str, word: str, *, yes: bool) -> None:
    """Ask the user to type a word, unless `yes`.

    Raises ConfigError if that is not possible, or if the user types another word.
    """
    if yes:
        return
    if not sys.stdin.isatty():
        raise ConfigError(f"delete of {what}: cannot ask without a terminal; give --yes")
    if typer.prompt(f"Delete {what}? Type {word!r} to confirm") != word:
        raise ConfigError("not confirmed; nothing was deleted")
