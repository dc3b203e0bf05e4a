"""Replicas are read once by the whole group and handed on: each rank of a DDP job wants the same bytes, and a bucket
should not be asked for them by every one.

Used where the ranks have a torch process group of their own; without one each rank reads all it wants.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from operator import itemgetter

import torch
import torch.distributed as dist

from raycheck.errors import RaycheckError
from raycheck.shards.pieces import Piece

BUCKET_BYTES = 32 * 1024 * 1024
ALIGN = 16
Box = tuple[str, tuple[int, ...], tuple[int, ...], str]


def read_shared(read: Callable[[Sequence[Piece]], int], pieces: Sequence[Piece], rank: int, world_size: int) -> int:
    """Fill the live tensors of `pieces` by `read`, those that all ranks want by one of them. A collective.

    Returns the bytes that this rank fetched. Raises what `read` raised on this rank, else on the lowest that failed.
    """
    if not _can_share(pieces, rank, world_size):
        return read(pieces)
    by_box = {_box(piece): piece for piece in pieces}
    wanted: list[list[Box] | None] = [None] * world_size
    dist.all_gather_object(wanted, list(by_box))
    common = sorted(set(by_box).intersection(*(boxes or [] for boxes in wanted)))
    reader_of = _readers({box: by_box[box].size_bytes for box in common}, world_size)
    failure, fetched = None, 0
    try:
        fetched = read([piece for box, piece in by_box.items() if reader_of.get(box, rank) == rank])
    except RaycheckError as error:
        failure = error
    failures: list[RaycheckError | None] = [None] * world_size
    dist.all_gather_object(failures, failure)
    first = failure or next(filter(None, failures), None)
    if first is not None:
        raise first
    ordered = sorted((reader, box) for box, reader in reader_of.items())
    for reader, group in groupby(ordered, itemgetter(0)):
        for bucket in _buckets([by_box[box] for _, box in group]):
            _hand_on(bucket, reader, rank)
    return fetched


def _can_share(pieces: Sequence[Piece], rank: int, world_size: int) -> bool:
    """Ranks judge alike: a group is of all of them or of none, and its devices are those of the state."""
    if world_size == 1 or not dist.is_available() or not dist.is_initialized():
        return False
    if (dist.get_rank(), dist.get_world_size()) != (rank, world_size):
        return False
    devices = {part.partition(":")[0] for part in dist.get_backend_config().split(",")}
    wanted: list[bool] = [False] * world_size
    dist.all_gather_object(wanted, {piece.local.device.type for piece in pieces} <= devices)
    return all(wanted)


def _box(piece: Piece) -> Box:
    return piece.name, piece.offsets, piece.sizes, f"{piece.dtype} on {piece.local.device.type}"


def _readers(sizes: dict[Box, int], world_size: int) -> dict[Box, int]:
    """Who reads what: shares of equal bytes, as even as the tensors allow."""
    load = [0] * world_size
    readers = {}
    for box, size in sorted(sizes.items(), key=lambda item: (-item[1], item[0])):
        reader = min(range(world_size), key=load.__getitem__)
        readers[box] = reader
        load[reader] += size
    return readers


def _buckets(pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    """Small tensors of one device together; a large one by itself."""
    bucket: list[Piece] = []
    size = 0
    for piece in sorted(pieces, key=lambda piece: str(piece.local.device.type)):
        is_other = bool(bucket) and bucket[0].local.device.type != piece.local.device.type
        if bucket and (is_other or size + piece.size_bytes > BUCKET_BYTES):
            yield bucket
            bucket, size = [], 0
        bucket.append(piece)
        size += piece.size_bytes
    if bucket:
        yield bucket


@torch.no_grad()
def _hand_on(bucket: Sequence[Piece], reader: int, rank: int) -> None:
    locals_ = [piece.local for piece in bucket]
    if len(locals_) == 1 and locals_[0].is_contiguous():
        dist.broadcast(locals_[0].view(-1).view(torch.uint8), src=reader)  # as bytes: gloo does not know every dtype
        return
    starts, end = [], 0
    for piece in bucket:
        starts.append(end)
        end += -(-piece.size_bytes // ALIGN) * ALIGN
    flat = torch.empty(end, dtype=torch.uint8, device=locals_[0].device)
    views = [
        flat[start : start + piece.size_bytes].view(piece.local.dtype).view(piece.sizes)
        for start, piece in zip(starts, bucket, strict=True)
    ]
    if rank == reader:
        for view, tensor in zip(views, locals_, strict=True):
            view.copy_(tensor)
    dist.broadcast(flat, src=reader)
    if rank != reader:
        for view, tensor in zip(views, locals_, strict=True):
            tensor.copy_(view)
