"""Commands that delete a checkpoint or a run."""

import sys
from typing import Annotated

import typer

from raycheck.bucket.protocol.removal.prune_and_sweep import GRACE_S
from raycheck.bucket.store.address import shown_uri
from raycheck.catalog import deletes
from raycheck.cli.options import At, DryRun, Grace, Json, Storage, Text, Uri, out, print_json, settings_of
from raycheck.cli.progress_bar import progress_bar
from raycheck.errors import ConfigError
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
    entry = deletes.plan_delete_checkpoint(uri, at, storage=settings)
    kept_by = f"{', pinned' if entry.pinned else ''}{f', named {entry.name}' if entry.name else ''}"
    if not dry_run:
        _confirm(f"{entry.key} ({size(entry.size_bytes)}{kept_by})", entry.name or str(entry.step), yes=yes)
        with progress_bar("objects") as progress:
            deletes.delete_checkpoint(uri, entry.key, grace_s=grace, storage=settings, progress=progress)
    if as_json:
        facts = {"is_pinned": entry.pinned, "name": entry.name, "is_deleted": not dry_run}
        print_json({"key": entry.key, "size_bytes": entry.size_bytes} | facts)
    else:
        what = f"{entry.key} ({size(entry.size_bytes)}{kept_by})"
        out.print(Text(f"{what}: {'would be deleted' if dry_run else 'deleted'}"))


def delete_run(  # noqa: PLR0917  typer makes options of them
    uri: Uri,
    yes: Yes = False,
    live: Annotated[bool, typer.Option("--live", help="Also when it seems to be running; that training ends.")] = False,
    keep_shared: Annotated[
        bool, typer.Option("--keep-shared", help="Keep what other runs use until they have dropped it.")
    ] = False,
    keep_exports: Annotated[bool, typer.Option("--keep-exports", help="Leave exports/ alone.")] = False,
    lost: Annotated[bool, typer.Option("--lost", help="Also what lies where 'latest' is missing.")] = False,
    dry_run: DryRun = False,
    as_json: Json = False,
    storage: Storage = None,
) -> None:
    """Delete a run. Data that other runs use is kept. Repeat the command after an interruption."""
    settings = settings_of(storage)
    if dry_run or not yes:  # otherwise nothing shows what is there
        with progress_bar("objects") as progress:
            plan = deletes.plan_delete_run(
                uri,
                live=live,
                keep_shared=keep_shared,
                keep_exports=keep_exports,
                lost=lost,
                storage=settings,
                progress=progress,
            )
    if dry_run:
        holds = [hold.holder for hold in plan.holds]
        if as_json:
            print_json({"objects": plan.num_objects, "size_bytes": plan.size_bytes, "used_by": holds})
        else:
            shared = f", except what {', '.join(holds)} use" if holds else ""
            out.print(
                Text(f"{shown_uri(uri)}: {plan.num_objects} objects, {size(plan.size_bytes)} would be deleted{shared}")
            )
        return
    if not yes:
        word = shown_uri(uri).rstrip("/").rpartition("/")[2]
        _confirm(f"{shown_uri(uri)} ({plan.num_objects} objects, {size(plan.size_bytes)})", word, yes=yes)
    with progress_bar("objects") as progress:
        done = deletes.delete_run(
            uri,
            live=live,
            keep_shared=keep_shared,
            keep_exports=keep_exports,
            lost=lost,
            storage=settings,
            progress=progress,
        )
    if as_json:
        print_json({"is_gone": done.is_gone, "used_by": [hold.holder for hold in done.holds]})
    elif done.is_gone:
        out.print(Text(f"{shown_uri(uri)}: deleted"))
    else:
        users = ", ".join(hold.holder for hold in done.holds)
        out.print(
            Text(f"{shown_uri(uri)}: deleted, except what {users} still use; run this again when they have dropped it")
        )


def _confirm(what: str, word: str, *, yes: bool) -> None:
    """Ask the user to type a word. Raises ConfigError if that is not possible, or if the user types another word."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise ConfigError(f"delete of {what}: cannot ask without a terminal; give --yes")
    if typer.prompt(f"Delete {what}? Type {word!r} to confirm") != word:
        raise ConfigError("not confirmed; nothing was deleted")
