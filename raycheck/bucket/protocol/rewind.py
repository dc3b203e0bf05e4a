"""Going back on purpose, from outside of any training: one swap that moves head to an earlier checkpoint.

It is a claim like a driver's: a run that is still going is fenced by it, since its next commit would undo the rewind
unseen. The branch that is left stays listed until retention takes it, so that one can go forward again.
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


def rewind(register: Register, key: str) -> Latest:
    """Step 31: make the live checkpoint `key` the head, as a new attempt without ranks. The next start restores it.

    One that was found damaged is read through first; when it is whole again it loses that mark. Raises NotFoundError
    when it is not live, DamagedError when it is still damaged, CorruptError when `latest` was lost or rolled back.
    """
    owner = f"rewind-{uuid4().hex[:12]}"

    def change(body: Latest, now: float) -> Latest | None:
        if owner in body.owners:  # applied, whoever may have come after it
            return None
        entry = body.entry(key)
        if entry is None:
            raise NotFoundError(f"{register.store.uri}: checkpoint {key} is no longer live")
        if entry.damaged and entry.damaged != verified:
            raise DamagedError(f"{register.store.uri}: {key} was found damaged just now: {entry.damaged}")
        number = body.attempt.number + 1
        return replace(
            body.with_entry(replace(entry, damaged=None)),
            owners=(*body.owners, owner),
            head=key,
            finished=None,  # whoever rewinds means to train on from there, be it the run's end
            attempts=(*body.attempts[1 - MAX_ATTEMPTS_LISTED :], by_hand(owner, number, restore_key=key, now=now)),
        )

    refuse_lost(register)
    verified = _verified(register, key)
    body = register.edit(change, what=f"rewind to {key}")
    for ended, mine in pairwise(body.attempts):
        if mine.owner == owner:
            record_end(register.store, ended, by=mine, cause=f"the run was rewound to {key}")
            record_end(register.store, mine, by=mine, cause=f"rewound the run to {key}")
    return body


def _verified(register: Register, key: str) -> str | None:
    """The mark of damage that no longer holds, after reading all of the checkpoint."""
    body, _ = register.look()
    entry = body.entry(key)
    if entry is None or not entry.damaged:
        return None
    for finding in Checkpoint(register.store, entry).verify():
        if finding.problem:
            raise DamagedError(f"{register.store.uri}: {finding.key}: {finding.problem}")
    return entry.damaged


def by_hand(owner: str, number: int, *, restore_key: str | None, now: float) -> Attempt:
    """An attempt that no worker group holds: it only fences what was before."""
    return Attempt(
        number=number,
        owner=owner,
        coordinator=owner,
        group=owner,
        world_size=0,
        restore_key=restore_key,
        claimed_at=now,
    )
