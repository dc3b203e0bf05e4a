"""Reads a matched checkpoint into the live tensors and objects, and proves that they contain all of it."""

from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial

import torch
import torch.distributed as dist

from raycheck.bucket.format.index import Index
from raycheck.bucket.format.manifest import Manifest
from raycheck.bucket.reading import Checkpoint, missing_error
from raycheck.bucket.store.moved_bytes import moved_bytes
from raycheck.errors import NotFoundError
from raycheck.state.deferred_tensors import DeferredTensors
from raycheck.state.entries.optimizer.optimizer_entry import OptimizerEntry
from raycheck.state.restore_matching import CheckpointMatch
from raycheck.transfer.read.aliased_tensors import overlapping, read_again, writable
from raycheck.transfer.read.reader import read_into
from raycheck.transfer.read.replica_broadcast import read_and_broadcast
from raycheck.transfer.read.restore_proof import WrittenBytes, not_restored
from raycheck.transfer.stage.local_box import LocalBox


def read_tensors(
    checkpoint: Checkpoint,
    manifest: Manifest,
    index: Index,
    boxes: Sequence[LocalBox],
    *,
    shared_by: tuple[int, int] | None,
    group: "dist.ProcessGroup | None" = None,
) -> int:
    """Fill the live tensors, and prove that each of them was filled. Return the bytes fetched by this rank.

    shared_by: this rank and the world size, if all ranks call this together, so that one of them reads what several
    need. group: the process group to do so; None: the default one. Raises DamagedError, CorruptError or NotFoundError;
    the state is then partly restored.
    """
    read = partial(read_into, checkpoint.shards or checkpoint.store, manifest.prefixes(), index)
    written = WrittenBytes()
    largest = _largest_rank_bytes(manifest)

    def read_bounded(boxes: Sequence[LocalBox], written: WrittenBytes | None = None) -> int:
        with moved_bytes().given_time_for(sum(box.size_bytes for box in boxes), largest):
            return read(boxes, written=written)

    read_own = partial(read_bounded, written=written)
    targets = [writable(box) for box in boxes]
    # The copies run on streams of the reader's threads: work that the script has enqueued must finish before them.
    _synchronize(boxes)
    try:
        if shared_by is not None:
            fetched = read_and_broadcast(read_own, targets, *shared_by, written=written, group=group)
        else:
            fetched = read_own(targets)
        written.check(targets)
        _synchronize(boxes)
        return fetched + read_again(overlapping(boxes), read_bounded)
    except NotFoundError as error:
        raise missing_error(checkpoint.store, checkpoint.entry.key, str(error)) from None


def _largest_rank_bytes(manifest: Manifest) -> int:
    """Return the size of the shards of the rank that has saved the most, including shards that it referred to."""
    sizes: Counter[int] = Counter()
    for component in manifest.components:
        for shard in component.shards:
            sizes[shard.rank] += shard.size_bytes
    return max(sizes.values(), default=0)


def load_objects(match: CheckpointMatch, deferred: DeferredTensors | None = None) -> None:
    """Load into the live objects what was not read in place.

    deferred: what is read only later. Raises ConfigError unless they contain all that was read.
    """
    for entry, tensors in match.wanted.items():
        entry.load(match.saved[entry], tensors)
        if deferred is not None and isinstance(entry, OptimizerEntry):
            deferred.loaded(entry, tensors)
    with nullcontext() if deferred is None else deferred.not_awaited():
        for entry, tensors in match.wanted.items():
            for name in entry.not_held(tensors):
                raise not_restored(name, "it was read, but the live object holds something else")


def _synchronize(boxes: Sequence[LocalBox]) -> None:
    """Wait until the accelerators that hold any of the boxes have finished all enqueued work, on every stream."""
    for device in {box.local.device for box in boxes if not box.local.is_cpu}:
        torch.accelerator.synchronize(device)
