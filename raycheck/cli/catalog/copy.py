"""`raycheck cp`: copies a run or a checkpoint to another place, once or continuously during training."""

import json
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from raycheck.bucket.store.address import shown_uri
from raycheck.catalog.copy import CopiedRun, copy_run
from raycheck.catalog.follow import FollowNews, follow_run
from raycheck.cli.closed_pipe import continue_without_reader
from raycheck.cli.options import DryRun, Json, Text, Uri, out, print_json, settings_of
from raycheck.cli.progress_bar import ProgressBar, progress_bar
from raycheck.errors import ConfigError
from raycheck.views.in_words import size

Storage = Annotated[Path | None, typer.Option(help="A YAML file with the fields of StorageSettings, for this side.")]


def cp(  # noqa: PLR0917  typer makes options of them
    uri: Uri,
    to: Annotated[str, typer.Argument(help="A free place, or an earlier copy of this run that nobody has trained.")],
    at: Annotated[
        str | None, typer.Option(help="Copy only this step, or the checkpoint of this name, into a new run.")
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", help="Keep running: copy each new commit, too.")] = False,
    every: Annotated[float, typer.Option(help="With --follow: seconds between two reads of the source.")] = 5.0,
    until_finished: Annotated[
        bool, typer.Option("--until-finished", help="With --follow: end when the run has come to its end.")
    ] = False,
    dry_run: DryRun = False,
    as_json: Json = False,
    from_storage: Storage = None,
    to_storage: Storage = None,
) -> None:
    """Copy a run, or one checkpoint, to another bucket or place.

    The copy of a run is the same run. Repeat the command to bring it up to date, or to continue after an interruption.
    Once someone trains on the copy, it is an independent run and no longer a target of copies.
    """
    one, other = settings_of(from_storage), settings_of(to_storage)
    if follow and (at is not None or dry_run):
        raise ConfigError("--follow cannot be combined with --at or --dry-run")
    if until_finished and not follow:
        raise ConfigError("--until-finished needs --follow")
    if dry_run:
        plan = copy_run(uri, to, at=at, dry_run=True, from_storage=one, to_storage=other)
        if as_json:
            print_json(asdict(plan))
            return
        for name, count in plan.copied.items():
            out.print(Text(f"{name}  {size(count)}"))
        total = size(sum(plan.copied.values()))
        out.print(Text(f"{len(plan.copied)} checkpoints, at most {total}, would be copied"))
        return
    with _stopped_by_signals() as stop, progress_bar() as show:
        if follow:
            continue_without_reader()
            follow_run(
                uri,
                to,
                every_s=every,
                until_finished=until_finished,
                from_storage=one,
                to_storage=other,
                news=partial(_print_news, show, as_json=as_json),
                progress=show,
                stop=stop,
            )
            return
        done = copy_run(uri, to, at=at, from_storage=one, to_storage=other, progress=show, stop=stop)
    _print_done(done, as_json=as_json)


def _print_done(done: CopiedRun, *, as_json: bool) -> None:
    if as_json:
        print_json(asdict(done))
        return
    there = f"{len(done.present)} were there, " if done.present else ""
    in_store = f", {size(done.in_store_bytes)} by the store itself" if done.in_store_bytes else ""
    dropped = f", {len(done.dropped)} were dropped in the meantime" if done.dropped else ""
    out.print(
        Text(
            f"{there}{len(done.copied)} checkpoints copied{dropped} "
            f"({size(done.sent_bytes + done.in_store_bytes)}{in_store}); head of {shown_uri(done.uri)} is {done.head}"
        )
    )


def _print_news(bar: ProgressBar, news: FollowNews, *, as_json: bool) -> None:
    bar.clear()
    if as_json:
        print(json.dumps(asdict(news)).replace("\x7f", "\\u007f"), flush=True)  # noqa: T201
    else:
        out.print(Text(news.text))


@contextmanager
def _stopped_by_signals() -> Iterator[threading.Event]:
    """Yield an event that the first Ctrl-C or SIGTERM sets. The second ends the process."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before: dict[int, Any] = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def note(number: int, frame: object) -> None:
        del frame
        stop.set()
        signal.signal(number, before[number])

    for number in before:
        signal.signal(number, note)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
