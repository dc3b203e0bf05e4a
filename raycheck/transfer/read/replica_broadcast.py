"""Reads replicas once for the whole group, and broadcasts them to the other ranks.

All ranks of a DDP job need the same bytes, and not every rank should fetch them from the bucket. This needs a torch
process group of exactly these ranks; without one, each rank reads everything it needs.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import groupby
from operator import itemgetter
from typing import Any

import torch
import torch.distributed as dist

from raycheck.errors import DamagedError, RaycheckError, StoreError
from raycheck.transfer.read.restore_proof import WrittenBytes, written_bytes
from raycheck.transfer.stage.local_box import LocalBox, as_bytes

BUCKET_BYTES = 32 * 1024 * 1024
WORTH_BYTES = 64 * 1024
"""Ranks that need no box as large as this in common do not get a process group for it: each reads its own."""
GROUP_TIMEOUT_S = 3600.0
"""How long a rank waits there for the slowest one, whose own requests have a deadline."""
ALIGN = 16
BoxKey = tuple[str, tuple[int, ...], tuple[int, ...], str]


def read_and_broadcast(
    read: Callable[[Sequence[LocalBox]], int],
    boxes: Sequence[LocalBox],
    rank: int,
    world_size: int,
    *,
    written: WrittenBytes,
    group: "dist.ProcessGroup | None" = None,
) -> int:
    """Fill the live tensors of `boxes` with `read`. A box that all ranks need is read by one rank. A collective.

    read: fills the boxes it is given, and returns the bytes fetched. written: counts the bytes that other ranks sent.
    group: the process group to use; None: the default one, whose collectives the script must not use meanwhile.
    Return the bytes that this rank fetched. Raises what `read` raised on this rank, otherwise what it raised on the
    lowest rank that failed.
    """
    if group is None and not _has_group(world_size):
        return read(boxes)
    by_key = {_key_of(box): box for box in boxes if box.sizes == box.shape}
    own = sorted(by_key) if dist.get_rank(group) == rank and _can_send(boxes, group) else []
    digest = hashlib.blake2b(repr(own).encode(), digest_size=16).digest()
    is_alike = len(set(_gathered((digest, None), world_size, group))) == 1
    common = own if is_alike else sorted(set(own).intersection(*_gather(own, world_size, group)))
    reader_of = _readers({key: by_key[key].size_bytes for key in common}, world_size)
    failure, fetched = None, 0
    try:
        fetched = read([box for box in boxes if reader_of.get(_key_of(box), rank) == rank])
    except RaycheckError as error:
        failure = error
    except Exception as error:  # noqa: BLE001  the other ranks must not wait for this one
        failure = StoreError(f"rank {rank} could not read its share: {type(error).__name__}: {error}")
    _gathered((None, failure), world_size, group)
    ordered = sorted((reader, key) for key, reader in reader_of.items())
    for reader, keys in groupby(ordered, itemgetter(0)):
        for bucket in _buckets([by_key[key] for _, key in keys]):
            _broadcast(bucket, reader, rank, group)
            if rank != reader:
                written.add_all((box, written_bytes(box.local)) for box in bucket)
    return fetched


@contextmanager
def errors_on_all_ranks(world_size: int) -> Iterator[None]:
    """Raise an error of the block on all ranks: the other ranks wait in `read_and_broadcast`, which raises it."""
    try:
        yield
    except Exception as error:
        if _has_group(world_size):
            is_ours = isinstance(error, RaycheckError)
            told = error if is_ours else StoreError(f"could not restore: {type(error).__name__}: {error}")
            _gather((None, told), world_size)
        raise


def own_group(boxes: Sequence[LocalBox], world_size: int) -> "dist.ProcessGroup | None":
    """Return a process group to exchange `boxes` in a thread while the script uses the default one. A collective.

    It is one of gloo: the kernels of two groups of NCCL could wait for each other. None if that would save little.
    """
    if not _has_group(world_size) or not dist.is_gloo_available():
        return None
    is_worth_it = any(box.sizes == box.shape and box.size_bytes >= WORTH_BYTES for box in boxes)
    if not all(_gather(is_worth_it, world_size)):
        return None
    group: dist.ProcessGroup = dist.new_group(timeout=timedelta(seconds=GROUP_TIMEOUT_S), backend="gloo")
    return group


def _has_group(world_size: int) -> bool:
    """Return whether there is a process group of this many ranks. All of its ranks get the same answer."""
    return world_size > 1 and dist.is_available() and dist.is_initialized() and dist.get_world_size() == world_size


def _gather(item: Any, world_size: int, group: "dist.ProcessGroup | None" = None) -> list[Any]:
    """Return the items of all ranks, in rank order. Every rank must call it."""
    gathered: list[Any] = [None] * world_size
    dist.all_gather_object(gathered, item, group=group)
    return gathered


def _gathered(
    item: tuple[bytes | None, RaycheckError | None], world_size: int, group: "dist.ProcessGroup | None"
) -> list[bytes | None]:
    """Gather pairs of a digest and an error, and return the digests.

    Raises this rank's error, otherwise the error of the lowest rank that has one, prefixed with that rank. The error of
    a damaged checkpoint gets no prefix, since it names the object.
    """
    pairs = _gather(item, world_size, group)
    if item[1] is not None:
        raise item[1]
    for rank, (_, error) in enumerate(pairs):
        if error is not None:
            is_named = isinstance(error, DamagedError) or str(error).startswith("rank ")
            raise error if is_named else type(error)(f"rank {rank}: {error}")
    return [found for found, _ in pairs]


def _can_send(boxes: Sequence[LocalBox], group: "dist.ProcessGroup | None") -> bool:
    """Return whether the process group can broadcast from the devices of these boxes."""
    devices = {part.partition(":")[0] for part in dist.get_backend_config(group).split(",")}
    return {box.local.device.type for box in boxes} <= devices


def _key_of(box: LocalBox) -> BoxKey:
    return box.name, box.offsets, box.sizes, f"{box.dtype} on {box.local.device.type}"


def _readers(sizes: dict[BoxKey, int], world_size: int) -> dict[BoxKey, int]:
    """Choose which rank reads which box, so that all ranks read about as many bytes."""
    load = [0] * world_size
    readers = {}
    for key, size in sorted(sizes.items(), key=lambda item: (-item[1], item[0])):
        reader = min(range(world_size), key=load.__getitem__)
        readers[key] = reader
        load[reader] += size
    return readers


def _buckets(boxes: Sequence[LocalBox]) -> Iterator[list[LocalBox]]:
    """Group boxes, each group for one broadcast: small boxes of one device together, a large box alone."""
    bucket: list[LocalBox] = []
    size = 0
    for box in sorted(boxes, key=lambda box: str(box.local.device.type)):
        is_other = bool(bucket) and bucket[0].local.device.type != box.local.device.type
        if bucket and (is_other or size + box.size_bytes > BUCKET_BYTES):
            yield bucket
            bucket, size = [], 0
        bucket.append(box)
        size += box.size_bytes
    if bucket:
        yield bucket


@torch.no_grad()
def _broadcast(bucket: Sequence[LocalBox], reader: int, rank: int, group: "dist.ProcessGroup | None") -> None:
    """Send the boxes of a bucket from the rank that read them to all others. A collective."""
    locals_ = [box.local for box in bucket]
    if len(locals_) == 1 and locals_[0].is_contiguous():
        dist.broadcast(as_bytes(locals_[0]), src=reader, group=group)  # as bytes: gloo does not know every dtype
        return
    starts, end = [], 0
    for box in bucket:
        starts.append(end)
        end += -(-box.size_bytes // ALIGN) * ALIGN
    flat = torch.empty(end, dtype=torch.uint8, device=locals_[0].device)
    views = [
        flat[start : start + box.size_bytes].view(box.local.dtype).view(box.sizes)
        for start, box in zip(starts, bucket, strict=True)
    ]
    if rank == reader:
        for view, tensor in zip(views, locals_, strict=True):
            view.copy_(tensor)
    dist.broadcast(flat, src=reader, group=group)
    if rank != reader:
        for view, tensor in zip(views, locals_, strict=True):
            tensor.copy_(view)
