"""Saves and restores the state of one rank: the user's entries, and the entries that raycheck adds.

raycheck adds `rng`, which each rank has, and `progress`. A save gathers the entries, finds which boxes this rank
writes, and stages them (transfer/). A restore first compares the whole checkpoint with the live state without changing
anything (restore_matching.py); then it reads, and proves what it read (restore_reading.py).
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch

from raycheck.bucket.assembly.replica_agreement import Agreement, Holdings
from raycheck.bucket.assembly.role import RankPlace, Role, is_under
from raycheck.bucket.format.index import Index
from raycheck.bucket.format.manifest import Manifest
from raycheck.bucket.format.progress import Progress
from raycheck.bucket.reading import Checkpoint
from raycheck.errors import ConfigError, StoreError
from raycheck.state.changed_attributes import ChangedAttributes
from raycheck.state.deferred_tensors import DeferredTensors, give_up_abandoned
from raycheck.state.entries.hf_assets import CONFIG, assets_of
from raycheck.state.entries.make_entries import Containers, make_entries, objects_by_name
from raycheck.state.entries.meta_tensors import ADVICE, is_on_meta
from raycheck.state.entries.optimizer.optimizer_entry import OptimizerEntry
from raycheck.state.entries.per_rank_entries import LoaderEntry, RankZeroEntry
from raycheck.state.entries.state_entry import ASSETS, GatheredEntry, Leaves
from raycheck.state.entries.wrappers import check_scalers
from raycheck.state.left_out import left_out
from raycheck.state.random_state import rng_values
from raycheck.state.rank_buffers import PerRankBuffers, buffer_checksums
from raycheck.state.replica_checksums import checksums_of, entry_of, shared_boxes, shared_values
from raycheck.state.restore_matching import CheckpointMatcher
from raycheck.state.restore_reading import load_objects, read_tensors
from raycheck.state.restore_result import Restored
from raycheck.state.restore_selection import EVERYTHING, Selection
from raycheck.transfer.collector_pause import collector_paused
from raycheck.transfer.incremental_upload import (
    BoxesAndSources,
    Components,
    StagedState,
    by_component,
    frozen_component,
)
from raycheck.transfer.read.replica_broadcast import errors_on_all_ranks
from raycheck.transfer.referred_component import Forms, forms_of
from raycheck.transfer.replica_digests import EncodedNames, ReplicaDigests, SharedBox
from raycheck.transfer.stage.gather_cache import local_of
from raycheck.transfer.stage.local_box import (
    TRAIN,
    LocalBox,
    Place,
    boxes_of,
    boxes_to_write,
    merge_tied,
    without_memory,
)
from raycheck.transfer.stage.stock_torch_names import Places
from raycheck.transfer.stage.tensor_parts import parts_of

logger = logging.getLogger("raycheck")


class TrainState:
    """The live objects of one rank, and the memory that they are staged in.

    objects: the user's objects by dotted name. role: see Role; None if all ranks have the same entries.
    """

    def __init__(
        self,
        state: Mapping[str, object],
        *,
        rank: int,
        world_size: int,
        role: Role | None = None,
        buffers: int = 1,
        is_shared: bool = False,
        has_memory: bool = False,
    ) -> None:
        if not state:
            raise ConfigError("the state is empty; it needs at least the model and the optimizer")
        self.objects = objects_by_name(state)
        self._containers = Containers(state)
        self._per_rank_buffers = PerRankBuffers(self.objects)
        self._given = state
        self._role = role or Role(in_group=RankPlace(rank, world_size))
        self._entries = make_entries(self.objects, self._role)
        self._matcher = CheckpointMatcher(self._entries, self._role)
        self._give_up_abandoned()
        self._assets = assets_of(self.objects)
        self._rank = rank
        self._world_size = world_size
        self._agreement = Agreement(writers={})
        self.components = Components(rank, buffers, is_shared=is_shared, has_memory=has_memory)
        # By component: the boxes that this rank writes.
        self._plan: dict[str, list[LocalBox]] | None = None
        # Made with the plan: the boxes that other ranks may hold too, and the number of each tensor's entry.
        self._shared: list[SharedBox] = []
        self._number_of: dict[str, int] = {}
        self._replica_names = EncodedNames()
        self._forms: dict[
            str, Forms
        ] = {}  # of all frozen components, including what other ranks write; made with the plan
        self._is_on_meta = False
        self._has_staged = False
        self._attributes = ChangedAttributes(self.objects)
        self._warnings: set[str] = set()  # already logged
        self.deferred: DeferredTensors | None = None  # of the last restore
        self._touched: set[str] = set()  # entries and tensors that a restore has changed, or may have

    @property
    def models(self) -> list[str]:
        """Return the names of the entries that can be exported: models with a Hugging Face configuration."""
        return [name for name, files in self._assets.items() if CONFIG in files]

    @property
    def has_loader(self) -> bool:
        """Return whether the state contains a loader with its own position."""
        return any(isinstance(entry, LoaderEntry) for entry in self._entries)

    @collector_paused()
    def check(self, *, is_before_restore: bool = False) -> None:
        """Raise ConfigError, naming the path, for anything that could not be saved.

        is_before_restore: tensors on the meta device may still get memory.
        """
        check_scalers(self._given, self.objects.values())
        gathered = self._gather(may_be_on_meta=is_before_restore)
        for found in gathered:
            for name, tensor in found.tensors.items():
                parts_of(name, tensor)
        self._warn_of_left_out(gathered)

    def _warn_of_left_out(self, gathered: Sequence[GatheredEntry]) -> None:
        for text in left_out(self.objects, self._entries, gathered):
            if text not in self._warnings and self._rank == 0:
                logger.warning(text)
            self._warnings.add(text)

    def check_memory(self) -> None:
        """Raise ConfigError, naming the path, for anything that is still on the meta device after a restore."""
        if self._is_on_meta:
            with self._not_awaited():
                self._gather()

    def check_selection(self, selection: Selection) -> None:
        """Raise ConfigError for a name that is not in the live state."""
        self._matcher.check_selection(selection)

    def frozen_components(self) -> dict[str, list[LocalBox]]:
        """Return this rank's boxes of tensors without gradients, by component, including shared ones."""
        with self._not_awaited():
            boxes = by_component(self._boxes(self._gather()))
        return {name: own for name, own in boxes.items() if name != TRAIN}

    def _not_awaited(self) -> AbstractContextManager[None]:
        """Return the context in which to look at where tensors are, whether or not they have been read."""
        return nullcontext() if self.deferred is None else self.deferred.not_awaited()

    def wait(self) -> None:
        """Wait for the tensors that a restore has left for later. Raises, each time, why they cannot be there."""
        if self.deferred is not None:
            self.deferred.wait()
            self.deferred = None

    def _give_up_abandoned(self) -> None:
        """Free the optimizers of an earlier restore that is over."""
        for entry in self._entries:
            if isinstance(entry, OptimizerEntry):
                give_up_abandoned(entry.optimizer)

    def abandon_deferred(self) -> None:
        """Stop reading what a restore has left for later."""
        if self.deferred is not None:
            self.deferred.abandon()

    @property
    def alone_bytes(self) -> int | None:
        """Return how much only one rank can write; see Agreement."""
        return self._agreement.alone_bytes

    @collector_paused()
    def replica_checksums(
        self, *, is_compared: bool = True, may_spread: bool = True, with_spares: bool = False
    ) -> Holdings:
        """Return everything on this rank that others may have too, for replica_agreement.agree.

        is_compared: include checksums, so that differences are refused. may_spread: a large box may be written by a
        rank other than its first holder. with_spares: include what a mesh places on some of its ranks, since a rank
        that writes it may be about to be taken away.
        """
        gathered = self._gather()
        boxes = self._boxes(gathered)
        holdings = checksums_of(
            self._entries, gathered, boxes, is_compared=is_compared, may_spread=may_spread, with_spares=with_spares
        )
        buffers = buffer_checksums(self.objects, self._entries, gathered)
        return replace(holdings, buffers=buffers, other_roles=self._role.others)

    def use_agreement(self, agreement: Agreement) -> None:
        """Stage by this agreement from now on. Without one this rank writes everything it has."""
        self._agreement = agreement
        self._plan = None

    def prepare(self) -> None:
        """Claim the memory to stage in, and have it faulted in while training runs.

        This is best done after the first optimizer step, when all state exists. It reports no error: the first save
        will, also when memory is short, and it notifies the other ranks.
        """
        with suppress(ConfigError, StoreError):
            held = [box for box in self._boxes(self._gather()) if box.is_held]
            self.components.prepare(by_component(held), world_size=self._world_size)

    def stage(self, progress: Progress) -> StagedState:
        """Copy this rank's shards into host memory.

        The live state may change again when this returns (on an accelerator: by work enqueued from then on). Raises
        ConfigError, naming the path, for anything that cannot be saved.
        """
        return self._stage(progress, self.components.stage)

    def stage_for_memory(self, progress: Progress, slot: int) -> StagedState:
        """Copy this rank's shards into one of the two buffers, 0 or 1, for memory checkpoints.

        Raises SaveFailedError when the bucket lacks the current version of a frozen component, and otherwise as `stage`
        does.
        """
        return self._stage(progress, partial(self.components.stage_for_memory, slot))

    @collector_paused()
    def _stage(
        self,
        progress: Progress,
        stage: Callable[[Mapping[str, BoxesAndSources], Leaves, Places, Mapping[str, Forms]], StagedState],
    ) -> StagedState:
        """Gather what this rank saves, and have `stage` copy its tensors."""
        gathered = self._gather()
        if not self._has_staged:  # tensors may have been registered after the check
            self._warn_of_left_out(gathered)
            self._has_staged = True
        changed = self._attributes.look(progress.step)
        if changed is not None and (self._rank == 0 or self._agreement.apart):
            logger.warning(changed)
        values: dict[str, Any] = {}
        rank_values: dict[str, Any] = {"rng": rng_values()}
        leaves: Leaves = {}
        also: dict[str, Sequence[Place]] = {}
        if self._rank == 0:
            values |= {"progress": progress.values(), ASSETS: self._assets}
            leaves |= {f"progress.{name}": (("progress", name), count) for name, count in asdict(progress).items()}
        elif self._role.place.rank == 0:
            rank_values[ASSETS] = self._assets
        for entry, found in zip(self._entries, gathered, strict=True):
            is_of_role = is_under(entry.name, self._role.entries)
            if self._rank == 0 and not entry.is_per_rank and not is_of_role:
                values[entry.name] = found.values
            elif entry.is_per_rank or is_of_role or entry.name in self._agreement.apart:
                rank_values[entry.name] = found.values
            else:
                continue  # rank 0 writes the values for all
            leaves |= found.leaves
            also |= found.also
        own = self._boxes_and_sources(gathered)
        replicas = self._begin_to_digest(gathered)
        try:
            staged = stage(own, leaves, also, self._forms)
        finally:
            replicas.release(self.components.digested)
        return replace(staged, values=values, rank_values=rank_values, replicas=replicas)

    def _begin_to_digest(self, gathered: Sequence[GatheredEntry]) -> ReplicaDigests:
        """Start digesting what other ranks may have too, for the coordinator's comparison."""
        if self._world_size == 1:
            return ReplicaDigests()
        sources = self._sources(gathered, [shared.box for shared in self._shared])
        return ReplicaDigests(self._shared, sources, shared_values(self._entries, gathered), self._replica_names)

    def apply(
        self,
        checkpoint: Checkpoint,
        selection: Selection = EVERYTHING,
        *,
        strict: bool = True,
        once: bool = False,
        share: bool = False,
        cast: bool = False,
        defer_optimizer: bool = False,
    ) -> Restored:
        """Restore a checkpoint into the live objects, resharded to this rank. Tensors on the meta device get memory.

        cast: accept floating-point tensors of modules and optimizers that were saved in another floating-point type.
        defer_optimizer: leave tensors of optimizers for later; `deferred` must then read them.
        once: restore a checkpoint completely if it was saved after the same selection was applied. share: all ranks
        call this together, so that one rank can read what all of them need. strict: refuse what is only here or only in
        the checkpoint; otherwise leave it unchanged and report it. What both sides have but with differences is always
        refused.

        Raises StateMismatchError, which lists every difference, before anything was changed. Raises DamagedError,
        CorruptError or NotFoundError while reading; the state is then partly restored and must not be trained on before
        another checkpoint is applied. Raises SupersededError if that checkpoint does not cover everything that was
        changed.
        """
        place = self._role.place
        self.abandon_deferred()
        self.deferred = None
        self._give_up_abandoned()
        with errors_on_all_ranks(place.world_size if share else 1), collector_paused():
            manifest = checkpoint.read_manifest()
            index = checkpoint.read_index(manifest)
            if once and str(selection) in manifest.partial:
                selection = EVERYTHING
            match = self._matcher.match(
                checkpoint.entry.key, index, selection, strict=strict, cast=cast, touched_before=self._touched
            )
            random_source = self._matcher.random_source(checkpoint.entry.key, index)
        self._touched |= match.touched
        read = partial(read_tensors, checkpoint, manifest, index)
        if defer_optimizer:
            self.deferred = DeferredTensors(match, read, place=place)
        at_once = match.boxes if self.deferred is None else self.deferred.at_once
        fetched = read(at_once, shared_by=place if share else None)
        there = [part for part in manifest.components if checkpoint.shards is None or part.checkpoint != manifest.key]
        in_bucket = replace(manifest, components=tuple(there))
        self.components.restored(in_bucket, index, match.boxes)  # before the objects can change the tensors
        with collector_paused():
            load_objects(match, self.deferred)
        return Restored(
            manifest=manifest,
            progress=match.progress,
            lineage=manifest.partial if selection == EVERYTHING else (*manifest.partial, str(selection)),
            random_source=random_source if selection.takes("rng") and random_source.states else None,
            tensors=len(at_once),
            bytes_fetched=fetched,
            report=replace(match.report, drifted=manifest.drifted),
            is_whole=not cast and self._is_whole(manifest, index, selection, strict=strict),
        )

    def _is_whole(self, manifest: Manifest, index: Index, selection: Selection, *, strict: bool) -> bool:
        """Return whether the ranks have exactly what was saved.

        All ranks must come to the same answer, so it depends only on what all of them know.
        """
        rank_zeros = [entry.name for entry in self._entries if isinstance(entry, RankZeroEntry)]
        once = [name for name in rank_zeros if not is_under(name, self._role.entries)]
        return (
            strict
            and selection == EVERYTHING
            and manifest.world_size == self._world_size
            and all(name in index.values for name in once)
        )

    def _gather(self, *, may_be_on_meta: bool = False) -> list[GatheredEntry]:
        self._containers.check()
        self._per_rank_buffers.check()
        plan, self._plan = self._plan, None  # if one entry raises, the others have recorded changes that are in no plan
        gathered = [entry.gather() for entry in self._entries]
        is_as_before = all(found.is_as_before for found in gathered)
        if is_as_before:
            self._plan = plan
        if not is_as_before or self._is_on_meta:
            on_meta = [name for found in gathered for name, tensor in found.tensors.items() if is_on_meta(tensor)]
            self._is_on_meta = bool(on_meta)
            if on_meta and not may_be_on_meta:
                raise ConfigError(
                    f"state at {on_meta[0]} is on the meta device and has no memory to save; {ADVICE}, or restore it"
                )
        return gathered

    def _boxes_and_sources(
        self, gathered: Sequence[GatheredEntry]
    ) -> dict[str, tuple[list[LocalBox], list[torch.Tensor]]]:
        """Return, by component, the boxes that this rank writes and their live tensors.

        The boxes are planned again only when a tensor has moved.
        """
        if self._plan is None:
            boxes = self._boxes(gathered)
            self._forms = {name: forms_of(frozen) for name, frozen in by_component(boxes).items() if name != TRAIN}
            own = boxes_to_write(boxes, rank=self._rank, writers=self._agreement.writers)
            self._number_of = {name: number for number, found in enumerate(gathered) for name in found.tensors}
            owners = entry_of(self._entries, gathered)
            self._shared = shared_boxes(owners, boxes, {box.box_name for box in own}, self._agreement)
            grouped: dict[str, list[LocalBox]] = {TRAIN: []} | by_component(own)
            self._plan = {name: [without_memory(box) for box in boxes] for name, boxes in grouped.items()}
        return {component: (boxes, self._sources(gathered, boxes)) for component, boxes in self._plan.items()}

    def _sources(self, gathered: Sequence[GatheredEntry], boxes: Sequence[LocalBox]) -> list[torch.Tensor]:
        """Return the live memory of each box."""
        number_of = self._number_of
        return [box.within(local_of(gathered[number_of[box.name]].tensors[box.name])) for box in boxes]

    def _boxes(self, gathered: Sequence[GatheredEntry]) -> list[LocalBox]:
        """Return this rank's boxes, with tied ones merged.

        A PerRank value is never tied to what one rank writes for all.
        """
        shared, own = [], []
        for entry, found in zip(self._entries, gathered, strict=True):
            _, world_size = self._role.place_for(entry.name)
            for name, tensor in found.tensors.items():
                path = found.paths.get(name, (name,))
                spread = entry.may_spread(name)
                boxes = boxes_of(name, path, tensor, may_spread=spread, world_size=world_size)
                if entry.is_per_rank:
                    own += [replace(box, is_unique=True, has_replicas=False) for box in boxes]
                elif name in found.frozen:
                    shared += [replace(box, component=frozen_component(entry.name)) for box in boxes]
                else:
                    shared += boxes
        return [*merge_tied(shared), *merge_tied(own)]
