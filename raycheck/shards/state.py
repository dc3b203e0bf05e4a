"""A train state as a whole: gathered for a save, checked and applied at a restore.

The user's entries, plus what raycheck adds by itself: `rng` (per rank) and `progress`. Nothing is changed before the
whole checkpoint was compared with the live state; every difference is listed in one error.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch

from raycheck.bucket.catalog import Checkpoint, missing
from raycheck.bucket.checksum import crc32
from raycheck.bucket.index import Index, places
from raycheck.bucket.lossless import encode
from raycheck.bucket.manifest import Manifest
from raycheck.errors import ConfigError, NotFoundError, StateMismatchError
from raycheck.shards.agreement import Agreement, Held, Holdings, Values
from raycheck.shards.assets import CONFIG, assets_of
from raycheck.shards.entries import parts_of
from raycheck.shards.parts import Gathered, Leaves, Named, Part, SavedPart
from raycheck.shards.pieces import Piece, mine, piece_of, tied
from raycheck.shards.reader import read_into
from raycheck.shards.rng import apply_rng, rng_values
from raycheck.shards.selection import ASSETS, EVERYTHING, OWN_ENTRIES, RestoreReport, Selection
from raycheck.shards.stager import Staged, Stager

COMPONENT = "train"


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """step: completed optimizer steps, and index of the next. epoch, samples: consumed position of the data."""

    step: int = 0
    epoch: int = 0
    samples: int = 0


class TrainState:
    """The live objects of one rank, with the staging buffer they are saved through."""

    def __init__(self, state: Mapping[str, object], *, rank: int, world_size: int) -> None:
        if not state:
            raise ConfigError("the state is empty; give at least the model and the optimizer")
        self._parts = parts_of(state, rank=rank)
        self._assets = assets_of(state)
        self._rank = rank
        self._world_size = world_size
        self._agreement = Agreement(writers={})
        self._stager = Stager(COMPONENT, rank)

    @property
    def models(self) -> list[str]:
        """Entries that can be exported as they are: models with a Hugging Face configuration."""
        return [name for name, files in self._assets.items() if CONFIG in files]

    def check(self) -> None:
        """Raise ConfigError, naming the path, for what could not be saved."""
        self._gather()

    def holdings(self) -> Holdings:
        """What this rank holds that others may hold too, with checksums: for agreement.agree."""
        gathered = self._gather()
        of = {name: part for part, found in zip(self._parts, gathered, strict=True) for name in found.tensors}
        return Holdings(
            held=tuple(
                Held(
                    box=piece.box,
                    name=piece.name,
                    dtype=piece.dtype,
                    shape=piece.shape,
                    sizes=piece.sizes,
                    size_bytes=piece.size_bytes,
                    may_spread=piece.may_spread,
                    crc32=_crc32(piece.local) if of[piece.name].is_compared(piece.name) else None,
                )
                for piece in self._pieces(gathered)
                if piece.is_held and not piece.is_unique
            ),
            values={
                part.name: Values(
                    names_crc32=_crc32_of(sorted(part.names())),
                    may_differ=part.may_differ,
                    crc32=_crc32_of(found.values) if part.compares_values else None,
                )
                for part, found in zip(self._parts, gathered, strict=True)
                if not part.is_per_rank
            },
        )

    def settle(self, agreement: Agreement) -> None:
        """Stage by this agreement from now on. Without one this rank writes all it holds."""
        self._agreement = agreement

    def stage(self, progress: Progress) -> Staged:
        """Copy this rank's shard into the buffer. Live state may change again when it returns (on an accelerator:
        by work enqueued from then on). Raises ConfigError, naming the path, for what cannot be saved."""
        gathered = self._gather()
        values: dict[str, Any] = {}
        rank_values: dict[str, Any] = {"rng": rng_values()}
        leaves: Leaves = {}
        if self._rank == 0:
            values |= {"progress": _progress_values(progress), ASSETS: self._assets}
            for name in ("step", "epoch", "samples"):
                leaves[f"progress.{name}"] = (("progress", name), getattr(progress, name))
        for part, found in zip(self._parts, gathered, strict=True):
            if self._rank == 0 and not part.is_per_rank:
                values[part.name] = found.values
                leaves |= found.leaves
            elif part.is_per_rank or part.name in self._agreement.apart:
                rank_values[part.name] = found.values
                leaves |= found.leaves
        own = mine(self._pieces(gathered), rank=self._rank, writers=self._agreement.writers)
        staged = self._stager.stage(own, leaves)
        staged.add(values, rank_values)
        return staged

    def apply(self, checkpoint: Checkpoint, selection: Selection = EVERYTHING, *, strict: bool = True) -> "Restored":
        """Put a checkpoint into the live objects, resharded to this rank.

        strict: what is only here, or only in the checkpoint, is refused; else left alone and reported. What is on both
        sides but not alike is always refused. Raises StateMismatchError listing every difference before anything was
        changed; CorruptError or NotFoundError while reading, after which the state is a mixture and the process must
        not train on.
        """
        manifest = checkpoint.manifest()
        index = checkpoint.index(manifest)
        places_in_it = [name for part in self._parts if part.can_split for name in part.names()]
        there = {*index.values, *(name for values in index.rank_values for name in values)} - {ASSETS}
        saved_tensors = (tensor.name for tensor in index.tensors)
        selection.check([*(part.name for part in self._parts), *places_in_it, *there, *saved_tensors])
        saved = self._saved(index, selection)
        wanted = {part: part.prepare(found) for part, found in saved.items()}
        pieces = self._targets(wanted, saved)
        report = self._report(saved, selection, there)
        mismatched = [line for found in saved.values() for line in found.mismatched]
        _refuse_differences(checkpoint, report, mismatched, strict=strict)
        try:
            fetched = read_into(checkpoint.store, manifest.prefixes(), index, pieces)
        except NotFoundError as error:
            raise missing(checkpoint.store, checkpoint.entry.key, str(error)) from None
        for part, tensors in wanted.items():
            part.finish(saved[part], tensors)
        return Restored(
            manifest=manifest,
            progress=Progress(**index.values["progress"]) if selection.takes("progress") else Progress(),
            rng_values=tuple(values.get("rng") for values in index.rank_values) if selection.takes("rng") else (),
            tensors=len(pieces),
            bytes_fetched=fetched,
            report=report,
        )

    def _gather(self) -> list[Gathered]:
        return [part.gather() for part in self._parts]

    def _pieces(self, gathered: Sequence[Gathered]) -> list[Piece]:
        """Tied ones drawn together. A rank's own value is never tied to what one rank writes for all."""
        shared, own = [], []
        for part, found in zip(self._parts, gathered, strict=True):
            for name, tensor in found.tensors.items():
                path = found.paths.get(name, (name,))
                spread = part.may_spread(name)
                piece = piece_of(name, path, tensor, may_spread=spread, world_size=self._world_size)
                if part.is_per_rank:
                    own.append(replace(piece, is_unique=True))
                else:
                    shared.append(piece)
        return [*tied(shared), *tied(own)]

    def _saved(self, index: Index, selection: Selection) -> dict[Part, SavedPart]:
        """What the checkpoint holds of each part that is to be restored."""
        there = places(index)
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
            saved[part] = SavedPart(
                {tensor.name: tensor for tensor in index.tensors if tensor.name.startswith(f"{part.name}.")},
                values,
                apart=tuple(ranks.values()),
                place=there.get,
                takes=selection.takes,
            )
            if part.is_per_rank:
                saved[part].unused += [f"{part.name}.rank{rank}" for rank in ranks if rank >= self._world_size]
        return saved

    def _report(self, saved: Mapping[Part, SavedPart], selection: Selection, there: set[str]) -> RestoreReport:
        restored, skipped = [], []
        for part in self._parts:
            found = saved.get(part)
            if found is None:
                skipped.append(part.name)
            elif found.values is None:
                continue  # missing or fresh, which the part has said
            elif selection.splits(part.name):
                taken = {name for name in part.names() if selection.takes(name)}
                restored += [name for name in part.names() if name in taken - set(found.missing)]
                skipped += [name for name in part.names() if name not in taken]
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
        )

    def _targets(self, wanted: Mapping[Part, Named], saved: Mapping[Part, SavedPart]) -> list[Piece]:
        """What to read, each memory once; nothing where this rank has no elements. Two tensors that are tied here but
        were not when saved are a mismatch."""
        of = {name: part for part, tensors in wanted.items() for name in tensors}
        pieces = tied(
            piece_of(name, (name,), tensor, may_spread=False)
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
        return [piece for piece in pieces if piece.local.numel()]


@dataclass(frozen=True, kw_only=True, slots=True)
class Restored:
    """What a restore did on this rank. Random state is applied apart, as late as possible."""

    manifest: Manifest
    progress: Progress
    rng_values: Sequence[Any]
    tensors: int
    bytes_fetched: int
    report: RestoreReport

    def apply_rng(self, rank: int) -> str:
        return apply_rng(self.rng_values, rank) if self.rng_values else "untouched"


def _progress_values(progress: Progress) -> Any:
    return encode({"step": progress.step, "epoch": progress.epoch, "samples": progress.samples}, "progress")


def _crc32(tensor: torch.Tensor) -> int:
    """Of the tensor's bytes, row by row."""
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().view(-1)
    return crc32(memoryview(cast("Any", flat.view(torch.uint8).numpy()))) if flat.numel() else 0


def _crc32_of(values: Any) -> int:
    return crc32(json.dumps(values, sort_keys=True).encode())


def _refuse_differences(
    checkpoint: Checkpoint, report: RestoreReport, mismatched: Sequence[str], *, strict: bool
) -> None:
    if not mismatched and not (strict and (report.missing or report.unexpected)):
        return
    lines = [
        f"checkpoint {checkpoint.entry.key} and the live state do not hold the same things; nothing was changed.",
        *(f"  not alike: {line}" for line in mismatched),
        *(f"  missing in the checkpoint: {line}" for line in report.missing),
        *(f"  only in the checkpoint: {line}" for line in report.unexpected),
    ]
    if not mismatched:
        lines.append(
            "  restore(skip=[...]) leaves entries out by name; restore(strict=False) takes what both sides hold"
        )
    raise StateMismatchError("\n".join(lines))
