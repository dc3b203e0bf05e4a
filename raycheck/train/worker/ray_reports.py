"""Reports of commits to Ray: which commit Ray is told of, and when."""

from collections.abc import Mapping
from dataclasses import dataclass, field

RAY_REPORT_PAUSE_S = 5.0
"""Two reports to Ray within 2 s block the training loop."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UnreportedCommit:
    """A commit that rank 0 can tell Ray of, since its pointer is written. metrics: rank 0's at its step, and its step
    and epoch. validate: whether Ray runs the trainer's validation function on it."""

    key: str
    metrics: Mapping[str, float] = field(default_factory=dict)
    validate: bool = False
