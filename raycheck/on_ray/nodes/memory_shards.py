"""Shards of memory checkpoints, held in host memory by the actor of a node, and read from there by a restore.

A shard is byte for byte the object that a save would upload. So a restore reads it with the same index, checksums and
resharding, at any world size. The coordinator knows which of these shards make a checkpoint
(group/coordinator/memory_checkpoints.py).
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import ray
from ray.exceptions import GetTimeoutError, RayError

from raycheck.bucket.format.object_keys import CheckpointName, checkpoint_prefix
from raycheck.bucket.store import Store
from raycheck.bucket.store.interface import Buffer
from raycheck.errors import DamagedError, RaycheckError
from raycheck.group.coordinator.messages import HeldShard, Holder
from raycheck.transfer.stage.memory_claims import MemoryClaim
from raycheck.transfer.stage.shared_memory import MemoryPlace, SharedMemory, open_to_read

CHUNK_BYTES = 32 * 1024 * 1024
CHUNKS_IN_FLIGHT = 4
READ_TIMEOUT_S = 60.0
Bytes = np.ndarray[Any, np.dtype[np.uint8]]
AttemptAndStep = tuple[int, int]
"""An attempt and a step: memory checkpoints are made in the order of these."""


@dataclass(kw_only=True, slots=True)
class _Held:
    """The bytes of a shard. missing: how many have not arrived yet. claim: the claim on memory for these."""

    data: Bytes
    place: MemoryPlace | None
    missing: int = 0
    claim: MemoryClaim | None = None


class MemoryShards:
    """Shards by their keys: those that ranks of this node share, and copies of another node's."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._floor: AttemptAndStep = (0, 0)
        self._own: dict[str, _Held] = {}
        self._copies: dict[str, _Held] = {}

    def put(self, key: str, shard: memoryview, place: MemoryPlace | None = None) -> None:
        """Keep a sealed shard, whose memory the rank shares and does not write to while it is listed.

        place: the shared memory, whose first bytes are the shard.
        """
        with self._lock:
            if _attempt_and_step(key) > self._floor:  # else nobody waits for it any more
                self._own[key] = _Held(data=np.frombuffer(shard, np.uint8), place=place)

    def receive(self, key: str, size_bytes: int, start: int, chunk: Bytes) -> None:
        """Store the bytes from `start` on of another node's shard. Raises ConfigError when there is no room for it."""
        with self._lock:
            if _attempt_and_step(key) <= self._floor:
                return
            if key not in self._copies:
                claim = MemoryClaim(size_bytes)
                memory = SharedMemory(size_bytes)
                data = np.frombuffer(memory.pages, np.uint8)
                self._copies[key] = _Held(data=data, place=memory.place, missing=size_bytes, claim=claim)
            received = self._copies[key]
        received.data[start : start + len(chunk)] = chunk
        with self._lock:
            received.missing -= len(chunk)
            if received.claim is not None:
                received.claim.shrink(len(chunk))
            if not received.missing:
                received.claim = None

    def whole(self) -> dict[str, HeldShard]:
        """Return the shards of which all bytes are here, by key."""
        with self._lock:
            found = {**self._copies, **self._own}
            return {
                key: HeldShard(size_bytes=len(held.data), place=held.place)
                for key, held in found.items()
                if not held.missing
            }

    def read(self, key: str, start: int, stop: int) -> Bytes | None:
        """Return bytes start..stop of a shard; None when it is not here."""
        with self._lock:
            found = self._own.get(key) or self._copies.get(key)
        return None if found is None else found.data[start:stop]

    def own(self, checkpoint: str) -> dict[str, Bytes]:
        """Return the shards of a checkpoint that ranks of this node have put here, by key."""
        prefix = checkpoint_prefix(checkpoint)
        with self._lock:
            return {key: held.data for key, held in self._own.items() if key.startswith(prefix)}

    def keep(self, checkpoint: str | None, floor: AttemptAndStep) -> None:
        """Free all shards except those of this checkpoint and of checkpoints above the floor.

        From now on, only shards above the floor are accepted: others may arrive late from a group that is gone.
        """
        with self._lock:
            self._floor = max(self._floor, floor)
            keys = {*self._own, *self._copies}
            kept = {key for key in keys if _attempt_and_step(key) > self._floor}
            kept |= {key for key in keys if checkpoint is not None and key.startswith(checkpoint_prefix(checkpoint))}
            self._own = {key: held for key, held in self._own.items() if key in kept}
            self._copies = {key: held for key, held in self._copies.items() if key in kept}


def _attempt_and_step(key: str) -> AttemptAndStep:
    """Return attempt and step of the checkpoint that a shard belongs to."""
    name = CheckpointName.parse(key.split("/")[1])
    assert name is not None, "the ranks make the names"
    return name.attempt, name.step


def send(
    shards: Mapping[str, Bytes],
    to: Any,
    *,
    timeout_s: float,
    pause: Callable[[float], object] = time.sleep,
) -> None:
    """Copy shards to the actor of another node in chunks, a few of which are in flight at a time.

    After each group of chunks, it pauses for as long as they took, so that training has the network for half of the
    time. to: that actor's handle. timeout_s: how long the chunks may take, without the pauses. pause: waits for that
    many seconds. Raises the errors of `MemoryShards.receive`, Ray's errors, and TimeoutError.
    """
    left_s = timeout_s
    chunks = [(key, start) for key, data in shards.items() for start in range(0, len(data), CHUNK_BYTES)]
    for first in range(0, len(chunks), CHUNKS_IN_FLIGHT):
        began = time.monotonic()
        together = chunks[first : first + CHUNKS_IN_FLIGHT]
        under_way = [
            to.receive.remote(key, len(shards[key]), start, shards[key][start : start + CHUNK_BYTES])
            for key, start in together
        ]
        try:
            ray.get(under_way, timeout=left_s)
        except GetTimeoutError:
            raise TimeoutError(f"the other node has not taken it within {timeout_s:.0f} s") from None
        took_s = time.monotonic() - began
        left_s = max(0.0, left_s - took_s)
        if first + CHUNKS_IN_FLIGHT < len(chunks):
            pause(took_s)


@dataclass(frozen=True, slots=True)
class MemoryReader:
    """The reader of a memory checkpoint's shards for one rank; all other objects come from the bucket.

    holders: who holds each shard, by key. node: the rank's own, whose memory is read first, and without its actor where
    this process can map it. A range that is requested again, because its checksum was wrong, comes from the next
    holder. A node that does not answer is asked last from then on.
    """

    store: Store
    holders: Mapping[str, Sequence[Holder]]
    node: str
    _asked: Counter[tuple[str, int, int]] = field(default_factory=Counter)
    _silent: set[str] = field(default_factory=set)
    _mapped: dict[MemoryPlace, memoryview] = field(default_factory=dict)

    def get_range(self, key: str, start: int, stop: int) -> Buffer:
        """Return bytes start..stop of an object. Raises DamagedError if no node has these bytes of a shard, and the
        store's errors."""
        if key not in self.holders:
            return self.store.get_range(key, start, stop)
        own_first = sorted(
            self.holders[key], key=lambda holder: (holder.node in self._silent, holder.node != self.node)
        )
        turn = self._asked[key, start, stop] % len(own_first)
        self._asked[key, start, stop] += 1
        problems = []
        for holder in (*own_first[turn:], *own_first[:turn]):
            try:
                found = self._read(holder, key, start, stop)
            except (RayError, GetTimeoutError, RaycheckError) as error:
                problems.append(f"node {holder.node}: {type(error).__name__}")
                self._silent.add(holder.node)
                continue
            if found is not None and len(found) == stop - start:
                return found
            problems.append(f"node {holder.node} does not have it")
        raise DamagedError(f"{key} is in no node's memory any more ({'; '.join(problems)})")

    def _read(self, holder: Holder, key: str, start: int, stop: int) -> memoryview | None:
        """Return these bytes as far as one node has them. Raises Ray's errors."""
        if holder.node == self.node and holder.place is not None:
            with suppress(OSError):  # its actor was started again, or is in another container
                if holder.place not in self._mapped:
                    self._mapped[holder.place] = open_to_read(holder.place)
                # A copy: its checksum is compared before it is read again, and whoever staged it may still live.
                return memoryview(bytes(self._mapped[holder.place][start:stop]))
        found = ray.get(holder.actor.read_shard.remote(key, start, stop), timeout=READ_TIMEOUT_S)
        return None if found is None else memoryview(found)
