"""Describes what a restore did: which entries it restored, and what only the checkpoint or only the live state had."""

from dataclasses import dataclass, fields

from raycheck.bucket.assembly.role import RandomSource
from raycheck.bucket.format.manifest import Manifest
from raycheck.bucket.format.progress import Progress
from raycheck.state.random_state import apply_rng
from raycheck.terminal import first_few


@dataclass(frozen=True, kw_only=True, slots=True)
class RestoreReport:
    """The outcome of a restore, by the names of entries, or of places in a module that was restored in part.

    missing: names here that the checkpoint does not have; they were left unchanged. unexpected: names in the checkpoint
    that are not here. skipped: names left unchanged because the caller said so. fresh: names left unchanged by a stated
    rule. unused: names in the checkpoint that, by a stated rule, are not for this rank (another pipeline stage's,
    PerRank values of ranks that no longer exist). cast: tensors restored into another floating-point type, because the
    caller said so. registered: buffers that a module here had not registered, and got from the checkpoint because
    strict was off. refused: newer checkpoints that this rank was to restore, but which are damaged, each with the
    proof. drifted: what differed between ranks when it was saved, so that the checkpoint has one rank's version.
    """

    restored: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    fresh: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    cast: tuple[str, ...] = ()
    registered: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    drifted: tuple[str, ...] = ()

    def __str__(self) -> str:
        names = tuple(spec.name for spec in fields(self))
        lists = [f"{name}: {first_few(getattr(self, name))}" for name in names if getattr(self, name)]
        return "; ".join(lists) or "nothing was restored"


@dataclass(frozen=True, kw_only=True, slots=True)
class Restored:
    """The outcome of a restore on this rank. Random state is applied separately, as late as possible.

    random_source: whose random state to take; None if it is not to be restored. lineage: the partial restores that the
    state now descends from. is_whole: the ranks have exactly what the checkpoint has; equal on every rank.
    """

    manifest: Manifest
    progress: Progress
    random_source: RandomSource | None
    lineage: tuple[str, ...]
    tensors: int
    bytes_fetched: int
    report: RestoreReport
    is_whole: bool

    @property
    def trained_s(self) -> float:
        """Return the seconds of training behind the state; 0 when training starts over from trained weights."""
        return self.manifest.trained_s if self.progress.step else 0.0

    def apply_rng(self) -> str:
        """Set this process's random state. Return what was done, for the restore report."""
        source = self.random_source
        return apply_rng(source.states, source.rank, source.apart) if source else "untouched"
