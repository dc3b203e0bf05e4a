"""Everything that is known of a run's past, as a value.

Facts are a set of records with keys: a commit by the name of its checkpoint, an attempt by its number, a metric's value
by attempt and step. They have no order, so the union of any number of segments, which may overlap or repeat each other,
is the history of the run. Two records of one key describe one thing at different times: the later one counts, except
that a checkpoint was dropped when it first was.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, TypeVar

from raycheck.bucket.attempt_records import AttemptRecord, ResumeRecord
from raycheck.bucket.format.document import FORMAT_VERSION, Document, dump, load
from raycheck.bucket.format.latest import Attempt, Entry
from raycheck.bucket.format.object_keys import CheckpointName
from raycheck.bucket.history.metric_rows import Block, MetricRows, blocks_of, rows_of
from raycheck.errors import CorruptError

MAX_SEGMENT_BYTES = 256 * 1024 * 1024
K = TypeVar("K")
R = TypeVar("R", bound=Document)


@dataclass(frozen=True, kw_only=True, slots=True)
class CommitRecord(Document):
    """A commit, as the body of `latest` with the counter `counter` listed it. See Entry."""

    when_true: ClassVar[frozenset[str]] = frozenset(
        {"metrics", "scores", "pinned", "rolling", "name", "by_notice", "drifted", "damaged"}
    )

    key: str
    counter: int
    at: float
    size_bytes: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    scores: Mapping[str, float] = field(default_factory=dict)
    pinned: bool = False
    rolling: bool = False
    name: str | None = None
    by_notice: bool = False
    drifted: bool = False
    damaged: str | None = None

    def __post_init__(self) -> None:
        _check_name(self.key)

    @classmethod
    def of(cls, entry: Entry, counter: int) -> "CommitRecord":
        return cls(
            key=entry.key,
            counter=counter,
            at=entry.committed_at,
            size_bytes=entry.size_bytes,
            metrics=entry.metrics,
            scores=entry.scores,
            pinned=entry.pinned,
            rolling=entry.rolling,
            name=entry.name,
            by_notice=entry.by_notice,
            drifted=entry.drifted,
            damaged=entry.damaged,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class DropRecord(Document):
    """A checkpoint that left the list of live ones at `at`, and why; "" if that is not known. See Evicted."""

    when_true: ClassVar[frozenset[str]] = frozenset({"why"})

    key: str
    at: float
    why: str = ""

    def __post_init__(self) -> None:
        _check_name(self.key)


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptFact(Document):
    """An attempt, as the body of `latest` with the counter `counter` listed it."""

    counter: int
    attempt: Attempt


def _check_name(key: str) -> None:
    if CheckpointName.parse(key) is None:
        raise CorruptError(f"a segment of the history names {key!r}, which is not a checkpoint's name")


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """The known facts of a run's past.

    commits, drops: by the checkpoint's name. attempts, starts, ends: by number. rows: the metrics of its steps.
    """

    commits: Mapping[str, CommitRecord] = field(default_factory=dict)
    drops: Mapping[str, DropRecord] = field(default_factory=dict)
    attempts: Mapping[int, AttemptFact] = field(default_factory=dict)
    starts: Mapping[int, ResumeRecord] = field(default_factory=dict)
    ends: Mapping[int, AttemptRecord] = field(default_factory=dict)
    rows: MetricRows = field(default_factory=MetricRows)

    def __bool__(self) -> bool:
        return self != Facts(rows=MetricRows(every=self.rows.every))

    @property
    def numbers(self) -> set[int]:
        """Return the numbers of all attempts of which anything is known, except 0, which is the past of a fork."""
        names = map(CheckpointName.parse, self.commits.keys() | self.drops.keys())
        of_rows = {attempt for attempt, _ in self.rows.series}
        return {*self.attempts, *self.starts, *self.ends, *of_rows, *(name.attempt for name in names if name)} - {0}

    def joined(self, other: "Facts") -> "Facts":
        """Return the union. It does not depend on the order, and joining the same facts again changes nothing."""
        return Facts(
            commits=_joined(self.commits, other.commits, lambda item: item.counter),
            drops=_joined(self.drops, other.drops, lambda item: -item.at),
            attempts=_joined(self.attempts, other.attempts, lambda item: item.counter),
            starts=_joined(self.starts, other.starts, lambda _: 0),
            ends=_joined(self.ends, other.ends, lambda _: 0),
            rows=self.rows.joined(other.rows),
        )

    def covers(self, other: "Facts") -> bool:
        """Return whether `other` has nothing that is not here, except values that thinning leaves out."""
        mine, others = (replace(facts, rows=MetricRows()) for facts in (self, other))
        return mine.joined(others) == mine and self.rows.covers(other.rows)

    def thinned(self) -> "Facts":
        """Return these facts with no more rows than a segment may have. All else stays."""
        return replace(self, rows=self.rows.thinned())

    def without(self, other: "Facts") -> "Facts":
        """Return the facts that `other` lacks, or knows otherwise, except rows."""
        return Facts(
            commits=_missing(self.commits, other.commits, lambda mine, known: replace(mine, counter=known.counter)),
            drops=_missing(self.drops, other.drops),
            attempts=_missing(self.attempts, other.attempts, lambda mine, known: replace(mine, counter=known.counter)),
            starts=_missing(self.starts, other.starts),
            ends=_missing(self.ends, other.ends),
        )


def _joined(one: Mapping[K, R], other: Mapping[K, R], time: Callable[[R], float]) -> Mapping[K, R]:
    both = {**one, **other}
    for key in one.keys() & other.keys():
        if one[key] != other[key]:
            both[key] = max(one[key], other[key], key=lambda item: (time(item), dump(item)))
    return both


def _missing(
    mine: Mapping[K, R], others: Mapping[K, R], alike: Callable[[R, R], R] = lambda mine, _: mine
) -> Mapping[K, R]:
    """Return what `others` lacks or has differently. alike: makes the first record equal to the second one, if they
    differ only in what does not matter."""
    return {key: item for key, item in mine.items() if key not in others or alike(item, others[key]) != others[key]}


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment(Document):
    """The document of one object of the history: any facts of the run `run_id`. Step 41."""

    is_long: ClassVar[bool] = True

    format_version: int = FORMAT_VERSION
    run_id: str
    commits: tuple[CommitRecord, ...] = ()
    drops: tuple[DropRecord, ...] = ()
    attempts: tuple[AttemptFact, ...] = ()
    starts: tuple[ResumeRecord, ...] = ()
    ends: tuple[AttemptRecord, ...] = ()
    every: int = 1
    rows: tuple[Block, ...] = ()

    def __post_init__(self) -> None:
        if self.every < 1:
            raise CorruptError("a segment of the history says that it has the values of spans of no step")


def dump_segment(facts: Facts, run_id: str) -> bytes:
    """Write facts as a document. Equal facts give equal bytes."""
    return dump(
        Segment(
            run_id=run_id,
            commits=_in_order(facts.commits),
            drops=_in_order(facts.drops),
            attempts=_in_order(facts.attempts),
            starts=_in_order(facts.starts),
            ends=_in_order(facts.ends),
            every=facts.rows.every,
            rows=blocks_of(facts.rows),
        )
    )


def _in_order(records: Mapping[K, R]) -> tuple[R, ...]:
    return tuple(record for _, record in sorted(records.items()))


def has_unknown_fields(segment: Segment) -> bool:
    """Return whether a newer writer put something into a segment that its facts lack."""
    return bool(segment.unknown) or any(block.unknown for block in segment.rows)


def load_segment(data: bytes, *, what: str) -> Segment:
    """Parse a segment. Raises CorruptError."""
    return load(Segment, data, what=what, max_bytes=MAX_SEGMENT_BYTES)


def facts_in(segment: Segment, *, what: str) -> Facts:
    """Return the facts in a segment. Raises CorruptError. what: the object's name, for errors."""
    return Facts(
        commits={item.key: item for item in segment.commits},
        drops={item.key: item for item in segment.drops},
        attempts={item.attempt.number: item for item in segment.attempts},
        starts={item.attempt: item for item in segment.starts},
        ends={item.attempt.number: item for item in segment.ends},
        rows=rows_of(segment.rows, every=segment.every, what=what),
    )
