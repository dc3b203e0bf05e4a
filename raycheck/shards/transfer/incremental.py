"""This rank's shards, by component: staged to be written, or known to lie in the bucket as they are.

What training changes is the component `train`, written at every save. The parameters of a module that get no gradient
are a component of their own, written only when they hold something else than at the newest commit: else the checkpoint
refers to the one that has them.
"""

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from raycheck.bucket.format.index import Chunk, Index, Leaf, Tensor, index_of
from raycheck.bucket.format.manifest import Manifest, ShardRecord
from raycheck.bucket.format.object_keys import shard_key
from raycheck.bucket.store import Store
from raycheck.shards.transfer.host_buffer import available_bytes, check_fits
from raycheck.shards.transfer.local_box import TRAIN, LocalBox
from raycheck.shards.transfer.shard import IndexRows, Shard
from raycheck.shards.transfer.stager import Leaves, Staged, Stager
from raycheck.shards.transfer.stock_torch_names import Places
from raycheck.shards.transfer.tensor_digest import Digest, digests

MAX_NAME = 90
BoxesAndSources = tuple[Sequence[LocalBox], Sequence[torch.Tensor]]
"""Boxes, and the live tensors that they are of."""


def frozen_component(entry: str) -> str:
    """The component of what an entry of the state has frozen; entries whose names differ in odd characters share it."""
    return f"{re.sub(r'[^A-Za-z0-9_.-]', '_', entry)[:MAX_NAME]}.frozen"


def by_component(boxes: Iterable[LocalBox]) -> dict[str, list[LocalBox]]:
    found: dict[str, list[LocalBox]] = {}
    for box in boxes:
        found.setdefault(box.component, []).append(box)
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownShard:
    """A shard that the newest commit has, in `checkpoint`. boxes: the selected ones that it is known to be of. digests:
    of its tensors, by name."""

    checkpoint: str
    shard: Shard
    boxes: Sequence[LocalBox]
    digests: Mapping[str, Digest]

    def lies_as(self, rows: IndexRows) -> bool:
        tensors, chunks = rows
        return tensors == self.shard.tensors and chunks == tuple(replace(c, crcs=()) for c in self.shard.chunks)


@dataclass(frozen=True, kw_only=True, slots=True)
class RestoredShards:
    """What a restore has read. digests: of tensors outside `train`, by name, as they are now."""

    manifest: Manifest
    index: Index
    digests: Mapping[str, Digest]

    @classmethod
    def of(cls, manifest: Manifest, index: Index, boxes: Sequence[LocalBox]) -> "RestoredShards":
        """boxes: those that were just read."""
        plan = index.plan
        is_train = [item.component == TRAIN for item in plan.objects]
        elsewhere = {
            tensor.name
            for tensor, (first, end) in zip(plan.tensors, plan.rows(), strict=True)
            if first < end and not is_train[plan.object[first]]
        }
        kept = [box for box in boxes if box.name in elsewhere]
        return cls(manifest=manifest, index=index, digests=_digests(kept, [box.local for box in kept]))

    def kept(self, component: str, rank: int, boxes: Sequence[LocalBox], rows: IndexRows) -> KnownShard | None:
        """This rank's shard of a component, if what it would write lies there in the same way."""
        part = next((part for part in self.manifest.components if part.name == component), None)
        record = next((shard for shard in part.shards if shard.rank == rank), None) if part else None
        if part is None or record is None:
            return None
        numbers = {tensor: number for number, tensor in enumerate(self.index.tensors)}
        tensors, chunks = rows
        saved = []
        for chunk in chunks:
            number = numbers.get(tensors[chunk.tensor])
            there = () if number is None else self.index.chunks_in(number, chunk.offsets, chunk.sizes)
            alike = (replace(found, tensor=chunk.tensor) for found in there)
            saved += [found for found in alike if replace(found, crcs=()) == chunk]
        if len(saved) != len(chunks):
            return None
        shard = Shard(record=record, tensors=tensors, chunks=tuple(saved))
        return KnownShard(checkpoint=part.checkpoint, shard=shard, boxes=boxes, digests=self.digests)


@dataclass(frozen=True, kw_only=True, slots=True)
class UploadedShard:
    """A shard outside `train` that a save uploads. See Kept."""

    staged: Staged
    boxes: Sequence[LocalBox]
    digests: Mapping[str, Digest]


@dataclass(frozen=True, kw_only=True, slots=True)
class StagedState:
    """One save of this rank: shards to upload, shards that are there, and values. written: of the former, those outside
    `train`, by component."""

    staged: Sequence[Staged]
    kept: Sequence[KnownShard] = ()
    written: Mapping[str, UploadedShard] = field(default_factory=dict)
    values: Mapping[str, object] = field(default_factory=dict)
    rank_values: Mapping[str, object] = field(default_factory=dict)

    def wait(self) -> None:
        """Until all is copied from the devices."""
        for shard in self.staged:
            shard.wait()

    def upload(self, store: Store, checkpoint: str) -> None:
        """Durable when it returns. Single use."""
        for shard in self.staged:
            key = shard_key(checkpoint, shard.name.component, shard.name.rank)
            store.put_parts(key, shard.parts(store.part_bytes(shard.size_bytes)), shard.size_bytes)

    @property
    def shards(self) -> tuple[Shard, ...]:
        """Only after the upload."""
        return (*(staged.shard() for staged in self.staged), *(kept.shard for kept in self.kept))

    @property
    def records(self) -> tuple[ShardRecord, ...]:
        return tuple(shard.record for shard in self.shards)

    @property
    def places(self) -> dict[str, str]:
        """The checkpoint in which each component lies that is not uploaded."""
        return {kept.shard.record.component: kept.checkpoint for kept in self.kept}

    def section(self) -> Index:
        """This rank's part of the index."""
        tensors: list[Tensor] = []
        chunks: list[Chunk] = []
        leaves: list[Leaf] = []
        for shard in self.shards:
            first = len(tensors)
            chunks += [replace(c, tensor=first + c.tensor) for c in shard.chunks] if first else shard.chunks
            tensors += shard.tensors
            leaves += shard.leaves
        return index_of(tensors, chunks, leaves=leaves, values=self.values, rank_values=[self.rank_values])


class Components:
    """What a rank stages through, and what it knows to lie in the bucket. buffers: saves that may be under way at a
    time. They take turns; one that writes more than `train` must have ended before the next is staged."""

    def __init__(self, rank: int, buffers: int = 1) -> None:
        self._rank = rank
        self._train = [Stager(TRAIN, rank) for _ in range(buffers)]
        self._frozen: dict[str, Stager] = {}
        self._kept: dict[str, KnownShard] = {}
        self._found: RestoredShards | None = None

    def prepare(self, boxes: Mapping[str, Sequence[LocalBox]], *, world_size: int) -> None:
        """Claim memory and have it faulted in behind the training. boxes: all that may be written, by component.
        Raises ConfigError when there is too little for all of them."""
        stagers = [(stager, boxes.get(TRAIN, ())) for stager in self._train]
        if self._found is None:  # else it will hardly be written
            stagers += [(self._stager(name), own) for name, own in boxes.items() if name != TRAIN]
        size_bytes = sum(stager.wanted(own, world_size=world_size) for stager, own in stagers)
        check_fits(size_bytes, available_bytes())
        logging.getLogger("raycheck").info("rank %d: staging buffer, %d bytes of host memory", self._rank, size_bytes)
        for stager, own in stagers:
            stager.prepare(own, world_size=world_size)

    def stage(self, selected: Mapping[str, BoxesAndSources], leaves: Leaves, also: Places) -> StagedState:
        """selected: by component. also: further places of the leaves. See Stager.stage."""
        staged, kept, written = [], [], {}
        for component, (boxes, sources) in selected.items():
            if component == TRAIN:
                self._train.append(self._train.pop(0))
                staged.append(self._train[0].stage(boxes, leaves, sources, also))
                continue
            stager, found = self._stager(component), _digests(boxes, sources)
            there = self._there(component, boxes, sources)
            if there is not None and found and all(there.digests.get(name) == own for name, own in found.items()):
                stager.release()
                kept.append(there)
            else:
                staged.append(stager.stage(boxes, {}, sources))
                written[component] = UploadedShard(staged=staged[-1], boxes=boxes, digests=found)
        self._found = None
        return StagedState(staged=staged, kept=kept, written=written)

    def restored(self, manifest: Manifest, index: Index, boxes: Sequence[LocalBox]) -> None:
        """These live tensors hold what was read: the first save may refer to it."""
        self.forget()
        self._found = RestoredShards.of(manifest, index, boxes) if len(manifest.components) > 1 else None

    def committed(self, save: StagedState, places: Mapping[str, str]) -> None:
        """Saves are told of in order. places: the checkpoint that holds each component now; those of which it is not
        known are written by the next save."""
        known = {kept.shard.record.component: kept for kept in save.kept} | {
            name: KnownShard(checkpoint="", shard=item.staged.shard(), boxes=item.boxes, digests=item.digests)
            for name, item in save.written.items()
        }
        self._kept = {name: replace(kept, checkpoint=places[name]) for name, kept in known.items() if name in places}
        self._found = None

    def forget(self) -> None:
        """The next save is written whole."""
        self._kept, self._found = {}, None

    def _there(self, component: str, boxes: Sequence[LocalBox], sources: Sequence[torch.Tensor]) -> KnownShard | None:
        """What is known to lie in the bucket of these boxes, whatever they hold."""
        kept = self._kept.get(component)
        if kept is not None and kept.boxes is boxes:
            return kept
        rows = self._stager(component).rows(boxes, sources)
        if kept is not None and kept.lies_as(rows):
            kept = replace(kept, boxes=boxes)
        else:
            kept = self._found.kept(component, self._rank, boxes, rows) if self._found is not None else None
        if kept is not None:
            self._kept[component] = kept
        return kept

    def _stager(self, component: str) -> Stager:
        return self._frozen.setdefault(component, Stager(component, self._rank))


def _digests(boxes: Sequence[LocalBox], sources: Sequence[torch.Tensor]) -> dict[str, Digest]:
    """By name. Empty, which is like nothing, where an accelerator has no memory left to compute them in."""
    try:
        return dict(zip((box.name for box in boxes), digests(sources), strict=True))
    except torch.OutOfMemoryError:
        return {}
