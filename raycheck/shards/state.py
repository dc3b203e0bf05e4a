"""A train state as a whole: gathered for a save, checked and applied at a restore.

The user's entries, plus what raycheck adds by itself: `rng` (per rank) and `progress`. Nothing is changed before the
whole checkpoint was compared with the live state; every difference is listed in one error.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from raycheck.bucket.catalog import Checkpoint, missing
from raycheck.bucket.checksum import crc32
from raycheck.bucket.lossless import encode
from raycheck.bucket.manifest import Manifest
from raycheck.errors import ConfigError, NotFoundError, StateMismatchError
from raycheck.shards.assets import FilesPart, assets_of, has_files
from raycheck.shards.optimizer import OptimizerPart
from raycheck.shards.parts import ModulePart, ObjectPart, Part, SavedPart
from raycheck.shards.pieces import Piece, mine, piece_of
from raycheck.shards.reader import read_into
from raycheck.shards.rng import apply_rng, rng_values
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
        self._parts = _parts_of(state)
        self._assets = assets_of(state)
        self._rank = rank
        self._world_size = world_size
        self._stager = Stager(COMPONENT, rank)

    def stage(self, progress: Progress) -> Staged:
        """Copy this rank's shard into the buffer. Live state may change again when it returns (on an accelerator:
        by work enqueued from then on). Raises ConfigError, naming the path, for what cannot be saved."""
        pieces: list[Piece] = []
        values: dict[str, Any] = {"progress": _progress_values(progress), "assets": self._assets}
        leaves: dict[str, tuple[tuple[str | int, ...], object]] = {}
        for part in self._parts:
            own_pieces, values[part.name], own_leaves = part.gather()
            pieces += own_pieces
            leaves |= own_leaves
        if self._rank == 0:
            for name in ("step", "epoch", "samples"):
                leaves[f"progress.{name}"] = (("progress", name), getattr(progress, name))
        rank_values = {"rng": rng_values()}
        own = mine(pieces, rank=self._rank, world_size=self._world_size)
        staged = self._stager.stage(own, leaves if self._rank == 0 else {})
        common = sorted((p.name, p.dtype, p.shape) for p in pieces if not p.is_sharded)
        digest = f"{len(common)} tensors, {crc32(repr(common).encode()):08x}"
        staged.add(values if self._rank == 0 else {}, rank_values, common=digest)
        return staged

    def apply(self, checkpoint: Checkpoint, *, only_mine: bool = False) -> "Restored":
        """Put a checkpoint into the live objects, resharded to this rank.

        only_mine: entries of the checkpoint that this state does not have are left alone instead of refused.
        Raises StateMismatchError listing every difference before anything was changed; CorruptError or NotFoundError
        while reading, after which the state is a mixture and the process must not train on.
        """
        manifest = checkpoint.manifest()
        index = checkpoint.index(manifest)
        saved = [SavedPart(part.name, index) for part in self._parts]
        wanted = [part.prepare(found) for part, found in zip(self._parts, saved, strict=True)]
        extra = sorted(set(index.values) - {part.name for part in self._parts} - {"progress", "assets"})
        _refuse_differences(checkpoint, saved, [] if only_mine else extra)
        pieces = [
            piece_of(name, (name,), tensor, may_spread=False) for tensors in wanted for name, tensor in tensors.items()
        ]
        try:
            fetched = read_into(checkpoint.store, manifest.prefixes(), index, pieces)
        except NotFoundError as error:
            raise missing(checkpoint.store, checkpoint.entry.key, str(error)) from None
        for part, found, tensors in zip(self._parts, saved, wanted, strict=True):
            part.finish(found, tensors)
        return Restored(
            manifest=manifest,
            progress=Progress(**index.values["progress"]),
            rng_values=tuple(values.get("rng") for values in index.rank_values),
            tensors=len(pieces),
            bytes_fetched=fetched,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Restored:
    """What a restore did on this rank. Random state is applied apart, as late as possible."""

    manifest: Manifest
    progress: Progress
    rng_values: Sequence[Any]
    tensors: int
    bytes_fetched: int

    def apply_rng(self, rank: int) -> str:
        return apply_rng(self.rng_values, rank)


def _progress_values(progress: Progress) -> Any:
    return encode({"step": progress.step, "epoch": progress.epoch, "samples": progress.samples}, "progress")


def _refuse_differences(checkpoint: Checkpoint, saved: Sequence[SavedPart], extra: Sequence[str]) -> None:
    missing = [line for part in saved for line in part.missing]
    unexpected = [line for part in saved for line in part.unexpected] + [f"{name} (a whole entry)" for name in extra]
    if not missing and not unexpected:
        return
    lines = [
        f"checkpoint {checkpoint.entry.key} and the live state do not hold the same things; nothing was changed.",
        *(f"  missing in the checkpoint: {line}" for line in missing),
        *(f"  only in the checkpoint: {line}" for line in unexpected),
    ]
    raise StateMismatchError("\n".join(lines))


def _parts_of(state: Mapping[str, object]) -> list[Part]:
    """One part per entry. Raises ConfigError, naming the entry, for what cannot be saved; before any step runs."""
    modules = {name: value for name, value in state.items() if isinstance(value, torch.nn.Module)}
    return [_part(name, value, modules) for name, value in state.items()]


def _part(name: str, value: object, modules: Mapping[str, torch.nn.Module]) -> Part:
    if not name.isidentifier() or name in ("rng", "progress", "assets"):
        raise ConfigError(f"state[{name!r}]: use a plain name; 'rng', 'progress' and 'assets' are raycheck's own")
    if isinstance(value, torch.nn.Module):
        return ModulePart(name, value)
    if isinstance(value, Optimizer):
        return OptimizerPart(name, value, modules)
    if isinstance(value, torch.utils.data.DataLoader):
        raise ConfigError(
            f"state[{name!r}] is a torch DataLoader, which cannot say where it stands. Use "
            "raycheck.Batches(dataset, global_batch=..., seed=...) and iterate over its loader(epoch)"
        )
    if callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None)):
        return ObjectPart(name, value)
    if has_files(value):
        return FilesPart(name, value)
    raise ConfigError(f"state[{name!r}] is a {type(value).__qualname__} without state_dict and load_state_dict")
