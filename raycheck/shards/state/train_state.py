"""A train state as a whole: gathered for a save, checked and applied at a restore.

The user's entries, plus what raycheck adds by itself: `rng` (per rank) and `progress`. Nothing is changed before the
whole checkpoint was compared with the live state; every difference is listed in one error.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch

from raycheck.bucket.assembly.replica_agreement import Agreement, Holdings
from raycheck.bucket.format.index import Index, places
from raycheck.bucket.format.manifest import Manifest
from raycheck.bucket.format.progress import Progress
from raycheck.bucket.reading import Checkpoint, missing
from raycheck.errors import ConfigError, NotFoundError, StoreError, SupersededError
from raycheck.shards.entries.hf_assets import CONFIG, assets_of
from raycheck.shards.entries.make_entries import Containers, make_entries, objects_by_name
from raycheck.shards.entries.meta_tensors import ADVICE, is_on_meta
from raycheck.shards.entries.module.module_entry import ModuleEntry
from raycheck.shards.entries.per_rank_entries import LoaderEntry, RankZeroEntry
from raycheck.shards.entries.saved_entry import Named, SavedEntry
from raycheck.shards.entries.state_entry import ASSETS, OWN_ENTRIES, GatheredEntry, Leaves, StateEntry
from raycheck.shards.entries.wrappers import check_scalers
from raycheck.shards.state.random_state import rng_values
from raycheck.shards.state.replica_checksums import holdings_of
from raycheck.shards.state.restore_result import Restored, RestoreReport, refuse_differences
from raycheck.shards.state.restore_selection import (
    EVERYTHING,
    Selection,
    corrupt_if_odd,
)
from raycheck.shards.transfer.gather_cache import local_of
from raycheck.shards.transfer.incremental import Components, StagedState, by_component, frozen_component
from raycheck.shards.transfer.local_box import (
    TRAIN,
    LocalBox,
    Place,
    box_of,
    boxes_to_write,
    merge_tied,
    without_memory,
)
from raycheck.shards.transfer.overlapping_tensors import overlapping, read_again, writable
from raycheck.shards.transfer.reader import read_into
from raycheck.shards.transfer.replica_broadcast import errors_on_all_ranks, read_and_broadcast
from raycheck.shards.transfer.restore_proof import WrittenBytes, not_restored


@dataclass(frozen=True, kw_only=True, slots=True)
class _Match:
    """A checkpoint beside the live state: what it holds of each part, the tensors and boxes that this goes into, and
    the names that a restore will have touched."""

    saved: Mapping[StateEntry, SavedEntry]
    wanted: Mapping[StateEntry, Named]
    pieces: Sequence[LocalBox]
    report: RestoreReport
    progress: Progress
    touched: set[str]


class TrainState:
    """The live objects of one rank, with the staging buffer they are saved through."""

    def __init__(self, state: Mapping[str, object], *, rank: int, world_size: int, buffers: int = 1) -> None:
        if not state:
            raise ConfigError("the state is empty; give at least the model and the optimizer")
        self.objects = objects_by_name(state)
        self._containers = Containers(state)
        self._given = state
        self._parts = make_entries(self.objects, rank=rank, world_size=world_size)
        self._assets = assets_of(self.objects)
        self._rank = rank
        self._world_size = world_size
        self._agreement = Agreement(writers={})
        self.components = Components(rank, buffers)
        self._plan: dict[str, tuple[list[LocalBox], list[tuple[int, str]]]] | None = None
        self._is_on_meta = False
        self._restored: set[str] = set()  # entries and tensors that a restore has touched, or may have

    @property
    def models(self) -> list[str]:
        """Entries that can be exported as they are: models with a Hugging Face configuration."""
        return [name for name, files in self._assets.items() if CONFIG in files]

    @property
    def has_loader(self) -> bool:
        """Whether a loader with a position of its own is in it."""
        return any(isinstance(part, LoaderEntry) for part in self._parts)

    def check(self, *, is_before_restore: bool = False) -> None:
        """Raise ConfigError, naming the path, for what could not be saved.

        is_before_restore: what is on the meta device may still get memory.
        """
        check_scalers(self._given, self.objects.values())
        self._gather(may_be_on_meta=is_before_restore)

    def check_memory(self) -> None:
        """After a restore, raise ConfigError, naming the path, for what was on the meta device and still is."""
        if self._is_on_meta:
            self._gather()

    def replica_checksums(self) -> Holdings:
        """What this rank holds that others may hold too, with checksums: for agreement.agree."""
        gathered = self._gather()
        return holdings_of(self._parts, gathered, self._pieces(gathered))

    def use_agreement(self, agreement: Agreement) -> None:
        """Stage by this agreement from now on. Without one this rank writes all it holds."""
        self._agreement = agreement
        self._plan = None

    def prepare(self) -> None:
        """Claim the memory to stage in and have it faulted in behind the training. Best after the first optimizer step,
        when all state exists. What is wrong, too little of it too, the first save says, and tells the other ranks."""
        with suppress(ConfigError, StoreError):
            held = [piece for piece in self._pieces(self._gather()) if piece.is_held]
            self.components.prepare(by_component(held), world_size=self._world_size)

    def stage(self, progress: Progress) -> StagedState:
        """Copy this rank's shard into the buffer. Live state may change again when it returns (on an accelerator:
        by work enqueued from then on). Raises ConfigError, naming the path, for what cannot be saved."""
        gathered = self._gather()
        values: dict[str, Any] = {}
        rank_values: dict[str, Any] = {"rng": rng_values()}
        leaves: Leaves = {}
        also: dict[str, Sequence[Place]] = {}
        if self._rank == 0:
            values |= {"progress": progress.values(), ASSETS: self._assets}
            leaves |= {f"progress.{name}": (("progress", name), count) for name, count in asdict(progress).items()}
        for part, found in zip(self._parts, gathered, strict=True):
            if self._rank == 0 and not part.is_per_rank:
                values[part.name] = found.values
                leaves |= found.leaves
                also |= found.also
            elif part.is_per_rank or part.name in self._agreement.apart:
                rank_values[part.name] = found.values
                leaves |= found.leaves
                also |= found.also
        staged = self.components.stage(self._own(gathered), leaves, also)
        return replace(staged, values=values, rank_values=rank_values)

    def apply(
        self,
        checkpoint: Checkpoint,
        selection: Selection = EVERYTHING,
        *,
        strict: bool = True,
        once: bool = False,
        share: bool = False,
        cast: bool = False,
    ) -> "Restored":
        """Put a checkpoint into the live objects, resharded to this rank. What is on the meta device gets memory.

        cast: floating-point tensors of modules and optimizers may have been saved in another floating-point type.
        once: a checkpoint that descends from this very selection is restored whole. share: all ranks call this
        together, so that what all of them want may be read by one.
        strict: what is only here, or only in the checkpoint, is refused; else left alone and reported. What is on both
        sides but not alike is always refused. Raises StateMismatchError listing every difference before anything was
        changed; DamagedError, CorruptError or NotFoundError while reading, after which the state is a mixture and must
        not be trained on before another checkpoint is applied; SupersededError when that one leaves some of it.
        """
        with errors_on_all_ranks(self._world_size if share else 1):
            manifest = checkpoint.read_manifest()
            index = checkpoint.read_index(manifest)
            if once and str(selection) in manifest.partial:
                selection = EVERYTHING
            match = self._match(checkpoint.entry.key, index, selection, strict=strict, cast=cast)
        self._restored |= match.touched
        read = partial(read_into, checkpoint.store, manifest.prefixes(), index)
        fetched = self._read(checkpoint, read, match.pieces, share)
        self.components.restored(manifest, index, match.pieces)  # before anything else is done to them
        _finish(match.saved, match.wanted)
        return Restored(
            manifest=manifest,
            progress=match.progress,
            lineage=manifest.partial if selection == EVERYTHING else (*manifest.partial, str(selection)),
            rng_values=tuple(values.get("rng") for values in index.rank_values) if selection.takes("rng") else (),
            tensors=len(match.pieces),
            bytes_fetched=fetched,
            report=match.report,
            is_whole=not cast and self._is_whole(manifest, index, selection, strict=strict),
        )

    def _match(self, key: str, index: Index, selection: Selection, *, strict: bool, cast: bool) -> "_Match":
        """Compare the checkpoint with the live state, and give memory to what is on the meta device. Raises
        StateMismatchError before anything was changed."""
        there = {*index.values, *(name for values in index.rank_values for name in values)} - {ASSETS}
        if selection != EVERYTHING:
            self.check_selection(selection, [*there, *(tensor.name for tensor in index.tensors)])
        with corrupt_if_odd(key):
            saved, wanted, pieces = self._prepared(index, selection, cast=cast)
            report = self._report(saved, wanted, selection, there)
            progress = Progress.of(index.values["progress"]) if selection.takes("progress") else Progress()
        mismatched = [line for found in saved.values() for line in found.mismatched]
        mismatched += [line for part in self._parts for line in part.left_on_meta(wanted.get(part, {}))]
        touched = {*report.restored, *(name for piece in pieces for name in (piece.name, *dict(piece.aliases)))}
        self._refuse_leftovers(key, touched)
        refuse_differences(key, report, mismatched, strict=strict, cast=cast)
        if any(is_on_meta(tensor) for tensors in wanted.values() for tensor in tensors.values()):
            _give_memory(wanted)
            with corrupt_if_odd(key):
                saved, wanted, pieces = self._prepared(index, selection, cast=cast)
        return _Match(saved=saved, wanted=wanted, pieces=pieces, report=report, progress=progress, touched=touched)

    def _is_whole(self, manifest: Manifest, index: Index, selection: Selection, *, strict: bool) -> bool:
        """Whether the ranks hold just what was saved. Judged by what all ranks know: they must decide alike."""
        once = [part.name for part in self._parts if isinstance(part, RankZeroEntry)]
        return (
            strict
            and selection == EVERYTHING
            and manifest.world_size == self._world_size
            and all(name in index.values for name in once)
        )

    def _prepared(
        self, index: Index, selection: Selection, *, cast: bool
    ) -> tuple[dict[StateEntry, SavedEntry], dict[StateEntry, Named], list[LocalBox]]:
        """What the checkpoint holds, the live tensors that it goes into, and the boxes of them to read."""
        saved = self._saved(index, selection, cast=cast)
        wanted = {part: part.match(found) for part, found in saved.items()}
        return saved, wanted, self._targets(wanted, saved)

    def _read(
        self,
        checkpoint: Checkpoint,
        read: Callable[..., int],
        pieces: Sequence[LocalBox],
        share: bool,
    ) -> int:
        """Fill the live tensors, and prove that each of them was filled."""
        written = WrittenBytes()
        targets = [writable(piece) for piece in pieces]
        read_own = partial(read, written=written)
        # The copies run on streams of the reader's threads: what the script has enqueued must not come after them.
        _synchronize(pieces)
        try:
            if share:
                fetched = read_and_broadcast(read_own, targets, self._rank, self._world_size, written=written)
            else:
                fetched = read_own(targets)
            written.check(targets)
            _synchronize(pieces)
            return fetched + read_again(overlapping(pieces), read)
        except NotFoundError as error:
            raise missing(checkpoint.store, checkpoint.entry.key, str(error)) from None

    def _refuse_leftovers(self, key: str, touched: set[str]) -> None:
        """What an earlier restore of this process has changed must be restored again, else it would be trained on."""
        left = self._restored - touched
        if left:
            raise SupersededError(
                f"{min(left)} holds what a damaged checkpoint had for it, and {key} has nothing: start the workers "
                "again"
            )

    def _gather(self, *, may_be_on_meta: bool = False) -> list[GatheredEntry]:
        self._containers.check()
        plan, self._plan = self._plan, None  # when a part raises, the others have seen changes that no plan has
        gathered = [part.gather() for part in self._parts]
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

    def _own(self, gathered: Sequence[GatheredEntry]) -> dict[str, tuple[list[LocalBox], list[torch.Tensor]]]:
        """What this rank writes, and its live tensors, by component. Planned once: a plan stands until something
        moves."""
        if self._plan is None:
            own = boxes_to_write(self._pieces(gathered), rank=self._rank, writers=self._agreement.writers)
            part_of = {name: number for number, found in enumerate(gathered) for name in found.tensors}
            grouped: dict[str, list[LocalBox]] = {TRAIN: []} | by_component(own)
            self._plan = {
                component: ([without_memory(piece) for piece in pieces], [(part_of[p.name], p.name) for p in pieces])
                for component, pieces in grouped.items()
            }
        return {
            component: (pieces, [local_of(gathered[number].tensors[name]) for number, name in places])
            for component, (pieces, places) in self._plan.items()
        }

    def _pieces(self, gathered: Sequence[GatheredEntry]) -> list[LocalBox]:
        """Tied ones drawn together. A rank's own value is never tied to what one rank writes for all."""
        shared, own = [], []
        for part, found in zip(self._parts, gathered, strict=True):
            for name, tensor in found.tensors.items():
                path = found.paths.get(name, (name,))
                spread = part.may_spread(name)
                piece = box_of(name, path, tensor, may_spread=spread, world_size=self._world_size)
                if part.is_per_rank:
                    own.append(replace(piece, is_unique=True))
                elif name in found.frozen:
                    shared.append(replace(piece, component=frozen_component(part.name)))
                else:
                    shared.append(piece)
        return [*merge_tied(shared), *merge_tied(own)]

    def _saved(self, index: Index, selection: Selection, *, cast: bool) -> dict[StateEntry, SavedEntry]:
        """What the checkpoint holds of each part that is to be restored."""
        there = places(index)
        dtypes = {tensor.name: tensor.dtype for tensor in index.tensors} if cast else None
        saved = {}
        for part in self._parts:
            if not selection.touches(part.name):
                continue
            if selection.splits(part.name) and not part.can_split:
                raise ConfigError(f"restore: give {part.name!r} whole; only modules can be restored in part")
            ranks = {
                rank: values[part.name]
                for rank, values in enumerate(index.rank_values)
                if part.name in values and isinstance(values[part.name], list) == part.is_per_rank
            }
            if part.is_per_rank:
                values = ranks.get(self._rank)
            else:
                values = index.values.get(part.name, next(iter(ranks.values()), None))
            saved[part] = SavedEntry(
                {tensor.name: tensor for tensor in index.tensors if f"{tensor.name}.".startswith(f"{part.name}.")},
                values,
                rank_values=tuple(ranks.values()),
                place=there.get,
                takes=selection.takes,
                dtypes=dtypes,
            )
            if part.is_per_rank:
                saved[part].unused += [f"{part.name}.rank{rank}" for rank in ranks if rank >= self._world_size]
        return saved

    def check_selection(self, selection: Selection, saved: Iterable[str] = ()) -> None:
        """Raise ConfigError for a name that is nowhere in the live state, nor among the saved names."""
        places_in_it = [name for part in self._parts if part.can_split for name in part.names()]
        selection.check([*(part.name for part in self._parts), *places_in_it, *saved])

    def _report(
        self,
        saved: Mapping[StateEntry, SavedEntry],
        wanted: Mapping[StateEntry, Named],
        selection: Selection,
        there: set[str],
    ) -> RestoreReport:
        restored, skipped = [], []
        for part in self._parts:
            found = saved.get(part)
            if found is None:
                skipped.append(part.name)
            elif found.values is None and not wanted[part]:
                continue  # missing or fresh, which the part has said
            elif selection.splits(part.name):
                names, not_there = part.names(), set(found.missing)
                restored += [name for name in names if selection.takes(name) and name not in not_there]
                skipped += [name for name in names if not selection.takes(name)]
            else:
                restored.append(part.name)
        for name in OWN_ENTRIES:
            (restored if selection.takes(name) else skipped).append(name)
        only_there = sorted(there - {*(part.name for part in self._parts), *OWN_ENTRIES})
        skipped += [name for name in only_there if not selection.touches(name)]
        unexpected = [name for name in only_there if selection.touches(name)]
        return RestoreReport(
            restored=tuple(restored),
            skipped=tuple(skipped),
            missing=tuple(line for found in saved.values() for line in found.missing),
            unexpected=(*(line for found in saved.values() for line in found.unexpected), *unexpected),
            fresh=tuple(line for found in saved.values() for line in found.fresh),
            unused=tuple(line for found in saved.values() for line in found.unused),
            cast=tuple(line for found in saved.values() for line in found.cast),
        )

    def _targets(self, wanted: Mapping[StateEntry, Named], saved: Mapping[StateEntry, SavedEntry]) -> list[LocalBox]:
        """What to read, each memory once; nothing where this rank has no elements. Two tensors that are tied here but
        were not when saved are a mismatch."""
        of = {name: part for part, tensors in wanted.items() for name in tensors}
        pieces = merge_tied(
            box_of(name, (name,), tensor, may_spread=False)
            for tensors in wanted.values()
            for name, tensor in tensors.items()
        )
        for piece in pieces:
            found = saved[of[piece.name]]
            found.mismatched += [
                f"{piece.name} and {name} are tied here, but were not when saved"
                for name, _ in piece.aliases
                if found.place(name) != found.place(piece.name)
            ]
        return [self._cast(piece, saved[of[piece.name]]) for piece in pieces if piece.local.numel()]

    @staticmethod
    def _cast(piece: LocalBox, found: SavedEntry) -> LocalBox:
        dtype: torch.dtype = getattr(torch, found.tensors[piece.name].dtype)
        return piece if dtype == piece.local.dtype else replace(piece, cast_from=dtype)


def _synchronize(pieces: Sequence[LocalBox]) -> None:
    """Wait until the accelerators that hold any of these have done all that was enqueued, on whatever stream."""
    for device in {piece.local.device for piece in pieces if piece.local.device.type != "cpu"}:
        torch.accelerator.synchronize(device)


def _give_memory(wanted: Mapping[StateEntry, Named]) -> None:
    for part in wanted:
        if isinstance(part, ModuleEntry):
            part.give_memory()


def _finish(saved: Mapping[StateEntry, SavedEntry], wanted: Mapping[StateEntry, Named]) -> None:
    """Hand over what was not read in place, and prove that the live objects hold it all."""
    for part, tensors in wanted.items():
        part.load(saved[part], tensors)
    for part, tensors in wanted.items():
        for name in part.not_held(tensors):
            raise not_restored(name, "it was read, and the live object holds something else")
