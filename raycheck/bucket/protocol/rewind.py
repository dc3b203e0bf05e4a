"""Rewinds a run by hand: one swap, outside of any training, moves head to an earlier checkpoint. Step 31.

It is a claim like a driver's. It fences a run that is still active, since that run's next commit would otherwise undo
the rewind unnoticed. The abandoned branch stays listed until retention drops it, so the rewind can be reversed.
"""

from dataclasses import replace
from itertools import pairwise
from uuid import uuid4

from raycheck.bucket.attempt_records import record_end
from raycheck.bucket.format.latest import MAX_ATTEMPTS_LISTED, Attempt, Latest
from raycheck.bucket.protocol.claim import refuse_lost
from raycheck.bucket.protocol.swap import Register
from raycheck.bucket.reading import Checkpoint
from raycheck.errors import DamagedError, NotFoundError
from raycheck.show_progress import ProgressTally, ShowProgress, show_nothing


def rewind(register: Register, key: str, *, progress: ShowProgress = show_nothing) -> Latest:
    """Make the live checkpoint `key` the head, by a new attempt without ranks. The next start restores it. Step 31.

    A checkpoint that was marked as damaged is read completely first; if it is whole again, the mark is removed.
    progress: called with the bytes that were read of it, and their total. Raises NotFoundError when it is not live,
    DamagedError when it is still damaged, CorruptError when `latest` was lost or rolled back.
    """
    owner = f"rewind-{uuid4().hex[:12]}"

    def change(body: Latest, now: float) -> Latest | None:
        if body.has_owner(owner):  # the rewind was applied, even if others have claimed since
            return None
        entry = body.entry(key)
        if entry is None:
            raise NotFoundError(f"{register.store}: checkpoint {key} is no longer live")
        if entry.damaged and entry.damaged != verified:
            raise DamagedError(f"{register.store}: {key} was found damaged just now: {entry.damaged}")
        mine = attempt_by_hand(owner, body.attempt.number + 1, restore_key=key, now=now)
        finished_at[body.attempt.number] = body.finished_at
        return replace(
            body.with_entry(replace(entry, damaged=None)),
            newest_owners=(*body.newest_owners, owner),
            head=key,
            mirror=None,
            finished=None,  # a rewind means continuing training from there, even from the run's end
            attempts=(*body.attempts[1 - MAX_ATTEMPTS_LISTED :], mine),
        )

    finished_at: dict[int, float | None] = {}  # by the number of the attempt that a try ends
    refuse_lost(register)
    verified = _verified(register, key, ProgressTally(progress))
    body = register.edit(change, what=f"rewind to {key}")
    for ended, mine in pairwise(body.attempts):
        if mine.owner == owner and not register.is_dry:
            cause = f"the run was rewound to {key}"
            record_end(register.store, ended, by=mine, cause=cause, finished_at=finished_at[ended.number])
            record_end(register.store, mine, by=mine, cause=f"rewound the run to {key}")
    return body


def _verified(register: Register, key: str, tally: ProgressTally) -> str | None:
    """Read all of a checkpoint that is marked as damaged. Return the mark, which no longer applies; None if there is
    none.

    Raises DamagedError when it is still damaged.
    """
    body, _ = register.read_existing()
    entry = body.entry(key)
    if entry is None:
        raise NotFoundError(f"{register.store}: checkpoint {key} is no longer live")
    if not entry.damaged:
        return None
    tally.expect(entry.size_bytes)
    for finding in Checkpoint(register.store, entry).verify():
        tally.add(finding.size_bytes)
        if finding.problem:
            raise DamagedError(f"{register.store}: {finding.key}: {finding.problem}")
    return entry.damaged


def attempt_by_hand(owner: str, number: int, *, restore_key: str | None, now: float) -> Attempt:
    """Make an attempt without a worker group: it only fences the earlier ones."""
    return Attempt(
        number=number,
        owner=owner,
        coordinator=owner,
        group=owner,
        world_size=0,
        restore_key=restore_key,
        claimed_at=now,
    )
