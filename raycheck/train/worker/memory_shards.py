"""Shards of memory checkpoints, held in host memory by the actor of a node, and read from there by a restore.

A shard is byte for byte the object that a save would upload. So a restore reads it with the same index, checksums and
resharding, at any world size. Which of these shards make a checkpoint, the coordinator knows
(train/coordinator/memory_checkpoints.py).
"""

import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import ray
from ray.exceptions import GetTimeoutError, RayError

from raycheck.bucket.format.object_keys import CheckpointName, checkpoint_prefix
from raycheck.bucket.store import Store
from raycheck.bucket.store.interface import Buffer
from raycheck.errors import DamagedError, RaycheckError
from raycheck.shards.transfer.host_buffer import HostBuffer

CHUNK_BYTES = 32 * 1024 * 1024
CHUNKS_IN_FLIGHT = 4
READ_TIMEOUT_S = 60.0
Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Place = tuple[int, int]
"""An attempt and a step: memory checkpoints are made in the order of these."""


@dataclass(slots=True)
class _Received:
    """Holds a shard of which another node sends the bytes. missing: how many of them have not come yet."""

    data: Bytes
    missing: int


class MemoryShards:
    """Holds shards by their keys: those that ranks of this node share, and copies of another node's."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._floor: Place = (0, 0)
        self._own: dict[str, Bytes] = {}
        self._copies: dict[str, _Received] = {}

    def put(self, key: str, shard: memoryview) -> None:
        """Holds a sealed shard, whose memory the rank shares and does not write to while it is listed."""
        with self._lock:
            if _place(key) > self._floor:  # else nobody waits for it any more
                self._own[key] = np.frombuffer(shard, np.uint8)

    def receive(self, key: str, size_bytes: int, start: int, chunk: Bytes) -> None:
        """Takes the bytes from `start` on of another node's shard. Raises ConfigError when there is no room for it."""
        with self._lock:
            if _place(key) <= self._floor:
                return
            if key not in self._copies:
                data = HostBuffer(size_bytes, pinned=False).tensor.numpy()
                self._copies[key] = _Received(data, missing=size_bytes)
            received = self._copies[key]
        received.data[start : start + len(chunk)] = chunk
        with self._lock:
            received.missing -= len(chunk)

    def sizes(self) -> dict[str, int]:
        """Returns the size in bytes of each shard that is here whole, by key."""
        with self._lock:
            whole = {key: len(received.data) for key, received in self._copies.items() if not received.missing}
            return whole | {key: len(data) for key, data in self._own.items()}

    def read(self, key: str, start: int, stop: int) -> Bytes | None:
        """Returns bytes start..stop of a shard; None when it is not here."""
        with self._lock:
            found = self._own.get(key)
            if found is None and key in self._copies:
                found = self._copies[key].data
        return None if found is None else found[start:stop]

    def own(self, checkpoint: str) -> dict[str, Bytes]:
        """Returns the shards of a checkpoint that ranks of this node have put here, by key."""
        prefix = checkpoint_prefix(checkpoint)
        with self._lock:
            return {key: data for key, data in self._own.items() if key.startswith(prefix)}

    def keep(self, checkpoint: str | None, floor: Place) -> None:
        """Gives back all but the shards of this checkpoint, and of those above the floor.

        What is not above it is not taken from now on: it may come late from a group that is gone.
        """
        with self._lock:
            self._floor = max(self._floor, floor)
            keys = {*self._own, *self._copies}
            kept = {key for key in keys if _place(key) > self._floor}
            kept |= {key for key in keys if checkpoint is not None and key.startswith(checkpoint_prefix(checkpoint))}
            self._own = {key: data for key, data in self._own.items() if key in kept}
            self._copies = {key: data for key, data in self._copies.items() if key in kept}


def _place(key: str) -> Place:
    """Returns attempt and step of the checkpoint that a shard belongs to."""
    name = CheckpointName.parse(key.split("/")[1])
    assert name is not None, "the ranks make the names"
    return name.attempt, name.step


def send(shards: Mapping[str, Bytes], to: Any, *, timeout_s: float) -> None:
    """Copies shards to the actor of another node, in chunks, a few of which are on their way at a time.

    to: that actor's handle. Raises what `MemoryShards.receive` does, Ray's errors, and TimeoutError.
    """
    deadline = time.monotonic() + timeout_s
    under_way: list[Any] = []

    def wait_for(count: int) -> None:
        while len(under_way) > count:
            done, _ = ray.wait(under_way, timeout=max(0.0, deadline - time.monotonic()))
            if not done:
                raise TimeoutError(f"the other node has not taken it within {timeout_s:.0f} s")
            under_way.remove(done[0])
            ray.get(done[0])

    for key, data in shards.items():
        for start in range(0, len(data), CHUNK_BYTES):
            wait_for(CHUNKS_IN_FLIGHT - 1)
            under_way.append(to.receive.remote(key, len(data), start, data[start : start + CHUNK_BYTES]))
    wait_for(0)


@dataclass(frozen=True, slots=True)
class MemoryReader:
    """Reads the shards of a memory checkpoint for one rank; all other objects come from the bucket.

    holders: by key, the nodes that hold a shard, and the handles of their actors. node: the rank's own, which is asked
    first. A range that is asked for again, since its checksum was wrong, comes from the next of them. A node that does
    not answer is asked last from then on.
    """

    store: Store
    holders: Mapping[str, Sequence[tuple[str, Any]]]
    node: str
    _asked: Counter[tuple[str, int, int]] = field(default_factory=Counter)
    _silent: set[str] = field(default_factory=set)

    def get_range(self, key: str, start: int, stop: int) -> Buffer:
        """Returns bytes start..stop of an object. Raises DamagedError when no node has those of a shard, and what the
        store does."""
        if key not in self.holders:
            return self.store.get_range(key, start, stop)
        own_first = sorted(self.holders[key], key=lambda holder: (holder[0] in self._silent, holder[0] != self.node))
        turn = self._asked[key, start, stop] % len(own_first)
        self._asked[key, start, stop] += 1
        problems = []
        for node, actor in (*own_first[turn:], *own_first[:turn]):
            try:
                found = ray.get(actor.read_shard.remote(key, start, stop), timeout=READ_TIMEOUT_S)
            except (RayError, GetTimeoutError, RaycheckError) as error:
                problems.append(f"node {node}: {type(error).__name__}")
                self._silent.add(node)
                continue
            if found is not None and len(found) == stop - start:
                return memoryview(found)
            problems.append(f"node {node} has not got it")
        raise DamagedError(f"{key} is in no node's memory any more ({'; '.join(problems)})")
