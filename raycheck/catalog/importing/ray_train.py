"""Finds the newest checkpoint in a Ray Train experiment's directory, and the contents of a checkpoint's directory.

Ray's callbacks write `checkpoint.pt`, `checkpoint.ckpt` (Lightning) or a folder `checkpoint/` (transformers) there.
"""

import re
from dataclasses import dataclass

from raycheck.catalog.importing.source_files import SourceFiles
from raycheck.errors import ConfigError, CorruptError, NotFoundError

SNAPSHOT = "checkpoint_manager_snapshot.json"
"""Ray Train's record of its checkpoints, which names the latest one."""
_FOLDER = re.compile(r"checkpoint_(?:\d{1,12}|\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d\.\d{1,9})")
"""A name given by Ray: a number, or in Ray 2 a time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundCheckpoint:
    """The files of one checkpoint in an experiment, and how it was chosen, for people."""

    files: SourceFiles
    note: str
    step: int | None


def has_checkpoints(files: SourceFiles) -> bool:
    """Return whether this is the directory of an experiment or of one of Ray's trials."""
    return SNAPSHOT in files.sizes or any(
        _FOLDER.fullmatch(part) for name in files.sizes for part in name.split("/")[:2]
    )


def latest_checkpoint(files: SourceFiles) -> FoundCheckpoint:
    """Choose the newest checkpoint: the one named by Ray's record, else the last by number or time.

    Raises ConfigError if several trials have checkpoints, and NotFoundError if the recorded one is gone.
    """
    by_trial: dict[str, set[str]] = {}
    for name in files.sizes:
        for depth, part in _parts(name):
            by_trial.setdefault("/".join(name.split("/")[:depth]), set()).add(part)
    if len(by_trial) > 1:
        raise ConfigError(f"{files}: several trials have checkpoints ({', '.join(sorted(by_trial))}): name one")
    recorded = _recorded(files)
    trial, folders = next(iter(by_trial.items()), ("", set()))
    if recorded is not None and recorded not in folders:
        raise NotFoundError(f"{files}: {SNAPSHOT} says that {recorded} is the latest checkpoint, but it does not exist")
    if not folders:
        raise NotFoundError(f"{files}: the experiment has no checkpoint")
    chosen = recorded or max(folders, key=_order)
    how = "the latest one, as Ray recorded it" if recorded else f"the last of {len(folders)} by name"
    number = chosen.removeprefix("checkpoint_")
    return FoundCheckpoint(
        files=files.below(f"{trial}/{chosen}/".lstrip("/")),
        note=f"{chosen}: {how}",
        step=int(number) if number.isdigit() else None,
    )


def _parts(name: str) -> list[tuple[int, str]]:
    return [(depth, part) for depth, part in enumerate(name.split("/")[:-1][:2]) if _FOLDER.fullmatch(part)][:1]


def _recorded(files: SourceFiles) -> str | None:
    if SNAPSHOT not in files.sizes:
        return None
    record = files.read_json(SNAPSHOT)
    latest = record.get("latest_checkpoint_result") if isinstance(record, dict) else None
    results = record.get("checkpoint_results") if isinstance(record, dict) else None
    chosen = latest or (results[-1] if isinstance(results, list) and results else None)
    if chosen is None:
        return None
    name = chosen.get("checkpoint_dir_name") if isinstance(chosen, dict) else None
    if not isinstance(name, str) or "/" in name or name in ("", ".", ".."):
        raise CorruptError(f"{files.what(SNAPSHOT)} does not name the folder of a checkpoint: {str(name)[:100]!r}")
    return name


def _order(folder: str) -> tuple[int, int, str]:
    number = folder.removeprefix("checkpoint_")
    return (0, int(number), "") if number.isdigit() else (1, 0, number)
