"""Judges what a bucket does on its own: whether it deletes what a run needs, or keeps what nobody needs."""

from collections.abc import Iterator

from raycheck.bucket.diagnosis.finding import BucketFinding, ok
from raycheck.bucket.store.bucket_rules import BucketRules, LifecycleRule, Unread

_SPARED = ("exports", "probes")
"""Folders of a run that it does without."""
_UPLOADS_DAYS, _VERSIONS_DAYS = 7, 30


def judge(rules: BucketRules, root: str) -> Iterator[BucketFinding]:
    """Yield the findings about a bucket's own rules, for runs below `root`, a path in the bucket."""
    yield _region(rules)
    prefix = f"{root}/" if root else ""
    life = rules.lifecycle
    actions = [] if isinstance(life, Unread) else [rule for rule in life if _touches(rule, prefix)]
    yield _versioning(rules, actions)
    yield _lock(rules)
    yield from _soft_delete(rules)
    if isinstance(life, Unread):
        yield _unread("lifecycle rules", life, "a rule that deletes by age would delete checkpoints that are needed")
        return
    yield from _deletes(actions)
    if rules.keeps_uploads:
        yield _uploads(actions)


def _touches(rule: LifecycleRule, prefix: str) -> bool:
    """Return whether a rule applies to objects that a run below `prefix` needs."""
    inside = [one.removeprefix(prefix).split("/") for one in rule.prefixes if one.startswith(prefix)]
    is_spared = bool(inside) and len(inside) == len(rule.prefixes)
    return rule.touches(prefix) and not (is_spared and all(set(path[:-1]) & set(_SPARED) for path in inside))


def _region(rules: BucketRules) -> BucketFinding:
    if isinstance(rules.region, Unread):
        return _unread("region", rules.region, "")
    if rules.asked_region and rules.region and rules.asked_region != rules.region:
        return BucketFinding(
            name="region",
            state="slow",
            text=f"the bucket is in {rules.region}, and the settings say {rules.asked_region}: requests are redirected",
            cure=f"Set StorageSettings(region={rules.region!r}), or AWS_REGION",
        )
    return ok("region", rules.region or "the store has no regions")


def _versioning(rules: BucketRules, actions: list[LifecycleRule]) -> BucketFinding:
    name = "versioning"
    if isinstance(rules.versioning, Unread):
        return _unread(name, rules.versioning, "with versioning, all that is replaced or deleted stays, and is billed")
    if not rules.versioning:
        return ok(name, "off: what is deleted is gone, and no longer billed")
    days = [rule.days or 0 for rule in actions if rule.deed == "delete versions"]
    text = "on: every dropped checkpoint and every earlier `latest` stays as a version, and is billed,"
    if days and min(days) <= _VERSIONS_DAYS:
        return ok(name, f"{text} for {min(days):g} days")
    text = f"{text} for {f'{min(days):g} days' if days else 'ever'}"
    cure = "Set a lifecycle rule that deletes noncurrent versions after some days, or turn versioning off"
    return BucketFinding(name=name, state="advice", text=text, cure=f"{cure}: raycheck never reads an older version")


def _lock(rules: BucketRules) -> BucketFinding:
    name = "object lock"
    if isinstance(rules.lock, Unread):
        return _unread(name, rules.lock, "")
    if rules.is_immutable:
        return BucketFinding(
            name=name,
            state="wrong",
            text=f"{rules.lock}: a new object can neither be replaced nor deleted, and each commit replaces `latest`",
            cure="Use a bucket or container without it",
        )
    if rules.lock:
        return BucketFinding(
            name=name,
            state="advice",
            text=f"every new object is retained for {rules.lock}: dropped checkpoints stay as versions, and are billed",
            cure="Use a bucket without a default retention",
        )
    return ok(name, "none by default")


def _soft_delete(rules: BucketRules) -> Iterator[BucketFinding]:
    name = "soft delete"
    if isinstance(rules.kept_days, Unread):
        yield _unread(name, rules.kept_days, "")
    elif rules.kept_days:
        yield BucketFinding(
            name=name,
            state="advice",
            text=f"on: every dropped checkpoint and every earlier `latest` is billed for {rules.kept_days:g} more days",
            cure="Turn soft delete off for this bucket if that costs too much",
        )


def _deletes(actions: list[LifecycleRule]) -> Iterator[BucketFinding]:
    name, is_fine = "lifecycle rules", True
    for rule in actions:
        after = "at a fixed date" if rule.days is None else f"after {rule.days:g} days"
        whose = f"the rule {rule.name!r} ({_reach(rule)})"
        if rule.deed in ("delete", "archive"):
            deed = "deletes objects" if rule.deed == "delete" else "moves objects where they cannot be read at once"
            yield BucketFinding(
                name=name,
                state="wrong",
                text=f"{whose} {deed} {after}, also those that checkpoints still need: an object's age says nothing "
                "about that, and frozen parameters are uploaded once",
                cure="Limit the rule to other prefixes, or put the runs under a prefix that it leaves alone; "
                "SaveSettings(keep_last=...) and raycheck prune delete what is not needed",
            )
            is_fine = False
        elif rule.deed == "colder":
            yield BucketFinding(
                name=name,
                state="advice",
                text=f"{whose} moves objects to another class of storage {after}; a restore still reads them, at that "
                "class's price",
                cure="Limit the rule to other prefixes, unless the runs are old ones",
            )
            is_fine = False
    if is_fine:
        yield ok(name, "none deletes or moves what a run needs")


def _reach(rule: LifecycleRule) -> str:
    where = ", ".join(rule.prefixes) or "the whole bucket"
    return f"{where}, {rule.only}" if rule.only else where


def _uploads(actions: list[LifecycleRule]) -> BucketFinding:
    name = "abandoned uploads"
    days = [rule.days or 0 for rule in actions if rule.deed == "abort uploads"]
    if days:
        return ok(name, f"a lifecycle rule aborts them after {min(days):g} days")
    return BucketFinding(
        name=name,
        state="advice",
        text="no lifecycle rule aborts them: the parts that a killed writer has sent stay, and are billed, until the "
        "run's next start or raycheck sweep",
        cure=f"Set a lifecycle rule that aborts incomplete multipart uploads after {_UPLOADS_DAYS} days",
    )


def _unread(name: str, rule: Unread, risk: str) -> BucketFinding:
    return BucketFinding(
        name=name, state="unknown", text=f"not readable: {rule.why}", cure=risk and f"Find out in another way: {risk}"
    )
