"""Decides for each component whether this rank's shard is uploaded, or is already in the bucket.

Everything that training changes is the component `train`, which each save writes. The parameters of a module that get
no gradient are a separate component, which is uploaded only if its contents differ from those at the newest commit.
Otherwise the checkpoint refers to the one that has it.
"""

import logging
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import torch

from raycheck.bucket.assembly.replica_comparison import RankDigests
from raycheck.bucket.assembly.save_report import Reference
from raycheck.bucket.format.index import Chunk, Index, Tensor, index_of
from raycheck.bucket.format.manifest import Component, Manifest, ShardRecord
from raycheck.bucket.format.object_keys import shard_key, split_directory
from raycheck.bucket.store import Store
from raycheck.bucket.store.moved_bytes import moved_bytes
from raycheck.bucket.store.request_window import fewest_requests
from raycheck.errors import ConfigError, SaveFailedError
from raycheck.transfer.referred_component import NO_ROWS, Forms, ReferredComponent
from raycheck.transfer.replica_digests import NO_REPLICAS, ReplicaDigests
from raycheck.transfer.stage.live_slices import LiveSlices, slices_bytes
from raycheck.transfer.stage.local_box import TRAIN, LocalBox
from raycheck.transfer.stage.memory_claims import PATIENCE_S, unclaimed_bytes
from raycheck.transfer.stage.shard import IndexRows, Shard
from raycheck.transfer.stage.shared_memory import MemoryPlace
from raycheck.transfer.stage.staged_shard import SharedShard, Staged
from raycheck.transfer.stage.stager import Leaves, Stager
from raycheck.transfer.stage.stock_torch_names import Places
from raycheck.transfer.tensor_digest import Digest, digests

MAX_NAME = 90
BoxesAndSources = tuple[Sequence[LocalBox], Sequence[torch.Tensor]]
"""Boxes without memory, and for each of them the live tensor of this rank."""


def frozen_component(entry: str) -> str:
    """Return the component of the frozen parameters of an entry.

    Entries whose names differ only in unusual characters share one.
    """
    return f"{re.sub(r'[^A-Za-z0-9_.-]', '_', entry)[:MAX_NAME]}.frozen"


def by_component(boxes: Iterable[LocalBox]) -> dict[str, list[LocalBox]]:
    """Group boxes by the component that they are saved in."""
    found: dict[str, list[LocalBox]] = {}
    for box in boxes:
        found.setdefault(box.component, []).append(box)
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class RestoredShards:
    """The checkpoint that a restore has read. digests: those of the live tensors outside `train`, by name."""

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
        found = {box.box_name: crcs for box in kept if (crcs := _crcs_of(index, elsewhere[box.name], box)) is not None}
        others = [box for box in kept if box.box_name not in found]
        return cls(manifest=manifest, index=index, digests=found | _digests(others, [box.local for box in others]))

    def find(self, component: str, rank: int, boxes: Sequence[LocalBox], rows: IndexRows) -> ReferredComponent | None:
        """Return a component that was saved in this rank's boxes, None unless this rank's shard has exactly these
        rows."""
        saved = self._saved(component)
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
        reference = Reference(name=component, checkpoint=saved.checkpoint)
        return ReferredComponent(reference=reference, digests=self.digests, shard=shard, boxes=boxes)

    def whole(self, component: str, forms: Forms, *, is_for_memory: bool) -> ReferredComponent | None:
        """Return a component in whatever boxes it was saved, None unless this rank has exactly its tensors.

        For a save to the bucket, only a component that the checkpoint has borrowed; for a memory checkpoint, only one
        of which every rank has all tensors.
        """
        saved = self._saved(component)
        if saved is None:
            return None
        if is_for_memory:
            is_wanted = component not in {frozen_component(it) for values in self.index.rank_values for it in values}
        else:
            is_wanted = bool(split_directory(saved.checkpoint)[0])
        return ReferredComponent.restored(saved, self.index, forms, self.digests) if is_wanted else None

    def _saved(self, component: str) -> Component | None:
        return next((saved for saved in self.manifest.components if saved.name == component), None)


@dataclass(frozen=True, kw_only=True, slots=True)
class UploadedShard:
    """A shard outside `train` that a save uploads.

    boxes, digests: see ReferredComponent. digests: None if the tensors are in host memory, where the checksums of the
    upload are the digests.
    """

    staged: Staged
    boxes: Sequence[LocalBox]
    digests: Mapping[str, Digest] | None

    def known(self, checkpoint: str) -> ReferredComponent:
        """Return the component to which later saves may refer, once the upload is committed as part of `checkpoint`."""
        shard, found = self.staged.shard(), self.digests
        if found is None:  # the first chunks are those of the boxes, in their order
            found = {box.box_name: chunk.crcs for box, chunk in zip(self.boxes, shard.chunks, strict=False)}
        reference = Reference(name=shard.record.component, checkpoint=checkpoint)
        return ReferredComponent(reference=reference, digests=found, shard=shard, boxes=self.boxes)


@dataclass(frozen=True, kw_only=True, slots=True)
class StagedState:
    """One save of this rank: shards to upload, components that it refers to, and values.

    staged: the shards to upload. written: those of them outside `train`, by component. referred: the components that
    this rank does not upload. values, rank_values: the non-tensor values that all ranks share, and this rank's own.
    replicas: the digests of what other ranks may hold too. staged_at: when it was staged, by time.monotonic.
    """

    staged: Sequence[Staged]
    referred: Sequence[ReferredComponent] = ()
    written: Mapping[str, UploadedShard] = field(default_factory=dict)
    values: Mapping[str, object] = field(default_factory=dict)
    rank_values: Mapping[str, object] = field(default_factory=dict)
    replicas: ReplicaDigests = NO_REPLICAS
    staged_at: float = field(default_factory=time.monotonic)

    def wait(self) -> None:
        """Wait until everything has been copied from the devices, and digested there."""
        for shard in self.staged:
            shard.wait()
        self.replicas.wait()

    def to_share(self) -> "SharedState | None":
        """Return a description with which another process on the node can upload this save, or None. Call it after
        `wait`."""
        shards = [shard.to_share() for shard in self.staged]
        if any(shard is None for shard in shards):
            return None
        referred = [replace(known, boxes=(), forms=frozenset(), digests={}) for known in self.referred]
        save = replace(self, staged=(), written={}, referred=referred)
        return SharedState(save=save, shards=tuple(shard for shard in shards if shard is not None))

    def keep_buffers_apart(self) -> None:
        """Stage the next save into other buffers, since another process may still read these."""
        for shard in self.staged:
            shard.keep_buffer_apart()

    @property
    def slices(self) -> Sequence[LiveSlices]:
        """Return the live tensors that the upload copies directly, since there was no buffer for their shards."""
        return [shard.slices for shard in self.staged if shard.slices is not None]

    def wait_for_slices(self, deadline: float) -> None:
        """Wait until the live tensors may change: all are copied, the upload has failed, or it is past `deadline`.

        deadline: by time.monotonic; after it, no more of them are copied.
        """
        try:
            for slices in self.slices:
                slices.wait(deadline)
        finally:
            self.let_slices_go()

    def let_slices_go(self) -> None:
        """Stop copying from live tensors. An upload that still needs some of them fails."""
        for slices in self.slices:
            slices.let_go()

    @property
    def sliced_s(self) -> float:
        """Return the seconds from the staging to the copy of the last live tensor. Call it after the upload."""
        return max((slices.copied_at - self.staged_at for slices in self.slices), default=0.0)

    def upload(self, store: Store, checkpoint: str) -> None:
        """Upload the staged shards. They are durable when this returns. Call it once."""
        moved, done = moved_bytes(), 0
        moved.want(sum(shard.size_bytes for shard in self.staged))
        try:
            for shard in sorted(self.staged, key=lambda shard: shard.slices is None):  # training waits for slices
                key = shard_key(checkpoint, shard.name.component, shard.name.rank)
                with moved.at(key), fewest_requests() if shard.slices is not None else nullcontext():
                    store.put_parts(key, shard.parts(store.part_bytes(shard.size_bytes)), shard.size_bytes)
                moved.done = done = done + shard.size_bytes  # also of a store that sends an object in one request
        finally:
            self.let_slices_go()  # training does not wait any longer for an upload that has failed

    def seal(self, checkpoint: str) -> Iterator[tuple[str, memoryview, MemoryPlace | None]]:
        """Yield, for each staged shard, its key in the bucket, its bytes, and where other processes find these bytes.

        Call it once.
        """
        for shard in self.staged:
            yield shard_key(checkpoint, shard.name.component, shard.name.rank), shard.seal(), shard.place

    @property
    def shards(self) -> tuple[Shard, ...]:
        """Return this rank's shards: those of this save, and those it refers to.

        Call it after the upload, which computes the checksums.
        """
        own = (known.shard for known in self.referred if known.shard is not None)
        return (*(staged.shard() for staged in self.staged), *own)

    @property
    def records(self) -> tuple[ShardRecord, ...]:
        """Return the manifest's record of each shard. Call it after the upload."""
        return tuple(shard.record for shard in self.shards)

    @property
    def references(self) -> tuple[Reference, ...]:
        """Return the report's entries for the components that this rank does not upload."""
        return tuple(known.reference for known in self.referred)

    def replica_digests(self) -> RankDigests:
        """Return the digests that the coordinator compares with those of other ranks. Call it after the upload."""
        self.replicas.wait()
        return self.replicas.report(self.shards)

    def section(self) -> Index:
        """Return this rank's section of the index. Call it after the upload."""
        tensors: list[Tensor] = []
        chunks: list[Chunk] = []
        shards = self.shards
        rows = [(shard.tensors, shard.chunks) for shard in shards] + [known.rows for known in self.referred]
        for own_tensors, own_chunks in rows:
            first = len(tensors)
            chunks += [replace(c, tensor=first + c.tensor) for c in own_chunks] if first else own_chunks
            tensors += own_tensors
        leaves = [leaf for shard in shards for leaf in shard.leaves]
        return index_of(tensors, chunks, leaves=leaves, values=self.values, rank_values=[self.rank_values])


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedState:
    """One save of this rank, for another process on the node. save: without the shards to upload.

    shards: these shards, in order.
    """

    save: StagedState
    shards: tuple[SharedShard, ...]

    def open(self) -> StagedState:
        """Return the save in this process. Raises OSError when this process cannot reach the shards' memory."""
        return replace(self.save, staged=tuple(shard.open() for shard in self.shards))


class Components:
    """The components of a rank: stages them, and remembers which of them are in the bucket.

    buffers: how many saves may be in progress at a time; they take turns. A save that uploads more than `train` must
    have finished before the next one is staged. is_shared: another process on the node may upload from the buffers.
    has_memory: there are two more buffers, for memory checkpoints.

    A component for which the host has no memory is staged in slices: training then waits for its upload.

    digested: the digests that the last save computed for tensors outside `train`, by name.
    """

    def __init__(self, rank: int, buffers: int = 1, *, is_shared: bool = False, has_memory: bool = False) -> None:
        self._rank = rank
        self._is_shared = is_shared
        self._train = [Stager(TRAIN, rank, is_shared=is_shared) for _ in range(buffers)]
        self._memory = [{TRAIN: Stager(TRAIN, rank, is_shared=True)} for _ in range(2 if has_memory else 0)]
        self._frozen: dict[str, Stager] = {}
        self._known: dict[str, ReferredComponent] = {}
        self._restored: RestoredShards | None = None
        self._sliced: set[str] = set()  # the components of which it was said that they are staged in slices
        self._has_staged = False
        self.digested: dict[str, Digest] = {}

    @property
    def buffers(self) -> int:
        """Return how many saves may be in progress at a time, with the memory that the host has."""
        return len(self._train)

    def prepare(self, boxes: Mapping[str, Sequence[LocalBox]], *, world_size: int) -> None:
        """Claim memory, and have it faulted in while training runs. Warn about each part for which the host has too
        little.

        boxes: all that this rank may write, by component.
        """
        memory, self._memory = self._memory, []
        train = boxes.get(TRAIN, ())
        stagers = [(TRAIN, stager, train) for stager in self._train]
        if self._restored is None:  # after a restore a frozen component will hardly be written
            written = boxes.keys() - self._known.keys() - {TRAIN}
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
                    text = "each save waits for the previous one, despite when_busy=copy, rank=%d: %s"
                    logging.getLogger("raycheck").warning(text, self._rank, error)
                elif _fits_in_slices(size_bytes, unclaimed_bytes()):
                    self._warn_of_slices(component, str(error))
        logging.getLogger("raycheck").info("claiming host memory for staging rank=%d bytes=%d", self._rank, claimed)
        if memory:
            self._prepare_memory(memory, train, world_size=world_size, deadline=deadline)

    def _prepare_memory(
        self, memory: list[dict[str, Stager]], boxes: Sequence[LocalBox], *, world_size: int, deadline: float
    ) -> None:
        """Claim the buffers for memory checkpoints, after this rank's buffers for the bucket, which come first.

        deadline: until when to wait for memory that other claims count too, by time.monotonic.
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
        self.digested = {}
        self._train.append(self._train.pop(0))
        staged = [self._stage_shard(self._train[0], *selected[TRAIN], leaves, also)]
        written: dict[str, UploadedShard] = {}
        referred = self._unchanged(selected, forms)
        for component, (boxes, sources) in selected.items():
            if component in referred:
                self._stager(component).release()
            elif component != TRAIN:
                names = [box.box_name for box in boxes]
                found = {name: self.digested[name] for name in names if name in self.digested} or None
                # Without anything to compare with, training does not wait for digests that the upload will compute.
                if found is None and any(source.device.type != "cpu" for source in sources):
                    found = self._digest(boxes, sources)
                staged.append(self._stage_shard(self._stager(component), boxes, sources))
                written[component] = UploadedShard(staged=staged[-1], boxes=boxes, digests=found)
        self._known |= referred
        self._restored, self._has_staged = None, True
        return self._state(staged, referred, written)

    def _state(
        self,
        staged: Sequence[Staged],
        referred: Mapping[str, ReferredComponent],
        written: Mapping[str, UploadedShard] = MappingProxyType({}),
    ) -> StagedState:
        """Assemble the save. Only rank 0's section has the rows of components that were saved in other boxes than the
        ranks'."""
        in_order = [referred[name] for name in sorted(referred)]
        if self._rank:
            in_order = [replace(known, rows=NO_ROWS) for known in in_order]
        return StagedState(staged=staged, written=written, referred=in_order)

    def _stage_shard(
        self,
        stager: Stager,
        boxes: Sequence[LocalBox],
        sources: Sequence[torch.Tensor],
        leaves: Leaves = MappingProxyType({}),
        also: Places = MappingProxyType({}),
    ) -> Staged:
        """Stage a component into its buffer, or in slices.

        If there is no memory for the slices, raises ConfigError at the first save, and SaveFailedError at a later one.
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
        """Warn, once, that training waits for the uploads of a component. why: the error about the missing memory."""
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
        """Stage everything that is not in the bucket into the buffers of memory checkpoint 0 or 1.

        The other arguments: see `stage`. Between a restore and the first save to the bucket, this refers to everything
        that was restored from the bucket, in whatever boxes it was saved. Raises SaveFailedError if the bucket lacks a
        component other than `train`: such a component is usually large and never changes, so a save to the bucket must
        upload it first.
        """
        if not self._memory:
            raise SaveFailedError(f"rank {self._rank}: the host has no room for memory checkpoints")
        self.digested = {}
        referred = self._unchanged(selected, forms, is_for_memory=True)
        stagers = self._memory[slot]
        staged: list[Staged] = []
        for component, (boxes, sources) in selected.items():
            if component == TRAIN:
                staged.append(stagers[TRAIN].stage(boxes, leaves, sources, also))
            elif component not in referred:
                known = self._known.get(component)
                if known is None or known.shard is None:
                    raise SaveFailedError(
                        f"rank {self._rank}: {component}, which gets no gradient, is not in the bucket as it is now; "
                        "the next save to the bucket uploads it, and when that is committed there are memory "
                        "checkpoints again"
                    )
                stager = stagers.setdefault(component, Stager(component, self._rank, is_shared=True))
                staged.append(stager.stage(boxes, {}, sources))
        return self._state(staged, referred)

    def _unchanged(
        self, selected: Mapping[str, BoxesAndSources], forms: Mapping[str, Forms], *, is_for_memory: bool = False
    ) -> dict[str, ReferredComponent]:
        """Return the components of which the bucket has the current contents, by name. Digests every candidate.

        is_for_memory: include components of this run that were restored and were saved in other boxes.
        """
        unchanged: dict[str, ReferredComponent] = {}
        for component, own in forms.items():
            boxes, sources = selected.get(component, ((), ()))
            found: Mapping[str, Digest] | None = None
            for known in self._candidates(component, boxes, sources, own, is_for_memory=is_for_memory):
                found = self._digest(boxes, sources) if found is None else found
                if known.has(boxes, found):
                    unchanged[component] = known
                    break
        return unchanged

    def _candidates(
        self,
        component: str,
        boxes: Sequence[LocalBox],
        sources: Sequence[torch.Tensor],
        forms: Forms,
        *,
        is_for_memory: bool,
    ) -> Iterator[ReferredComponent]:
        """Yield the versions of a component in the bucket whose layout fits this rank, whatever their contents."""
        known = self._known.get(component)
        if known is not None and known.shard is None:
            if known.forms == forms:
                yield known
        elif self._restored is not None:
            whole = self._restored.whole(component, forms, is_for_memory=is_for_memory)
            if whole is not None:
                yield whole
        if boxes:
            known = self._learn(component, boxes, sources)
            if known is not None:
                yield known

    def refer_to(self, whole: ReferredComponent) -> None:
        """From the next save on, refer to a component of a base for as long as it is unchanged."""
        self._known[whole.reference.name] = whole

    def restored(self, manifest: Manifest, index: Index, boxes: Sequence[LocalBox]) -> None:
        """Note that these live tensors hold what was just read, so that the first save can refer to it.

        manifest: lists the components that are in the bucket; after a restore from memory, these do not include
        `train`.
        """
        self.forget(referred=True)
        has_frozen = any(component.name != TRAIN for component in manifest.components)
        self._restored = RestoredShards.of(manifest, index, boxes) if has_frozen else None

    def committed(self, save: StagedState, places: Mapping[str, str]) -> None:
        """Note that a save was committed. Call it in the order of the saves.

        places: the checkpoint that holds each component now. A component that is missing there is written by the next
        save.
        """
        self._known = {
            known.reference.name: known if known.shard is None else known.at(places[known.reference.name])
            for known in save.referred
            if known.shard is None or known.reference.name in places
        } | {name: item.known(places[name]) for name, item in save.written.items() if name in places}
        self._restored = None

    def forget(self, *, referred: bool = False) -> None:
        """Forget which of this rank's shards are in the bucket, so that the next save writes all of them.

        referred: also forget components that were saved in other boxes. A failed save does not cast doubt on these
        unless it failed because of them: the next commit finds out whether they are still held.
        """
        self._known = {} if referred else {name: known for name, known in self._known.items() if known.shard is None}
        self._restored = None

    def _learn(
        self, component: str, boxes: Sequence[LocalBox], sources: Sequence[torch.Tensor]
    ) -> ReferredComponent | None:
        """Find the component in the bucket that was saved in exactly these boxes, whatever their contents, and remember
        it."""
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
    """Return whether there is memory for the slices of a shard of this size. If there is none, the save fails."""
    return available is None or slices_bytes(size_bytes) <= available


def _crcs_of(index: Index, tensor: int, box: LocalBox) -> Digest | None:
    """Return the checksums with which a box of this tensor was saved, which are its digest in host memory.

    None if the tensor is not in host memory, or was not saved as one chunk.
    """
    local = box.local
    if local.device.type != "cpu" or box.cast_from is not None or local.is_conj() or local.is_neg():
        return None
    there = index.chunks_in(tensor, box.offsets, box.sizes)
    return next((c.crcs for c in there if (c.offsets, c.sizes) == (box.offsets, box.sizes)), None)


def _digests(boxes: Sequence[LocalBox], sources: Sequence[torch.Tensor]) -> dict[str, Digest]:
    """Return one digest per tensor name.

    Empty when the accelerator is out of memory: then nothing matches, so that all is uploaded.
    """
    try:
        return dict(zip((box.box_name for box in boxes), digests(sources), strict=True))
    except torch.OutOfMemoryError:
        return {}
