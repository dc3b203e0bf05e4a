"""Moves a run back from a checkpoint that proved to be damaged when the group restored it. Step 26.

One swap marks the checkpoint, moves head to the newest checkpoint through which training passed before it, and makes
the attempt restore that one. A checkpoint that the run abandoned, or that a rewind skipped, is not used, as far as
`latest` still lists the attempts that show it: using it would undo someone's decision. Only proof counts as damage: a
wrong checksum or size, or an object that is missing although `latest` lists its checkpoint.
"""

from collections.abc import Iterator
from dataclasses import replace

from raycheck.bucket.format.latest import Entry, Latest
from raycheck.bucket.format.object_keys import CheckpointName
from raycheck.bucket.protocol.claim import Identity, check_current
from raycheck.bucket.protocol.swap import Register
from raycheck.errors import DamagedError, SupersededError

MAX_PROBLEM = 300


def go_back(register: Register, me: Identity, *, group: str, key: str, problem: str) -> Entry:
    """Mark `key`, which `group` tried to restore, as damaged, and return what the group restores instead.

    May be repeated. The marked checkpoint is pinned, so that it is kept for inspection. problem: what was found. Raises
    DamagedError when there is no earlier checkpoint to restore, and then changes nothing; FencedError or
    SupersededError when the attempt is over or has already saved.
    """

    def decide(body: Latest | None, now: float) -> Latest | None:
        del now
        assert body is not None, "a group has claimed, so this process has seen latest"
        check_current(register, body, me)
        current = body.attempt
        if current.group != group or current.last_save:
            raise SupersededError(f"{register.store}: attempt {current.number} no longer restores {key}")
        if current.restore_key != key:
            return None
        before = next(ancestors(body, key), None)
        if before is None:
            raise DamagedError(
                f"{register.store}: {key} is damaged, and there is no earlier checkpoint that it came from to go "
                f"back to: {problem}. 'raycheck verify' shows what is whole, 'raycheck rewind' makes it the head"
            )
        attempts = (*body.attempts[:-1], replace(current, restore_key=before.key))
        moved = replace(body, head=before.key, finished=None, attempts=attempts)
        bad = body.entry(key)
        return moved.with_entry(replace(bad, damaged=problem[:MAX_PROBLEM], pinned=True)) if bad else moved

    body = register.swap(decide, what=f"going back from {key}")
    entry = body.entry(body.attempt.restore_key or "")
    if entry is None:
        raise SupersededError(f"{register.store}: attempt {body.attempt.number} no longer restores {key}")
    return entry


def ancestors(body: Latest, key: str) -> Iterator[Entry]:
    """Yield the unmarked live checkpoints through which training passed on its way to `key`, newest first.

    Before the attempts that `latest` still lists, all earlier checkpoints count. Raises PagesNeededError when the next
    one may be in a page.
    """
    source_of = {attempt.number: attempt.restore_key for attempt in body.attempts}
    at = CheckpointName.parse(key)
    while at is not None:
        start = CheckpointName(attempt=at.attempt, save=0, step=0) if at.attempt in source_of else None
        yield from (entry for entry in body.between(start, at) if not entry.damaged)
        source = CheckpointName.parse(source_of.get(at.attempt) or "")
        at = source if source is not None and source < at else None
        entry = None if at is None else body.entry(str(at))
        if entry is not None and not entry.damaged:
            yield entry
