"""Decides which checkpoints stay: a pure function of a body of `latest`, part of the swap that applies it. Step 19.

Entries are in the order of their commits. Only this order counts here, since steps repeat after a rewind. The head and
pinned entries are never dropped, not even when they expire; the head is also what the live attempt restores, until its
first commit moves it. An entry with a name is dropped only when it expires. A checkpoint to which a kept entry refers
may leave the list; its objects stay as long as an entry holds them (prune_and_sweep.py).
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from raycheck.bucket.format.latest import Entry, Latest
from raycheck.bucket.format.object_keys import CheckpointName
from raycheck.settings import Retention

NO_RULE = "no rule keeps it"
EXPIRED = "expired"


@dataclass(frozen=True, kw_only=True, slots=True)
class KeepDecision:
    """The decision whether one entry stays, and its reason."""

    entry: Entry
    is_kept: bool
    reason: str


def decide_retention(body: Latest, rules: Retention, *, now: float) -> tuple[KeepDecision, ...]:
    """Decide on each live entry, in order.

    Damaged entries stay while they are pinned or named, and no rule counts them. A mirror keeps what its source keeps.
    now: the bucket's time, for expiry.
    """
    if body.is_mirror:
        return tuple(KeepDecision(entry=entry, is_kept=True, reason="its source keeps it") for entry in body.live)
    protected = dict(_protected(body, now))
    whole = [entry for entry in body.live if not entry.damaged]
    kept = dict(_kept([entry for entry in whole if not entry.rolling], _left_behind(body), rules))
    kept |= _rolling([entry.key for entry in whole if entry.rolling], rules.rolling_keep_last)
    return tuple(_decision(entry, protected, kept, now) for entry in body.live)


def dropped(body: Latest, rules: Retention, *, now: float) -> dict[str, str]:
    """Return the entries to evict: their keys, and in words why each is dropped."""
    found = (item for item in decide_retention(body, rules, now=now) if not item.is_kept)
    return {item.entry.key: _why_dropped(item, rules) for item in found}


def _why_dropped(item: KeepDecision, rules: Retention) -> str:
    if item.reason != NO_RULE:
        return item.reason
    if item.entry.damaged:
        return "damaged, and neither pinned nor named"
    if item.entry.rolling:
        return f"retention keeps the newest {rules.rolling_keep_last} rolling ones"
    best = rules.keep_best
    words = (
        None if rules.keep_last is None else f"the newest {rules.keep_last}",
        None if rules.keep_every_steps is None else f"one per {rules.keep_every_steps} steps",
        None if rules.keep_every_s is None else f"one per {rules.keep_every_s:g} s",
        None if best is None else f"the best {best['count']} by {best['metric']}",
    )
    return f"retention keeps {', '.join(filter(None, words))}"


def _decision(entry: Entry, protected: dict[str, str], kept: dict[str, str], now: float) -> KeepDecision:
    if entry.key in protected:
        return KeepDecision(entry=entry, is_kept=True, reason=protected[entry.key])
    if entry.expires_at is not None and now >= entry.expires_at:
        return KeepDecision(entry=entry, is_kept=False, reason=EXPIRED)
    if entry.key in kept:
        return KeepDecision(entry=entry, is_kept=True, reason=kept[entry.key])
    return KeepDecision(entry=entry, is_kept=False, reason=NO_RULE)


def _protected(body: Latest, now: float) -> Iterator[tuple[str, str]]:
    """Yield (key, reason) of the entries that stay whatever the rules say. If there are several reasons, the last one
    counts."""
    for entry in body.live:
        if entry.is_kept_by_name(now):
            yield entry.key, f"named {entry.name}"
        if entry.pinned:
            yield entry.key, "pinned"
    if body.head is not None:
        yield body.head, "head"


def _kept(live: Sequence[Entry], left: set[str], rules: Retention) -> Iterator[tuple[str, str]]:
    best: list[Entry] = []
    if rules.keep_best is not None:
        metric, count = rules.keep_best["metric"], rules.keep_best["count"]
        best = best_by(live, metric, rules.keep_best["mode"], count)
        yield from ((entry.key, f"among the best {count} by {metric}") for entry in best)
    counted = (rules.keep_last, rules.keep_every_steps, rules.keep_every_s)
    if counted == (None, None, None) and not best:  # a metric that no entry has does not count as a rule
        yield from ((entry.key, "no rule applies") for entry in live)
    if rules.keep_every_steps is not None:
        every = rules.keep_every_steps
        yield from ((entry.key, f"one per {every} steps") for entry in _milestones(live, every, left))
    if rules.keep_every_s is not None:
        every_s = rules.keep_every_s
        yield from ((entry.key, f"one per {every_s:g} s") for entry in _first_by_time(live, every_s, left))
    if rules.keep_last is not None:
        line = [entry for entry in live if entry.key not in left]
        newest = (*live[-rules.keep_last :], *line[-rules.keep_last :])
        yield from ((entry.key, f"among the newest {rules.keep_last}") for entry in newest)


def _rolling(keys: list[str], count: int | None) -> dict[str, str]:
    if count is None:
        return dict.fromkeys(keys, "no rule applies")
    return dict.fromkeys(keys[-count:], f"among the newest {count} rolling")


def _left_behind(body: Latest) -> set[str]:
    """Return the keys of abandoned entries: a later attempt restored a checkpoint before them."""
    sources = [(CheckpointName.parse(attempt.restore_key or ""), attempt.number) for attempt in body.attempts]
    return {
        entry.key
        for entry in body.live
        if (name := CheckpointName.parse(entry.key))
        and any(source and source < name and name.attempt < number for source, number in sources)
    }


def best_by(live: Iterable[Entry], metric: str, mode: str, count: int) -> list[Entry]:
    """Return the best `count` entries by a metric, never one without a finite value.

    A score that was attached after the commit takes precedence over a metric of the same name. Of equal entries the
    newer counts as better: training continued from it.
    """
    sign = -1.0 if mode == "max" else 1.0
    ranked = [
        (sign * value, -place, entry)
        for place, entry in enumerate(live)
        if math.isfinite(value := entry.scores.get(metric, entry.metrics.get(metric, math.nan)))
    ]
    return [entry for _, _, entry in sorted(ranked, key=lambda item: item[:2])[:count]]


def _milestones(live: Iterable[Entry], every: int, left: set[str]) -> list[Entry]:
    """Return the lowest step of each span [k x every, (k + 1) x every) for k >= 1, and of equal steps the newest
    commit.

    An abandoned entry counts only where its span has no other. So a save triggered by the clock or a preemption notice
    takes the place of a missing multiple.
    """
    found: dict[int, Entry] = {}
    for entry in sorted(live, key=lambda entry: entry.key not in left):  # abandoned ones first
        span = entry.step // every
        chosen = found.get(span)
        if span and (chosen is None or chosen.key in left or entry.step <= chosen.step):
            found[span] = entry
    return list(found.values())


def _first_by_time(live: Iterable[Entry], every_s: float, left: set[str]) -> list[Entry]:
    """Return the first commit of each span [k x every_s, (k + 1) x every_s) of the bucket's time.

    The first one is chosen so that later commits do not change the choice for a span. An abandoned entry counts only
    where its span has no other.
    """
    found: dict[float, Entry] = {}
    for entry in sorted(live, key=lambda entry: entry.key in left):  # abandoned ones last; otherwise in order of commit
        found.setdefault(entry.committed_at // every_s, entry)
    return list(found.values())
