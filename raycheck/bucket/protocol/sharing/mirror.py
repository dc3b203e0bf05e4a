"""Maintains the `latest` of a mirror: a copy of a run in another place that follows it and is not trained on. Step 38.

A mirror names only checkpoints that are complete in it (I3). Its live attempt belongs to no driver, and has a number
above every attempt whose objects a copier may still write. So training that starts there never uses a name to which a
late copier writes (I2). The claim for that training is by another owner, which ends the mirror permanently: each change
here is a swap of a body that is still a mirror, and of the very run that is copied.
"""

from collections.abc import Collection, Iterable
from dataclasses import replace
from uuid import uuid4

from raycheck.bucket.document_reading import again_if_corrupt
from raycheck.bucket.format.latest import MAX_ATTEMPTS_LISTED, Evicted, Latest, Mirror
from raycheck.bucket.format.object_keys import CheckpointName
from raycheck.bucket.protocol.claim import claimed_body
from raycheck.bucket.protocol.rewind import attempt_by_hand
from raycheck.bucket.protocol.sharing.new_run import refuse_folder_of_runs
from raycheck.bucket.protocol.swap import Register, lost_error
from raycheck.bucket.reading import list_directories
from raycheck.bucket.store.address import shown_uri
from raycheck.errors import ConfigError, CorruptError


def original(body: Latest) -> Latest:
    """Return the body as the training wrote it if `body` is a mirror's; otherwise `body` itself.

    So a mirror can itself be copied. Nothing may be concluded from what an unfinished mirror lacks.
    """
    if body.mirror is None or not body.is_mirror:
        return body
    return replace(
        body,
        counter=body.mirror.counter,
        holds=(),  # for runs that were forked from the mirror
        newest_owners=tuple(owner for owner in body.newest_owners if owner != body.mirror.owner),
        attempts=body.attempts[:-1],
        mirror=None,
    )


def look_at_mirror(register: Register) -> tuple[Latest | None, tuple[CheckpointName, ...]]:
    """Read the body of a mirror, None if nothing is there, and list the mirror's directories.

    Raises CorruptError when there are checkpoints without `latest`, or of attempts that it does not know; ConfigError
    when the place contains other runs.
    """

    def look() -> tuple[Latest | None, tuple[CheckpointName, ...]]:
        names = list_directories(register.store)
        found = register.read()  # after the listing, as in step 10
        if names and (found is None or not found[0].has_answered(names[-1])):
            raise lost_error(
                register.store.uri, f"{'does not know' if found else 'is missing, but there is'} {names[-1]}"
            )
        return (found[0] if found else None), tuple(names)

    found, names = again_if_corrupt(look)
    if found is None:
        refuse_folder_of_runs(register.store)
    return found, names


def check_mirror(uri: str, body: Latest, source: Latest) -> None:
    """Raise ConfigError unless the body at `uri` belongs to a mirror of the run with the body `source`.

    Owners are never removed from their list, and every branch of a run begins with a claim. So a copy has an owner that
    its source lacks as soon as the two have diverged.
    """
    if body.run_id != source.run_id:
        raise ConfigError(f"{shown_uri(uri)}: there is already another run ({body.run_id}); give a free place")
    if not body.is_mirror:
        what = "somebody has trained, rewound or repaired there" if body.mirror is None else "somebody has claimed it"
        what = "it was deleted" if body.deleted_at is not None else what
        raise ConfigError(
            f"{shown_uri(uri)}: this is the run itself, or a copy that has become a separate run ({what}). "
            "Copy to another place"
        )
    known, owners = original(body).owners, source.owners
    if known[: len(owners)] != owners[: len(known)]:
        raise ConfigError(
            f"{shown_uri(uri)}: it mirrors another branch of this run: one of the two was trained on, or repaired, "
            "since they diverged. Copy to another place"
        )


def check_forward(uri: str, body: Latest, source: Latest) -> None:
    """Raise CorruptError when `source`, which was read after `body`, is older than what that mirror shows of it."""
    assert body.mirror is not None
    if source.counter < body.mirror.counter or source.num_owners < body.num_owners - 1:
        raise CorruptError(
            f"{shown_uri(uri)}: the mirror shows write {body.mirror.counter} of its source, whose latest is of write "
            f"{source.counter}: it was rolled back, or the copy that was given is behind. Nothing was written"
        )


def open_mirror(register: Register, source: Latest, *, uri: str) -> Latest:
    """Make the place a mirror of the run that has the body `source`, unless it already is one. Return its body.

    After that, objects of every attempt that `source` knows may be written there. A new mirror has no checkpoint, and
    cannot be claimed (claim.py). uri: where the source is, without settings.
    """
    owner = f"mirror-{uuid4().hex[:12]}"
    number = source.attempt.number + 1

    def decide(body: Latest | None, now: float) -> Latest | None:
        if body is not None:
            check_mirror(register.store.uri, body, source)
            if body.attempt.number >= number:
                return None
            return replace(body, proven=number, attempts=(*body.attempts[:-1], replace(body.attempt, number=number)))
        mine = attempt_by_hand(owner, number, restore_key=None, now=now)
        return Latest(
            run_id=source.run_id,
            counter=0,
            proven=number,
            newest_owners=(*source.owners, owner),
            attempts=(*source.attempts[1 - MAX_ATTEMPTS_LISTED :], mine),
            head=None,
            mirror=Mirror(source=uri, counter=0, missing=len(source.live), owner=owner),
        )

    return register.swap(decide, what="mirror")


def show(
    register: Register,
    source: Latest,
    *,
    uri: str,
    whole: Collection[str],
    coming: Collection[str] = (),
    directories: Iterable[str] = (),
) -> Latest:
    """Make the mirror show `source`, as far as its checkpoints are here. Step 38. Return the mirror's body.

    What the source has dropped is evicted here in the same swap, permanently. Nothing changes if the head is not here,
    or if another copier has already shown a later state.

    whole: checkpoints whose objects and manifest are all here and verified, in addition to those that the mirror lists.
    coming: those still to come. directories: other checkpoints whose copy has begun; those that can never be live again
    are evicted, so that they are deleted.
    """

    def decide(body: Latest | None, now: float) -> Latest | None:
        body = claimed_body(register, body)
        check_mirror(register.store.uri, body, source)
        assert body.mirror is not None
        listed = {entry.key for entry in body.live}
        here = (listed | set(whole)) - {item.key for item in body.evicted}
        if source.counter < body.mirror.counter or source.head not in here:
            return None
        live = tuple(replace(entry, damaged=None) for entry in source.live if entry.key in here)
        last = replace(
            body.attempt, number=max(body.attempt.number, source.attempt.number + 1), restore_key=source.head
        )
        new = replace(
            body,
            proven=last.number,
            newest_owners=(*source.owners, body.mirror.owner),
            owner_pages=(),
            attempts=(*source.attempts[1 - MAX_ATTEMPTS_LISTED :], last),
            head=source.head,
            finished=source.finished,
            forked_from=source.forked_from,
            newest=live,
            mirror=replace(body.mirror, source=uri, counter=source.counter, missing=len(set(coming) - here)),
        )
        new = replace(new, newest_evicted=_evicted(body, new, source, directories, now))
        return None if new == body else new

    return register.swap(decide, what="mirror")


def _evicted(body: Latest, new: Latest, source: Latest, directories: Iterable[str], now: float) -> tuple[Evicted, ...]:
    """Return the evicted checkpoints after the swap: those evicted before, and those that have left the source and are
    not listed here."""
    before, live = {item.key for item in body.evicted}, {entry.key for entry in new.live}
    released = (body.held() - new.held()) & before  # again, so that readers have the whole grace period
    there = {entry.key for entry in source.live}
    candidates = (body.held() | set(directories)) - before - live - there
    left = {key for key in candidates if _has_gone(source, key)}
    kept = tuple(item for item in body.evicted if item.key not in released)
    why = "its source no longer lists it"
    return (*kept, *(Evicted(key=key, at=now, why=why) for key in sorted(released | left)))


def _has_gone(source: Latest, key: str) -> bool:
    """Return whether checkpoint `key`, which is not live in the source, never will be, again or for the first time
    (I4).

    A later commit there is of a higher attempt, or of a higher save of the live one.
    """
    name = CheckpointName.parse(key)
    last = source.attempt
    return name is not None and (name.attempt, name.save) <= (last.number, last.last_save)
