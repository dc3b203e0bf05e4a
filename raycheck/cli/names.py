"""Commands that pin, name, and score single checkpoints. They are safe during training."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from raycheck.cli.options import At, DryRun, Json, Storage, Text, Uri, out, print_json, settings_of
from raycheck.errors import ConfigError
from raycheck.run import CommittedCheckpoint, Run, open_run
from raycheck.views.in_words import age, short_number

Given = Annotated[str, typer.Argument(metavar="NAME", help="The name that the checkpoint has.")]


def pin(uri: Uri, at: At, dry_run: DryRun = False, as_json: Json = False, storage: Storage = None) -> None:
    """Keep a checkpoint, whatever the retention rules say."""
    _pin(uri, at, storage, pinned=True, dry_run=dry_run, as_json=as_json)


def unpin(uri: Uri, at: At, dry_run: DryRun = False, as_json: Json = False, storage: Storage = None) -> None:
    """Apply the retention rules to a pinned checkpoint again."""
    _pin(uri, at, storage, pinned=False, dry_run=dry_run, as_json=as_json)


def name(  # noqa: PLR0917  typer makes options of them
    uri: Uri,
    at: At,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Up to 100 letters, digits and '_.-'.")],
    expire_after: Annotated[
        float | None,
        typer.Option(help="Keep it for this many seconds from now, then drop it; default: for ever."),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Take the name from another step, or another name from this checkpoint.")
    ] = False,
    dry_run: DryRun = False,
    as_json: Json = False,
    storage: Storage = None,
) -> None:
    """Give a checkpoint a name.

    Retention keeps a named checkpoint, and every command and resume accept the name in place of a step.
    """
    run = open_run(uri, settings_of(storage))
    key = run.at(at).key
    changed = run.name_checkpoint(key, name, expire_after_s=expire_after, overwrite=overwrite, dry_run=dry_run)
    _say(run, changed, key, dry_run=dry_run, as_json=as_json)


def rename(  # noqa: PLR0917  typer makes options of them
    uri: Uri,
    old: Given,
    new: Annotated[str, typer.Argument(metavar="NEW", help="The name that it gets instead.")],
    dry_run: DryRun = False,
    as_json: Json = False,
    storage: Storage = None,
) -> None:
    """Rename a named checkpoint. Its expiry stays."""
    run = open_run(uri, settings_of(storage))
    changed = run.rename_checkpoint(old, new, dry_run=dry_run)
    _say(run, changed, changed.at(new).key, dry_run=dry_run, as_json=as_json)


def unname(uri: Uri, name: Given, dry_run: DryRun = False, as_json: Json = False, storage: Storage = None) -> None:
    """Remove a name from its checkpoint, and apply the retention rules to it again."""
    run = open_run(uri, settings_of(storage))
    changed = run.unname_checkpoint(name, dry_run=dry_run)
    _say(run, changed, run.at(name).key, dry_run=dry_run, as_json=as_json)


def score(  # noqa: PLR0917  typer makes options of them
    uri: Uri,
    at: At,
    values: Annotated[list[str], typer.Argument(metavar="METRIC=VALUE...", help="What was measured, e.g. mmlu=0.63.")],
    dry_run: DryRun = False,
    as_json: Json = False,
    storage: Storage = None,
) -> None:
    """Attach scores measured after the commit to a checkpoint.

    The rule keep_best uses them from the training's next commit on, and in `raycheck prune --keep-best`.
    """
    scores = _scores(values)
    run = open_run(uri, settings_of(storage))
    key = run.at(at).key
    _say(run, run.score(key, scores, dry_run=dry_run), key, dry_run=dry_run, as_json=as_json)


def _pin(uri: str, at: str, storage: Path | None, *, pinned: bool, dry_run: bool, as_json: bool) -> None:
    run = open_run(uri, settings_of(storage))
    key = run.at(at).key
    changed = run.pin(key, dry_run=dry_run) if pinned else run.unpin(key, dry_run=dry_run)
    if as_json:
        _say(run, changed, key, dry_run=dry_run, as_json=True)
        return
    what = "pinned" if pinned else "no longer pinned; the retention rules apply to it again"
    out.print(Text(f"{key} {'would be' if dry_run else 'is'} {what}"))


def _scores(values: Sequence[str]) -> dict[str, float]:
    """Return METRIC=VALUE arguments as numbers by name. Raises ConfigError."""
    scores = {}
    for text in values:
        metric, sign, value = text.rpartition("=")
        try:
            scores[metric] = float(value)
        except ValueError:
            sign = ""
        if not sign:
            raise ConfigError(f"{text}: give METRIC=VALUE with a number, e.g. mmlu=0.63")
    return scores


def _say(before: Run, after: Run, key: str, *, dry_run: bool, as_json: bool) -> None:
    """Print the changed checkpoints, `key` first."""
    names = {item.key: item.name for item in before.checkpoints}
    changed = [item for item in after.checkpoints if item.key == key or names.get(item.key, item.name) != item.name]
    changed.sort(key=lambda item: item.key != key)
    if as_json:
        print_json({"changed": [_facts(item) for item in changed], "dry_run": dry_run})
        return
    for item in changed:
        out.print(Text(f"step {item.step}  {item.key}  {_in_words(item, now=before.read_at or 0.0)}"))
    if dry_run:
        out.print(Text("this would be the result; nothing was changed"))


def _facts(item: CommittedCheckpoint) -> dict[str, Any]:
    return {
        "key": item.key,
        "step": item.step,
        "name": item.name,
        "pinned": item.is_pinned,
        "expires_at": item.expires_at,
        "scores": dict(item.scores),
    }


def _in_words(item: CommittedCheckpoint, *, now: float) -> str:
    until = "" if item.expires_at is None else f", expires {age(item.expires_at, now)}"
    scores = "".join(f"  {metric} {short_number(value)}" for metric, value in item.scores.items())
    return f"{f'named {item.name}' if item.name else 'no name'}{until}{scores}"
