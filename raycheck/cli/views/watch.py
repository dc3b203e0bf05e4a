"""`raycheck watch`: watches runs from outside, and tells people when one is silent, has died, or has finished."""

import shlex
import time
from typing import Annotated, Any, get_args

import typer

from raycheck.catalog.watch_runs import RunsWatch
from raycheck.cli.closed_pipe import continue_without_reader
from raycheck.cli.options import Storage, Uri, settings_of
from raycheck.errors import ConfigError, NotFoundError, StoreError
from raycheck.log import event, logger, show_log
from raycheck.settings import AlertKind, Alerts


def watch(  # noqa: PLR0917  typer makes options of them
    uri: Uri,
    webhook: Annotated[
        str | None,
        typer.Option(
            envvar="RAYCHECK_ALERT_WEBHOOK",
            show_envvar=True,
            help="URL of a webhook as Slack's; other users of this machine see arguments, so better use the variable.",
        ),
    ] = None,
    command: Annotated[
        str | None, typer.Option(help="A program to run, with its arguments; it gets the alert as JSON in its input.")
    ] = None,
    on: Annotated[
        list[str] | None, typer.Option(help=f"Tell only of this; may be repeated: {', '.join(get_args(AlertKind))}.")
    ] = None,
    every: Annotated[float, typer.Option(help="Seconds between two looks.", min=1.0)] = 60.0,
    once: Annotated[bool, typer.Option("--once", help="Look once and exit, for a timer such as cron.")] = False,
    storage: Storage = None,
) -> None:
    """Tell people when a run here, or below here, is silent, has died, or has finished.

    It runs until Ctrl-C, on a machine that outlives the runs. Nobody is told twice, not even by the run itself.
    """
    continue_without_reader()
    show_log()
    words = None if command is None else _words(command)
    kinds: Any = tuple(on) if on else get_args(AlertKind)
    watched = RunsWatch(uri, Alerts(webhook=webhook, command=words, on=kinds), settings_of(storage))
    while True:
        try:
            watched.look()
        except (StoreError, NotFoundError) as error:  # the storage may recover, and the first run may start
            if once:
                raise
            logger.warning(event("could not look at the runs", cause=error, run=uri))
        if once:
            return
        time.sleep(every)


def _words(command: str) -> list[str]:
    """Split a command as a shell does. It may contain a secret, so the error does not repeat it."""
    try:
        return shlex.split(command)
    except ValueError as error:
        text = f"command=: {error}: close each quotation mark, and write a single one as \\' or \\\""
        raise ConfigError(text) from None
