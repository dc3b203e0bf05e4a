"""Claim, commit, finish, fence: what may become of `latest`. Step numbers are those of FORMAT.md.

`latest` is a register only ever replaced by compare-and-swap. Why no two coordinators can both commit: a commit is
one swap of the very body it was computed from, and that body must carry the committer's own attempt number and
coordinator id; whoever claims later has replaced the body, so an older one's swap is refused, and when it reads
again it finds itself fenced. Safety uses no clock.
"""

import time
from contextlib import suppress
from dataclasses import dataclass, replace

from raycheck.bucket.document_reading import again_if_corrupt
from raycheck.bucket.format import object_keys
from raycheck.bucket.format.checksum import READS, crc32
from raycheck.bucket.format.document import dump
from raycheck.bucket.format.latest import MAX_ATTEMPTS_LISTED, Attempt, Entry, Finished, Latest, fitted, listed_metrics
from raycheck.bucket.format.manifest import Manifest
from raycheck.bucket.protocol.pin_and_evict import without
from raycheck.bucket.protocol.retention import dropped
from raycheck.bucket.protocol.swap import Register, lost
from raycheck.bucket.reading import directories
from raycheck.bucket.store import Store
from raycheck.bucket.store.jitter import CHANCE
from raycheck.errors import (
    ConfigError,
    ConflictError,
    CorruptError,
    FencedError,
    SaveFailedError,
    StoreError,
    SupersededError,
)
from raycheck.settings import Retention

PUT_ONCE_ATTEMPTS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Identity:
    """Who writes: the driver's `fit` (owner) and this start of its coordinator."""

    owner: str
    coordinator: str


def claim(
    register: Register, me: Identity, *, group: str, world_size: int, resume: str | int, run_id: str
) -> tuple[Attempt, Entry | None]:
    """Steps 8 to 11: make `group` the live attempt and name the one checkpoint that all its ranks restore.

    resume: "auto", "never", "must", or a step; it binds this owner's first claim only. Idempotent per group.
    Raises FencedError, SupersededError, ConfigError, CorruptError.
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
            check_resume(register.store.uri, None, resume)
            return Latest(run_id=run_id, counter=0, owners=(me.owner,), attempts=(attempt(1, None, now),), head=None)
        current = body.attempt
        check_owner(register, body, me)
        if current.group == group:  # 8: this group holds the attempt already
            return _taken_over(body, me)
        if any(known.group == group for known in body.attempts):
            raise SupersededError(f"group {group} was replaced by attempt {current.number} of the same driver")
        new_owner = me.owner not in body.owners
        head = check_resume(register.store.uri, body, resume) if new_owner else body.head
        return replace(
            body,
            owners=(*body.owners, me.owner) if new_owner else body.owners,
            head=head,
            finished=body.finished if head == body.head else None,
            attempts=(*body.attempts[1 - MAX_ATTEMPTS_LISTED :], attempt(current.number + 1, head, now)),
        )

    refuse_lost(register)  # 10, before: nothing is written over a lost or rolled back latest
    body = register.swap(decide, what=f"claim for group {group}")
    if body.proven != body.attempt.number:
        refuse_lost(register, mine=body.attempt)  # 10, after: it may have been lost in between
        body = _prove(register, body.attempt)
    key = body.attempt.restore_key
    entry = None
    if key is not None:
        entry = body.entry(key)
        if entry is None and body.attempt.last_save:
            raise SupersededError(f"attempt {body.attempt.number} was answered long ago; {key} is no longer needed")
        if entry is None:
            raise lost(register.store.uri, f"restores {key}, which it does not list")
    return body.attempt, entry  # 11


def take_over(register: Register, me: Identity, *, group: str) -> Attempt:
    """Step 12: a coordinator that Ray restarted goes on with the attempt of the group that called it.

    Raises SupersededError when that group is not the live one, FencedError when its driver is not.
    """

    def decide(body: Latest | None, now: float) -> Latest | None:
        del now
        body = _there(register, body)
        check_owner(register, body, me)
        if body.attempt.group != group:
            raise SupersededError(f"group {group} is not the live one; attempt {body.attempt.number} is")
        return _taken_over(body, me)

    return register.swap(decide, what=f"take-over of group {group}").attempt


def finish(register: Register, me: Identity, *, group: str) -> Latest:
    """Step 33: `group`, whose ranks have all come to the end of training, is done, and the head is all that it leaves.

    Raises SupersededError or FencedError when its attempt is over. May be repeated.
    """

    def decide(body: Latest | None, now: float) -> Latest | None:
        body = _there(register, body)
        check_current(register, body, me)
        if body.attempt.group != group:
            raise SupersededError(f"group {group} is not the live one; attempt {body.attempt.number} is")
        if body.is_finished:
            return None
        return replace(body, finished=Finished(attempt=body.attempt.number, key=body.head, at=now))

    return register.swap(decide, what=f"end of the run in group {group}")


def write_manifest(store: Store, manifest: Manifest) -> bytes:
    """Step 16: put-if-absent; equal bytes there already are our own earlier self's. Returns the bytes."""
    data = dump(manifest)
    put_once(store, object_keys.manifest_key(manifest.key), data)
    return data


def put_once(store: Store, key: str, data: bytes) -> None:
    """Create `key`, or accept that exactly these bytes are there. Raises SaveFailedError on other bytes (I2)."""
    for attempt in range(1, PUT_ONCE_ATTEMPTS + 1):
        try:
            store.put_if_absent(key, data)
        except ConflictError:
            if not _holds(store, key, data):
                raise SaveFailedError(f"{store.uri}: {key} exists with other bytes; this save is given up") from None
        except StoreError:  # judged by effect: if it was applied, the next try finds these bytes
            if attempt == PUT_ONCE_ATTEMPTS:
                raise
            time.sleep(CHANCE.uniform(0.1, 0.2) * 3**attempt)
            continue
        return


def _holds(store: Store, key: str, data: bytes) -> bool:
    """Whether exactly these bytes are there. Other ones are read again: they may have been changed on their way."""
    for _ in range(READS):
        with suppress(CorruptError):  # there are more of them
            if store.get(key, len(data)).data == data:
                return True
    return False


def commit(register: Register, me: Identity, manifest: Manifest, data: bytes, rules: Retention) -> bool:
    """Step 17, THE commit point. `data` are the manifest's bytes as they lie in the bucket: the proof.

    What `rules` drop is part of the same swap. False when a later save of the attempt was committed before (15):
    then this one never will be. Raises SupersededError or FencedError when the attempt is over, SaveFailedError
    when the manifest refers to a directory that is no longer held.
    """

    def decide(body: Latest | None, now: float) -> Latest | None:
        body = _there(register, body)
        if body.entry(manifest.key) is not None:
            return None
        check_owner(register, body, me)
        current = body.attempt
        if current.number != manifest.attempt or current.coordinator != me.coordinator:
            raise SupersededError(
                f"{manifest.key}: attempt {current.number} is live now; this save of attempt {manifest.attempt} is over"
            )
        if manifest.save <= current.last_save:
            raise _TooLateError
        missing = set(manifest.refs) - body.held()
        if missing:
            raise SaveFailedError(f"{manifest.key} refers to {min(missing)}, which is no longer held")
        entry = Entry(
            key=manifest.key,
            refs=manifest.refs,
            step=manifest.step,
            committed_at=now,
            size_bytes=manifest.size_bytes,
            metrics=listed_metrics(manifest.metrics, needed=rules.metric),
            manifest_crc32=crc32(data),
            expires_at=None if rules.expire_after_s is None else now + rules.expire_after_s,
            rolling=manifest.rolling,
        )
        new = replace(
            body,
            head=manifest.key,
            finished=None,
            live=(*body.live, entry),
            attempts=(*body.attempts[:-1], replace(current, last_save=manifest.save)),
        )
        return fitted(without(new, dropped(new, rules, now=now), now=now), needed=rules.metric)

    try:
        register.swap(decide, what=f"commit of {manifest.key}")
    except _TooLateError:
        return False
    return True


class _TooLateError(Exception):
    """A later save of the same attempt is committed."""


def check_owner(register: Register, body: Latest, me: Identity) -> None:
    """Step 9: an owner that is listed but not current is fenced for good. Owners are never taken off the list."""
    if body.attempt.owner != me.owner and me.owner in body.owners:
        raise FencedError(
            f"{register.store.uri}: another driver ({body.attempt.owner}) has taken over this run with attempt "
            f"{body.attempt.number}. This driver commits nothing more; stop it, or give it another run name"
        )


def check_current(register: Register, body: Latest, me: Identity) -> None:
    """Step 28: raises FencedError when another driver owns the run, SupersededError when another coordinator does."""
    check_owner(register, body, me)
    if body.attempt.owner != me.owner or body.attempt.coordinator != me.coordinator:
        raise SupersededError(f"{register.store.uri}: attempt {body.attempt.number} belongs to another coordinator")


def _there(register: Register, body: Latest | None) -> Latest:
    """A body that must exist because a claim came before. Raises CorruptError when it is gone."""
    if body is None:
        raise lost(register.store.uri, "is gone")
    return body


def _taken_over(body: Latest, me: Identity) -> Latest | None:
    current = body.attempt
    if current.coordinator == me.coordinator:
        return None
    return replace(body, attempts=(*body.attempts[:-1], replace(current, coordinator=me.coordinator)))


def check_resume(uri: str, body: Latest | None, resume: str | int) -> str | None:
    """The key that a new owner's first attempt restores under `resume`; None to start fresh. Raises ConfigError."""
    live = () if body is None else body.live
    head = None if body is None else body.head
    if resume == "never" and live:
        raise ConfigError(f"{uri}: resume='never', but the run has {len(live)} checkpoints. Use another run name")
    if resume == "must" and head is None:
        raise ConfigError(f"{uri}: resume='must', but the run has no committed checkpoint")
    if isinstance(resume, int):
        keys = [entry.key for entry in live if entry.step == resume and not entry.damaged]
        if not keys:
            steps = ", ".join(f"{entry.step}{' (damaged)' if entry.damaged else ''}" for entry in live) or "none"
            raise ConfigError(f"{uri}: resume={resume}, but there is no checkpoint of that step; there are: {steps}")
        return keys[-1]
    return head


def refuse_lost(register: Register, *, mine: Attempt | None = None) -> None:
    """Step 10. Raises CorruptError when `checkpoints/` holds a directory of an attempt that was never answered, as far
    as `latest` knows: it was lost or rolled back. mine: just claimed; SupersededError when it has been overtaken."""

    def look() -> None:
        names = directories(register.store)
        found = register.read()  # after the listing: a claim in between would look like a loss
        if not names or (found and found[0].knows(names[-1])):
            return
        if found and mine:
            _check_still(register, found[0], mine)
        what = "does not know" if found else "is missing beside"
        raise lost(register.store.uri, f"{what} the checkpoint {names[-1]}")

    again_if_corrupt(look)


def _prove(register: Register, mine: Attempt) -> Latest:
    """Step 10, last: from now on the group may save, and who finds a directory of this attempt knows whose it is."""

    def decide(body: Latest | None, now: float) -> Latest | None:
        del now
        body = _there(register, body)
        _check_still(register, body, mine)
        return None if body.proven == mine.number else replace(body, proven=mine.number)

    return register.swap(decide, what=f"answer to the claim of attempt {mine.number}")


def _check_still(register: Register, body: Latest, mine: Attempt) -> None:
    """Raises FencedError or SupersededError when the claim `mine` was overtaken before it was answered."""
    check_owner(register, body, Identity(owner=mine.owner, coordinator=mine.coordinator))
    there = body.attempt
    if (there.number, there.coordinator) != (mine.number, mine.coordinator):
        raise SupersededError(f"attempt {there.number} was claimed or taken over meanwhile")
