"""Reads what a bucket on Google Cloud Storage does on its own, from the bucket's metadata, which is one request."""

from collections.abc import Iterator, Mapping
from typing import Any

from raycheck.bucket.store.bucket_rules import BucketRules, Deed, LifecycleRule

LOOK = "storage.buckets.get"
FIELDS = "location,versioning,lifecycle,retentionPolicy,softDeletePolicy,defaultEventBasedHold"
DAY_S = 86400.0
_DEEDS: dict[str, Deed] = {
    "Delete": "delete",
    "SetStorageClass": "colder",  # every class is read at once, also ARCHIVE
    "AbortIncompleteMultipartUpload": "abort uploads",
}
_ONLY_VERSIONS = ("daysSinceNoncurrentTime", "noncurrentTimeBefore", "numNewerVersions")
_AGES = ("age", "createdBefore", "daysSinceCustomTime", "customTimeBefore", *_ONLY_VERSIONS)


def rules_of(about: Mapping[str, Any]) -> BucketRules:
    """Return the rules in a bucket's metadata."""
    retained_s = float((about.get("retentionPolicy") or {}).get("retentionPeriod") or 0)
    has_hold = bool(about.get("defaultEventBasedHold"))
    words = [f"a retention policy of {retained_s / DAY_S:.6g} days"] if retained_s else []
    words += ["an event-based hold on every new object"] if has_hold else []
    softly_s = float((about.get("softDeletePolicy") or {}).get("retentionDurationSeconds") or 0)
    return BucketRules(
        region=str(about.get("location") or "").lower(),
        versioning=bool((about.get("versioning") or {}).get("enabled")),
        lock=" and ".join(words),
        is_immutable=bool(words),
        kept_days=softly_s / DAY_S,
        lifecycle=tuple(_lifecycle((about.get("lifecycle") or {}).get("rule") or [])),
    )


def _lifecycle(rules: Any) -> Iterator[LifecycleRule]:
    for number, rule in enumerate(rules, 1):
        deed = _DEEDS.get(rule["action"]["type"])
        where = rule.get("condition") or {}
        if deed is None:
            continue
        if where.get("isLive") is False or any(name in where for name in _ONLY_VERSIONS):
            if deed != "delete":
                continue
            deed = "delete versions"
        days = where.get("daysSinceNoncurrentTime") if deed == "delete versions" else where.get("age")
        other = {name: value for name, value in where.items() if name not in (*_AGES, "isLive", "matchesPrefix")}
        yield LifecycleRule(
            name=f"number {number}",
            deed=deed,
            days=None if days is None else float(days),
            prefixes=tuple(where.get("matchesPrefix") or ()),
            only=" and ".join(f"{name}={value}" for name, value in other.items()),
        )
