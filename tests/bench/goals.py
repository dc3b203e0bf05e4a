"""The measures of the benchmark and their goals, and a row: what one measure came to.

Nearly all are ratios of two things timed in one run on one machine, store and state, so that they carry over to other
machines where seconds would not. A row that could not be measured stays, with the reason in its note.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from tests.bench.sampling import Spread


@dataclass(frozen=True, kw_only=True, slots=True)
class Goal:
    """is_floor: the value should be at least `limit`; otherwise at most."""

    what: str
    limit: float
    unit: str = "ratio"
    is_floor: bool = False

    def is_met_by(self, value: float) -> bool:
        return value >= self.limit if self.is_floor else value <= self.limit

    def worst(self, values: Sequence[Spread]) -> Spread:
        return (min if self.is_floor else max)(values, key=lambda spread: spread.median)


GOALS = {
    "R1": Goal(what="training blocked by a save / copying the state tensor by tensor", limit=1.05),
    "R1.first": Goal(what="training blocked by the first save / by a warm one", limit=1.5),
    "R2": Goal(what="durable save / raw parallel PUT, engine fast", limit=0.90, is_floor=True),
    "R2.fsspec": Goal(what="durable save / raw parallel PUT, engine fsspec", limit=0.60, is_floor=True),
    "R3": Goal(what="load / raw windowed GET, engine fast", limit=0.85, is_floor=True),
    "R3.fsspec": Goal(what="load / raw windowed GET, engine fsspec", limit=0.60, is_floor=True),
    "R4": Goal(what="bytes read / needed, same world size", limit=1.01),
    "R4.resharded": Goal(what="bytes read / needed, resharded on dim 0", limit=1.05),
    "R4.replicas": Goal(what="bytes read / needed once, by two replicas", limit=1.05),
    "R5": Goal(what="requests without tensor data, per rank and save", limit=0, unit="requests"),
    "R5.commit": Goal(what="requests per commit with one component", limit=5, unit="requests"),
    "R5.load": Goal(what="requests without tensor data, per rank and load", limit=0, unit="requests"),
    "R6": Goal(what="coordinator CPU per (rank, tensor), new plan", limit=5, unit="us"),
    "R6.unchanged": Goal(what="coordinator CPU per rank, unchanged plan", limit=50, unit="us"),
    "R7": Goal(what="index and manifest bytes per (rank, tensor)", limit=16, unit="bytes"),
    "R7.parse": Goal(what="parsing 1 M (rank, tensor)", limit=2, unit="s"),
    "R8": Goal(what="peak extra host memory of a save / shard, less 2 x part x in flight", limit=1.0),
    "R9": Goal(what="mean step while uploading / without, engine fast", limit=1.15),
    "R9.fsspec": Goal(what="mean step while uploading / without, engine fsspec", limit=1.30),
    "R10": Goal(what="save with checksums / without", limit=1.05),
    "R13": Goal(what="bytes uploaded / bytes changed, 95 % frozen", limit=1.02),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """key: of GOALS. value: None when it was not measured, and `note` says why. today: stock DCP through fsspec, in
    this run. peers: what others came to by the same measure. details: the parts that the value was chosen from."""

    key: str
    value: float | None
    spread: Spread | None = None
    today: float | None = None
    peers: Mapping[str, float] = field(default_factory=dict)
    details: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""

    @property
    def goal(self) -> Goal:
        return GOALS[self.key]

    @property
    def is_met(self) -> bool:
        return self.value is not None and self.goal.is_met_by(self.value)

    def as_json(self) -> dict[str, Any]:
        goal = self.goal
        return {
            "what": goal.what,
            "value": self.value,
            "goal": goal.limit,
            "bound": "at least" if goal.is_floor else "at most",
            "is_met": self.is_met,
            "today": self.today,
            "unit": goal.unit,
            "peers": dict(self.peers),
            "spread": None if self.spread is None else asdict(self.spread),
            "details": dict(self.details),
            "note": self.note,
        }


def worst_row(key: str, by_state: Mapping[str, Spread], **more: Any) -> Row:
    """The row of a measure that was taken on several states: its value is that of the worst, all stand in details."""
    spread = GOALS[key].worst(list(by_state.values()))
    details = {name: found.median for name, found in by_state.items()} | more.pop("details", {})
    return Row(key=key, value=spread.median, spread=spread, details=details, **more)


def not_measured(key: str, why: str) -> Row:
    return Row(key=key, value=None, note=f"not measured: {why}")
