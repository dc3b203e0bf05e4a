"""What a bucket does on its own, in one form for all services: keeps versions, locks objects, deletes by age.

Each service states this in its own requests, most of which need permissions that a run does not need. So every answer
may also be `Unread`, which is neither yes nor no.
"""

from dataclasses import dataclass
from typing import Literal

Deed = Literal["delete", "archive", "colder", "delete versions", "abort uploads"]
"""What a lifecycle rule does. archive: moves objects to a class that must be thawed before a read. colder: moves them
to a class that is read as before, at another price."""


@dataclass(frozen=True, slots=True)
class Unread:
    """The reason why a rule of the bucket is not known."""

    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class LifecycleRule:
    """One action of one enabled lifecycle rule.

    name: as people know the rule. days: the age at which it acts; None for a fixed date, or where the service names
    none. prefixes: of the keys in the bucket; () for all. only: other conditions, in words, under which it acts on some
    of these objects; "" if there are none. Rules for objects with a tag are left out: raycheck's have none.
    """

    name: str
    deed: Deed
    days: float | None = None
    prefixes: tuple[str, ...] = ()
    only: str = ""

    def touches(self, prefix: str) -> bool:
        """Return whether the rule applies to keys that begin with `prefix`, or to some of them."""
        return not self.prefixes or any(one.startswith(prefix) or prefix.startswith(one) for one in self.prefixes)


@dataclass(frozen=True, kw_only=True, slots=True)
class BucketRules:
    """The rules that a bucket applies on its own.

    region: where it is; "" where the store has none. asked_region: where the settings say that it is; "" if they do
    not. versioning: whether replaced and deleted objects are kept. lock: a default retention or hold of new objects, in
    words; "" for none. is_immutable: new objects can neither be replaced nor deleted for a time. kept_days: for how
    many days deleted objects are kept and billed (soft delete); 0 for none.
    lifecycle: the actions of all enabled rules. keeps_uploads: unfinished uploads stay until somebody aborts them.
    """

    region: str | Unread = ""
    asked_region: str = ""
    versioning: bool | Unread = False
    lock: str | Unread = ""
    is_immutable: bool = False
    kept_days: float | Unread = 0.0
    lifecycle: tuple[LifecycleRule, ...] | Unread = ()
    keeps_uploads: bool = False
