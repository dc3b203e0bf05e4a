"""The command line `raycheck`: this file assembles the commands and turns errors into one line.

- browse.py shows and verifies a run's checkpoints: `ls`, `show`, `verify`.
- data.py lists the samples of a run's steps: `data`.
- manage.py changes what a run keeps, and repairs it: `prune`, `sweep`, `rewind`, `repair` and others.
- names.py pins, names, and scores single checkpoints: `pin`, `name`, `rename`, `unname`, `score`.
- submit.py runs a training script as a Ray job, watch_node.py forwards a cloud's preemption notice, export.py writes
  Hugging Face directories, tinker.py serves the tinker SDK, demo.py runs a demo, docs.py prints the guides.
- catalog/ works with many runs in one bucket: `runs`, `fork`, `delete`, `delete-run`, `pack`, `unpack`, `download`,
  `import`, `prune-runs`, `clean`, `cp`; and examines a bucket: `doctor`.
- views/ looks into checkpoints: `tensors`, `diff`; shows what a run was: `history`; watches a run: `top`; alerts:
  `watch`; and serves the `page`.
- options.py has the shared arguments, their shell completion, and the printing functions.

To add a command, write a function in the file of its topic and add it to GROUPS below. The function's name, with
hyphens, is the command's name. Its docstring is the help text, and its parameters are typer arguments and options.
Import torch and Ray inside the function, since browsing must load neither. Print with `out`, `Text`, `print_table` and
`print_json` of options.py, which make text from a bucket harmless for a terminal. Raise a RaycheckError if the command
fails; `name=` in its message is shown to the user as `--name`.

Exit codes: 0 success, 1 something is damaged or wrong (or a submitted training failed), 2 the command failed for the
reason in its message, 141 the reader of the output has gone (closed_pipe.py).
"""

import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import raycheck
from raycheck.cli import browse, data, demo, docs, export, manage, names, published, submit, tinker, watch_node
from raycheck.cli.catalog import archives, clean, delete, doctor, fork, import_command, policy, runs
from raycheck.cli.catalog import copy as copies
from raycheck.cli.closed_pipe import end_with_the_reader
from raycheck.cli.options import Text, out, with_flags
from raycheck.cli.views import history, page, tensors, top, watch
from raycheck.errors import RaycheckError
from raycheck.terminal import printable_lines

GROUPS: dict[str, tuple[Callable[..., None], ...]] = {
    "Look": (
        runs.runs,
        browse.ls,
        browse.show,
        history.history,
        top.top,
        watch.watch,
        tensors.tensors,
        tensors.diff,
        data.data,
        page.page,
        docs.docs,
    ),
    "Change": (
        names.pin,
        names.unpin,
        names.name,
        names.rename,
        names.unname,
        names.score,
        manage.rewind,
        manage.prune,
        manage.prune_exports,
        manage.sweep,
        policy.prune_runs,
        clean.clean,
        delete.delete,
        delete.delete_run,
    ),
    "Move": (
        copies.cp,
        fork.fork,
        export.export_hf,
        published.publish,
        published.pull,
        archives.download,
        archives.pack,
        archives.unpack,
        import_command.import_,
    ),
    "Run": (submit.submit, watch_node.watch_node, tinker.tinker, demo.demo),
    "Diagnose": (doctor.doctor, browse.verify, manage.repair),
}
"""Every command, in the groups and the order in which --help shows them."""


class _Grouped(TyperGroup):
    """The group of all commands, whose help lists them by topic as plain text."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        named = {name: self.get_command(ctx, name) for name in self.list_commands(ctx)}
        limit = formatter.width - 6 - max(map(len, named))
        for group in GROUPS:
            rows = [
                (name, command.get_short_help_str(limit))
                for name, command in named.items()
                if command is not None and getattr(command, "rich_help_panel", None) == group
            ]
            with formatter.section(group):
                formatter.write_dl(rows)


app = typer.Typer(
    cls=_Grouped,
    help="Look at the checkpoints of Ray Train runs in a bucket, verify, keep, drop, rewind, repair and export them.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
for group, commands in GROUPS.items():
    for command in commands:
        name = command.__name__.strip("_").replace("_", "-")
        app.command(name, rich_help_panel=group)(with_flags(command))


def main() -> None:
    """Run the command line. A RaycheckError or OSError becomes one line; no error exits with 1, which means damage."""
    end_with_the_reader()
    try:
        try:
            app()
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except (RaycheckError, OSError) as error:
        print(f"raycheck: {printable_lines(str(error))}", file=sys.stderr)  # noqa: T201
        sys.exit(2)
    except Exception:  # noqa: BLE001  a bug of ours says nothing about the run
        sys.excepthook(*sys.exc_info())
        sys.exit(2)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        out.print(Text(f"raycheck {raycheck.__version__}"))
        raise typer.Exit


@app.callback()
def _options(
    _: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    pass
