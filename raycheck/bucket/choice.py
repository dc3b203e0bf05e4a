"""Finds a committed checkpoint by what a person calls it: a step, a name, a key or "best"; None is the head."""

from operator import index

from raycheck.bucket.format.latest import Entry, Latest
from raycheck.bucket.format.object_keys import CheckpointName
from raycheck.bucket.protocol.name_and_score import names_near
from raycheck.bucket.protocol.resume import AtName, Resume, steps_near
from raycheck.bucket.protocol.retention import best_by
from raycheck.bucket.reading import Checkpoint, ask_latest
from raycheck.bucket.recorded_rules import recorded_rules
from raycheck.bucket.store import Store
from raycheck.errors import ConfigError, NotFoundError

BEST = "best"
MAX_DIGITS = 18
"""A longer number is not a step."""


def entry_at(store: Store, body: Latest, at: int | str | None) -> Entry:
    """Return the entry of a live checkpoint; of several with one step, the newest.

    at: "best" is the best one by the `keep_best` of the run's newest save. Raises NotFoundError, which says what there
    is, and ConfigError for "best" of a run without that setting.
    """
    if at == BEST:
        return _best(store, body)
    if at is None:
        if body.head is None:
            raise NotFoundError(f"{store}: the run has no committed checkpoint")
        return _with_key(store, body, body.head)
    if not isinstance(at, str):
        return _of_step(store, body, index(at))
    if at.isdecimal() and len(at) <= MAX_DIGITS:
        return _of_step(store, body, int(at))
    if (entry := body.named(at)) is not None:
        return entry
    if CheckpointName.parse(at) is not None:
        return _with_key(store, body, at)
    raise NotFoundError(
        f"{store}: {at!r} is not a checkpoint's name. Names in use: {names_near(body, at)}; keys are like "
        f"{body.head or 'step-000000100-a1-s1'}; a step is a whole number"
    )


def _best(store: Store, body: Latest) -> Entry:
    """Return the best undamaged entry by the rule that the head's manifest states."""
    live = [entry for entry in body.live if not entry.damaged]
    settings = Checkpoint(store, entry_at(store, body, None)).read_manifest().settings
    rule = recorded_rules(settings).rules.keep_best
    if rule is None:
        raise ConfigError(
            f"{store}: the run has no metric by which a checkpoint is the best one. Train with "
            'SaveSettings(keep_best={"metric": "loss", "mode": "min", "count": 1}), or give a step or a name'
        )
    found = best_by(live, rule["metric"], rule["mode"], 1)
    if not found:
        raise NotFoundError(
            f"{store}: no checkpoint has a finite {rule['metric']}, by which the run chooses the best one"
        )
    return found[0]


def _of_step(store: Store, body: Latest, step: int) -> Entry:
    found = body.of_step(step)
    if not found:
        raise NotFoundError(f"{store}: no checkpoint of step {step}; there are: {steps_near(body, step)}")
    return found[-1]


def _with_key(store: Store, body: Latest, key: str) -> Entry:
    entry = body.entry(key)
    if entry is None:
        is_dropped = any(item.key == key for item in body.evicted)
        why = "was dropped, by retention or by hand" if is_dropped else "is not listed: never committed, or dropped"
        raise NotFoundError(f"{store}: checkpoint {key} {why}. 'raycheck ls' lists those that exist")
    return entry


def resolved(store: Store, wish: Resume) -> Resume:
    """Return `wish` with "best" replaced by the key of the best checkpoint. Raises the errors of entry_at."""
    if wish != AtName(BEST):
        return wish
    return AtName(ask_latest(store, lambda body: entry_at(store, body, BEST)).key)
