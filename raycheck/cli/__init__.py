"""The command line `raycheck`: this file assembles the commands and turns errors into one line.

- browse.py shows and verifies a run's checkpoints: `ls`, `show`, `verify`.
- data.py lists the samples of a run's steps: `data`.
- manage.py changes what a run keeps, and repairs it: `prune`, `sweep`, `rewind`, `repair` and others.
- names.py pins, names, and scores single checkpoints: `pin`, `name`, `rename`, `unname`, `score`.
- submit.py runs a training script as a Ray job, watch_node.py forwards a cloud's preemption notice, export.py writes
  Hugging Face directories, tinker.py serves the tinker SDK, demo.py runs a demo, docs.py prints the guides.
- catalog/ works with many runs in one bucket: `runs`, `fork`, `delete`, `delete-run`, `pack`, `unpack`, `download`,
  `import`, `prune-runs`, `cp`.
- views/ looks into checkpoints: `tensors`, `diff`; watches a run: `top`; and serves the `page`.
- options.py has the shared arguments, their shell completion, and the printing functions.

To add a command, write a function in the file of its topic and add it to that file's COMMANDS. The function's name,
with hyphens, is the command's name. Its docstring is the help text, and its parameters are typer arguments and options.
Import torch and Ray inside the function, since browsing must load neither. Print with `out`, `Text`, and `print_json`
of options.py, which make text from a bucket harmless for a terminal. Raise a RaycheckError if the command fails;
`name=` in its message is shown to the user as `--name`.

Exit codes: 0 success, 1 something is damaged (or a submitted training failed), 2 the command failed for the reason in
its message, 141 the reader of the output has gone (closed_pipe.py).
"""

import sys
from typing import Annotated

import typer

import raycheck
from raycheck.cli import browse, data, demo, docs, export, manage, names, submit, tinker, watch_node
from raycheck.cli.catalog import archives, delete, fork, import_command, policy, runs
from raycheck.cli.catalog import copy as copies
from raycheck.cli.closed_pipe import end_with_the_reader
from raycheck.cli.options import Text, out, with_flags
from raycheck.cli.views import page, tensors, top
from raycheck.errors import RaycheckError
from raycheck.terminal import printable_lines

app = typer.Typer(
    help="Look at the checkpoints of Ray Train runs in a bucket, verify, keep, drop, rewind, repair and export them.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
for topic in (
    browse,
    tensors,
    top,
    page,
    tinker,
    data,
    manage,
    names,
    runs,
    fork,
    policy,
    delete,
    submit,
    watch_node,
    export,
    copies,
    archives,
    import_command,
    demo,
    docs,
):
    for command in topic.COMMANDS:
        app.command(command.__name__.strip("_").replace("_", "-"))(with_flags(command))


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
