"""Explains why each checkpoint of a run is kept, by the rules that its training had at its newest commit.

The rules are the user's settings, which the head's manifest stores as text. A setting that cannot be parsed counts as
its default and is listed in `unread`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from raycheck.bucket.format.latest import Latest
from raycheck.bucket.protocol.retention import decide_retention
from raycheck.bucket.recorded_rules import recorded_rules
from raycheck.settings import Retention


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptCheckpoint:
    """The decision whether the next commit would keep a checkpoint, by its key, and the reason."""

    key: str
    size_bytes: int
    is_kept: bool
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptCheckpoints:
    """The checkpoints that the next commit would keep, and why.

    decisions: one for each live checkpoint, in commit order. rules: the settings that differ from the defaults, as in
    SaveSettings. unread: settings that could not be parsed.
    """

    decisions: tuple[KeptCheckpoint, ...]
    rules: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()


def why_kept(body: Latest, settings: Sequence[str], *, now: float) -> KeptCheckpoints:
    """Decide which checkpoints in `body` to keep. settings: those in the newest manifest. now: the bucket's time."""
    found = recorded_rules(settings)
    return replace(kept_by(body, found.rules, now=now), rules=found.stated, unread=found.unread)


def kept_by(body: Latest, rules: Retention, *, now: float) -> KeptCheckpoints:
    """Decide which checkpoints in `body` these rules keep."""
    decisions = tuple(
        KeptCheckpoint(key=item.entry.key, size_bytes=item.entry.size_bytes, is_kept=item.is_kept, reason=item.reason)
        for item in decide_retention(body, rules, now=now)
    )
    return KeptCheckpoints(decisions=decisions)
