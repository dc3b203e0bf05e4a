"""Judges what a bucket does on its own: whether it deletes what a run needs, or keeps what nobody needs."""

from collections.abc import Callable, Iterator
from typing import TypeVar

from raycheck.bucket.diagnosis.finding import BucketFinding, State
from raycheck.bucket.store.bucket_rules import BucketRules, LifecycleRule, Unread

T = TypeVar("T")
Verdict = tuple[State, str, str]
"""The state, text and cure of a finding."""
_SPARED = ("exports", "probes")
"""Folders of a run that it does without."""
_UPLOADS_DAYS, _VERSIONS_DAYS = 7, 30


def judge(rules: BucketRules, root: str) -> Iterator[BucketFinding]:
    """Yield the findings about a bucket's own rules, for runs below `root`, a path in the bucket."""
    prefix = f"{root}/" if root else ""
    life = rules.lifecycle
    actions = [] if isinstance(life, Unread) else [rule for rule in life if _touches(rule, prefix)]
    yield from _findings("region", rules.region, lambda region: _region(region, rules.asked_region))
    yield from _findings(
        "versioning",
        rules.versioning,
        lambda is_on: _versioning(actions, is_on=is_on),
        risk="with versioning, all that is replaced or deleted stays, and is billed",
    )
    yield from _findings("object lock", rules.lock, lambda lock: _lock(lock, is_immutable=rules.is_immutable))
    yield from _findings("soft delete", rules.kept_days, _soft_delete)
    risk = "a rule that deletes by age would delete checkpoints that are needed"
    yield from _findings("lifecycle rules", life, lambda _: _deletes(actions), risk=risk)
    if rules.keeps_uploads and not isinstance(life, Unread):
        yield from _findings("abandoned uploads", actions, _uploads)


def _findings(
    name: str, rule: T | Unread, judged: Callable[[T], Iterator[Verdict]], risk: str = ""
) -> Iterator[BucketFinding]:
    """Yield the verdicts about a rule as findings. risk: what may be so if the rule is not known."""
    if isinstance(rule, Unread):
        cure = risk and f"Find out in another way: {risk}"
        yield BucketFinding(name=name, state="unknown", text=f"not readable: {rule.why}", cure=cure)
        return
    for state, text, cure in judged(rule):
        yield BucketFinding(name=name, state=state, text=text, cure=cure)


def _touches(rule: LifecycleRule, prefix: str) -> bool:
    """Return whether a rule applies to objects that a run below `prefix` needs."""
    inside = [one.removeprefix(prefix).split("/") for one in rule.prefixes if one.startswith(prefix)]
    is_spared = bool(inside) and len(inside) == len(rule.prefixes)
    return rule.touches(prefix) and not (is_spared and all(set(path[:-1]) & set(_SPARED) for path in inside))


def _region(region: str, asked: str) -> Iterator[Verdict]:
    if asked and region and asked != region:
        text = f"the bucket is in {region}, and the settings say {asked}: requests are redirected"
        yield "slow", text, f"Set StorageSettings(region={region!r}), or AWS_REGION"
    else:
        yield "ok", region or "the store has no regions", ""


def _versioning(actions: list[LifecycleRule], *, is_on: bool) -> Iterator[Verdict]:
    if not is_on:
        yield "ok", "off: what is deleted is gone, and no longer billed", ""
        return
    days = [rule.days or 0 for rule in actions if rule.deed == "delete versions"]
    text = "on: every dropped checkpoint and every earlier `latest` stays as a version, and is billed,"
    if days and min(days) <= _VERSIONS_DAYS:
        yield "ok", f"{text} for {min(days):g} days", ""
        return
    text = f"{text} for {f'{min(days):g} days' if days else 'ever'}"
    cure = "Set a lifecycle rule that deletes noncurrent versions after some days, or turn versioning off"
    yield "advice", text, f"{cure}: raycheck never reads an older version"


def _lock(lock: str, *, is_immutable: bool) -> Iterator[Verdict]:
    if is_immutable:
        text = f"{lock}: a new object can neither be replaced nor deleted, and each commit replaces `latest`"
        yield "wrong", text, "Use a bucket or container without it"
    elif lock:
        text = f"every new object is retained for {lock}: dropped checkpoints stay as versions, and are billed"
        yield "advice", text, "Use a bucket without a default retention"
    else:
        yield "ok", "none by default", ""


def _soft_delete(kept_days: float) -> Iterator[Verdict]:
    if kept_days:
        text = f"on: every dropped checkpoint and every earlier `latest` is billed for {kept_days:g} more days"
        yield "advice", text, "Turn soft delete off for this bucket if that costs too much"


def _deletes(actions: list[LifecycleRule]) -> Iterator[Verdict]:
    is_fine = True
    for rule in actions:
        after = "at a fixed date" if rule.days is None else f"after {rule.days:g} days"
        whose = f"the rule {rule.name!r} ({_reach(rule)})"
        if rule.deed in ("delete", "archive"):
            deed = "deletes objects" if rule.deed == "delete" else "moves objects where they cannot be read at once"
            text = (
                f"{whose} {deed} {after}, also those that checkpoints still need: an object's age says nothing about "
                "that, and frozen parameters are uploaded once"
            )
            cure = (
                "Limit the rule to other prefixes, or put the runs under a prefix that it leaves alone; "
                "SaveSettings(keep_last=...) and raycheck prune delete what is not needed"
            )
            yield "wrong", text, cure
            is_fine = False
        elif rule.deed == "colder":
            text = f"{whose} moves objects to another class of storage {after}; a restore still reads them, at that "
            yield "advice", f"{text}class's price", "Limit the rule to other prefixes, unless the runs are old ones"
            is_fine = False
    if is_fine:
        yield "ok", "none deletes or moves what a run needs", ""


def _reach(rule: LifecycleRule) -> str:
    where = ", ".join(rule.prefixes) or "the whole bucket"
    return f"{where}, {rule.only}" if rule.only else where


def _uploads(actions: list[LifecycleRule]) -> Iterator[Verdict]:
    days = [rule.days or 0 for rule in actions if rule.deed == "abort uploads"]
    if days:
        yield "ok", f"a lifecycle rule aborts them after {min(days):g} days", ""
        return
    text = (
        "no lifecycle rule aborts them: the parts that a killed writer has sent stay, and are billed, until the run's "
        "next start or raycheck sweep"
    )
    yield "advice", text, f"Set a lifecycle rule that aborts incomplete multipart uploads after {_UPLOADS_DAYS} days"
