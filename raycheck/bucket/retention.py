"""What to keep: a pure decision on the entries of `latest`, taken inside the commit's own swap."""

from collections.abc import Sequence

from raycheck.bucket.latest import Entry


def to_evict(live: Sequence[Entry], *, head: str, keep_last: int) -> tuple[str, ...]:
    """Keys to drop, by order of commit and not of step: never the head, never a pinned one."""
    old = live[:-keep_last] if len(live) > keep_last else ()
    return tuple(entry.key for entry in old if entry.key != head and not entry.pinned)
