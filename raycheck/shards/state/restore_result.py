"""What a restore came to: which entries it took, and what the checkpoint and the live state did not share."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from raycheck.bucket.format.manifest import Manifest
from raycheck.bucket.format.progress import Progress
from raycheck.errors import StateMismatchError
from raycheck.shards.state.random_state import apply_rng


@dataclass(frozen=True, kw_only=True, slots=True)
class RestoreReport:
    """What a restore did, by name: entries as a whole, places of a module that was restored in part.

    missing: live, but not in the checkpoint, and left as it was. unexpected: in the checkpoint, but not here. skipped:
    left as it was because the caller said so. fresh: the same, by a stated rule. unused: in the checkpoint and by a
    stated rule not for this rank (another pipeline stage's, PerRank values of ranks that are gone). cast: restored into
    another floating-point type, because the caller said so. refused: newer checkpoints that this rank was to restore,
    but which are damaged, each with the proof.
    """

    restored: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    fresh: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    cast: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()

    def __str__(self) -> str:
        names = tuple(spec.name for spec in fields(self))
        parts = [f"{name}: {_short(getattr(self, name))}" for name in names if getattr(self, name)]
        return "; ".join(parts) or "nothing was restored"


def refuse_differences(
    key: str, report: RestoreReport, mismatched: Sequence[str], *, strict: bool, cast: bool = False
) -> None:
    """Raise StateMismatchError that lists them all. mismatched: on both sides but not alike; always refused. cast:
    whether floating-point types may differ already."""
    if not mismatched and not (strict and (report.missing or report.unexpected)):
        return
    lines = [
        f"checkpoint {key} and the live state do not hold the same things; nothing was changed.",
        *(f"  not alike: {line}" for line in mismatched),
        *(f"  missing in the checkpoint: {line}" for line in report.missing),
        *(f"  only in the checkpoint: {line}" for line in report.unexpected),
    ]
    if not mismatched:
        lines.append(
            "  restore(skip=[...]) leaves entries out by name; restore(strict=False) takes what both sides hold"
        )
    elif not cast:
        lines.append("  where only the floating-point type of a weight differs, restore(cast=True) converts it")
    raise StateMismatchError("\n".join(lines))


@dataclass(frozen=True, kw_only=True, slots=True)
class Restored:
    """What a restore did on this rank. Random state is applied apart, as late as possible.

    is_whole: the ranks hold what the checkpoint does, no more and no less; every rank says alike.
    """

    manifest: Manifest
    progress: Progress
    rng_values: Sequence[Any]
    lineage: tuple[str, ...]
    tensors: int
    bytes_fetched: int
    report: RestoreReport
    is_whole: bool

    @property
    def trained_s(self) -> float:
        """Seconds of training that stand in the state; none of them when it starts anew from trained weights."""
        return self.manifest.trained_s if self.progress.step else 0.0

    def apply_rng(self, rank: int) -> str:
        return apply_rng(self.rng_values, rank) if self.rng_values else "untouched"


def _short(names: tuple[str, ...]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
