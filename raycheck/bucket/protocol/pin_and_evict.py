"""Pins, unpins, evicts and forgets checkpoints, without an attempt. Step 29.

Each change is a swap that leaves owner, attempt, coordinator, head and last save unchanged, so a running coordinator is
not disturbed: its next commit is computed from the changed body. Anyone may make these changes at any time.
"""

import getpass
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace

from raycheck.bucket.format.latest import Evicted, Latest
from raycheck.bucket.format.object_keys import split_directory
from raycheck.bucket.history.facts import CommitRecord, DropRecord, Facts
from raycheck.bucket.history.segments import record_facts
from raycheck.bucket.pages import PageMissingError
from raycheck.bucket.protocol.retention import EXPIRED, dropped
from raycheck.bucket.protocol.swap import Register, refuse_mirror
from raycheck.bucket.store.address import shown_uri
from raycheck.errors import NotFoundError, RaycheckError
from raycheck.settings import Retention

MAX_WHO = 100


def pin(register: Register, key: str, *, pinned: bool = True) -> Latest:
    """Keep the live checkpoint `key` regardless of retention and expiry; pinned=False ends that.

    Raises NotFoundError when it is not live, ConfigError in a mirror, which has the pins of the run that it follows.
    """

    def change(body: Latest, now: float) -> Latest | None:
        del now
        new = with_pin(register.store.uri, body, key, pinned=pinned)
        return None if new == body else new

    return register.edit(change, what=f"{'pin' if pinned else 'unpin'} of {key}")


def with_pin(uri: str, body: Latest, key: str, *, pinned: bool) -> Latest:
    """Return `body` with the checkpoint `key` pinned or unpinned. uri: the run's. Raises the errors of `pin`."""
    refuse_mirror(uri, body, "pin the checkpoint")
    entry = body.entry(key)
    if entry is None:
        raise NotFoundError(f"{shown_uri(uri)}: checkpoint {key} is no longer live")
    return body.with_entry(replace(entry, pinned=pinned))


def by_hand(what: str = "by hand") -> str:
    """Return in words, for the history, that this process's user drops checkpoints. what: the means."""
    user = "somebody"
    with suppress(OSError, KeyError, ImportError):  # a user without a name
        user = getpass.getuser()
    return f"dropped {what} by {user}@{socket.gethostname()}"[:MAX_WHO]


def evict(register: Register, rules: Retention, *, coordinator: str | None = None, by: str = "") -> Latest:
    """Move the checkpoints that no rule keeps to `evicted`, permanently (I4). Step 19, outside of a commit.

    coordinator: do nothing when the live attempt belongs to another one, which has rules of its own. by: see by_hand;
    "" for training's own rules, whose evictions training writes into the history.
    """
    past = PastOfDropped(register)

    def change(body: Latest, now: float) -> Latest | None:
        if coordinator not in (None, body.attempt.coordinator):
            return None
        found = dropped(body, rules, now=now)
        why = {key: f"{by}: {text}" if by and text != EXPIRED else text for key, text in found.items()}
        new = with_evicted(body, why, now=now)
        past.note(body, why, now=now)
        return None if new == body else new

    body = register.edit(change, what="eviction")
    if by:
        past.record(body)
    return body


class PastOfDropped:
    """The past of checkpoints that are dropped outside of training: nobody else may ever write it into the history."""

    def __init__(self, register: Register) -> None:
        self._register = register
        self._commits: dict[str, CommitRecord] = {}
        self._drops: dict[str, DropRecord] = {}

    def note(self, body: Latest, why: Mapping[str, str], *, now: float) -> None:
        """Note what is about to be dropped from `body`, which lists it itself. why: the reasons, by key."""
        self._commits |= {entry.key: CommitRecord.of(entry, body.counter) for entry in body.newest if entry.key in why}
        self._drops |= {key: DropRecord(key=key, at=now, why=text) for key, text in why.items()}

    def record(self, body: Latest) -> None:
        """Write what was dropped, as the new `body` shows, into the history. Step 41. It fails nothing."""
        with suppress(RaycheckError, PageMissingError):  # for people only: losing it loses no checkpoint
            if not self._drops or self._register.is_dry:
                return
            live = {entry.key for entry in self._register.pages.whole(body).live}
            commits = {key: item for key, item in self._commits.items() if key not in live}
            drops = {key: item for key, item in self._drops.items() if key not in live}
            facts = Facts(commits=commits, drops=drops)
            record_facts(self._register.store, facts, run_id=body.run_id, counter=body.counter)


def with_evicted(body: Latest, keys: Mapping[str, str], *, now: float) -> Latest:
    """Return `body` with the live entries `keys`, which it lists itself, evicted. keys: each with the reason, in words.

    Evicted checkpoints to which only these referred are evicted again, so that a reader of `keys` has the whole grace
    period.
    """
    gone = [entry for entry in body.newest if entry.key in keys]
    new = replace(body, newest=tuple(entry for entry in body.newest if entry.key not in keys))
    freed = {ref for entry in gone for ref in entry.refs if not split_directory(ref)[0]}
    released = new.not_held(freed)
    evicted = body.evicted if released else body.newest_evicted
    left = tuple(item for item in evicted if item.key not in released)
    again = tuple(replace(item, at=now) for item in evicted if item.key in released)
    dropped = tuple(
        Evicted(
            key=entry.key,
            at=now,
            borrowed=tuple(ref for ref in entry.refs if split_directory(ref)[0]),
            why=keys[entry.key],
        )
        for entry in gone
    )
    return replace(new, newest_evicted=(*left, *again, *dropped))


def forget(register: Register, keys: frozenset[str]) -> Latest:
    """Remove names whose objects are all deleted from `evicted`. Step 21.

    They cannot return: a save number is committed once per attempt, and an older attempt commits nothing.
    """

    def change(body: Latest, now: float) -> Latest | None:
        del now
        left = tuple(item for item in body.evicted if item.key not in keys)
        return None if len(left) == len(body.evicted) else replace(body, newest_evicted=left)

    return register.edit(change, what="prune")
