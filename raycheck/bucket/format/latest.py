"""Defines the body of `latest`, the run's only mutable object, as a value.

One GET of it shows who owns the run, which attempt is live, and which checkpoints are the newest. It names only
committed checkpoints (I3). It is replaced by compare-and-swap only, in protocol/swap.py; this module does not access
any store.

A body lists its newest checkpoints and owners itself, and refers to pages for the others (40). Whoever asks it for
something that may be in a page gets a PagesNeededError. A *whole* body is one whose pages have been read: it lists all.
Reading and swapping make a body whole when it is needed (pages.py, protocol/swap.py), so nobody can mistake a part of
the list for all of it.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

from raycheck.bucket.format.document import FORMAT_VERSION, Document, NewerFormatError, dump, load
from raycheck.bucket.format.label import is_name
from raycheck.bucket.format.object_keys import CheckpointName, is_directory, is_page_key, is_way, split_directory
from raycheck.errors import ConfigError, CorruptError

MAX_BYTES = 256 * 1024
ROOMY_BYTES = MAX_BYTES * 3 // 4
"""Nothing that may be refused, such as a hold, is added above this size, so that claims and commits always fit."""
MAX_PAGE_BYTES = 256 * 1024 * 1024
MAX_ATTEMPTS_LISTED = 50
MAX_METRICS_LISTED = 32


class PagesNeededError(Exception):
    """A body that refers to pages was asked for something that may be in one of them. It never leaves the package.

    pages: those on which the answer depends.
    """

    def __init__(self, pages: "Iterable[PageRef]") -> None:
        super().__init__()
        self.pages = tuple(pages)


def _check_directories(*directories: str) -> None:
    """Raise CorruptError for what is not a checkpoint's directory, of this run or of another one."""
    for text in directories:
        if not is_directory(text):
            raise CorruptError(f"latest names {text!r}, which is not a checkpoint's name")


def _check_names(*names: str) -> None:
    """Raise CorruptError for what is not the name of a checkpoint of a run."""
    for text in names:
        if CheckpointName.parse(text) is None:
            raise CorruptError(f"latest names {text!r}, which is not a checkpoint's name")


def _check_way(way: str) -> None:
    if not is_way(way):
        raise CorruptError(f"latest names the run {way!r}, which is not a path to another run")


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry(Document):
    """A live checkpoint.

    refs: the directories that it uses in addition to its own: those of other checkpoints, and borrowed ones of other
    runs. committed_at, expires_at: by the bucket's time. metrics: the first 32 of its manifest's, or fewer in entries
    of a body that an older raycheck wrote. damaged: what a restore found wrong with it, None for nothing; a damaged
    entry is neither restored nor counted by retention. rolling: see Retention. name: its user-given name, which no
    other live entry of the run has. scores: what was measured after its commit, at most 32; retention prefers a score
    to a metric of the same name. by_notice: it was saved because a node was about to be removed. drifted: see Manifest.
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

    def __post_init__(self) -> None:
        _check_names(self.key)
        _check_directories(*self.refs)
        if self.name is not None and not is_name(self.name):
            raise CorruptError(f"latest calls a checkpoint {self.name!r}, which cannot be a name")

    def is_kept_by_name(self, now: float) -> bool:
        """Return whether it has a name and has not expired. now: the bucket's time."""
        return self.name is not None and (self.expires_at is None or now < self.expires_at)


@dataclass(frozen=True, kw_only=True, slots=True)
class Evicted(Document):
    """A checkpoint that left the live list permanently, at `at` (bucket time).

    Its objects may be deleted after a grace period for readers. borrowed: the directories of other runs that it used;
    they are needed until then. why: the reason, for people; "" if it is not known.
    """

    when_true: ClassVar[frozenset[str]] = frozenset({"borrowed", "why"})

    key: str
    at: float
    borrowed: tuple[str, ...] = ()
    why: str = ""

    def __post_init__(self) -> None:
        _check_names(self.key)
        _check_directories(*self.borrowed)


@dataclass(frozen=True, kw_only=True, slots=True)
class PageRef(Document):
    """A reference to a page: an immutable object that lists what `latest` does not list itself. Step 40.

    key: the page's object. crc32, size_bytes: of its bytes. count: how many checkpoints or owners it lists. first,
    last: the first and the last owner, or the keys of these checkpoints, between which are those of all live ones.
    steps: the lowest and the highest step of live ones. is_unnamed: no live one has a user-given name. Both may be
    absent.
    """

    when_true: ClassVar[frozenset[str]] = frozenset({"steps", "is_unnamed"})

    key: str
    crc32: int
    size_bytes: int
    count: int
    first: str
    last: str
    steps: tuple[int, ...] = ()
    is_unnamed: bool = False

    def __post_init__(self) -> None:
        if not is_page_key(self.key):
            raise CorruptError(f"latest names the page {self.key!r}, which is not the key of a page")

    def may_list(self, name: CheckpointName | None) -> bool:
        """Return whether the page may list the checkpoint `name`."""
        first, last = CheckpointName.parse(self.first), CheckpointName.parse(self.last)
        return name is None or first is None or last is None or first <= name <= last

    def may_list_between(self, low: CheckpointName | None, high: CheckpointName) -> bool:
        """Return whether the page may list a checkpoint above `low`, if that is given, and below `high`."""
        first, last = CheckpointName.parse(self.first), CheckpointName.parse(self.last)
        return first is None or last is None or (first < high and (low is None or low < last))

    def may_have_step(self, step: int) -> bool:
        """Return whether the page may list a checkpoint of this step."""
        return not self.steps or self.steps[0] <= step <= self.steps[-1]


@dataclass(frozen=True, kw_only=True, slots=True)
class PastPage(Document):
    """A page that no body names any more since the one with the counter `since`. Its object stays for some writes."""

    key: str
    since: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Page(Document):
    """A page: live checkpoints of a run in the order of their commits, evicted ones in that of their evictions, or
    owners in that of their claims. Step 40.
    """

    is_long: ClassVar[bool] = True

    format_version: int = FORMAT_VERSION
    run_id: str
    live: tuple[Entry, ...] = ()
    evicted: tuple[Evicted, ...] = ()
    owners: tuple[str, ...] = ()


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

    def __post_init__(self) -> None:
        _check_way(self.holder)
        _check_directories(*self.directories)


@dataclass(frozen=True, kw_only=True, slots=True)
class Loan(Document):
    """The counterpart of a Hold in the borrowing run: this run uses directories of another one. Step 30.

    source: the path from this run's root to the other's. run_id: the other run's. directories: the names of checkpoints
    there; the hold names these and perhaps more.
    """

    source: str
    run_id: str
    directories: tuple[str, ...]

    def __post_init__(self) -> None:
        _check_way(self.source)
        _check_names(*self.directories)


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

    def __post_init__(self) -> None:
        _check_names(*([self.key] if self.key else []))


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

    counter: one higher at every write. attempts: the newest 50, the live one last. head: what the next start restores.
    newest: the newest live checkpoints in the order of their commits, with the head and what the live attempt restored;
    all of them in a whole body. pages: where the other ones are listed. newest_evicted, evicted_pages: the same of
    evicted checkpoints. newest_owners, owner_pages: the same of all owners ever. past_pages: the pages that bodies
    before this one named. proven: the highest attempt whose claim was answered, None before the first. A group saves
    only after that answer, so a directory of a higher attempt means that `latest` was lost (step 10). finished: the end
    of training, until the run continues or goes back (step 33). holds, loans: what other runs use of this one, and what
    this one uses of others (step 30). deleted_at: when someone deleted the run, whose objects may still exist (step
    37). mirror: what the run is a copy of; see is_mirror. trained: the newest commit's, None when it is not known.
    forked_from: the URI of the run that this one was forked from, for people; "" if it was not, and if an older
    raycheck forked it.
    """

    when_true: ClassVar[frozenset[str]] = frozenset(
        {
            *("pages", "evicted_pages", "owner_pages", "past_pages"),
            *("finished", "holds", "loans", "deleted_at", "mirror", "trained", "forked_from"),
        }
    )
    renamed: ClassVar[Mapping[str, str]] = {
        "live": "newest",  # since version 4
        "evicted": "newest_evicted",
        "owners": "newest_owners",  # since version 5
    }

    format_version: int = FORMAT_VERSION
    run_id: str
    counter: int
    proven: int | None = None
    newest_owners: tuple[str, ...]
    owner_pages: tuple[PageRef, ...] = ()
    attempts: tuple[Attempt, ...]
    head: str | None
    newest: tuple[Entry, ...] = ()
    pages: tuple[PageRef, ...] = ()
    newest_evicted: tuple[Evicted, ...] = ()
    evicted_pages: tuple[PageRef, ...] = ()
    past_pages: tuple[PastPage, ...] = ()
    finished: Finished | None = None
    holds: tuple[Hold, ...] = ()
    loans: tuple[Loan, ...] = ()
    deleted_at: float | None = None
    mirror: Mirror | None = None
    trained: Trained | None = None
    forked_from: str = ""

    def __post_init__(self) -> None:
        keys = {entry.key for entry in self.newest}
        if len(keys) < len(self.newest):
            raise CorruptError("latest lists a checkpoint twice")
        _check_names(*(name for page in (*self.pages, *self.evicted_pages) for name in (page.first, page.last)))
        given = [entry.name for entry in self.newest if entry.name is not None]
        if len(set(given)) < len(given):
            raise CorruptError("latest gives one name to two checkpoints")
        if self.head is not None and self.head not in keys:
            raise CorruptError(f"latest has head {self.head}, which it does not list")
        if any(entry.damaged and entry.key == self.head for entry in self.newest):
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

    @property
    def finished_at(self) -> float | None:
        """Return when the live attempt reached the end of training, None if it has not."""
        return self.finished.at if self.finished is not None and self.is_finished else None

    def ends_with(self, key: str | None) -> bool:
        """Return whether an attempt reached the end of training with `key`, and nothing was committed or decided since.

        `finished` alone does not show this: an older raycheck moves head without removing it.
        """
        return self.finished is not None and self.finished.key == self.head == key

    @property
    def live(self) -> tuple[Entry, ...]:
        """Return every live checkpoint, in the order of their commits. Raises PagesNeededError unless it is whole."""
        if self.pages:
            raise PagesNeededError(self.pages)
        return self.newest

    @property
    def evicted(self) -> tuple[Evicted, ...]:
        """Return every evicted checkpoint that is not forgotten, in the order of the evictions.

        Raises PagesNeededError unless it is whole.
        """
        if self.evicted_pages:
            raise PagesNeededError(self.evicted_pages)
        return self.newest_evicted

    @property
    def owners(self) -> tuple[str, ...]:
        """Return all owners that the run ever had, in the order of their claims.

        Raises PagesNeededError unless it is whole.
        """
        if self.owner_pages:
            raise PagesNeededError(self.owner_pages)
        return self.newest_owners

    def has_owner(self, owner: str) -> bool:
        """Return whether this is an owner, or was one. Raises PagesNeededError when a page may list it."""
        return owner in self.newest_owners or owner in self.owners

    @property
    def num_owners(self) -> int:
        """Return the number of owners, also of a body that is not whole."""
        return len(self.newest_owners) + sum(page.count for page in self.owner_pages)

    @property
    def first_owner(self) -> str:
        """Return the owner that began the run, also of a body that is not whole."""
        return self.owner_pages[0].first if self.owner_pages else next(iter(self.newest_owners), "")

    @property
    def all_pages(self) -> tuple[PageRef, ...]:
        """Return every page that the body names."""
        return (*self.pages, *self.evicted_pages, *self.owner_pages)

    @property
    def num_live(self) -> int:
        """Return the number of live checkpoints, also of a body that is not whole."""
        return len(self.newest) + sum(page.count for page in self.pages)

    def entry(self, key: str) -> Entry | None:
        """Return the live entry `key`, None when it is not live (evicted, or never committed).

        Raises PagesNeededError when a page may list it.
        """
        found = next((entry for entry in self.newest if entry.key == key), None)
        if found is None and key not in self.kept_newest:
            name = CheckpointName.parse(key)
            self._need(lambda page: page.may_list(name))
        return found

    def _need(self, may_tell: Callable[[PageRef], bool]) -> None:
        """Raise PagesNeededError if an answer may be in one of the pages that are not read yet."""
        if needed := tuple(filter(may_tell, self.pages)):
            raise PagesNeededError(needed)

    def of_step(self, step: int) -> tuple[Entry, ...]:
        """Return the live entries of this step, in order. Raises PagesNeededError when a page may list one."""
        self._need(lambda page: page.may_have_step(step))
        return tuple(entry for entry in self.newest if entry.step == step)

    def between(self, low: CheckpointName | None, high: CheckpointName) -> Iterator[Entry]:
        """Yield the live entries above `low`, if that is given, and below `high`, the newest first.

        Raises PagesNeededError when a page may list the next one.
        """
        for entry in reversed(self.newest):
            name = CheckpointName.parse(entry.key)
            assert name is not None, "an entry has checked its key"
            if name < high and (low is None or low < name):
                self._need_newest(name, high)
                yield entry
                high = name
        self._need_newest(low, high)

    def _need_newest(self, low: CheckpointName | None, high: CheckpointName) -> None:
        """Raise PagesNeededError for the newest of the pages that may list a checkpoint between these."""
        found = [page for page in self.pages if page.may_list_between(low, high)]
        if found:
            raise PagesNeededError([max(found, key=lambda page: CheckpointName.parse(page.last) or high)])

    @property
    def kept_newest(self) -> frozenset[str]:
        """Return the keys that no page may list: the head's, and that of what the live attempt restores."""
        return frozenset(key for key in (self.head, self.attempt.restore_key) if key)

    def named(self, name: str) -> Entry | None:
        """Return the live entry with this user-given name, None when there is none.

        Raises PagesNeededError when a page may list it.
        """
        found = next((entry for entry in self.newest if entry.name == name), None)
        if found is None:
            self._need(lambda page: not page.is_unnamed)
        return found

    def with_entry(self, changed: Entry) -> "Latest":
        """Return this body with `changed` in place of the live entry of its key.

        Raises PagesNeededError when it does not list that entry itself.
        """
        if all(entry.key != changed.key for entry in self.newest):
            name = CheckpointName.parse(changed.key)
            raise PagesNeededError(page for page in self.pages if page.may_list(name))
        return replace(self, newest=tuple(changed if entry.key == changed.key else entry for entry in self.newest))

    def has_answered(self, name: CheckpointName) -> bool:
        """Return whether the claim of the attempt that wrote directory `name` was answered, so that the directory may
        exist.

        A body that lists checkpoints and has no `proven` was written before that field existed: then the live attempt
        counts as answered.
        """
        proven = self.attempt.number if self.proven is None and self.newest else self.proven
        return proven is not None and name.attempt <= proven

    def held(self) -> set[str]:
        """Return the directories held by a live entry, as its own or by reference, or by a hold of another run.

        Raises PagesNeededError unless it is whole.
        """
        own = {name for entry in self.live for name in (entry.key, *entry.refs)}
        return own | {directory for hold in self.holds for directory in hold.directories}

    def not_held(self, directories: Iterable[str]) -> set[str]:
        """Return which of these directories it does not hold. Raises PagesNeededError when that depends on a page."""
        missing = set(directories) - replace(self, pages=()).held()
        return missing and missing - self.held()

    def borrowed(self, source: str) -> set[str]:
        """Return the checkpoints of the run at `source` whose directories this run still needs.

        It needs what a live entry refers to, what an evicted entry refers to while its readers still have time, and
        what its holds name.
        """
        directories = self.held() | {directory for item in self.evicted for directory in item.borrowed}
        return {name for way, name in map(split_directory, directories) if way == source}


def in_order(entries: Iterable[Entry]) -> tuple[Entry, ...]:
    """Return entries in the order of their commits, which is that of their attempts and saves."""

    def order(entry: Entry) -> tuple[int, int]:
        name = CheckpointName.parse(entry.key)
        assert name is not None, "an entry has checked its key"
        return name.attempt, name.save

    return tuple(sorted(entries, key=order))


def dump_latest(body: Latest) -> bytes:
    data = dump(body)
    if len(data) > MAX_BYTES:
        raise full_error(body, len(data))
    return data


def full_error(body: Latest, size: int) -> ConfigError:
    """Make the error for a body that would have `size` bytes. Only holds and loans are not limited in another way."""
    return ConfigError(
        f"latest would have {size} bytes, and may have {MAX_BYTES}: {len(body.holds)} other runs use checkpoints of "
        f"this one, and it uses checkpoints of {len(body.loans)} others. 'raycheck prune' deletes what was dropped; a "
        "fork with --copy uses nothing of its source"
    )


def listed_metrics(metrics: Mapping[str, float], *, needed: str | None) -> dict[str, float]:
    """Return the metrics of a manifest that its entry repeats: the first ones, and `needed`.

    needed: the metric by which retention ranks, None without such a rule.
    """
    names = sorted(metrics, key=lambda name: name != needed)
    return {name: metrics[name] for name in names[:MAX_METRICS_LISTED]}


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


def load_page(data: bytes, *, what: str) -> Page:
    """Parse a page. Raises CorruptError."""
    return load(Page, data, what=what, max_bytes=MAX_PAGE_BYTES)
