"""Frees an amount of space in a folder of runs: the public `clean`.

What no run lists any more goes first: dropped and expired checkpoints, and what interrupted saves left, as a prune and
a sweep of each run find them. Then the oldest checkpoints of all runs are dropped, until the amount is reached. A
checkpoint counts with what lies below its own directory. As long as another one refers to that directory, dropping it
would free nothing, so it stays; once the last of these is dropped, it is the oldest again.

The head and the newest checkpoint of a run are never dropped, nor are its best ones by its own `keep_best`, those with
a pin or a name, what its live attempt restores, what other runs hold, and what is being exported. A run that is being
trained is left alone. All of this is decided again inside the swap that drops the checkpoints, and nothing is dropped
from a run that was started, or has saved, since it was examined.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import reduce
from heapq import heapify, heappop, heappush

from raycheck.bucket.format.latest import Entry, Latest
from raycheck.bucket.format.object_keys import EXPORTS_PREFIX
from raycheck.bucket.protocol.pin_and_evict import by_hand, drop
from raycheck.bucket.protocol.removal.prune_and_sweep import (
    GRACE_S,
    NO_RULES,
    Deletion,
    deletion_of,
    plan_prune,
    plan_sweep,
    prune,
    sweep,
)
from raycheck.bucket.protocol.retention import decide_retention, dropped
from raycheck.bucket.protocol.swap import Register
from raycheck.bucket.reading import Checkpoint
from raycheck.bucket.recorded_rules import recorded_rules
from raycheck.bucket.store import Store, open_store
from raycheck.bucket.stored_export import StoredExport
from raycheck.catalog.listing import DEPTH, RunSummary, find_runs
from raycheck.errors import ConfigError, ConflictError, RaycheckError
from raycheck.settings import KeepBest, Retention
from raycheck.show_progress import ProgressTally, ShowProgress, show_nothing
from raycheck.storage_settings import StorageSettings
from raycheck.views.context_pool import ContextPool
from raycheck.views.in_words import size

AT_ONCE = 16
"""How many runs are examined at a time."""
WHY = "dropped to free space"
CHANGED = (
    "it was started, has saved, or keeps other checkpoints since it was examined; nothing was dropped. Repeat the clean"
)
UNREADABLE = ("lost", "damaged", "newer", "unreadable")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunDeletion(Deletion):
    """What a clean deletes of one checkpoint or upload, and in which run.

    uri, run: the run's address, and its path below the folder. committed_at: when the checkpoint that is dropped was
    committed, in unix seconds by the store's clock; None for what the run does not list any more.
    """

    uri: str
    run: str
    committed_at: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Cleaned:
    """What a clean deletes, or would delete.

    freed: first what no run lists any more, then the dropped checkpoints, the oldest first. left_alone: runs that are
    being trained, and why nothing is taken from them, by name. problems: the same of runs that could not be read or
    changed.
    """

    freed: tuple[RunDeletion, ...]
    left_alone: Mapping[str, str]
    problems: Mapping[str, str]

    @property
    def freed_bytes(self) -> int:
        """Return the size of what is deleted, now or after the grace period."""
        return sum(item.size_bytes for item in self.freed)


def clean(
    prefix: str,
    free_bytes: int,
    *,
    dry_run: bool = False,
    depth: int = DEPTH,
    grace_s: float = GRACE_S,
    storage: StorageSettings | None = None,
    progress: ShowProgress = show_nothing,
) -> Cleaned:
    """Free at least this many bytes in the runs under `prefix`, by dropping the oldest checkpoints that nothing needs.

    dry_run: only report what would be dropped. depth: how many folders deep runs may be. grace_s: seconds that readers
    get before what was dropped is deleted, by the run's next commit, a prune, or another clean. storage: the settings
    for the bucket. progress: called with the number of runs that are done, and of all. A run that cannot be changed is
    in the result with its problem. Raises ConfigError, which says how much could be freed, if it is less than this;
    nothing is dropped then.
    """
    plan = plan_clean(prefix, free_bytes, depth=depth, grace_s=grace_s, storage=storage, progress=progress)
    return plan.cleaned if dry_run else plan.carry_out(progress)


def plan_clean(
    prefix: str,
    free_bytes: int,
    *,
    depth: int = DEPTH,
    grace_s: float = GRACE_S,
    storage: StorageSettings | None = None,
    progress: ShowProgress = show_nothing,
) -> "CleanPlan":
    """Choose what to drop. Write nothing. The arguments and errors are those of `clean`."""
    if free_bytes < 1:
        raise ConfigError(f"free_bytes={free_bytes!r}: give a number of bytes above 0")
    progress(0, 0)
    top = open_store(prefix, storage)
    found = sorted(find_runs(top, depth=depth), key=lambda run: run.name)
    left_alone = {run.name: run.text for run in found if run.state == "running"}
    problems = {run.name: run.text for run in found if run.state in UNREADABLE}
    others = [run for run in found if run.name not in left_alone and run.name not in problems]
    tally = ProgressTally(progress, total=len(others))

    def examine(run: RunSummary) -> "_Examined | str":
        try:
            return _examined(run, _store_of(top, run), grace_s=grace_s)
        except RaycheckError as error:
            return str(error)
        finally:
            tally.add(1)

    with ContextPool(AT_ONCE, thread_name_prefix="raycheck-clean") as pool:
        seen = list(zip(others, pool.map(examine, others), strict=True))
    problems |= {run.name: one for run, one in seen if isinstance(one, str)}
    runs = [one for _, one in seen if not isinstance(one, str)]
    freed = [item for run in runs for item in run.leftovers]
    freed += _oldest(runs, free_bytes - sum(item.size_bytes for item in freed), grace_s=grace_s)
    plan = CleanPlan(Cleaned(freed=tuple(freed), left_alone=left_alone, problems=problems), runs, grace_s)
    if plan.cleaned.freed_bytes < free_bytes:
        raise _too_much(top, free_bytes, plan.cleaned)
    return plan


def _too_much(top: Store, free_bytes: int, most: Cleaned) -> ConfigError:
    names = ", ".join([*most.left_alone, *most.problems][:5])
    apart = f". Left alone, since they are being trained or cannot be read: {names}" if names else ""
    return ConfigError(
        f"{top}: {size(free_bytes)} cannot be freed, at most {size(most.freed_bytes)} ({most.freed_bytes} bytes) can: "
        "what remains is each run's head, newest and best checkpoint, what has a pin or a name, and what these or "
        f"other runs use{apart}"
    )


def _store_of(top: Store, run: RunSummary) -> Store:
    return top if run.uri == top.uri else reduce(Store.below, run.name.split("/"), top)


@dataclass(slots=True)
class _Examined:
    """A run of which something may be deleted.

    body: its `latest`, whole. best: its rule by which checkpoints are the best. exporting: checkpoints that are being
    exported. gone: what a prune drops without any rules. candidates: what may be dropped, by key. uses: how many
    entries that stay, and holds, refer to each directory. leftovers: what a prune and a sweep delete. chosen: the keys
    to drop.
    """

    summary: RunSummary
    register: Register
    body: Latest
    best: KeepBest | None
    exporting: frozenset[str]
    gone: frozenset[str]
    candidates: dict[str, Entry]
    uses: Counter[str]
    leftovers: Sequence[RunDeletion] = ()
    chosen: list[str] = field(default_factory=list)

    def of_run(self, item: Deletion, committed_at: float | None = None) -> RunDeletion:
        return RunDeletion(**asdict(item), uri=self.summary.uri, run=self.summary.name, committed_at=committed_at)

    def drop(self, key: str, *, grace_s: float) -> Iterator[RunDeletion]:
        """Choose a checkpoint to which no other one refers. Yield what that frees."""
        entry, store = self.candidates[key], self.register.store
        self.chosen.append(key)
        self.uses.subtract(set(entry.refs))
        yield self.of_run(deletion_of(store, key, WHY, grace_s), entry.committed_at)
        unlisted = self.gone | {item.key for item in self.body.evicted}
        for ref in sorted(unlisted.intersection(entry.refs)):
            if not self.uses[ref]:
                yield self.of_run(deletion_of(store, ref, f"not listed, and only {key} used it", grace_s))


def _examined(run: RunSummary, store: Store, *, grace_s: float) -> _Examined:
    register = Register(store)
    body, got = register.read_existing()
    gone = dropped(body, NO_RULES, now=got.at)
    stay = [entry for entry in body.live if entry.key not in gone]
    names = set(store.list_names(EXPORTS_PREFIX))
    exporting = {
        entry.key for entry in stay if entry.key in names and not StoredExport.at(store, entry.key).is_complete
    }
    best = _best_rule(store, body)
    droppable = _droppable(body, best, exporting, now=got.at)
    found = _Examined(
        summary=run,
        register=register,
        body=body,
        best=best,
        exporting=frozenset(exporting),
        gone=frozenset(gone),
        candidates={entry.key: entry for entry in stay if entry.key in droppable},
        uses=Counter(ref for entry in stay for ref in set(entry.refs)),
    )
    found.uses.update(directory for hold in body.holds for directory in hold.directories)
    held = {*found.uses, *(entry.key for entry in stay)}
    pruned = (item for item in plan_prune(register, grace_s=grace_s) if item.name not in held)
    found.leftovers = [found.of_run(item) for item in (*pruned, *plan_sweep(store))]
    return found


def _best_rule(store: Store, body: Latest) -> KeepBest | None:
    """Return the rule that the run's newest save states. Raises ConfigError when it cannot be read."""
    head = body.entry(body.head or "")
    if head is None:
        return None
    found = recorded_rules(Checkpoint(store, head).read_manifest().settings)
    unread = [text for text in found.unread if text.startswith("keep_best=")]
    if unread:
        raise ConfigError(f"{store}: nobody knows which checkpoints are its best: it was trained with {unread[0]}")
    return found.rules.keep_best


def _droppable(body: Latest, best: KeepBest | None, exporting: Collection[str], *, now: float) -> set[str]:
    """Return the keys of the checkpoints that nothing protects."""
    rules = Retention(keep_last=1, rolling_keep_last=1, keep_best=best)
    needed = {directory for hold in body.holds for directory in hold.directories} | body.kept_newest | set(exporting)
    return {item.entry.key for item in decide_retention(body, rules, now=now) if not item.is_kept} - needed


def _oldest(runs: Sequence[_Examined], wanted: int, *, grace_s: float) -> Iterator[RunDeletion]:
    """Choose the oldest checkpoints of all runs until this many bytes are freed, or nothing is left."""
    waiting = [(entry.committed_at, at, key) for at, run in enumerate(runs) for key, entry in run.candidates.items()]
    heapify(waiting)
    while wanted > 0 and waiting:
        _, at, key = heappop(waiting)
        run = runs[at]
        if run.uses[key] or key in run.chosen:
            continue
        for item in run.drop(key, grace_s=grace_s):
            wanted -= item.size_bytes
            yield item
        for ref in set(run.candidates[key].refs) & run.candidates.keys():
            if not run.uses[ref]:
                heappush(waiting, (run.candidates[ref].committed_at, at, ref))


@dataclass(frozen=True, slots=True)
class CleanPlan:
    """What a clean would do. cleaned: what it would delete."""

    cleaned: Cleaned
    _runs: Sequence[_Examined]
    _grace_s: float

    def carry_out(self, progress: ShowProgress = show_nothing) -> Cleaned:
        """Do it, run by run. Return what was deleted, and what will be after the grace period."""
        todo = [run for run in self._runs if run.chosen or run.leftovers]
        tally = ProgressTally(progress, total=len(todo))
        gone: dict[str, set[str]] = {}
        problems = dict(self.cleaned.problems)
        for run in todo:
            try:
                gone[run.summary.name] = self._clean(run)
            except RaycheckError as error:
                problems[run.summary.name] = str(error)
            tally.add(1)
        freed = [
            replace(item, is_deleted=item.name in gone[item.run]) for item in self.cleaned.freed if item.run in gone
        ]
        return replace(self.cleaned, freed=tuple(freed), problems=problems)

    def _clean(self, run: _Examined) -> set[str]:
        """Drop what was chosen of a run, and delete what it does not list. Return the names of what is deleted."""

        def choose(body: Latest, now: float) -> Mapping[str, str]:
            keys = {entry.key for entry in body.live}.intersection(run.chosen)
            if not keys:
                return {}
            is_same = (body.attempt.number, body.live[-1].key) == (run.body.attempt.number, run.body.live[-1].key)
            if not is_same or not keys <= _droppable(body, run.best, run.exporting, now=now):
                raise ConflictError(f"{run.register.store}: {CHANGED}")
            return dict.fromkeys(keys, by_hand("to free space"))

        if run.chosen:
            drop(run.register, choose, what="clean")
        pruned = prune(run.register, grace_s=self._grace_s)
        return {*pruned, *(item.name for item in sweep(run.register.store))}
