"""Defines the body of `latest`, the run's only mutable object, as a value.

One GET of it shows who owns the run, which attempt is live, and which checkpoints exist. It names only committed
checkpoints (I3). It is replaced by compare-and-swap only, in protocol/swap.py; this module does not access any store.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

from raycheck.bucket.format.document import FORMAT_VERSION, Document, NewerFormatError, dump, load
from raycheck.bucket.format.label import is_name
from raycheck.bucket.format.object_keys import CheckpointName, is_directory, is_way, split_directory
from raycheck.errors import ConfigError, CorruptError

MAX_BYTES = 256 * 1024
"""Room for more than a thousand checkpoints."""
COMMIT_BYTES = MAX_BYTES * 7 // 8
"""Commits stop at 7/8 of the limit so that a claim always fits; otherwise the run could not be resumed."""
CROWDED_BYTES = MAX_BYTES * 3 // 4
"""Above this size old entries lose metrics, and each save checks for room before it uploads anything."""
MAX_ATTEMPTS_LISTED = 50
MAX_METRICS_LISTED = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry(Document):
    """A live checkpoint.

    refs: the directories that it uses in addition to its own: those of other checkpoints, and borrowed ones of other
    runs. committed_at, expires_at: by the bucket's time. metrics: the first 32 of its manifest's, or fewer in older
    entries when `latest` is nearly full. damaged: what a restore found wrong with it, None for nothing; a damaged entry
    is neither restored nor counted by retention. rolling: see Retention. name: its user-given name, which no other live
    entry of the run has. scores: what was measured after its commit, at most 32; retention prefers a score to a metric
    of the same name. by_notice: it was saved because a node was about to be removed. drifted: see Manifest.
    """

    when_true: ClassVar[frozenset[str]] = frozenset({"rolling", "name", "scores", "by_notice", "drifted"})

    key: str
    refs: tuple[str, ...] = ()
    step: int
    committed_at: float
    size_bytes: int
    metrics: Mapping[str, float]
    manifest_crc32: int
    pinned: bool = False
    expires_at: float | None = None
    damaged: str | None = None
    rolling: bool = False
    name: str | None = None
    scores: Mapping[str, float] = field(default_factory=dict)
    by_notice: bool = False
    drifted: bool = False

    def is_kept_by_name(self, now: float) -> bool:
        """Return whether it has a name and has not expired. now: the bucket's time."""
        return self.name is not None and (self.expires_at is None or now < self.expires_at)


@dataclass(frozen=True, kw_only=True, slots=True)
class Evicted(Document):
    """A checkpoint that left the live list permanently, at `at` (bucket time).

    Its objects may be deleted after a grace period for readers. borrowed: the directories of other runs that it used;
    they are needed until then.
    """

    when_true: ClassVar[frozenset[str]] = frozenset({"borrowed"})

    key: str
    at: float
    borrowed: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Hold(Document):
    """A hold: another run uses directories of this one, which must not be deleted. Step 30.

    holder: the path from this run's root to the other's. run_id: the other run's. directories: what it uses; while it
    is being created, also what this run itself has borrowed. at: when the hold was given, by the bucket's time.
    is_confirmed: the other run's `latest` existed after the hold was given. renewals: how often it was given again; a
    process that would end the hold it has seen does not end a renewed one. A hold whose holder is this run itself is a
    reservation of what its next commit will refer to.
    """

    when_true: ClassVar[frozenset[str]] = frozenset({"renewals"})

    holder: str
    run_id: str
    directories: tuple[str, ...]
    at: float
    is_confirmed: bool = False
    renewals: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Loan(Document):
    """The counterpart of a Hold in the borrowing run: this run uses directories of another one. Step 30.

    source: the path from this run's root to the other's. run_id: the other run's. directories: the names of checkpoints
    there; the hold names these and perhaps more.
    """

    source: str
    run_id: str
    directories: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt(Document):
    """One start of the worker group that has claimed the run.

    number: the fencing token. restore_key: the checkpoint that the group restores, None to start fresh. last_save: the
    highest save committed in it.
    """

    number: int
    owner: str
    coordinator: str
    group: str
    world_size: int
    restore_key: str | None
    last_save: int = 0
    claimed_at: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished(Document):
    """The end of training: attempt number `attempt` reached it at `at` (bucket time).

    key: the head at that time, which has everything that the attempt had to save; None when nothing was committed.
    """

    attempt: int
    key: str | None
    at: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Mirror(Document):
    """The source of a run that is a copy of one trained elsewhere, and that still follows it (step 38).

    source: where that run is, for people. counter: the write of its `latest` that this body shows, 0 for none yet.
    missing: how many of its checkpoints are still to come. owner: the owner of the live attempt for as long as the copy
    is a mirror. Whoever claims or rewinds the copy is a different owner, and makes it an independent run.
    """

    source: str
    counter: int
    missing: int
    owner: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained(Document):
    """The amount of training in checkpoint `key`, as in its manifest, for listings of many runs.

    trained_s, began_at: see Manifest. It does not apply to any other checkpoint: an older raycheck and a rewind move
    head without it.
    """

    key: str
    trained_s: float
    began_at: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Latest(Document):
    """The body of `latest`.

    counter: one higher at every write. owners: all owners ever. attempts: the newest 50, the live one last. head: what
    the next start restores. proven: the highest attempt whose claim was answered, None before the first. A group saves
    only after that answer, so a directory of a higher attempt means that `latest` was lost (step 10). finished: the end
    of training, until the run continues or goes back (step 33). holds, loans: what other runs use of this one, and what
    this one uses of others (step 30). deleted_at: when someone deleted the run, whose objects may still exist (step
    37). mirror: what the run is a copy of; see is_mirror. trained: the newest commit's, None when it is not known.
    """

    when_true: ClassVar[frozenset[str]] = frozenset({"finished", "holds", "loans", "deleted_at", "mirror", "trained"})

    format_version: int = FORMAT_VERSION
    run_id: str
    counter: int
    proven: int | None = None
    owners: tuple[str, ...]
    attempts: tuple[Attempt, ...]
    head: str | None
    live: tuple[Entry, ...] = ()
    evicted: tuple[Evicted, ...] = ()
    finished: Finished | None = None
    holds: tuple[Hold, ...] = ()
    loans: tuple[Loan, ...] = ()
    deleted_at: float | None = None
    mirror: Mirror | None = None
    trained: Trained | None = None

    def __post_init__(self) -> None:
        keys = [entry.key for entry in self.live]
        names = [
            *keys,
            *(item.key for item in self.evicted),
            *(name for loan in self.loans for name in loan.directories),
            *((self.finished.key,) if self.finished and self.finished.key else ()),
        ]
        directories = [
            *(ref for entry in self.live for ref in entry.refs),
            *(ref for item in self.evicted for ref in item.borrowed),
            *(directory for hold in self.holds for directory in hold.directories),
        ]
        bad = [name for name in names if CheckpointName.parse(name) is None]
        bad += [text for text in directories if not is_directory(text)]
        if bad:
            raise CorruptError(f"latest names {bad[0]!r}, which is not a checkpoint's name")
        ways = [*(hold.holder for hold in self.holds), *(loan.source for loan in self.loans)]
        lost = [way for way in ways if not is_way(way)]
        if lost:
            raise CorruptError(f"latest names the run {lost[0]!r}, which is not a path to another run")
        if len(set(keys)) < len(keys):
            raise CorruptError("latest lists a checkpoint twice")
        given = [entry.name for entry in self.live if entry.name is not None]
        if odd := [name for name in given if not is_name(name)]:
            raise CorruptError(f"latest calls a checkpoint {odd[0]!r}, which cannot be a name")
        if len(set(given)) < len(given):
            raise CorruptError("latest gives one name to two checkpoints")
        if self.head is not None and self.head not in keys:
            raise CorruptError(f"latest has head {self.head}, which it does not list")
        if any(entry.damaged and entry.key == self.head for entry in self.live):
            raise CorruptError(f"latest has head {self.head}, which it marks as damaged")
        if not self.attempts:
            raise CorruptError("latest names no attempt")
        if self.is_mirror and len(self.attempts) == 1:
            raise CorruptError("latest is that of a mirror, and names no attempt of the run that it follows")

    @property
    def attempt(self) -> Attempt:
        return self.attempts[-1]

    @property
    def is_mirror(self) -> bool:
        """Return whether the run only follows another one. `mirror` alone does not show this: the run may have been
        claimed since."""
        return self.mirror is not None and self.mirror.owner == self.attempt.owner

    @property
    def is_finished(self) -> bool:
        """Return whether the live attempt reached the end of training. A later claim starts the run again."""
        last = self.attempts[-2] if self.is_mirror else self.attempt
        return self.finished is not None and self.finished.attempt == last.number and self.ends_with(self.head)

    def ends_with(self, key: str | None) -> bool:
        """Return whether an attempt reached the end of training with `key`, and nothing was committed or decided since.

        `finished` alone does not show this: an older raycheck moves head without removing it.
        """
        return self.finished is not None and self.finished.key == self.head == key

    def entry(self, key: str) -> Entry | None:
        """Return the live entry `key`, None when it is not live (evicted, or never committed)."""
        return next((entry for entry in self.live if entry.key == key), None)

    def named(self, name: str) -> Entry | None:
        """Return the live entry with this user-given name, None when there is none."""
        return next((entry for entry in self.live if entry.name == name), None)

    def with_entry(self, changed: Entry) -> "Latest":
        """Return this body with `changed` in place of the live entry of its key."""
        return replace(self, live=tuple(changed if entry.key == changed.key else entry for entry in self.live))

    def has_answered(self, name: CheckpointName) -> bool:
        """Return whether the claim of the attempt that wrote directory `name` was answered, so that the directory may
        exist.

        A body that lists checkpoints and has no `proven` was written before that field existed: then the live attempt
        counts as answered.
        """
        proven = self.attempt.number if self.proven is None and self.live else self.proven
        return proven is not None and name.attempt <= proven

    def held(self) -> set[str]:
        """Return the directories held by a live entry, as its own or by reference, or by a hold of another run."""
        own = {name for entry in self.live for name in (entry.key, *entry.refs)}
        return own | {directory for hold in self.holds for directory in hold.directories}

    def borrowed(self, source: str) -> set[str]:
        """Return the checkpoints of the run at `source` whose directories this run still needs.

        It needs what a live entry refers to, what an evicted entry refers to while its readers still have time, and
        what its holds name.
        """
        directories = self.held() | {directory for item in self.evicted for directory in item.borrowed}
        return {name for way, name in map(split_directory, directories) if way == source}


def dump_latest(body: Latest) -> bytes:
    data = dump(body)
    if len(data) > MAX_BYTES:
        raise _full(body, len(data), MAX_BYTES)
    return data


def _full(body: Latest, size: int, bound: int) -> ConfigError:
    return ConfigError(
        f"latest would have {size} bytes, more than {bound}: it lists {len(body.live)} checkpoints and "
        f"{len(body.evicted)} dropped ones. 'raycheck prune --keep-last N' makes room at once, also while the run is "
        "active: what is neither pinned nor named is dropped. Then set SaveSettings(keep_last=...) to keep it small"
    )


def check_room(body: Latest) -> None:
    """Refuse a body that would leave no room for commits, even though they remove the metrics of old entries.

    Call it before a swap that adds names or scores: commits drop old metrics to make room, but never these. Raises
    ConfigError, which says how to make room.
    """
    bare = replace(body, live=tuple(replace(entry, metrics={}) for entry in body.live))
    for size, bound in ((len(dump(bare)), CROWDED_BYTES), (len(dump(body)), COMMIT_BYTES)):
        if size > bound:
            raise _full(body, size, bound)


def listed_metrics(metrics: Mapping[str, float], *, needed: str | None) -> dict[str, float]:
    """Return the metrics of a manifest that its entry repeats: the first ones, and `needed`.

    needed: the metric by which retention ranks, None without such a rule.
    """
    names = sorted(metrics, key=lambda name: name != needed)
    return {name: metrics[name] for name in names[:MAX_METRICS_LISTED]}


def shrink_metrics(body: Latest, *, needed: str | None) -> Latest:
    """Remove metrics from the oldest entries when `body` is nearly full; their manifests still have all of them.

    needed: the metric by which retention ranks, which stays. Raises ConfigError, which says how to make room, when that
    is not enough.
    """
    excess = len(dump(body)) - CROWDED_BYTES
    if excess <= 0:
        return body
    live = list(body.live)
    for place, entry in enumerate(live):
        live[place] = replace(entry, metrics={name: value for name, value in entry.metrics.items() if name == needed})
        excess -= len(dump(entry)) - len(dump(live[place]))
        if excess <= 0:
            break
    slim = replace(body, live=tuple(live))
    size = len(dump(slim))
    if size > COMMIT_BYTES:
        raise _full(body, size, COMMIT_BYTES)
    return slim


def load_latest(data: bytes, *, what: str) -> Latest:
    """Parse the body of `latest`. Raises CorruptError, which says how to get a readable one back."""
    try:
        return load(Latest, data, what=what, max_bytes=MAX_BYTES)
    except NewerFormatError:
        raise
    except CorruptError as error:
        raise CorruptError(
            f"{error}. If nobody has edited it: put an earlier version back (bucket versioning), or rebuild it with "
            "'raycheck repair'"
        ) from None
