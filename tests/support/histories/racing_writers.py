"""Sixteen writers of one key at one moment, as processes with a client each, or as threads that share one.

The processes are started once for all stores and rounds: making sixteen clients costs more than racing them.
"""

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from raycheck.bucket.store import Store, open_store
from raycheck.errors import ConflictError, RaycheckError
from tests.support.processes.fork_server import fork_server

RACERS = 16
START_S = 90.0
ROUND_S = 60.0
WON, REFUSED = "won", "refused"


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What one race came to. told: by the store, in order of racers. author: whose bytes the object holds afterwards,
    None when they are nobody's, or not whole."""

    key: str
    told: tuple[str, ...]
    author: int | None

    @property
    def has_one_winner(self) -> bool:
        """By what they were told, and by effect."""
        return [racer for racer, told in enumerate(self.told) if told == WON] == [self.author]

    @property
    def unclear(self) -> tuple[str, ...]:
        """What those were told who neither won nor were refused."""
        return tuple(told for told in self.told if told not in (WON, REFUSED))


def body_of(racer: int, version: str | None, size: int) -> bytes:
    """A racer's own bytes, all of them: a mixture of two is nobody's."""
    head = f"{racer} {'creates' if version is None else 'swaps'} "
    return head.encode().ljust(size, bytes([ord("a") + racer]))


def race_once(store: Store, racers: "Processes | Threads", key: str, *, size: int, swap: bool) -> Outcome:
    """All create `key`, or all swap the version that is there now."""
    version = store.get(key).version if swap else None
    told = racers.race(store, key, version=version, size=size)
    data = store.get(key).data
    authors = [racer for racer in range(RACERS) if data == body_of(racer, version, size)]
    return Outcome(key=key, told=told, author=authors[0] if authors else None)


def write(store: Store, racer: int, key: str, version: str | None, size: int) -> str:
    """One try to win, and what the store said."""
    body = body_of(racer, version, size)
    try:
        if version is None:
            store.put_if_absent(key, body)
        else:
            store.put_if_match(key, body, version)
    except ConflictError:
        return REFUSED
    except RaycheckError as error:
        return f"{type(error).__name__}: {error}"
    return WON


class Threads:
    """For a store that is one process's own."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(RACERS)
        self._barrier = threading.Barrier(RACERS)

    def race(self, store: Store, key: str, *, version: str | None, size: int) -> tuple[str, ...]:
        def run(racer: int) -> str:
            self._barrier.wait(ROUND_S)
            return write(store, racer, key, version, size)

        return tuple(self._pool.map(run, range(RACERS), timeout=ROUND_S))

    def stop(self) -> None:
        self._pool.shutdown()


class Processes:
    """Each with its own client of each store."""

    def __init__(self) -> None:
        context = fork_server()
        barrier = context.Barrier(RACERS)
        pipes = [context.Pipe() for _ in range(RACERS)]
        self._ours = [ours for ours, _ in pipes]
        self._processes = [
            context.Process(target=_obey, args=(racer, theirs, barrier), daemon=True)
            for racer, (_, theirs) in enumerate(pipes)
        ]
        for process, (_, theirs) in zip(self._processes, pipes, strict=True):
            process.start()
            theirs.close()  # so that its death is seen here as the end of the pipe
        self._ask(START_S, "hello")

    def race(self, store: Store, key: str, *, version: str | None, size: int) -> tuple[str, ...]:
        self._ask(START_S, "open", store.uri, dict(os.environ))  # addresses and credentials of servers started since
        return self._ask(ROUND_S, "write", key, version, size)

    def stop(self) -> None:
        for ours in self._ours:
            ours.send(("stop",))
        for process in self._processes:
            process.join(ROUND_S)
            assert process.exitcode == 0

    def _ask(self, timeout_s: float, *order: object) -> tuple[Any, ...]:
        """The answers of all, in order of racers."""
        for ours in self._ours:
            ours.send(order)
        answers = []
        for racer, ours in enumerate(self._ours):
            assert wait([ours], timeout_s), f"racer {racer} does not answer to {order[0]}"
            answers.append(ours.recv())
        return tuple(answers)


def _obey(racer: int, pipe: Connection, barrier: threading.Barrier) -> None:
    """The life of one process. A store once opened is kept, so that the next order finds its connections open."""
    stores: dict[str, Store] = {}
    store: Store | None = None
    while True:
        match pipe.recv():
            case ("open", uri, environment):
                os.environ.update(environment)
                store = stores[uri] = stores.get(uri) or open_store(uri)
                pipe.send("open")
            case ("write", key, version, size):
                assert store is not None, "opened before"
                barrier.wait(ROUND_S)
                pipe.send(write(store, racer, key, version, size))
            case ("stop",):
                return
            case _:
                pipe.send("here")
