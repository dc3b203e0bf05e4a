"""What the commands share: their common arguments, and how they print."""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from raycheck.errors import ConfigError
from raycheck.storage_settings import StorageSettings

out = Console(highlight=False)
Uri = Annotated[str, typer.Argument(help="The run: Ray's storage path and run name, e.g. s3://bucket/runs/my-run")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Storage = Annotated[Path | None, typer.Option(help="A YAML file with the fields of StorageSettings.")]
Step = Annotated[int | None, typer.Option(help="Only the checkpoint of this step.")]


def size(count: float) -> str:
    """Bytes for people: 1.5 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def settings_of(file: Path | None) -> StorageSettings | None:
    if file is None:
        return None
    return StorageSettings.from_mapping(yaml_of(file, option="--storage"))


def yaml_of(file: Path, *, option: str) -> dict[str, Any]:
    """What a YAML file given for `option` holds. Raises ConfigError."""
    import yaml

    try:
        found = yaml.safe_load(file.read_text())
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{option} {file}: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{option} {file}: it must hold name: value pairs")
    return found


def time_of(at: float) -> str:
    """A time of the store's clock for people, whatever a bucket says that it is."""
    try:
        return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OverflowError, OSError):
        return f"no date ({at:.3g})"


def print_json(value: object) -> None:
    print(json.dumps(value, indent=1))  # noqa: T201
