"""Prunes many runs by the rules of a file: the public `prune_runs`.

A rule selects runs by their state and by how long they have been idle, and says what such a run keeps. The first rule
that matches a run applies; a run that no rule matches is left alone. Each run is read again when its turn comes, which
may be hours after the listing, and is deleted only if nobody has written its `latest` since. Each run is pruned
separately, as by `raycheck prune`: safe during training, and repeatable after a crash.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, get_args

from raycheck.bucket.format.latest import Latest
from raycheck.bucket.protocol.pin_and_evict import by_hand
from raycheck.bucket.protocol.removal.delete import check_folder, check_users, delete_run
from raycheck.bucket.protocol.removal.prune_and_sweep import GRACE_S, NO_RULES, plan_prune, prune
from raycheck.bucket.protocol.swap import Register
from raycheck.bucket.store import open_store
from raycheck.catalog.listing import DEPTH, RunState, RunSummary, find_runs, list_runs
from raycheck.errors import ConfigError, NotFoundError, RaycheckError
from raycheck.settings import Retention
from raycheck.show_progress import ProgressTally, ShowProgress, show_nothing
from raycheck.storage_settings import StorageSettings

DAY_S = 86400.0
STATES: tuple[str, ...] = tuple(state for kind in get_args(RunState) for state in get_args(kind) or (kind,))
DELETABLE = ("finished", "died", "idle", "silent", "uncommitted")
_KEEPS = tuple(spec.name for spec in fields(Retention) if spec.name != "expire_after_s")


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """A rule of a policy: what runs in certain states keep.

    states: those of `list_runs`; () for all. name: a prefix of the run's path under the prefix. idle_days: only runs
    without a claim or commit for this long. keep: which checkpoints to keep. delete: delete the whole run instead.
    """

    states: tuple[str, ...] = ()
    name: str = ""
    idle_days: float = 0.0
    keep: Retention = NO_RULES
    delete: bool = False

    def fits(self, run: RunSummary) -> bool:
        """Return whether the rule matches this run. A run whose idle time is unknown is not idle."""
        is_old = not self.idle_days or (run.idle_s is not None and run.idle_s >= self.idle_days * DAY_S)
        return (not self.states or run.state in self.states) and run.name.startswith(self.name) and is_old


@dataclass(frozen=True, kw_only=True, slots=True)
class PrunedRun:
    """The result of a policy, planned or done, for one run.

    rule: the number of the rule that matched, from 1; None if none did. names: the checkpoints to delete, now or after
    the grace period. freed_bytes: the size of their objects. is_deleted: whether the whole run is deleted. problem: why
    the run could not be pruned; "" if it could.
    """

    uri: str
    name: str
    state: str
    rule: int | None = None
    names: tuple[str, ...] = ()
    freed_bytes: int = 0
    is_deleted: bool = False
    problem: str = ""


def parse_policy(tree: object) -> tuple[Rule, ...]:
    """Parse the rules in a policy file's content. Raises ConfigError, which names the rule and the field.

    tree: {"rules": [...]}; a rule has `states`, `name`, `idle_days`, and either `delete: true` or the settings of
    SaveSettings that say what stays, such as `keep_last`.
    """
    rules = tree.get("rules") if isinstance(tree, Mapping) and set(tree) == {"rules"} else None
    if not isinstance(rules, Sequence) or isinstance(rules, str) or not rules:
        raise ConfigError("a policy is a mapping with one entry, `rules`, a list of at least one rule")
    return tuple(_rule(item, number) for number, item in enumerate(rules, 1))


def _rule(item: object, number: int) -> Rule:
    known = {"states", "name", "idle_days", "delete", *_KEEPS}
    if not isinstance(item, Mapping) or not set(item) <= known:
        raise ConfigError(f"rule {number}: give a mapping with some of {', '.join(sorted(known))}")
    states = item.get("states", [])
    if not isinstance(states, Sequence) or isinstance(states, str) or not set(states) <= set(STATES):
        raise ConfigError(f"rule {number}: states={states!r}: give a list of {', '.join(STATES)}")
    idle_days = item.get("idle_days", 0)
    if type(idle_days) not in (int, float) or not 0 <= idle_days < float("inf"):
        raise ConfigError(f"rule {number}: idle_days={idle_days!r}: give a number of days")
    name, deletes = item.get("name", ""), item.get("delete", False)
    if not isinstance(name, str) or type(deletes) is not bool:
        raise ConfigError(f"rule {number}: name is a text, and delete is true or false")
    keeps: dict[str, Any] = {key: item[key] for key in _KEEPS if key in item}
    if deletes == bool(keeps):
        raise ConfigError(f"rule {number}: say either what such a run keeps ({', '.join(_KEEPS)}), or delete: true")
    if deletes and (not states or not set(states) <= set(DELETABLE) or not idle_days):
        raise ConfigError(f"rule {number}: to delete runs, give idle_days and states among {', '.join(DELETABLE)}")
    try:
        keep = Retention(**keeps)
    except ConfigError as error:
        raise ConfigError(f"rule {number}: {error}") from None
    return Rule(states=tuple(states), name=name, idle_days=float(idle_days), keep=keep, delete=deletes)


def prune_runs(
    prefix: str,
    policy: Mapping[str, object],
    *,
    dry_run: bool = False,
    depth: int = DEPTH,
    grace_s: float = GRACE_S,
    storage: StorageSettings | None = None,
    progress: ShowProgress = show_nothing,
) -> tuple[PrunedRun, ...]:
    """Prune every run under `prefix` by the first rule of a policy that matches it.

    policy: see parse_policy. dry_run: only report what would be deleted. depth: how many folders deep runs may be.
    grace_s: seconds that readers get before what was dropped is deleted. storage: the settings for the bucket.
    progress: called with the number of runs that are done, and of all runs. A run that cannot be pruned is in the
    result with its problem; the others are still pruned. A run that others use is not deleted. Raises ConfigError for
    an invalid policy, before anything is read.
    """
    rules = parse_policy(policy)
    progress(0, 0)
    found = list_runs(prefix, storage, depth=depth, sort="name")
    tally, done = ProgressTally(progress, total=len(found)), []
    for run in found:
        done.append(_pruned(run, rules, dry_run=dry_run, grace_s=grace_s, storage=storage))
        tally.add(1)
    return tuple(done)


def _pruned(
    run: RunSummary, rules: tuple[Rule, ...], *, dry_run: bool, grace_s: float, storage: StorageSettings | None
) -> PrunedRun:
    number = _rule_for(run, rules)
    done = PrunedRun(uri=run.uri, name=run.name, state=run.state, rule=number)
    if number is None:
        return done
    try:
        store = open_store(run.uri, storage)
        register = Register(store)
        body = register.read_existing()[0]  # before the check: a delete is refused if someone has written since
        looked = find_runs(store, depth=0)
        if not looked:
            raise NotFoundError(f"{store}: the run was deleted just now")
        run = replace(looked[0], name=run.name)
        number = _rule_for(run, rules)
        done = replace(done, state=run.state, rule=number)
        if number is None:
            return done
        rule = rules[number - 1]
        return _obeyed(rule, register, body, done, dry_run=dry_run, grace_s=grace_s)
    except RaycheckError as error:
        return replace(done, problem=str(error))


def _rule_for(run: RunSummary, rules: tuple[Rule, ...]) -> int | None:
    return next((number for number, rule in enumerate(rules, 1) if rule.fits(run)), None)


def _obeyed(
    rule: Rule, register: Register, body: Latest, done: PrunedRun, *, dry_run: bool, grace_s: float
) -> PrunedRun:
    """Apply `rule` to a run, or only plan it. Returns `done` with what is removed."""
    store = register.store
    if not rule.delete:
        found = plan_prune(register, rule.keep, grace_s=grace_s)
        if not dry_run:
            prune(register, rule.keep, grace_s=grace_s, by=by_hand("by a policy, applied"))
        freed = sum(item.size_bytes for item in found)
        return replace(done, names=tuple(item.name for item in found), freed_bytes=freed)
    check_folder(store)
    check_users(store, body, keeps_shared=False)
    freed = sum(item.size_bytes for item in store.list_objects(""))
    if not dry_run:
        delete_run(register, only_at=body.counter)
    return replace(done, names=tuple(entry.key for entry in body.live), freed_bytes=freed, is_deleted=True)
