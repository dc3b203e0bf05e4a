"""Makes a worker group the live attempt, fences the older ones, and recognizes a fenced writer. Steps 8 to 12 and 28.

A claim is one swap of `latest` that raises the attempt number, the fencing token. An owner whose attempt was replaced
by another owner's is refused permanently, since owners are never removed from the list. Safety does not depend on any
clock.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from raycheck.bucket.document_reading import again_if_corrupt
from raycheck.bucket.format.latest import MAX_ATTEMPTS_LISTED, Attempt, Entry, Latest
from raycheck.bucket.format.object_keys import CheckpointName
from raycheck.bucket.protocol.resume import Resume, key_to_restore
from raycheck.bucket.protocol.swap import Register, lost_error
from raycheck.bucket.reading import list_directories
from raycheck.bucket.store import Got
from raycheck.bucket.store.address import shown_uri
from raycheck.errors import ConfigError, FencedError, SupersededError


@dataclass(frozen=True, kw_only=True, slots=True)
class Identity:
    """The identity of a writer: the id of the driver's `fit` (owner), and the id of this start of its coordinator."""

    owner: str
    coordinator: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Claimed:
    """A claim that was answered.

    entry: the checkpoint that all ranks restore; None in a fresh run. before: the body that the claim found, and the
    store's response with it; None when there was none. body: the body after the claim.
    """

    attempt: Attempt
    entry: Entry | None
    before: tuple[Latest, Got] | None
    body: Latest


def claim(
    register: Register,
    me: Identity,
    *,
    group: str,
    world_size: int,
    resume: Resume,
    run_id: str,
    read_ahead: Callable[[Entry], object] = lambda _: None,
) -> Claimed:
    """Make `group` the live attempt, and name the one checkpoint that all its ranks restore. Steps 8 to 11.

    May be repeated for the same group. resume: obeyed only by this owner's first claim. read_ahead: called with the
    checkpoint that will be named, while the claim waits for the store. Raises FencedError, SupersededError,
    ConfigError, CorruptError.
    """

    def attempt(number: int, restore_key: str | None, now: float) -> Attempt:
        return Attempt(
            number=number,
            owner=me.owner,
            coordinator=me.coordinator,
            group=group,
            world_size=world_size,
            restore_key=restore_key,
            claimed_at=now,
        )

    def decide(body: Latest | None, now: float) -> Latest | None:
        if body is None:
            key_to_restore(register.store.uri, None, resume)
            first = attempt(1, None, now)
            return Latest(run_id=run_id, counter=0, newest_owners=(me.owner,), attempts=(first,), head=None)
        current = body.attempt
        check_owner(register, body, me)
        _refuse_deleted(register.store.uri, body)
        if current.group == group:  # 8: this group holds the attempt already
            return _with_coordinator(body, me)
        if any(known.group == group for known in body.attempts):
            raise SupersededError(f"group {group} was replaced by attempt {current.number} of the same driver")
        refuse_unfinished_copy(register.store.uri, body)
        new_owner = not body.has_owner(me.owner)
        head = key_to_restore(register.store.uri, body, resume) if new_owner else body.head
        return replace(
            body,
            newest_owners=(*body.newest_owners, me.owner) if new_owner else body.newest_owners,
            head=head,
            finished=body.finished if head == body.head else None,
            mirror=None,
            attempts=(*body.attempts[1 - MAX_ATTEMPTS_LISTED :], attempt(current.number + 1, head, now)),
        )

    before = refuse_lost(register)  # 10, before: never write over a lost or rolled back latest
    body = register.swap(decide, what=f"claim for group {group}", at=before[1].at if before else None)
    ahead = body.entry(body.attempt.restore_key or "")
    body, _ = register.store.both(partial(_prove, register, body), lambda: read_ahead(ahead) if ahead else None)
    return Claimed(attempt=body.attempt, entry=_restored(register.store.uri, body), before=before, body=body)  # 11


def _restored(uri: str, body: Latest) -> Entry | None:
    """Return the checkpoint that the live attempt restores; None when it started fresh."""
    key = body.attempt.restore_key
    if key is None:
        return None
    entry = body.entry(key)
    if entry is None and body.attempt.last_save:
        raise SupersededError(
            f"attempt {body.attempt.number} has saved since its claim was answered, and {key} has been dropped"
        )
    if entry is None:
        raise lost_error(uri, f"restores {key}, which it does not list")
    return entry


def _refuse_deleted(uri: str, body: Latest) -> None:
    """Raise ConfigError for a run that was deleted but has objects left. Step 37."""
    if body.deleted_at is not None:
        raise ConfigError(
            f"{shown_uri(uri)}: this run was deleted. 'raycheck delete-run {shown_uri(uri)}' deletes what is left, or "
            "says who uses it; give the new run another name"
        )


def refuse_unfinished_copy(uri: str, body: Latest) -> None:
    """Raise ConfigError for a mirror that has no checkpoint yet: starting from it would be starting from zero (I7)."""
    if body.is_mirror and body.head is None:
        raise ConfigError(
            f"{shown_uri(uri)}: 'raycheck cp' has begun to copy a run to this place, and no checkpoint is whole here "
            "yet. Let it finish, or give another run name"
        )


def take_over(register: Register, me: Identity, *, group: str) -> Attempt:
    """Let a coordinator that Ray restarted continue the attempt of the group that called it. Step 12.

    Raises SupersededError when that group is not the live one, FencedError when its driver is fenced.
    """

    def decide(body: Latest | None, now: float) -> Latest | None:
        del now
        body = claimed_body(register, body)
        check_owner(register, body, me)
        if body.attempt.group != group:
            raise SupersededError(f"group {group} is not the live one; attempt {body.attempt.number} is")
        return _with_coordinator(body, me)

    return register.swap(decide, what=f"take-over of group {group}").attempt


def check_owner(register: Register, body: Latest, me: Identity) -> None:
    """Refuse an owner that is listed but not current: it is fenced permanently (I4). Step 9. Raises FencedError."""
    if body.attempt.owner != me.owner and body.has_owner(me.owner):
        raise FencedError(
            f"{register.store}: another driver ({body.attempt.owner}) has taken over this run with attempt "
            f"{body.attempt.number}. This driver commits nothing more; stop it, or give it another run name"
        )


def check_current(register: Register, body: Latest, me: Identity) -> None:
    """Raise FencedError when another driver owns the run, SupersededError when another coordinator does. Step 28."""
    check_owner(register, body, me)
    if body.attempt.owner != me.owner or body.attempt.coordinator != me.coordinator:
        raise SupersededError(f"{register.store}: attempt {body.attempt.number} belongs to another coordinator")


def claimed_body(register: Register, body: Latest | None) -> Latest:
    """Return the body, which must exist because a claim came before. Raises CorruptError when it is missing."""
    if body is None:
        raise lost_error(register.store.uri, "is gone")
    return body


def refuse_lost(register: Register, *, mine: Attempt | None = None) -> tuple[Latest, Got] | None:
    """Refuse to continue when `latest` was lost or rolled back, and return what was read of it. Step 10.

    So a run with checkpoints never silently starts from zero (I7). It was lost or rolled back if `checkpoints/` has a
    directory of an attempt whose claim, according to `latest`, was never answered. mine: the attempt just claimed.
    Raises CorruptError, or SupersededError when `mine` has been overtaken.
    """

    def is_known(names: list[CheckpointName], found: tuple[Latest, Got] | None) -> bool:
        return not names or (found is not None and found[0].has_answered(names[-1]))

    def look() -> tuple[Latest, Got] | None:
        names = list_directories(register.store)
        found = register.read_newest()  # after the listing: otherwise a claim in between would look like a loss
        if is_known(names, found):
            return found
        if found and mine:
            register.pages.ask(found[0], lambda body: _check_not_overtaken(register, body, mine))
        what = "does not know" if found else "is missing, but there is"
        raise lost_error(register.store.uri, f"{what} the checkpoint {names[-1]}")

    names, found = register.store.both(lambda: list_directories(register.store), register.read_newest)
    return found if is_known(names, found) else again_if_corrupt(look)


def _with_coordinator(body: Latest, me: Identity) -> Latest | None:
    """Return the body with this coordinator in the live attempt, None when it is already there."""
    current = body.attempt
    if current.coordinator == me.coordinator:
        return None
    return replace(body, attempts=(*body.attempts[:-1], replace(current, coordinator=me.coordinator)))


def _prove(register: Register, claimed: Latest) -> Latest:
    """Record in `latest` that the claim that wrote the body `claimed` is answered. Step 10, last part.

    From now on the group may save: a directory of this attempt no longer means that `latest` was lost.
    """
    mine = claimed.attempt
    if claimed.proven == mine.number:
        return claimed
    found = refuse_lost(register, mine=mine)  # 10, after: latest may have been lost in between

    def decide(body: Latest | None, now: float) -> Latest | None:
        del now
        body = claimed_body(register, body)
        _check_not_overtaken(register, body, mine)
        return None if body.proven == mine.number else replace(body, proven=mine.number)

    return register.swap(
        decide, what=f"answer to the claim of attempt {mine.number}", at=found[1].at if found else None
    )


def _check_not_overtaken(register: Register, body: Latest, mine: Attempt) -> None:
    """Raise FencedError or SupersededError when another claim was made before `mine` was answered."""
    check_owner(register, body, Identity(owner=mine.owner, coordinator=mine.coordinator))
    live = body.attempt
    if (live.number, live.coordinator) != (mine.number, mine.coordinator):
        raise SupersededError(f"attempt {live.number} was claimed or taken over in the meantime")
