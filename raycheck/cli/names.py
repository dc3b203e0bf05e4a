"""Commands that pin, name, and score single checkpoints. They are safe during training."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from raycheck.bucket.format.label import Label, check_scores
from raycheck.bucket.format.latest import Entry, Latest
from raycheck.bucket.protocol import name_and_score, pin_and_evict
from raycheck.bucket.protocol.swap import Register
from raycheck.bucket.store import open_store
from raycheck.cli.options import At, DryRun, Json, Storage, Text, Uri, out, print_json, settings_of
from raycheck.errors import ConfigError
from raycheck.run import Run
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
    run, now = _opened(uri, storage)
    key = run.at(at).entry.key
    label = Label(name=name, expire_after_s=expire_after, may_move=overwrite)
    if dry_run:
        body = name_and_score.with_name(run.store.uri, run.latest, key, label, now=now)
    else:
        body = run.name_checkpoint(key, name, expire_after_s=expire_after, overwrite=overwrite).latest
    _say(run, body, key, now=now, dry_run=dry_run, as_json=as_json)


def rename(  # noqa: PLR0917  typer makes options of them
    uri: Uri,
    old: Given,
    new: Annotated[str, typer.Argument(metavar="NEW", help="The name that it gets instead.")],
    dry_run: DryRun = False,
    as_json: Json = False,
    storage: Storage = None,
) -> None:
    """Rename a named checkpoint. Its expiry stays."""
    run, now = _opened(uri, storage)
    key = name_and_score.named_entry(run.store.uri, run.latest, old).key
    if dry_run:
        body = name_and_score.with_new_name(run.store.uri, run.latest, old, new, now=now)
    else:
        body = run.rename_checkpoint(old, new).latest
    _say(run, body, key, now=now, dry_run=dry_run, as_json=as_json)


def unname(uri: Uri, name: Given, dry_run: DryRun = False, as_json: Json = False, storage: Storage = None) -> None:
    """Remove a name from its checkpoint, and apply the retention rules to it again."""
    run, now = _opened(uri, storage)
    key = name_and_score.named_entry(run.store.uri, run.latest, name).key
    if dry_run:
        body = name_and_score.without_name(run.store.uri, run.latest, name)
    else:
        body = run.unname_checkpoint(name).latest
    _say(run, body, key, now=now, dry_run=dry_run, as_json=as_json)


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
    run, now = _opened(uri, storage)
    key = run.at(at).entry.key
    if dry_run:
        body = name_and_score.with_scores(run.store.uri, run.latest, key, scores)
    else:
        body = run.score(key, scores).latest
    _say(run, body, key, now=now, dry_run=dry_run, as_json=as_json)


def _pin(uri: str, at: str, storage: Path | None, *, pinned: bool, dry_run: bool, as_json: bool) -> None:
    run, now = _opened(uri, storage)
    key = run.at(at).entry.key
    if dry_run:
        body = pin_and_evict.with_pin(run.store.uri, run.latest, key, pinned=pinned)
    else:
        body = (run.pin(key) if pinned else run.unpin(key)).latest
    if as_json:
        _say(run, body, key, now=now, dry_run=dry_run, as_json=True)
        return
    what = "pinned" if pinned else "no longer pinned; the retention rules apply to it again"
    out.print(Text(f"{key} {'would be' if dry_run else 'is'} {what}"))


def _opened(uri: str, storage: Path | None) -> tuple[Run, float]:
    """Return the run and the time by its store's clock."""
    store = open_store(uri, settings_of(storage))
    body, got = Register(store).read_existing()
    return Run(store, body), got.at


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
    check_scores(scores)
    return scores


def _say(run: Run, body: Latest, key: str, *, now: float, dry_run: bool, as_json: bool) -> None:
    """Print the changed checkpoints, `key` first."""
    before = {entry.key: entry for entry in run.latest.live}
    own = body.entry(key)
    lost = [
        entry
        for entry in body.live
        if entry.key != key and entry.key in before and before[entry.key].name != entry.name
    ]
    entries = [*([own] if own else []), *lost]
    if as_json:
        print_json({"changed": [_facts(entry) for entry in entries], "dry_run": dry_run})
        return
    for entry in entries:
        out.print(Text(f"step {entry.step}  {entry.key}  {_in_words(entry, now=now)}"))
    if dry_run:
        out.print(Text("this would be the result; nothing was changed"))


def _facts(entry: Entry) -> dict[str, Any]:
    return {
        "key": entry.key,
        "step": entry.step,
        "name": entry.name,
        "pinned": entry.pinned,
        "expires_at": entry.expires_at,
        "scores": dict(entry.scores),
    }


def _in_words(entry: Entry, *, now: float) -> str:
    until = "" if entry.expires_at is None else f", expires {age(entry.expires_at, now)}"
    scores = "".join(f"  {metric} {short_number(value)}" for metric, value in entry.scores.items())
    return f"{f'named {entry.name}' if entry.name else 'no name'}{until}{scores}"
