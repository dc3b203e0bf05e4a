"""Has several writers race for one object: exactly one may create it, and exactly one may replace a version.

`probe` of bucket/protocol/preflight.py shows that a store honors a condition. A store may do so and still check first
and write later; then two drivers that claim a run in the same moment both own it. A race that nobody wins twice does
not prove that there is none, so there are several rounds.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass
from typing import Literal
from uuid import uuid4

from raycheck.bucket.format import object_keys
from raycheck.bucket.store import Store
from raycheck.errors import ConfigError, ConflictError, DeniedError, StoreError

WRITERS = 8
ROUNDS = 2
Outcome = Literal["won", "lost", "unknown"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """One try of all writers of a race at the same moment: to create `key`, or to replace its `version`."""

    key: str
    version: str | None


Writers = Callable[[Turn], Sequence[Outcome]]
"""Has all writers take a turn at the same moment, by `contend`. Returns how each fared, in order."""


def race(store: Store, writers: Writers, *, rounds: int = ROUNDS) -> int:
    """Let the writers race for one object per round. Return how many writers there were.

    Raises ConfigError if two of them win one turn, and StoreError if nobody won any.
    """
    won, count = False, 0
    for _ in range(rounds):
        key = object_keys.probe_key(uuid4().hex)
        try:
            for what in ("creates", "replacements of one version"):
                turn = Turn(key=key, version=None if what == "creates" else store.get(key).version)
                outcomes = writers(turn)
                _judge(store, turn, outcomes, what)
                won, count = won or "won" in outcomes, len(outcomes)
        finally:
            store.delete(key)
    if not won:
        raise StoreError(f"{store}: none of {count} concurrent conditional writes of one object got an answer")
    return count


def by_threads(store: Store) -> Writers:
    """Return writers that are threads of this process, each with its own connection."""

    def take(turn: Turn) -> Sequence[Outcome]:
        with ThreadPoolExecutor(WRITERS, thread_name_prefix="raycheck-race") as pool:
            begun = [pool.submit(copy_context().run, contend, store, turn, number) for number in range(WRITERS)]
        return [turn.result() for turn in begun]

    return take


def contend(store: Store, turn: Turn, number: int) -> Outcome:
    """Take one writer's turn. Raises DeniedError."""
    body = _body(turn, number)
    try:
        if turn.version is None:
            store.put_if_absent(turn.key, body)
        else:
            store.put_if_match(turn.key, body, turn.version)
    except ConflictError:
        return "lost"
    except DeniedError:
        raise
    except StoreError:  # a busy store; it may have been applied
        return "unknown"
    return "won"


def _body(turn: Turn, number: int) -> bytes:
    """Return what a writer writes, so that what is there afterwards shows who has written it.

    It differs between the turns too: a store may take equal bytes for an equal version.
    """
    return f"writer {number} {'creates' if turn.version is None else 'replaces'}".encode()


def _judge(store: Store, turn: Turn, outcomes: Sequence[Outcome], what: str) -> None:
    winners = [number for number, outcome in enumerate(outcomes) if outcome == "won"]
    advice = "Two drivers could overwrite each other here; use a store whose conditional writes are atomic"
    if len(winners) > 1:
        raise ConfigError(
            f"{store}: {len(winners)} of {len(outcomes)} concurrent {what} of one object succeeded: the store checks "
            f"the condition before it writes, and not while it does. {advice}"
        )
    if winners and store.get(turn.key).data != _body(turn, winners[0]):
        raise ConfigError(
            f"{store}: of {len(outcomes)} concurrent {what} of one object, the store reported one as the winner and "
            f"applied another. {advice}"
        )
