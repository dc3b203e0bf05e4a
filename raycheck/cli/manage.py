"""Commands that change what a run keeps (prune, sweep), rewind it, and rebuild a lost `latest`."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer

from raycheck.bucket.format import object_keys
from raycheck.bucket.format.latest import Entry
from raycheck.bucket.protocol.removal import exported_directories
from raycheck.bucket.protocol.removal.prune_and_sweep import GRACE_S, Deletion
from raycheck.bucket.protocol.repair import repair as repair_run
from raycheck.bucket.reading import read_latest
from raycheck.bucket.store import open_store
from raycheck.bucket.store.address import join_uri, kind_of, shown_uri
from raycheck.cli.options import (
    At,
    DryRun,
    Grace,
    Json,
    Storage,
    Text,
    Uri,
    out,
    print_json,
    print_table,
    settings_of,
)
from raycheck.cli.progress_bar import progress_bar
from raycheck.errors import ConfigError
from raycheck.run import Run, open_run
from raycheck.settings import Retention
from raycheck.views.in_words import size


def prune(  # noqa: PLR0917  typer makes options of them
    uri: Uri,
    keep_last: Annotated[int | None, typer.Option(help="Keep this many of the newest commits.")] = None,
    keep_every_steps: Annotated[int | None, typer.Option(help="Keep one checkpoint per this many steps.")] = None,
    keep_every_s: Annotated[float | None, typer.Option(help="Keep one checkpoint per this many seconds.")] = None,
    keep_best: Annotated[
        str | None, typer.Option(help="Keep the best by a metric: METRIC:min:COUNT or METRIC:max:COUNT.")
    ] = None,
    rolling_keep_last: Annotated[
        int | None, typer.Option(help="Keep this many of the newest rolling checkpoints.")
    ] = None,
    grace: Grace = GRACE_S,
    dry_run: DryRun = False,
    as_json: Json = False,
    storage: Storage = None,
) -> None:
    """Drop checkpoints that no rule given here keeps.

    Expired ones are dropped too. Dropped checkpoints are deleted after a grace period for readers. Without a --keep
    option, only expired checkpoints are dropped. Rolling checkpoints are subject only to --rolling-keep-last; without
    it they stay. The head and pinned checkpoints always stay, and named ones stay until they expire. Running training
    continues.
    """
    run = open_run(uri, settings_of(storage))
    rules = Retention(
        keep_last=keep_last,
        keep_every_steps=keep_every_steps,
        keep_every_s=keep_every_s,
        keep_best=_best(run, keep_best),
        rolling_keep_last=rolling_keep_last,
    )
    kept = {item.key: item.reason for item in run.kept(rules=rules).decisions if item.is_kept}
    with progress_bar("objects") as progress:
        found = run.prune(rules, grace_s=grace, dry_run=dry_run, progress=progress)
    _print_deletions(found, kept, dry_run=dry_run, as_json=as_json)


def prune_exports(  # noqa: PLR0917  typer makes options of them
    uri: Uri,
    keep_last: Annotated[int, typer.Option(min=1, help="Keep the exports of this many of the newest checkpoints.")],
    to: Annotated[
        str | None, typer.Option(help="Where the exports are, as AfterCommit.export(to=...); default: in the run.")
    ] = None,
    dry_run: DryRun = False,
    as_json: Json = False,
    storage: Storage = None,
) -> None:
    """Delete older Hugging Face exports of this run.

    Only exports written by its training are deleted, even while someone reads them. A directory is deleted only if its
    record proves that it belongs to this run and is complete and unchanged. Manual exports stay, as do exports of
    pinned and named checkpoints.
    """
    settings = settings_of(storage)
    body = read_latest(open_store(uri, settings))
    is_alike = to is None or kind_of(to) == kind_of(uri)
    place, prefix = open_store(to or uri, settings if is_alike else None), "" if to else object_keys.EXPORTS_PREFIX
    verdicts = exported_directories.decide_exports(
        exported_directories.find_exports(place, prefix), body, keep_last=keep_last
    )
    if not verdicts and not as_json:
        out.print(Text(f"{shown_uri(to or join_uri(uri, object_keys.EXPORTS_PREFIX.rstrip('/')))}: no exports here"))
        return
    gone = () if dry_run else exported_directories.prune_exports(place, prefix, body, keep_last=keep_last)
    kept = {verdict.directory.place: verdict.reason for verdict in verdicts if verdict.is_kept}
    if not dry_run:
        going = [verdict.directory.place for verdict in verdicts if not verdict.is_kept]
        kept |= dict.fromkeys(set(going) - set(gone), "its record was changed in the meantime")
    found = [
        Deletion(
            name=verdict.directory.place,
            num_objects=len(verdict.directory.record.files) + 1 if verdict.directory.record else 0,
            size_bytes=verdict.directory.size_bytes,
            reason=verdict.reason,
            is_deleted=not dry_run,
        )
        for verdict in verdicts
        if verdict.directory.place not in kept
    ]
    _print_deletions(found, kept, dry_run=dry_run, as_json=as_json)


def sweep(
    uri: Uri,
    whole: Annotated[
        bool, typer.Option("--whole", help="Also delete whole checkpoints that the run does not list.")
    ] = False,
    dry_run: DryRun = False,
    as_json: Json = False,
    storage: Storage = None,
) -> None:
    """Delete uncommitted objects of earlier attempts.

    These are the leftovers of saves and uploads that were interrupted before a commit.
    """
    with progress_bar("objects") as progress:
        found = open_run(uri, settings_of(storage)).sweep(whole=whole, dry_run=dry_run, progress=progress)
    _print_deletions(found, {}, dry_run=dry_run, as_json=as_json)


def rewind(
    uri: Uri,
    at: At,
    dry_run: DryRun = False,
    storage: Storage = None,
) -> None:
    """Make an earlier checkpoint the head.

    The next start restores it. Training that is still running is stopped.
    """
    run = open_run(uri, settings_of(storage))
    with progress_bar() as progress:
        key = run.rewind(at, dry_run=dry_run, progress=progress).at(None).key
    if not dry_run:
        out.print(Text(f"head is {key}; later checkpoints remain listed until retention drops them"))
        return
    keys = [item.key for item in run.checkpoints]
    later = [str(item.step) for item in run.checkpoints[keys.index(key) + 1 :]]
    out.print(Text(f"{key} would be the head, instead of {run.head.key if run.head else None}"))
    if later:
        out.print(Text(f"the later checkpoints, of steps {', '.join(later)}, would remain listed"))
    status = run.status()
    if status.state == "running":
        out.print(Text(f"training would be stopped: {status.text}"))


def repair(uri: Uri, storage: Storage = None) -> None:
    """Rebuild a lost or damaged `latest`.

    It is rebuilt from the manifests, including after a rollback. Stop training, prunes, and sweeps first.
    """
    done = repair_run(open_store(uri, settings_of(storage)))
    for entry in done.latest.live:
        out.print(Text(f"listed    {entry.key}  {size(entry.size_bytes)}{_kept_by(entry)}"))
    for name, why in done.left_out:
        out.print(Text(f"left out  {name}: {why}"))
    out.print(Text(f"head is {done.latest.head}; the next start is attempt {done.latest.attempt.number + 1}"))


def _kept_by(entry: Entry) -> str:
    return f"{'  pinned' if entry.pinned else ''}{f'  named {entry.name}' if entry.name else ''}"


def _best(run: Run, keep_best: str | None) -> Any:
    """Return --keep-best as Retention takes it. Raises ConfigError for a metric that no checkpoint of the run has."""
    if keep_best is None:
        return None
    metric, mode, count = ["", "", *keep_best.rsplit(":", 2)][-3:]  # a metric may contain colons
    if not metric or mode not in ("min", "max") or not count.isdecimal() or count == "0":
        raise ConfigError(f"--keep-best {keep_best}: give METRIC:min:COUNT or METRIC:max:COUNT, e.g. loss:min:3")
    known = sorted({name for item in run.checkpoints for name in (*item.metrics, *item.scores)})
    if metric not in known:  # no checkpoint would be among the best, so all would be dropped
        raise ConfigError(f"--keep-best {keep_best}: no checkpoint has that metric; there are: {', '.join(known)}")
    return {"metric": metric, "mode": mode, "count": int(count)}


def _print_deletions(found: Sequence[Deletion], kept: Mapping[str, str], *, dry_run: bool, as_json: bool) -> None:
    if as_json:
        gone = [item.name for item in found if item.is_deleted]
        print_json({"found": [asdict(item) for item in found], "deleted": gone, "kept": dict(kept)})
        return
    rows: list[tuple[object, ...]] = []
    for item in found:
        when = "deleted" if item.is_deleted else f"in {item.wait_s:.0f} s" if item.wait_s else "now"
        rows.append((item.name, item.num_objects, size(item.size_bytes), item.reason, when))
    rows += [(name, "", "", why, "stays") for name, why in kept.items()]
    if rows:
        print_table(("what", "objects", "size", "why", "when"), rows)
    total = size(sum(item.size_bytes for item in found if dry_run or item.is_deleted))
    out.print(Text(f"{total} would be deleted" if dry_run else f"{total} deleted"))
    if not all(item.is_deleted for item in found) and not dry_run:
        out.print(Text("the others will be deleted after that time, by the run's next commit or the next prune"))
