"""Copies of newly published versions in Ray's object store, from which samplers of the same cluster take them.

One actor per series owns the copies and lends them. The publisher adds what it writes to the bucket, and announces the
version when the list in the bucket names it: so no sampler has a version that the bucket does not have. A reader still
reads that list, and compares every file with its checksum; without a copy it reads the bucket.

Ray moves a copy once to each node, and from any node that has it. So a few turns at a time are enough for many nodes,
and training keeps most of its network.
"""

import asyncio
import hashlib
import itertools
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raycheck.bucket.store.address import place_of
from raycheck.host import VersionCopies, is_forked_from_ray
from raycheck.log import event, logger
from raycheck.on_ray.api.calls import this_node

NAMESPACE = "raycheck"
"""Of the actor's name: samplers may belong to another job of the cluster."""
SHARE = 0.1
"""The part of the node's object store that all announced versions may use, and that the next one may use."""
VERSIONS = 4
"""How many versions are kept at most. A reader that is further behind reads the bucket."""
TURNS = 4
"""How many files may be on their way to readers at a time."""
TURN_S, QUEUE_S, NEWS_S = 60.0, 10.0, 60.0
"""How long a reader may take for a file, and wait for its turn, and how long a question about news stays open."""
ANSWER_S = 20.0
SILENT_S, ABSENT_S = 60.0, 10.0
"""How long nothing is asked of an actor that did not answer, and of one that was not there."""
SERIES = 2
"""Of so many series a process keeps the actors. A script that publishes many runs would fill the object store."""
CALLS = 4096
"""How many questions may be open: one about news for each reader."""
Bytes = np.ndarray[Any, np.dtype[np.uint8]]
_held: dict[str, Any] = {}
"""The actors that this process has started, by name: an actor ends when nobody holds the first handle."""


class VersionShelf:
    """The actor: the files of the newest versions, each in the object store of this actor's node."""

    def __init__(self) -> None:
        here = this_node()
        nodes: list[dict[str, Any]] = ray.nodes()
        size = sum(node["Resources"].get("object_store_memory", 0) for node in nodes if node["NodeID"] == here)
        self._room = int(SHARE * size)
        self._begun: dict[str, _Files] = {}  # at most one version
        self._versions: dict[str, _Files] = {}  # oldest first
        self._turns = asyncio.Semaphore(TURNS)
        self._lent: dict[int, asyncio.TimerHandle] = {}
        self._numbers = itertools.count()
        self._news = asyncio.Condition()

    async def begin(self, directory: str) -> int:
        """Begin a version. Return how many bytes it may have. One that was begun and not announced is dropped."""
        self._begun = {directory: _Files()}
        return self._room

    async def add(self, directory: str, name: str, data: Bytes) -> None:
        if directory in self._begun:
            self._begun[directory].add(name, data)

    async def announce(self, directory: str) -> None:
        if directory in self._begun:
            self._versions[directory] = self._begun.pop(directory)
        while len(self._versions) > VERSIONS or self._size_bytes() > self._room:
            del self._versions[next(iter(self._versions))]
        async with self._news:
            self._news.notify_all()

    def _size_bytes(self) -> int:
        return sum(files.size_bytes for files in self._versions.values())

    async def lend(self, directory: str, name: str) -> tuple[int, list[Any]] | None:
        """Return a file's reference in a list, with the number of the turn, which ends by `give_back`.

        Return None without the file. Raises TimeoutError when it is not the caller's turn soon.
        """
        files = self._versions.get(directory)
        if files is None or name not in files.references:
            return None
        await asyncio.wait_for(self._turns.acquire(), QUEUE_S)
        turn = next(self._numbers)
        self._lent[turn] = asyncio.get_running_loop().call_later(TURN_S, self._end, turn)
        return turn, [files.references[name]]

    async def give_back(self, turn: int) -> None:
        self._end(turn)

    def _end(self, turn: int) -> None:
        timer = self._lent.pop(turn, None)
        if timer is not None:
            timer.cancel()
            self._turns.release()

    async def newer(self, known: str | None) -> str | None:
        """Wait for another newest version than the `known` one. Return its directory; None if there is none yet."""
        with suppress(TimeoutError):
            async with asyncio.timeout(NEWS_S), self._news:
                await self._news.wait_for(lambda: self._newest() not in (known, None))
        newest = self._newest()
        return None if newest == known else newest

    def _newest(self) -> str | None:
        return next(reversed(self._versions), None)


class _Files:
    """The files of one version."""

    def __init__(self) -> None:
        self.references: dict[str, Any] = {}
        self.size_bytes = 0

    def add(self, name: str, data: Bytes) -> None:
        self.references[name] = ray.put(data)  # owned by this actor: what the publisher owns ends with its process
        self.size_bytes += len(data)


class RayVersionCopies(VersionCopies):
    """The copies of versions that are published at `uri`, for a publisher or a reader in a process of Ray."""

    def __init__(self, uri: str) -> None:
        place = hashlib.blake2b(repr(place_of(uri)).encode(), digest_size=8).hexdigest()
        self._name = f"raycheck-versions:{place}"
        self._shelf: Any = None  # while a version is added
        self._directory, self._room = "", 0
        self._silent_until = 0.0
        self._said = ""
        self._news = _News()

    def start(self, node: str) -> None:
        """Start the actor, unless it runs: on this node if possible. It ends with the process that started it."""
        self._try(lambda: self._find_or_start(node))

    def _find_or_start(self, node: str) -> Any:
        with suppress(ValueError):
            return self._find()
        for name in list(_held)[: len(_held) + 1 - SERIES]:
            del _held[name]
        actor: Any = ray.remote(VersionShelf)
        _held[self._name] = actor.options(
            name=self._name,
            namespace=NAMESPACE,
            get_if_exists=True,  # if another process was faster
            num_cpus=0,
            max_concurrency=CALLS,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=True) if node else "DEFAULT",
        ).remote()
        return _held[self._name]

    def _find(self) -> Any:
        """Return the actor. Raises ValueError if there is none."""
        return ray.get_actor(self._name, namespace=NAMESPACE)

    def begin(self, directory: str) -> None:
        def begin() -> None:
            shelf = self._find_or_start(this_node())
            self._room = ray.get(shelf.begin.remote(directory), timeout=ANSWER_S)
            self._shelf, self._directory = shelf, directory

        self._shelf = None
        self._try(begin)

    def add(self, name: str, data: memoryview) -> None:
        if self._shelf is None or len(data) > self._room:
            return
        self._room -= len(data)
        self._tell("add", self._directory, name, np.frombuffer(data, np.uint8))

    def announce(self) -> None:
        if self._shelf is not None:
            self._tell("announce", self._directory)

    def _tell(self, method: str, *args: object) -> None:
        shelf, self._shelf = self._shelf, None
        if self._try(lambda: ray.get(getattr(shelf, method).remote(*args), timeout=ANSWER_S)):
            self._shelf = shelf

    def take(self, directory: str, name: str) -> memoryview | None:
        found: list[memoryview] = []

        def take() -> None:
            shelf = self._find()
            lent = ray.get(shelf.lend.remote(directory, name), timeout=QUEUE_S + ANSWER_S)
            if lent is not None:
                turn, (reference,) = lent
                try:
                    found.append(memoryview(ray.get(reference, timeout=TURN_S)))
                finally:
                    if _is_connected():
                        shelf.give_back.remote(turn)

        self._try(take)
        return found[0] if found else None

    def wake_at_next(self, wake: threading.Event) -> None:
        if not self._news.is_open:
            self._try(lambda: self._news.ask(self._find(), wake))

    def _try(self, call: Callable[[], object]) -> bool:
        """Make a call, unless one has failed just now. Return whether it was successful.

        The bucket has everything, so nothing depends on it.
        """
        if time.monotonic() < self._silent_until or not _is_connected():
            return False
        try:
            call()
        except Exception as error:  # noqa: BLE001  Ray's errors have many classes
            is_absent = isinstance(error, ValueError)  # there is no such actor
            is_new = str(error) != self._said and not is_absent
            self._said = str(error)
            self._silent_until = time.monotonic() + (ABSENT_S if is_absent else SILENT_S)
            if is_new:
                logger.info(event("no copies of versions from Ray", cause=type(error).__name__, actor=self._name))
            return False
        return True


def _is_connected() -> bool:
    """Return whether calls of Ray may be made. Otherwise they would start a Ray, or hang in a child that was forked."""
    return ray.is_initialized() and not is_forked_from_ray()


class _News:
    """One open question about the newest version at a time."""

    def __init__(self) -> None:
        self._known: str | None = None
        self._open_until = 0.0

    @property
    def is_open(self) -> bool:
        """Return whether an answer may still come. None does when this process has left its Ray."""
        return time.monotonic() < self._open_until

    def ask(self, shelf: Any, wake: threading.Event) -> None:
        def hear(answer: Any) -> None:
            self._open_until = 0.0
            if answer.exception() is None and answer.result() is not None:
                self._known = answer.result()
                wake.set()

        answer = shelf.newer.remote(self._known).future()
        self._open_until = time.monotonic() + NEWS_S + ANSWER_S
        answer.add_done_callback(hear)
