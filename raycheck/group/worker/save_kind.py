"""The kinds of save, and which of several takes precedence."""

from collections.abc import Sequence
from typing import Literal, get_args

from raycheck.errors import ConfigError
from raycheck.settings import SaveSettings

SaveKind = Literal["roll", "keep"]
"""A rolling save, or one that retention keeps by its rules. The second includes the first."""


def strongest(*kinds: SaveKind | None) -> SaveKind | None:
    """Return the kind that includes all others; None when there is nothing to save."""
    return max((kind for kind in kinds if kind), key=get_args(SaveKind).index, default=None)


def kind_asked_for(
    settings: SaveSettings, *, is_rolling: bool, after_commit: str | Sequence[str]
) -> tuple[SaveKind, tuple[str, ...]]:
    """Return the kind of a save that the script asks for, and the tasks that follow its commit.

    Raises ConfigError for a task that the settings do not have.
    """
    tasks = (after_commit,) if isinstance(after_commit, str) else tuple(after_commit)
    if unknown := [name for name in tasks if name not in settings.tasks]:
        raise ConfigError(
            f"save(after_commit={unknown[0]!r}): SaveSettings(after_commit=...) has the tasks {list(settings.tasks)}"
        )
    return "roll" if is_rolling and not tasks else "keep", tasks
