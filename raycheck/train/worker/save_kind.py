"""Names the kinds of save, and says which of several wins."""

from typing import Literal, get_args

from raycheck.errors import ConfigError
from raycheck.settings import SaveSettings

SaveKind = Literal["roll", "keep", "export"]
"""A rolling save, one that retention keeps by its rules, or one that is exported too. Each includes those before it."""


def strongest(*kinds: SaveKind | None) -> SaveKind | None:
    """Returns the kind that includes all others; None when there is nothing to save."""
    return max((kind for kind in kinds if kind), key=get_args(SaveKind).index, default=None)


def kind_asked_for(settings: SaveSettings, *, is_rolling: bool, export: bool) -> SaveKind:
    """Returns the kind of a save that the script asks for. Raises ConfigError for an export without `exports`."""
    if export and settings.exports is None:
        raise ConfigError("save(export=True) needs SaveSettings(exports=ExportSettings(...))")
    return "export" if export else "roll" if is_rolling else "keep"
