"""Names and scores live checkpoints, without an attempt. Step 29.

Like a pin, each change is a swap that leaves owner, attempt, coordinator, head and last save unchanged. So it may be
made while training runs; the next commit is computed from the changed body. A name belongs to one live entry of a run.
It never moves to a checkpoint of another step unless the caller says so, but training that repeats a step takes over
the name that it gave that step before. A mirror has only the names and scores of the run that it follows. The
`with_...` functions change nothing but the body they receive.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches

from raycheck.bucket.format.label import MAX_SCORES, Label, check_name, check_scores
from raycheck.bucket.format.latest import Entry, Latest
from raycheck.bucket.protocol.swap import Register, refuse_mirror
from raycheck.bucket.store.address import shown_uri
from raycheck.errors import ConfigError, NotFoundError

MOST_SHOWN = 8
"""An error names no more checkpoints than these."""


def name(register: Register, key: str, label: Label) -> Latest:
    """Give the live checkpoint `key` the name in `label`. Retention then keeps it until it expires.

    Raises ConfigError, naming the step, when another checkpoint has that name or this one has another name, unless
    `label.may_move`; NotFoundError when it is not live.
    """
    until: list[float] = []  # counted from the first reading: a repeated swap must recognize its own effect

    def change(body: Latest, now: float) -> Latest | None:
        refuse_mirror(register.store.uri, body, "name the checkpoint")
        until.append(now)
        return _unless_equal(with_name(register.store.uri, body, key, label, now=until[0]), body)

    return register.edit(change, what=f"naming {key} {label.name}")


def rename(register: Register, old: str, new: str) -> Latest:
    """Give the checkpoint named `old` the name `new`; its expiry stays. Raises the errors of `name`."""
    holder: list[str] = []

    def change(body: Latest, now: float) -> Latest | None:
        refuse_mirror(register.store.uri, body, "rename the checkpoint")
        if not holder:
            holder.append(named_entry(register.store.uri, body, old).key)
        entry = body.entry(holder[0])
        if entry is not None and entry.name == new:
            return None
        if entry is None or entry.name != old:
            raise NotFoundError(f"{register.store}: somebody else has just removed the name {old} from {holder[0]}")
        return with_new_name(register.store.uri, body, old, new, now=now)

    return register.edit(change, what=f"renaming {old} to {new}")


def unname(register: Register, old: str) -> Latest:
    """Remove the name `old` from its checkpoint, which is then subject to retention again. Raises NotFoundError."""
    holder: list[str] = []

    def change(body: Latest, now: float) -> Latest | None:
        del now
        refuse_mirror(register.store.uri, body, "remove the name")
        if not holder:
            holder.append(named_entry(register.store.uri, body, old).key)
        entry = body.entry(holder[0])
        return body.with_entry(replace(entry, name=None)) if entry is not None and entry.name == old else None

    return register.edit(change, what=f"removing the name {old}")


def score(register: Register, key: str, scores: Mapping[str, float]) -> Latest:
    """Attach scores to the live checkpoint `key`; a score with an existing name replaces the old one.

    Raises ConfigError for more than 32 scores; NotFoundError when the checkpoint is not live.
    """

    def change(body: Latest, now: float) -> Latest | None:
        del now
        refuse_mirror(register.store.uri, body, "score the checkpoint")
        return _unless_equal(with_scores(register.store.uri, body, key, scores), body)

    return register.edit(change, what=f"scores of {key}")


def with_name(uri: str, body: Latest, key: str, label: Label, *, now: float) -> Latest:
    """Return `body` with the name of `label` at `key`. now: the bucket's time, from which the expiry counts."""
    assert label.name is not None, "the caller has a name to give"
    entry = live_entry(uri, body, key)
    if entry.name not in (None, label.name) and not label.may_move:
        raise ConfigError(
            f"{shown_uri(uri)}: {key} (step {entry.step}) is named {entry.name} already. Rename it, or give "
            "overwrite=True"
        )
    expires_at = None if label.expire_after_s is None else now + label.expire_after_s
    body = _released(uri, body, entry, label.name, may_move=label.may_move, now=now)
    return body.with_entry(replace(entry, name=label.name, expires_at=expires_at))


def with_new_name(uri: str, body: Latest, old: str, new: str, *, now: float) -> Latest:
    """Return `body` with the name `new` in place of `old`."""
    check_name(new)
    entry = named_entry(uri, body, old)
    body = _released(uri, body, entry, new, may_move=False, now=now)
    return body.with_entry(replace(entry, name=new))


def with_scores(uri: str, body: Latest, key: str, scores: Mapping[str, float]) -> Latest:
    """Return `body` with these scores added to the checkpoint `key`."""
    check_scores(scores)
    entry = live_entry(uri, body, key)
    both = {**entry.scores, **{name: float(value) for name, value in scores.items()}}
    if len(both) > MAX_SCORES:
        raise ConfigError(
            f"{shown_uri(uri)}: {key} would have {len(both)} scores; a checkpoint has at most {MAX_SCORES}"
        )
    return body.with_entry(replace(entry, scores=both))


def with_name_of_save(body: Latest, key: str, name: str, *, may_move: bool, now: float) -> Latest:
    """Return `body`, to which a commit has added `key`, with the name that its save requested. Step 17.

    If a checkpoint of another step keeps the name, `key` is pinned instead: whoever wanted to keep it can decide later.
    """
    entry = body.entry(key)
    assert entry is not None, "the commit has just added it"
    holder = body.named(name)
    if holder is not None and not _gives_way(holder, entry, may_move=may_move, now=now):
        return body.with_entry(replace(entry, pinned=True))
    free = body if holder is None else body.with_entry(replace(holder, name=None))
    return free.with_entry(replace(entry, name=name))


def live_entry(uri: str, body: Latest, key: str) -> Entry:
    """Return the entry of a live checkpoint. Raises NotFoundError when it is not live."""
    entry = body.entry(key)
    if entry is None:
        raise NotFoundError(f"{shown_uri(uri)}: checkpoint {key} is no longer live")
    return entry


def named_entry(uri: str, body: Latest, name: str) -> Entry:
    """Return the live entry with this name. Raises NotFoundError, which says which similar names exist."""
    entry = body.named(name)
    if entry is None:
        raise NotFoundError(f"{shown_uri(uri)}: no checkpoint is named {name!r}; there are: {names_near(body, name)}")
    return entry


def names_near(body: Latest, name: str) -> str:
    """Return in words which names exist and for which steps: those most similar to `name`, and how many others.

    Raises PagesNeededError unless the body is whole.
    """
    steps = {entry.name: entry.step for entry in body.live if entry.name}
    nearest = get_close_matches(name, steps, MOST_SHOWN, cutoff=0)
    return and_others([f"{near} (step {steps[near]})" for near in nearest], len(steps))


def and_others(shown: Sequence[str], count: int) -> str:
    """Return in words what is shown, and how many of `count` are not."""
    others = f" (and {count - len(shown)} others)" if count > len(shown) else ""
    return ", ".join(shown) + others or "none"


def _released(uri: str, body: Latest, entry: Entry, name: str, *, may_move: bool, now: float) -> Latest:
    """Return `body` in which nobody but `entry` may have the name. Raises ConfigError when another entry keeps it."""
    holder = body.named(name)
    if holder is None or holder.key == entry.key:
        return body
    if not _gives_way(holder, entry, may_move=may_move, now=now):
        raise ConfigError(
            f"{shown_uri(uri)}: step {holder.step} ({holder.key}) has the name {name}. Give another name, unname that "
            "checkpoint, or name this one with overwrite=True"
        )
    return body.with_entry(replace(holder, name=None))


def _gives_way(holder: Entry, entry: Entry, *, may_move: bool, now: float) -> bool:
    return may_move or holder.step == entry.step or not holder.is_kept_by_name(now)


def _unless_equal(new: Latest, body: Latest) -> Latest | None:
    return None if new == body else new
