"""Reads the retention rules of a save from its manifest, which has the user's settings as text."""

import ast
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from raycheck.errors import ConfigError
from raycheck.settings import Retention, SaveSettings


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedRules:
    """The retention rules of a save.

    rules: with the defaults for what was not set. stated: the texts that state them. unread: texts that cannot be
    parsed; the default counts in their place.
    """

    rules: Retention
    stated: tuple[str, ...]
    unread: tuple[str, ...]


def recorded_rules(settings: Sequence[str]) -> RecordedRules:
    """Parse the rules among the settings of a manifest."""
    defaults = SaveSettings().retention
    names = {spec.name for spec in fields(Retention)}
    chosen: dict[str, Any] = {name: getattr(defaults, name) for name in names}
    stated, unread = [], []
    for text in settings:
        name, _, value = text.partition("=")
        name = {"keep_every_seconds": "keep_every_s"}.get(name, name)  # as earlier versions wrote it
        if name not in names:
            continue
        try:
            chosen[name] = ast.literal_eval(value)
            if name == "keep_best" and isinstance(chosen[name], tuple):  # likewise
                chosen[name] = dict(zip(("metric", "mode", "count"), chosen[name], strict=True))
            Retention(**{name: chosen[name]})
            stated.append(text)
        except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError, ConfigError):
            chosen[name] = getattr(defaults, name)
            unread.append(text)
    return RecordedRules(rules=Retention(**chosen), stated=tuple(stated), unread=tuple(unread))
