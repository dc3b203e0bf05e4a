"""Measures a store as raycheck uses it: small requests one by one, many at a time, and one large object each way."""

import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from uuid import uuid4

from raycheck.bucket.diagnosis.finding import BucketFinding, ok
from raycheck.bucket.format import object_keys
from raycheck.bucket.format.checksum import crc32
from raycheck.bucket.store import Store
from raycheck.bucket.store.read_ahead import Spans, checked, read_ahead
from raycheck.errors import RaycheckError
from raycheck.views.in_words import size

TRANSFER_BYTES = 128 * 1024 * 1024
SLOW_WRITE_S = 0.5
SLOW_BYTES_PER_S = 50e6
_TURNS = 5
_BURST, _AT_A_TIME = 200, 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Speed:
    """The speeds at which one rank writes and reads here, and this machine copies memory, in bytes per second."""

    up: float
    down: float
    copy: float


def check_latency(store: Store) -> Iterator[BucketFinding]:
    """Measure small requests one by one, and have many at a time in flight."""
    keys = [object_keys.probe_key(uuid4().hex) for _ in range(_TURNS)]
    try:
        write_s = _median_s([partial(store.put_if_absent, key, b"latency") for key in keys])
        read_s = _median_s([partial(store.get, key) for key in keys])
        with ThreadPoolExecutor(_AT_A_TIME, thread_name_prefix="raycheck-burst") as pool:
            burst = [pool.submit(copy_context().run, store.head, keys[0]) for _ in range(_BURST)]
        for answer in burst:
            answer.result()
    finally:
        for key in keys:
            with suppress(RaycheckError):
                store.delete(key)
    text = f"a conditional write takes {1000 * write_s:.1f} ms, a read {1000 * read_s:.1f} ms (medians of {_TURNS})"
    if write_s <= SLOW_WRITE_S:
        yield ok("latency", text)
    else:
        yield BucketFinding(
            name="latency",
            state="slow",
            text=f"{text}; a commit waits for some six requests",
            cure="Use a bucket in the region of the cluster" if store.endpoint else "Use a faster file system",
        )


def measure(store: Store, size_bytes: int) -> tuple[Speed, BucketFinding]:
    """Write one object of random bytes as a rank writes its shard, and read it back and verify it."""
    data, key = os.urandom(size_bytes), object_keys.probe_key(uuid4().hex)
    copy = bytearray(size_bytes)
    copy_s = _seconds(lambda: copy.__setitem__(slice(None), data))
    part, view = store.part_bytes(size_bytes), memoryview(copy)
    parts = (view[at : at + part] for at in range(0, size_bytes, part))
    crc = crc32(data)
    try:
        up_s = _seconds(lambda: store.put_parts(key, parts, size_bytes))
        spans = Spans(store, key, 0, size_bytes)
        down_s = _seconds(lambda: [None for _ in checked(read_ahead(spans), crc, what=f"{store}: {key}")])
    finally:
        with suppress(RaycheckError):
            store.delete(key)
    speed = Speed(up=size_bytes / up_s, down=size_bytes / down_s, copy=size_bytes / copy_s)
    text = f"one rank writes {size(speed.up)}/s and reads {size(speed.down)}/s (an object of {size(size_bytes)})"
    if min(speed.up, speed.down) >= SLOW_BYTES_PER_S:
        return speed, ok("throughput", text)
    cure = "Look for what limits it: the network, the region, a proxy; for S3, pip install 'raycheck[fast]' helps"
    if not store.endpoint:
        cure = "Look for what limits it: the disk, or the network to the file system"
    return speed, BucketFinding(name="throughput", state="slow", text=text, cure=cure)


def throttling(repeats: Sequence[str]) -> BucketFinding:
    """Return the finding about the requests that had to be sent again while all other checks ran."""
    if not repeats:
        return ok("throttling", f"no request had to be repeated, with up to {_AT_A_TIME} at a time")
    reasons = Counter(text.rpartition(": ")[2] for text in repeats)
    said = ", ".join(f"{reason} ({count})" for reason, count in reasons.most_common(3))
    return BucketFinding(
        name="throttling",
        state="slow",
        text=f"{len(repeats)} requests had to be repeated: {said}",
        cure="Ask for a higher rate, or use a bucket of its own; with very many ranks, save less often",
    )


def _median_s(calls: Sequence[Callable[[], object]]) -> float:
    return statistics.median(_seconds(call) for call in calls)


def _seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return max(time.perf_counter() - began, 1e-9)
