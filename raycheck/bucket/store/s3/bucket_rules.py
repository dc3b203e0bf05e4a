"""Reads what a bucket on S3, or on a compatible store, does on its own: versioning, object lock, lifecycle rules."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from raycheck.bucket.store.bucket_rules import Deed, LifecycleRule

_THAWED = ("GLACIER", "DEEP_ARCHIVE")
"""The classes of storage from which an object must be restored before it can be read."""


def lock_in_words(answer: Mapping[str, Any]) -> str:
    """Return the default retention of new objects; "" if there is none. answer: of get_object_lock_configuration."""
    rule = answer.get("ObjectLockConfiguration", {}).get("Rule", {}).get("DefaultRetention", {})
    if not rule:
        return ""
    length = f"{rule['Years']} years" if rule.get("Years") else f"{rule.get('Days', '?')} days"
    return f"{length} in {str(rule.get('Mode', 'unknown')).lower()} mode"


def lifecycle_rules(answer: Mapping[str, Any]) -> tuple[LifecycleRule, ...]:
    """Return the actions of all enabled rules. answer: of get_bucket_lifecycle_configuration."""
    return tuple(
        action
        for number, rule in enumerate(answer.get("Rules", []), 1)
        if rule.get("Status") == "Enabled"
        for action in _actions(rule, str(rule.get("ID") or f"number {number}"))
    )


def _actions(rule: Mapping[str, Any], name: str) -> Iterator[LifecycleRule]:
    prefix, tags, only = _filter(rule)
    if tags:  # raycheck's objects have none
        return

    def action(deed: Deed, days: Any = None) -> LifecycleRule:
        return LifecycleRule(
            name=name,
            deed=deed,
            days=None if days is None else float(days),
            prefixes=(prefix,) if prefix else (),
            only=only,
        )

    expiration = rule.get("Expiration") or {}
    if expiration.get("Days") is not None or expiration.get("Date") is not None:
        yield action("delete", expiration.get("Days"))
    for move in _listed(rule.get("Transitions")):
        yield action("archive" if move.get("StorageClass") in _THAWED else "colder", move.get("Days"))
    if versions := rule.get("NoncurrentVersionExpiration"):
        yield action("delete versions", versions.get("NoncurrentDays"))
    if uploads := rule.get("AbortIncompleteMultipartUpload"):
        yield action("abort uploads", uploads.get("DaysAfterInitiation"))


def _filter(rule: Mapping[str, Any]) -> tuple[str, Sequence[Any], str]:
    """Return the prefix of the keys to which a rule applies, its tags, and its other conditions in words.

    Older rules have the prefix outside of the filter.
    """
    where = rule.get("Filter") or {}
    where = {**where, **(where.get("And") or {})}
    prefix = str(where.get("Prefix") or rule.get("Prefix") or "")
    tags = [*_listed(where.get("Tag")), *_listed(where.get("Tags"))]
    sizes = [f"{name}={where[name]}" for name in ("ObjectSizeGreaterThan", "ObjectSizeLessThan") if where.get(name)]
    return prefix, tags, " and ".join(sizes)


def _listed(value: Any) -> Sequence[Mapping[str, Any]]:
    return value if isinstance(value, list) else [value] if value else []
