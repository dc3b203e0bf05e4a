"""The arguments that commands share, their shell completion, and the printing of all commands."""

import inspect
import json
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import rich.text
import typer
from rich.console import Console
from rich.table import Table

from raycheck.bucket.store import open_store
from raycheck.errors import ConfigError, RaycheckError
from raycheck.run import open_run
from raycheck.storage_settings import StorageSettings
from raycheck.terminal import printable

UNCUT = 1_000_000
MAX_OFFERED = 200
_SIZE_ADVICE = "give a size above 0, such as 50GB or 128MiB"
_WORD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
"""Names that are safe to offer to a shell. It might interpret others, which untrusted writers may choose."""
out = Console(highlight=False, width=UNCUT)
"""Prints each table row as one line of any length: other programs need full names, and a terminal wraps lines."""


class Text(rich.text.Text):
    """A line or a table cell for `out`: its text is not markup and contains nothing that a terminal would interpret.

    Blank lines before and after the text are kept.
    """

    def __init__(self, text: str = "") -> None:
        bare = text.strip("\n")
        before, _, after = text.partition(bare) if bare else (text, "", "")
        super().__init__(before + printable(bare) + after)


def settings_of(file: Path | None) -> StorageSettings | None:
    """Return the storage settings in the file given with --storage, or None without a file. Raises ConfigError."""
    if file is None:
        return None
    return StorageSettings.from_mapping(yaml_of(file, option="--storage"))


def yaml_of(file: Path, *, option: str) -> dict[str, Any]:
    """Return the name: value pairs in a YAML file. option: the flag that named the file, for errors.

    Raises ConfigError if the file cannot be read or contains anything else.
    """
    import yaml

    try:
        found = yaml.safe_load(file.read_text())
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{option} {file}: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{option} {file}: it must contain name: value pairs")
    return found


def bytes_of(text: str, *, option: str) -> int:
    """Return a size such as 50GB or 128MiB in bytes. option: the flag that gave it, for errors. Raises ConfigError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([kmgtp]?)(i?)b?", text.strip(), re.IGNORECASE)
    if match is None or re.search(r"[KMGTP]i?b$", text.strip()):  # Mb may mean bits
        raise ConfigError(f"{option} {text}: {_SIZE_ADVICE}")
    unit: int = (1024 if match[3] else 1000) ** " kmgtp".index(match[2].lower() or " ")
    count = round(float(match[1]) * unit)
    if count < 1:
        raise ConfigError(f"{option} {text}: {_SIZE_ADVICE}")
    return count


def complete_uri(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the folders in a bucket that complete the URI being typed. The shell completes plain paths."""
    base, slash, begun = incomplete.rpartition("/")
    scheme, mark, rest = base.partition("://")
    if not slash or not mark or not (rest.strip("/") or scheme == "file") or "?" in incomplete:
        return []
    with suppress(RaycheckError, OSError):
        names = open_store(base, settings_of(_storage(ctx))).list_names("")
        fit = sorted(name for name in names if name.startswith(begun) and _WORD.fullmatch(name))
        return [f"{base}/{name}" for name in fit[:MAX_OFFERED]]
    return []


def complete_step(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the steps of the run on the command line, newest first, and the names of its checkpoints."""
    uri = ctx.params.get("uri") or next(iter(ctx.args), None)  # the latter when completing an option's value
    if not isinstance(uri, str):
        return []
    with suppress(RaycheckError, OSError):
        there = open_run(uri, settings_of(_storage(ctx))).checkpoints
        found = [str(item.step) for item in reversed(there)]
        found += [item.name for item in there if item.name and _WORD.fullmatch(item.name)]
        return [word for word in dict.fromkeys(found) if word.startswith(incomplete)][:MAX_OFFERED]
    return []


def _storage(ctx: typer.Context) -> Path | None:
    found = ctx.params.get("storage")
    return found if isinstance(found, Path) else Path(found) if isinstance(found, str) else None


Uri = Annotated[
    str,
    typer.Argument(
        help="The run: Ray's storage path and run name, e.g. s3://bucket/runs/my-run", autocompletion=complete_uri
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Storage = Annotated[Path | None, typer.Option(help="A YAML file with the fields of StorageSettings.")]
Step = Annotated[
    str | None,
    typer.Option(
        metavar="STEP",
        help="The newest checkpoint of this step; or a checkpoint's name or key.",
        autocompletion=complete_step,
    ),
]
At = Annotated[
    str,
    typer.Argument(
        metavar="STEP", help="A step, a checkpoint's name, or its key as ls shows it.", autocompletion=complete_step
    ),
]

DryRun = Annotated[bool, typer.Option("--dry-run", help="Only show what would be done; change nothing.")]
Grace = Annotated[
    float,
    typer.Option(min=0, help="Seconds that readers get before what was dropped is deleted; 0: none."),
]
Price = Annotated[float, typer.Option("--price-per-gib-month", min=0, help="What a GiB costs in a month, in dollars.")]
Host = Annotated[
    str, typer.Option(help="Where to listen. Others than this machine's own addresses need a token or key.")
]
Port = Annotated[int, typer.Option(help="The port; 0 takes a free one.", min=0, max=65535)]
AllowHost = Annotated[
    list[str] | None, typer.Option(help="Another name under which clients reach the server. Repeatable.")
]


def with_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Wrap a command so that its ConfigErrors name options in command-line form.

    Errors come from functions that take arguments of the options' names: `keep_last=` becomes `--keep-last`,
    and `overwrite=True` becomes `--overwrite`.
    """
    names = "|".join(inspect.signature(command).parameters)
    argument = re.compile(rf"(?<![\w(?&/.])({names})=(?:True\b)?(?=(.?))")

    def flag(found: re.Match[str]) -> str:
        if found[0].endswith("True"):
            return f"--{found[1].replace('_', '-')}"
        has_value = found[2] and (found[2].isalnum() or found[2] in "'\"-/")
        return f"--{found[1].replace('_', '-')}{' ' if has_value else ''}"

    @wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except ConfigError as error:
            raise type(error)(argument.sub(flag, str(error))) from None

    return run


def table_of(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    """Return a table without lines. A cell is any value that `str` accepts."""
    table = Table(*columns, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*map(Text, map(str, row)))
    return table


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table without lines."""
    table = table_of(columns, rows)
    out.print(table)


def print_json(value: object) -> None:
    """Print JSON with exact numbers. json.dumps escapes every control character but DEL, which is escaped here."""
    print(json.dumps(value, indent=1).replace("\x7f", "\\u007f"))  # noqa: T201
