"""Says why each checkpoint of a run stays, by the rules that its training had at its newest commit.

The rules are the user's settings, which the head's manifest keeps as text. What cannot be read there counts as its
default, and is named.
"""

import ast
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from raycheck.bucket.format.latest import Latest
from raycheck.bucket.protocol.retention import KeepDecision, decide_retention
from raycheck.errors import ConfigError
from raycheck.settings import Retention, SaveSettings


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptCheckpoints:
    """Says which checkpoints the next commit would keep, and why.

    decisions: one for each live checkpoint, in the order of their commits. rules: in the words of SaveSettings, those
    that differ from the defaults. unread: settings that could not be read.
    """

    decisions: tuple[KeepDecision, ...]
    rules: tuple[str, ...]
    unread: tuple[str, ...]


def why_kept(body: Latest, settings: Sequence[str], *, now: float) -> KeptCheckpoints:
    """Decide on the checkpoints in `body`. settings: of the newest manifest. now: the bucket's time."""
    names = {spec.name for spec in fields(Retention)}
    chosen: dict[str, Any] = {name: getattr(SaveSettings(), name) for name in names}
    rules, unread = [], []
    for text in settings:
        name, _, value = text.partition("=")
        if name not in names:
            continue
        try:
            chosen[name] = ast.literal_eval(value)
            Retention(**{name: chosen[name]})
            rules.append(text)
        except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError, ConfigError):
            chosen[name] = getattr(SaveSettings(), name)
            unread.append(text)
    decisions = decide_retention(body, Retention(**chosen), now=now)
    return KeptCheckpoints(decisions=decisions, rules=tuple(rules), unread=tuple(unread))
