"""Decides per component whether this rank's shard is written, or is in the bucket already.

Everything that training changes is the component `train`, which each save writes. The parameters of a module that get
no gradient are a component of their own. It is written only when its contents differ from those at the newest commit;
otherwise the checkpoint refers to the one that has it.
"""

import logging
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TypeGuard

import torch

from raycheck.bucket.assembly.replica_comparison import RankDigests
from raycheck.bucket.format.index import Chunk, Index, Leaf, Tensor, index_of
from raycheck.bucket.format.manifest import Component, Manifest, ShardRecord
from raycheck.bucket.format.object_keys import shard_key, split_directory
from raycheck.bucket.store import Store
from raycheck.errors import ConfigError, SaveFailedError
from raycheck.transfer.referred_component import Forms, ReferredComponent
from raycheck.transfer.replica_digests import NO_REPLICAS, ReplicaDigests
from raycheck.transfer.stage.live_slices import LiveSlices, slices_bytes
from raycheck.transfer.stage.local_box import TRAIN, LocalBox
from raycheck.transfer.stage.memory_claims import PATIENCE_S, unclaimed_bytes
from raycheck.transfer.stage.shard import IndexRows, Shard
from raycheck.transfer.stage.shared_memory import MemoryPlace
from raycheck.transfer.stage.staged_shard import SharedShard, Staged
from raycheck.transfer.stage.stager import Leaves, Stager
from raycheck.transfer.stage.stock_torch_names import Places
from raycheck.transfer.tensor_digest import Digest, are_equal, digests

MAX_NAME = 90
BoxesAndSources = tuple[Sequence[LocalBox], Sequence[torch.Tensor]]
"""Boxes without memory, and for each of them the live tensor of this rank."""


def frozen_component(entry: str) -> str:
    """Returns the component of the frozen parameters of an entry.

    Entries whose names differ only in odd characters share one.
    """
    return f"{re.sub(r'[^A-Za-z0-9_.-]', '_', entry)[:MAX_NAME]}.frozen"


def by_component(boxes: Iterable[LocalBox]) -> dict[str, list[LocalBox]]:
    """Group boxes by the component that they are saved in."""
    found: dict[str, list[LocalBox]] = {}
    for box in boxes:
        found.setdefault(box.component, []).append(box)
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownShard:
    """Describes a shard that the newest commit has.

    checkpoint: where its object is. boxes: the boxes that it holds, as they were passed to the last save. digests: of
    its tensors, by name.
    """

    checkpoint: str
    shard: Shard
    boxes: Sequence[LocalBox]
    digests: Mapping[str, Digest]

    def has_layout(self, rows: IndexRows) -> bool:
        """Returns whether the shard has exactly these rows, apart from the checksums."""
        tensors, chunks = rows
        return tensors == self.shard.tensors and chunks == tuple(replace(c, crcs=()) for c in self.shard.chunks)


@dataclass(frozen=True, kw_only=True, slots=True)
class RestoredShards:
    """Describes the checkpoint that a restore has read. digests: of the live tensors outside `train`, by name."""

    manifest: Manifest
    index: Index
    digests: Mapping[str, Digest]

    @classmethod
    def of(cls, manifest: Manifest, index: Index, boxes: Sequence[LocalBox]) -> "RestoredShards":
        """Take the digests of the boxes that were just read from the index, or compute them."""
        plan = index.plan
        is_train = [item.component == TRAIN for item in plan.objects]
        elsewhere = {
            tensor.name: number
            for number, (tensor, (first, end)) in enumerate(zip(plan.tensors, plan.rows(), strict=True))
            if first < end and not is_train[plan.object[first]]
        }
        kept = [box for box in boxes if box.name in elsewhere]
        found = {box.name: crcs for box in kept if (crcs := _crcs_of(index, elsewhere[box.name], box)) is not None}
        others = [box for box in kept if box.name not in found]
        return cls(manifest=manifest, index=index, digests=found | _digests(others, [box.local for box in others]))

    def find(self, component: str, rank: int, boxes: Sequence[LocalBox], rows: IndexRows) -> KnownShard | None:
        """Returns a rank's shard of a component, or None unless that shard has exactly these rows."""
        saved = next((saved for saved in self.manifest.components if saved.name == component), None)
        record = next((shard for shard in saved.shards if shard.rank == rank), None) if saved else None
        if saved is None or record is None:
            return None
        numbers = {tensor: number for number, tensor in enumerate(self.index.tensors)}
        tensors, chunks = rows
        found = []
        for chunk in chunks:
            number = numbers.get(tensors[chunk.tensor])
            there = () if number is None else self.index.chunks_in(number, chunk.offsets, chunk.sizes)
            if number is not None and not chunk.payload_size:  # which holds no elements of any box
                there = self.index.chunks_of(number)
            renumbered = (replace(other, tensor=chunk.tensor) for other in there)
            found += [other for other in renumbered if replace(other, crcs=()) == chunk]
        if len(found) != len(chunks):
            return None
        shard = Shard(record=record, tensors=tensors, chunks=tuple(found))
        return KnownShard(checkpoint=saved.checkpoint, shard=shard, boxes=boxes, digests=self.digests)

    def borrowed(self, component: str, forms: Forms) -> ReferredComponent | None:
        """Returns a component that the checkpoint has borrowed; None unless this rank has exactly its tensors."""
        saved = next((saved for saved in self.manifest.components if saved.name == component), None)
        if saved is None or not split_directory(saved.checkpoint)[0]:
            return None
        return ReferredComponent.restored(saved, self.index, forms, self.digests)

    def whole(self, component: str, forms: Forms) -> ReferredComponent | None:
        """Returns a component of the checkpoint, in whatever boxes it lies; None unless all ranks have its tensors."""
        saved = next((saved for saved in self.manifest.components if saved.name == component), None)
        apart = {frozen_component(entry) for values in self.index.rank_values for entry in values}
        if saved is None or component in apart:  # the ranks of a pipeline hold different tensors
            return None
        return ReferredComponent.restored(saved, self.index, forms, self.digests)


@dataclass(frozen=True, kw_only=True, slots=True)
class UploadedShard:
    """Describes a shard outside `train` that a save uploads. boxes: see KnownShard.

    digests: see KnownShard; None where they are the checksums that the upload computes, in host memory.
    """

    staged: Staged
    boxes: Sequence[LocalBox]
    digests: Mapping[str, Digest] | None

    def known(self, checkpoint: str) -> KnownShard:
        """Returns what later saves compare with, once the upload is committed as part of `checkpoint`."""
        shard, found = self.staged.shard(), self.digests
        if found is None:  # the first chunks are those of the boxes, in their order
            found = {box.name: chunk.crcs for box, chunk in zip(self.boxes, shard.chunks, strict=False)}
        return KnownShard(checkpoint=checkpoint, shard=shard, boxes=self.boxes, digests=found)


@dataclass(frozen=True, kw_only=True, slots=True)
class StagedState:
    """Holds one save of this rank: shards to upload, shards that are in the bucket already, and values.

    staged: the shards to upload. written: those of them outside `train`, by component. kept: the shards that are not
    uploaded. referred: components of which no rank uploads anything. has_rows_of_referred: this rank's section has
    their rows. values, rank_values: what is no tensor, of all ranks and of this one. replicas: digests of what other
    ranks may hold too. staged_at: when it was staged, by time.monotonic.
    """

    staged: Sequence[Staged]
    kept: Sequence[KnownShard] = ()
    referred: Sequence[ReferredComponent] = ()
    has_rows_of_referred: bool = False
    written: Mapping[str, UploadedShard] = field(default_factory=dict)
    values: Mapping[str, object] = field(default_factory=dict)
    rank_values: Mapping[str, object] = field(default_factory=dict)
    replicas: ReplicaDigests = NO_REPLICAS
    staged_at: float = field(default_factory=time.monotonic)

    def wait(self) -> None:
        """Wait until everything is copied from the devices, and digested there."""
        for shard in self.staged:
            shard.wait()
        self.replicas.wait()

    def to_share(self) -> "SharedState | None":
        """Returns what another process of the node needs to upload this save; None when it cannot. After `wait`."""
        shards = [shard.to_share() for shard in self.staged]
        if any(shard is None for shard in shards):
            return None
        kept = [replace(known, boxes=(), digests={}) for known in self.kept]
        referred = [replace(whole, forms=frozenset(), digests={}) for whole in self.referred]
        save = replace(self, staged=(), written={}, kept=kept, referred=referred)
        return SharedState(save=save, shards=tuple(shard for shard in shards if shard is not None))

    def keep_buffers_apart(self) -> None:
        """Have the next save staged into other buffers, since somebody may still read these."""
        for shard in self.staged:
            shard.keep_buffer_apart()

    @property
    def slices(self) -> Sequence[LiveSlices]:
        """Returns the live tensors from which the upload copies shards, for which there was no buffer."""
        return [shard.slices for shard in self.staged if shard.slices is not None]

    def wait_for_slices(self, deadline: float) -> None:
        """Wait until the live tensors may change: all are copied, the upload has failed, or it is `deadline` (of
        time.monotonic), after which no more of them are copied."""
        try:
            for slices in self.slices:
                slices.wait(deadline)
        finally:
            self.let_slices_go()

    def let_slices_go(self) -> None:
        """Have nothing more copied from live tensors. An upload that still needs some of them fails."""
        for slices in self.slices:
            slices.let_go()

    @property
    def sliced_s(self) -> float:
        """Returns how many seconds after the staging the last live tensor was copied. Only after the upload."""
        return max((slices.copied_at - self.staged_at for slices in self.slices), default=0.0)

    def upload(self, store: Store, checkpoint: str) -> None:
        """Upload the staged shards, which are durable when it returns. Single use."""
        try:
            for shard in sorted(self.staged, key=lambda shard: shard.slices is None):  # training waits for slices
                key = shard_key(checkpoint, shard.name.component, shard.name.rank)
                store.put_parts(key, shard.parts(store.part_bytes(shard.size_bytes)), shard.size_bytes)
        finally:
            self.let_slices_go()  # training does not wait any longer for an upload that has failed

    def seal(self, checkpoint: str) -> Iterator[tuple[str, memoryview, MemoryPlace | None]]:
        """Yields, for each staged shard, the key that it would have in the bucket, its bytes, and where other processes
        find these. Single use."""
        for shard in self.staged:
            yield shard_key(checkpoint, shard.name.component, shard.name.rank), shard.seal(), shard.place

    @property
    def shards(self) -> tuple[Shard, ...]:
        """Returns all shards of this save. Only after the upload, which computes the checksums."""
        return (*(staged.shard() for staged in self.staged), *(kept.shard for kept in self.kept))

    @property
    def records(self) -> tuple[ShardRecord, ...]:
        """Returns what the manifest has of each shard. Only after the upload."""
        return tuple(shard.record for shard in self.shards)

    @property
    def places(self) -> dict[str, str]:
        """Returns the checkpoint of each component that is not uploaded."""
        return {kept.shard.record.component: kept.checkpoint for kept in self.kept}

    @property
    def references(self) -> tuple[Component, ...]:
        """Returns the manifest's records of the components of which no rank uploads anything."""
        return tuple(whole.record for whole in self.referred)

    def replica_digests(self) -> RankDigests:
        """Returns what the coordinator compares with the other ranks'. Only after the upload."""
        self.replicas.wait()
        return self.replicas.report(self.shards)

    def section(self) -> Index:
        """Returns this rank's section of the index. Call it only after the upload."""
        tensors: list[Tensor] = []
        chunks: list[Chunk] = []
        leaves: list[Leaf] = []
        for shard in self.shards:
            first = len(tensors)
            chunks += [replace(c, tensor=first + c.tensor) for c in shard.chunks] if first else shard.chunks
            tensors += shard.tensors
            leaves += shard.leaves
        for whole in self.referred if self.has_rows_of_referred else ():
            chunks += [replace(chunk, tensor=len(tensors) + chunk.tensor) for chunk in whole.chunks]
            tensors += whole.tensors
        return index_of(tensors, chunks, leaves=leaves, values=self.values, rank_values=[self.rank_values])


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedState:
    """Describes one save of this rank to another process of the node. save: without the shards to upload.

    shards: these shards, in order.
    """

    save: StagedState
    shards: tuple[SharedShard, ...]

    def open(self) -> StagedState:
        """Returns the save in this process. Raises OSError when this process cannot reach the shards' memory."""
        return replace(self.save, staged=tuple(shard.open() for shard in self.shards))


class Components:
    """Stages all components of a rank, and remembers which of their shards are in the bucket.

    buffers: how many saves may be under way at a time; they take turns. A save that writes more than `train` must have
    ended before the next is staged. is_shared: let another process of the node upload from the buffers. has_memory:
    there are two buffers more, for memory checkpoints.

    A component for which the host has no memory is staged in slices: training then waits for its upload.

    digested: by name, the digests that the last save has taken of tensors outside `train`.
    """

    def __init__(self, rank: int, buffers: int = 1, *, is_shared: bool = False, has_memory: bool = False) -> None:
        self._rank = rank
        self._is_shared = is_shared
        self._train = [Stager(TRAIN, rank, is_shared=is_shared) for _ in range(buffers)]
        self._memory = [{TRAIN: Stager(TRAIN, rank, is_shared=True)} for _ in range(2 if has_memory else 0)]
        self._frozen: dict[str, Stager] = {}
        self._known: dict[str, KnownShard] = {}
        self._restored: RestoredShards | None = None
        self._referred: dict[str, ReferredComponent] = {}
        self._sliced: set[str] = set()  # the components of which it was said that they are staged in slices
        self._has_staged = False
        self.digested: dict[str, Digest] = {}

    @property
    def buffers(self) -> int:
        """Returns how many saves may be under way at a time, with the memory that the host has."""
        return len(self._train)

    def prepare(self, boxes: Mapping[str, Sequence[LocalBox]], *, world_size: int) -> None:
        """Claim memory, and have it faulted in while training runs. Warn of what the host has no memory for.

        boxes: all that this rank may write, by component.
        """
        memory, self._memory = self._memory, []
        train = boxes.get(TRAIN, ())
        stagers = [(TRAIN, stager, train) for stager in self._train]
        if self._restored is None:  # after a restore a frozen component will hardly be written
            written = boxes.keys() - self._referred.keys() - {TRAIN}
            stagers += [(name, self._stager(name), boxes[name]) for name in sorted(written)]
        claimed, deadline = 0, time.monotonic() + PATIENCE_S
        for component, stager, own in stagers:
            size_bytes = 0 if stager.has_buffer else stager.needed_bytes(own, world_size=world_size)
            try:
                stager.prepare(own, world_size=world_size, patience_s=deadline - time.monotonic())
                claimed += size_bytes
            except ConfigError as error:
                if component == TRAIN and len(self._train) > 1:
                    self._train.remove(stager)
                    text = "each save waits for the one before, in spite of when_busy=copy, rank=%d: %s"
                    logging.getLogger("raycheck").warning(text, self._rank, error)
                elif _fits_in_slices(size_bytes, unclaimed_bytes()):
                    self._warn_of_slices(component, str(error))
        logging.getLogger("raycheck").info("claiming host memory for staging rank=%d bytes=%d", self._rank, claimed)
        if memory:
            self._prepare_memory(memory, train, world_size=world_size, deadline=deadline)

    def _prepare_memory(
        self, memory: list[dict[str, Stager]], boxes: Sequence[LocalBox], *, world_size: int, deadline: float
    ) -> None:
        """Claim the buffers for memory checkpoints, once this rank's for the bucket are there: these come first.

        deadline: until when to wait for what is claimed twice, by time.monotonic.
        """
        text = "no memory checkpoints rank=%d: %s"
        if self._sliced:  # their slices need what is left
            problem = "there is too little memory for saves to the bucket already"
            logging.getLogger("raycheck").warning(text, self._rank, problem)
            return
        try:
            for slot in memory:
                slot[TRAIN].prepare(boxes, world_size=world_size, patience_s=deadline - time.monotonic())
        except ConfigError as error:
            for slot in memory:
                slot[TRAIN].release()
            logging.getLogger("raycheck").warning(text, self._rank, error)
        else:
            self._memory = memory

    def stage(
        self, selected: Mapping[str, BoxesAndSources], leaves: Leaves, also: Places, forms: Mapping[str, Forms]
    ) -> StagedState:
        """Stage what changed, by component. also: further names of the leaves. See Stager.stage.

        forms: what this rank has of each component, whether it writes it or another rank does.
        """
        staged, kept, written, self.digested = [], [], {}, {}
        self._referred = self._still_referred(selected, forms)
        for component, (boxes, sources) in selected.items():
            if component == TRAIN:
                self._train.append(self._train.pop(0))
                staged.append(self._stage_shard(self._train[0], boxes, sources, leaves, also))
                continue
            if component in self._referred:
                self._stager(component).release()
                continue
            stager = self._stager(component)
            known = self._learn(component, boxes, sources)
            # Without anything to compare with, training does not wait for digests that the upload will compute.
            is_compared = known is not None or any(source.device.type != "cpu" for source in sources)
            found = self._digest(boxes, sources) if is_compared else None
            if found is not None and _is_unchanged(known, found):
                stager.release()
                kept.append(known)
            else:
                staged.append(self._stage_shard(stager, boxes, sources))
                written[component] = UploadedShard(staged=staged[-1], boxes=boxes, digests=found)
        self._restored, self._has_staged = None, True
        referred = [self._referred[name] for name in sorted(self._referred)]
        return StagedState(
            staged=staged, kept=kept, written=written, referred=referred, has_rows_of_referred=self._rank == 0
        )

    def _stage_shard(
        self,
        stager: Stager,
        boxes: Sequence[LocalBox],
        sources: Sequence[torch.Tensor],
        leaves: Leaves = MappingProxyType({}),
        also: Places = MappingProxyType({}),
    ) -> Staged:
        """Stage a component into its buffer, or in slices.

        When there is no memory for these, raises ConfigError at the first save, and SaveFailedError at a later one.
        """
        try:
            return stager.stage(boxes, leaves, sources, also)
        except ConfigError as error:
            if not _fits_in_slices(stager.needed_bytes(boxes, world_size=1), unclaimed_bytes()):
                if self._has_staged:  # the memory may be there again at the next save
                    raise SaveFailedError(str(error)) from error
                raise
            self._warn_of_slices(stager.name.component, str(error))
        return stager.stage_in_slices(boxes, leaves, sources, also)

    def _warn_of_slices(self, component: str, why: str) -> None:
        """Warn, once, that training waits for the uploads of a component. why: what there is no memory for."""
        if component in self._sliced:
            return
        self._sliced.add(component)
        uploader = ", and this rank uploads it itself, in spite of upload_by='node'" if self._is_shared else ""
        text = "each save that writes component %s stops the training until it is uploaded in slices%s, rank=%d: %s"
        logging.getLogger("raycheck").warning(text, component, uploader, self._rank, why)

    def stage_for_memory(
        self,
        slot: int,
        selected: Mapping[str, BoxesAndSources],
        leaves: Leaves,
        also: Places,
        forms: Mapping[str, Forms],
    ) -> StagedState:
        """Stage all that is not in the bucket into the buffers of one of two memory checkpoints, 0 or 1.

        The other arguments: see `stage`. Between a restore and the first save to the bucket, this refers to all that
        was restored from the bucket, in whatever boxes it lies. Raises SaveFailedError when the bucket has no shard at
        all of another component than `train`: such a component is mostly large and never changes, so a save to the
        bucket uploads it first.
        """
        if not self._memory:
            raise SaveFailedError(f"rank {self._rank}: the host has no room for memory checkpoints")
        self.digested = {}
        referred, kept, staged = self._still_referred(selected, forms, is_for_memory=True), [], []
        stagers = self._memory[slot]
        for component, (boxes, sources) in selected.items():
            if component == TRAIN:
                staged.append(stagers[TRAIN].stage(boxes, leaves, sources, also))
                continue
            if component in referred:
                continue
            known = self._learn(component, boxes, sources)
            if known is None:
                raise SaveFailedError(
                    f"rank {self._rank}: {component}, which gets no gradient, is not in the bucket as it is now; the "
                    "next save to the bucket uploads it, and when that is committed there are memory checkpoints again"
                )
            if _is_unchanged(known, self._digest(boxes, sources)):
                kept.append(known)
            else:
                stager = stagers.setdefault(component, Stager(component, self._rank, is_shared=True))
                staged.append(stager.stage(boxes, {}, sources))
        whole = [referred[name] for name in sorted(referred)]
        return StagedState(staged=staged, kept=kept, referred=whole, has_rows_of_referred=self._rank == 0)

    def _still_referred(
        self, selected: Mapping[str, BoxesAndSources], forms: Mapping[str, Forms], *, is_for_memory: bool = False
    ) -> dict[str, ReferredComponent]:
        """Return the components to refer to: those that were, or are borrowed by what was restored, if unchanged.

        is_for_memory: also those that were restored, and are the run's own.
        """
        found = {}
        for component, own in forms.items():
            whole = self._referred.get(component)
            if whole is None and self._restored is not None:
                restored = self._restored.whole if is_for_memory else self._restored.borrowed
                whole = restored(component, own)
            if whole is not None:
                boxes, sources = selected.get(component, ((), ()))
                if whole.is_unchanged(own, self._digest(boxes, sources), len(boxes)):
                    found[component] = whole
        return found

    def refer_to(self, whole: ReferredComponent) -> None:
        """Refer to a component that lies in the bucket from the next save on, for as long as it is unchanged."""
        self._referred[whole.record.name] = whole

    def restored(self, manifest: Manifest, index: Index, boxes: Sequence[LocalBox]) -> None:
        """Learn that these live tensors hold what was just read, so that the first save may refer to it.

        manifest: with the components that lie in the bucket; after a restore from memory `train` is not among them.
        """
        self.forget(referred=True)
        has_frozen = any(component.name != TRAIN for component in manifest.components)
        self._restored = RestoredShards.of(manifest, index, boxes) if has_frozen else None

    def committed(self, save: StagedState, places: Mapping[str, str]) -> None:
        """Learn that a save was committed. Call it in the order of the saves.

        places: the checkpoint that holds each component now. A component that is missing there is written by the next
        save.
        """
        kept = {known.shard.record.component: known for known in save.kept}
        self._known = {
            name: replace(known, checkpoint=places[name]) for name, known in kept.items() if name in places
        } | {name: item.known(places[name]) for name, item in save.written.items() if name in places}
        self._restored = None

    def forget(self, *, referred: bool = False) -> None:
        """Forget which shards are in the bucket, so that the next save writes all of them.

        referred: also the components that all ranks refer to. A failed save does not put these in doubt, unless it
        failed because of them: the next commit finds out whether they are still held.
        """
        self._known, self._restored = {}, None
        if referred:
            self._referred = {}

    def _learn(self, component: str, boxes: Sequence[LocalBox], sources: Sequence[torch.Tensor]) -> KnownShard | None:
        """Find the shard in the bucket that has the layout of these boxes, whatever it holds, and remember it."""
        known = self._known.get(component)
        if known is not None and known.boxes is boxes:
            return known
        rows = self._stager(component).lay_out(boxes, sources)
        if known is not None and known.has_layout(rows):
            known = replace(known, boxes=boxes)
        else:
            known = self._restored.find(component, self._rank, boxes, rows) if self._restored is not None else None
        if known is not None:
            self._known[component] = known
        return known

    def _digest(self, boxes: Sequence[LocalBox], sources: Sequence[torch.Tensor]) -> dict[str, Digest]:
        """Return one digest per tensor name, as `_digests`, and remember them."""
        found = _digests(boxes, sources)
        self.digested |= found
        return found

    def _stager(self, component: str) -> Stager:
        return self._frozen.setdefault(component, Stager(component, self._rank, is_shared=self._is_shared))


def _fits_in_slices(size_bytes: int, available: int | None) -> bool:
    """Returns whether there is memory for the slices of a shard of this size. If there is none, the save fails."""
    return available is None or slices_bytes(size_bytes) <= available


def _crcs_of(index: Index, tensor: int, box: LocalBox) -> Digest | None:
    """Returns the checksums with which a box of this tensor was saved, which are its digest in host memory.

    None when it lies elsewhere, or was not saved as one chunk.
    """
    local = box.local
    if local.device.type != "cpu" or box.cast_from is not None or local.is_conj() or local.is_neg():
        return None
    there = index.chunks_in(tensor, box.offsets, box.sizes)
    return next((c.crcs for c in there if (c.offsets, c.sizes) == (box.offsets, box.sizes)), None)


def _is_unchanged(known: KnownShard | None, found: Mapping[str, Digest]) -> TypeGuard[KnownShard]:
    """Returns whether a shard in the bucket has exactly these digests."""
    return known is not None and bool(found) and are_equal(known.digests, found)


def _digests(boxes: Sequence[LocalBox], sources: Sequence[torch.Tensor]) -> dict[str, Digest]:
    """Returns one digest per tensor name.

    Empty when the accelerator is out of memory: then nothing matches, so that all is uploaded.
    """
    try:
        return dict(zip((box.name for box in boxes), digests(sources), strict=True))
    except torch.OutOfMemoryError:
        return {}
