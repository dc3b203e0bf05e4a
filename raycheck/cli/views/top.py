"""`raycheck top`: a live view of a run in a terminal."""

import sys
import time
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table

from raycheck.bucket.store import open_store
from raycheck.bucket.store.address import shown_uri
from raycheck.cli.options import Json, Storage, Text, Uri, out, print_json, settings_of, table_of
from raycheck.errors import StoreError
from raycheck.terminal import printable
from raycheck.views.attempts import AttemptHistory
from raycheck.views.in_words import age, goodput_text, short_number, size
from raycheck.views.live import LiveRun, RunWatch, SaveUnderWay

Once = Annotated[bool, typer.Option("--once", help="Print once and exit, as without a terminal.")]
Every = Annotated[float, typer.Option(help="Seconds between two updates.", min=0.5)]
MAX_ATTEMPTS = 12
BAR_WIDTH = 30


def top(uri: Uri, once: Once = False, every: Every = 2.0, as_json: Json = False, storage: Storage = None) -> None:
    """Watch a run: its step and speed, goodput, the save under way, the last commit, and its attempts.

    It refreshes every few seconds until Ctrl-C. With --json or --once, it prints the run once and ends.
    """
    watch = RunWatch(open_store(uri, settings_of(storage)))
    seen = watch.look()
    if as_json:
        print_json(_facts(seen) | {"problems": list(seen.history.problems)})
        return
    if once or not sys.stdout.isatty():
        _print(seen)
        return
    problem = ""
    with Live(_shown(seen, problem), console=Console(highlight=False), screen=True, auto_refresh=False) as live:
        try:
            while True:
                time.sleep(every)
                try:
                    seen, problem = watch.look(), ""
                except StoreError as error:  # the bucket may recover
                    problem = str(error)
                live.update(_shown(seen, problem), refresh=True)
        except KeyboardInterrupt:
            pass
    _print(seen)


def _print(seen: LiveRun) -> None:
    for problem in seen.history.problems:
        print(printable(f"raycheck: {problem}"), file=sys.stderr)  # noqa: T201  not among the data
    out.print(Text(shown_uri(seen.history.uri)))
    out.print(table_of_facts(seen))
    out.print(Text(""))
    out.print(table_of_attempts(seen))


def _shown(seen: LiveRun, problem: str) -> RenderableType:
    note = Text(f"the bucket does not answer: {problem}" if problem else "Ctrl-C ends it")
    return Group(
        Text(shown_uri(seen.history.uri)), table_of_facts(seen), Text(""), table_of_attempts(seen), Text(""), note
    )


def table_of_facts(seen: LiveRun) -> Table:
    """Return the current facts: a name and a value per row."""
    history, now = seen.history, seen.history.status.now
    table = Table.grid(padding=(0, 2))
    speed = "-" if seen.steps_per_s is None else f"{short_number(float(f'{seen.steps_per_s:.3g}'))} a second"
    for label, value in (
        ("state", history.status.text),
        ("step", "-" if seen.step is None else str(seen.step)),
        ("steps", speed),
        ("goodput", "-" if history.goodput is None else goodput_text(history.goodput, history.goodput_limit)),
        ("last commit", "none yet" if seen.committed_at is None else age(seen.committed_at, now)),
        ("save", "none under way" if seen.save is None else _progress(seen.save)),
    ):
        table.add_row(*map(Text, (label, value)))
    if history.slow is not None:
        table.add_row(Text("slow"), Text(str(history.slow)))
    return table


def table_of_attempts(seen: LiveRun) -> Table:
    """Return the newest attempts, the live one first."""
    columns = ("attempt", "workers", "began", "resumed at", "commits", "lost before", "why it ended")
    newest = seen.history.attempts[: -MAX_ATTEMPTS - 1 : -1]
    return table_of(columns, [_attempt(item, seen.history.status.now) for item in newest])


def _progress(save: SaveUnderWay) -> str:
    share = save.share
    if share is None:
        return f"step {save.step}: {size(save.size_bytes)} in {save.objects} objects"
    done = round(BAR_WIDTH * share)
    bar = "█" * done + "░" * (BAR_WIDTH - done)
    total = size(save.expected_bytes or 0)
    return f"step {save.step}: {bar} {100 * share:.0f} %, {size(save.size_bytes)} of about {total}"


def _attempt(item: AttemptHistory, now: float) -> tuple[str, ...]:
    went_on = "-" if item.start_step is None else f"step {item.start_step}"
    lost = "-" if item.lost_steps is None else f"{item.lost_steps} steps"
    why = item.ending + (f": {item.cause}" if item.cause else "")
    return str(item.number), item.workers, age(item.began_at, now), went_on, str(len(item.commits)), lost, why


def _facts(seen: LiveRun) -> dict[str, Any]:
    history = seen.history
    return {
        "run": history.uri,
        "run_id": history.run_id,
        "state": history.status.state,
        "state_text": history.status.text,
        "step": seen.step,
        "steps_per_s": seen.steps_per_s,
        "goodput": history.goodput,
        "goodput_limit": history.goodput_limit,
        "committed_at": seen.committed_at,
        "now": history.status.now,
        "save": None if seen.save is None else asdict(seen.save) | {"share": seen.save.share},
        "slow": None if history.slow is None else asdict(history.slow) | {"text": str(history.slow)},
        "attempts": [
            {name: value for name, value in asdict(item).items() if name not in ("commits", "resume")}
            | {"commits": [commit.key for commit in item.commits]}
            for item in history.attempts
        ],
    }
