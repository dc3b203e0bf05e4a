"""Pins, unpins, evicts and forgets checkpoints, without an attempt. Step 29.

Each change is a swap that leaves owner, attempt, coordinator, head and last save unchanged, so a running coordinator is
not disturbed: its next commit is computed from the changed body. Anyone may make these changes at any time.
"""

import getpass
import socket
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace

from raycheck.bucket.format.latest import Evicted, Latest
from raycheck.bucket.format.object_keys import CheckpointName, split_directory
from raycheck.bucket.history.facts import CommitRecord, DropRecord, Facts
from raycheck.bucket.history.segments import record_facts
from raycheck.bucket.pages import PageMissingError
from raycheck.bucket.protocol.retention import EXPIRED, dropped
from raycheck.bucket.protocol.swap import Register, refuse_mirror
from raycheck.bucket.store.address import shown_uri
from raycheck.errors import NotFoundError, RaycheckError
from raycheck.settings import Retention

MAX_WHO = 100
Choose = Callable[[Latest, float], Mapping[str, str]]


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

    def choose(body: Latest, now: float) -> Mapping[str, str]:
        if coordinator not in (None, body.attempt.coordinator):
            return {}
        found = dropped(body, rules, now=now)
        return {key: f"{by}: {text}" if by and text != EXPIRED else text for key, text in found.items()}

    return drop(register, choose, what="eviction", is_recorded=bool(by))


def drop(register: Register, choose: Choose, *, what: str, is_recorded: bool = True) -> Latest:
    """Evict the checkpoints that `choose` returns (I4), and write what they were into the history. Step 41.

    choose: returns their keys and the reasons; called with each body from which the swap is tried, which must list them
    itself, and the bucket's time. what: the purpose, for errors. is_recorded: False if training writes the history.
    Otherwise only this process can write it, so each try notes what it would drop before its outcome is known.
    """
    commits: dict[str, CommitRecord] = {}
    drops: dict[str, DropRecord] = {}

    def change(body: Latest, now: float) -> Latest | None:
        why = choose(body, now)
        commits.update({entry.key: CommitRecord.of(entry, body.counter) for entry in body.newest if entry.key in why})
        drops.update({key: DropRecord(key=key, at=now, why=text) for key, text in why.items()})
        return with_evicted(body, why, now=now) if why else None

    body = register.edit(change, what=what)
    if drops and is_recorded and not register.is_dry:
        with suppress(RaycheckError, PageMissingError):  # for people only: losing it loses no checkpoint
            live = _listed(register, body, drops)
            facts = Facts(
                commits={key: item for key, item in commits.items() if key not in live},
                drops={key: item for key, item in drops.items() if key not in live},
            )
            record_facts(register.store, facts, run_id=body.run_id, counter=body.counter)
    return body


def _listed(register: Register, body: Latest, keys: Iterable[str]) -> set[str]:
    """Return the live checkpoints of `body`, as far as they may be among `keys`. Reads only pages that may list one."""
    names = [CheckpointName.parse(key) for key in keys]
    pages = register.pages.read(page for page in body.pages if any(map(page.may_list, names)))
    return {entry.key for entry in (*body.newest, *(entry for page in pages for entry in page.live))}


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
