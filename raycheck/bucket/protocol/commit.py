"""Commits a checkpoint, and records the end of a run. Steps 17 and 33.

The commit point is one swap of `latest`. Two coordinators cannot both commit: the swap replaces the very body from
which it was computed, and that body must carry the committer's own attempt number and coordinator id. A later claim has
replaced the body, so the older coordinator's swap is refused, and when it reads again it finds itself fenced. Safety
does not depend on any clock.
"""

from dataclasses import replace

from raycheck.bucket.format.checksum import crc32
from raycheck.bucket.format.latest import Entry, Finished, Latest, Trained, listed_metrics
from raycheck.bucket.format.manifest import Manifest
from raycheck.bucket.protocol.claim import Identity, check_current, check_owner, claimed_body
from raycheck.bucket.protocol.name_and_score import with_name_of_save
from raycheck.bucket.protocol.pin_and_evict import with_evicted
from raycheck.bucket.protocol.retention import dropped
from raycheck.bucket.protocol.sharing.base_run import without_reservation
from raycheck.bucket.protocol.swap import Register
from raycheck.errors import SaveFailedError, SupersededError
from raycheck.settings import Retention


def commit(
    register: Register,
    me: Identity,
    manifest: Manifest,
    data: bytes,
    rules: Retention,
    *,
    at: float | None = None,
    may_move_name: bool = False,
) -> Entry | None:
    """Commit the checkpoint: THE commit point, step 17. The same swap evicts what `rules` drop.

    An older attempt cannot commit (I4), and `latest` lists only what is written and held (I3). data: the manifest's
    bytes as they are in the bucket, which prove that it was written. at: see Register.swap. may_move_name: the
    manifest's name may be taken from a checkpoint of another step. Returns the entry, without that name when another
    checkpoint has kept it; None when a later save of the attempt is already committed (15), so that this one never will
    be. Raises SupersededError or FencedError when the attempt is over, SaveFailedError when the manifest refers to a
    directory that is no longer held.
    """

    def decide(body: Latest | None, now: float) -> Latest | None:
        body = claimed_body(register, body)
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
        missing = body.not_held(manifest.refs)
        if missing:
            raise SaveFailedError(f"{manifest.key} refers to {min(missing)}, which is no longer held")
        new = replace(
            body,
            head=manifest.key,
            finished=None,
            newest=(*body.newest, _entry(manifest, data, rules, now)),
            attempts=(*body.attempts[:-1], replace(current, last_save=manifest.save)),
            trained=_trained(manifest),
        )
        new = without_reservation(register.store, new, manifest.refs)
        if manifest.name is not None:
            new = with_name_of_save(new, manifest.key, manifest.name, may_move=may_move_name, now=now)
        # Of a part of the entries the rules drop no more than of all of them, so this needs no page. A prune does the
        # rest.
        why = f"replaced by {manifest.key}, a later save of its step"
        new = with_evicted(new, dict.fromkeys(_replaced(body, manifest), why), now=now)
        return with_evicted(new, dropped(replace(new, pages=()), rules, now=now), now=now)

    try:
        body = register.swap(decide, what=f"commit of {manifest.key}", at=at)
    except _TooLateError:
        return None
    return register.pages.ask(body, lambda body: body.entry(manifest.key))


def _entry(manifest: Manifest, data: bytes, rules: Retention, now: float) -> Entry:
    """Return the entry of a checkpoint that is being committed."""
    return Entry(
        key=manifest.key,
        refs=manifest.refs,
        step=manifest.step,
        committed_at=now,
        size_bytes=manifest.size_bytes,
        metrics=listed_metrics(manifest.metrics, needed=rules.metric),
        manifest_crc32=crc32(data),
        expires_at=_expires_at(manifest, rules, now),
        rolling=manifest.rolling,
        by_notice=manifest.by_notice,
        drifted=bool(manifest.drifted),
    )


def _replaced(body: Latest, manifest: Manifest) -> tuple[str, ...]:
    """Return the key of the checkpoint whose place this one takes; empty when that checkpoint may still be wanted.

    A name, a pin and scores mean that someone wants that very checkpoint. A rolling save, and one that lacks a metric
    of the other, is counted by fewer rules.
    """
    entry = body.entry(manifest.replaces) if manifest.replaces is not None else None
    if entry is None or entry.step != manifest.step or entry.key == manifest.key:
        return ()
    is_wanted = entry.pinned or entry.name is not None or bool(entry.scores)
    is_more = (manifest.rolling and not entry.rolling) or not entry.metrics.keys() <= manifest.metrics.keys()
    return () if is_wanted or is_more else (entry.key,)


def _trained(manifest: Manifest) -> Trained | None:
    """Return a manifest's training time in the form for `latest`; None if the start of the run is unknown."""
    if manifest.began_at is None:
        return None
    return Trained(key=manifest.key, trained_s=manifest.trained_s, began_at=manifest.began_at)


def _expires_at(manifest: Manifest, rules: Retention, now: float) -> float | None:
    """Return when a new entry expires: as its save says, otherwise by the rules. A named entry without its own expiry
    never does."""
    after_s = manifest.expire_after_s
    if after_s is None and manifest.name is None:
        after_s = rules.expire_after_s
    return None if after_s is None else now + after_s


class _TooLateError(Exception):
    """A later save of the same attempt is already committed."""


def finish(register: Register, me: Identity, *, group: str) -> Latest:
    """Record that all ranks of `group` reached the end of training, with head as the last checkpoint. Step 33.

    May be repeated. Raises SupersededError or FencedError when the group's attempt is over.
    """

    def decide(body: Latest | None, now: float) -> Latest | None:
        body = claimed_body(register, body)
        check_current(register, body, me)
        if body.attempt.group != group:
            raise SupersededError(f"group {group} is not the live one; attempt {body.attempt.number} is")
        if body.is_finished:
            return None
        return replace(body, finished=Finished(attempt=body.attempt.number, key=body.head, at=now))

    return register.swap(decide, what=f"end of the run in group {group}")
