"""What `latest` and the records of attempts say about a run's past, as facts, and how the history catches up."""

from contextlib import suppress
from functools import partial

from raycheck.bucket.attempt_records import read_record, read_resumes
from raycheck.bucket.format.latest import Latest
from raycheck.bucket.format.object_keys import ATTEMPTS_PREFIX, attempt_of
from raycheck.bucket.history.facts import AttemptFact, CommitRecord, DropRecord, Facts
from raycheck.bucket.history.segments import read_facts, record_facts
from raycheck.bucket.store import Store
from raycheck.errors import DeniedError

AT_ONCE = 32


def facts_of(body: Latest) -> Facts:
    """Return what a body of `latest` lists itself, without its pages, as facts."""
    return Facts(
        commits={entry.key: CommitRecord.of(entry, body.counter) for entry in body.newest},
        drops={item.key: DropRecord(key=item.key, at=item.at, why=item.why) for item in body.newest_evicted},
        attempts={item.number: AttemptFact(counter=body.counter, attempt=item) for item in body.attempts},
    )


def with_records(store: Store, body: Latest, known: Facts) -> Facts:
    """Return `known` with what `body` and the records of attempts say. body: of `latest`, as whole as it can be read.

    The two records of an attempt are read only if `known` lacks the one of its end, which is written last. Those of
    attempts that `body` does not list are read if `known` names only their commits or metrics. If it has no attempt,
    which is so for a run of an older raycheck, all are looked for.
    """
    facts = known.joined(facts_of(body))
    numbers = {attempt.number for attempt in body.attempts} | (facts.numbers - facts.attempts.keys())
    if not known.attempts:
        with suppress(DeniedError):
            numbers |= {number for item in store.list_objects(ATTEMPTS_PREFIX) if (number := attempt_of(item.key))}
    unread = sorted(numbers - known.ends.keys())
    for first in range(0, len(unread), AT_ONCE):
        batch = unread[first : first + AT_ONCE]
        for found in store.together(*(partial(_records, store, number) for number in batch)):
            facts = facts.joined(found)
    ended = (record.attempt for number, record in facts.ends.items() if number not in facts.attempts)
    return facts.joined(Facts(attempts={item.number: AttemptFact(counter=0, attempt=item) for item in ended}))


def _records(store: Store, number: int) -> Facts:
    """Read the records of an attempt. For a missing object S3 may answer "denied"."""
    end, starts = None, {}
    with suppress(DeniedError):
        end = read_record(store, number)
    with suppress(DeniedError):
        starts = read_resumes(store, [number])
    return Facts(ends={} if end is None else {number: end}, starts=starts)


def catch_up(store: Store, body: Latest) -> None:
    """Write what `body` and the records of attempts say and the history lacks. Raises StoreError. body: as whole as it
    can be read."""
    known, _ = read_facts(store, body.run_id)
    new = with_records(store, body, known).without(known)
    record_facts(store, new, run_id=body.run_id, counter=body.counter)
