"""Finds a committed checkpoint by what a person calls it: a step, a name or a key; None is the head."""

from operator import index

from raycheck.bucket.format.latest import Entry, Latest
from raycheck.bucket.format.object_keys import CheckpointName
from raycheck.bucket.protocol.name_and_score import names_in
from raycheck.bucket.store import Store
from raycheck.errors import NotFoundError

MAX_DIGITS = 18
"""A longer number is not a step."""


def entry_at(store: Store, body: Latest, at: int | str | None) -> Entry:
    """Return the entry of a live checkpoint; of several with one step, the newest.

    Raises NotFoundError, which says what there is.
    """
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
        f"{store}: {at!r} is not a checkpoint's name. Names in use: {names_in(body)}; keys are like "
        f"{body.head or 'step-000000100-a1-s1'}; a step is a whole number"
    )


def _of_step(store: Store, body: Latest, step: int) -> Entry:
    found = [entry for entry in body.live if entry.step == step]
    if not found:
        steps = ", ".join(str(entry.step) for entry in body.live) or "none"
        raise NotFoundError(f"{store}: no checkpoint of step {step}; there are: {steps}")
    return found[-1]


def _with_key(store: Store, body: Latest, key: str) -> Entry:
    entry = body.entry(key)
    if entry is None:
        is_dropped = any(item.key == key for item in body.evicted)
        why = "was dropped, by retention or by hand" if is_dropped else "is not listed: never committed, or dropped"
        raise NotFoundError(f"{store}: checkpoint {key} {why}. 'raycheck ls' lists those that exist")
    return entry
