"""The history of a run: its attempts, why each ended and what that cost, its commits, and its goodput.

It is assembled from `latest`, the two small records of each attempt, and the newest manifest. Commits whose checkpoints
retention has dropped are not included.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from raycheck.bucket.attempt_records import AttemptRecord, ResumeRecord, read_record, read_resumes
from raycheck.bucket.format.latest import Attempt, Entry, Latest
from raycheck.bucket.format.manifest import Manifest
from raycheck.bucket.format.object_keys import CheckpointName
from raycheck.bucket.protocol.sharing.fork import origin_in, origin_of
from raycheck.bucket.reading import Checkpoint, read_latest_at
from raycheck.bucket.run_status import Status, status_of
from raycheck.bucket.store import Store
from raycheck.errors import CorruptError, DamagedError, DeniedError, NotFoundError
from raycheck.views.attempts import AttemptHistory, Commit, Ending
from raycheck.views.context_pool import ContextPool
from raycheck.views.goodput import goodput_limit, goodput_of
from raycheck.views.in_words import goodput_text
from raycheck.views.notebook import Picture, history_html, steps_html

AT_ONCE = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class RunHistory:
    """A run from its first attempt until now.

    status: whether it is running, judging by the bucket. attempts: the newest 50, the live one last. began_at: the
    start of the first attempt, None if unknown. trained_s: seconds of training in the head's state, excluding lost work
    and the time of saves. goodput: trained_s divided by the seconds from began_at to the head's commit, between 0 and
    1; None without a commit. goodput_limit: the highest possible goodput, see raycheck/views/goodput.py; None for fewer
    than two failures or if a cost is unknown. parent: the URI of the run that this one was forked from; None for a run
    that is not a fork, or has dropped the checkpoint from which it started. settings: those of the training at its
    newest commit, as text; None if its manifest cannot be read.
    """

    uri: str
    run_id: str
    status: Status
    attempts: tuple[AttemptHistory, ...]
    began_at: float | None
    trained_s: float | None
    goodput: float | None
    goodput_limit: float | None = None
    parent: str | None = None
    settings: tuple[str, ...] | None = None

    @property
    def commits(self) -> tuple[Commit, ...]:
        """Return the commits of all attempts, in order."""
        return tuple(commit for attempt in self.attempts for commit in attempt.commits)

    @property
    def until(self) -> float:
        """Return the time up to which the run's history is known, in unix seconds; for a live run that is now."""
        if self.status.state == "running":
            return self.status.now
        ends = [item.ended_at for item in self.attempts if item.ended_at is not None]
        return max(self.status.at, *ends, *(commit.at for commit in self.commits), self.attempts[0].began_at)

    @property
    def over_steps(self) -> Picture:
        """Return a picture for a notebook: the attempts over steps instead of time, with the steps trained and lost."""
        return Picture(steps_html(self.attempts))

    def _repr_html_(self) -> str:
        """Return HTML for a notebook: the attempts over time, why each ended, and the metrics at commits."""
        goodput = f"goodput {goodput_text(self.goodput, self.goodput_limit)}"
        facts = (self.uri.partition("?")[0], self.status.text, goodput)
        return history_html(facts, self.attempts, until=self.until)


def read_history(store: Store, body: Latest | None = None, *, now: float | None = None) -> RunHistory:
    """Read the history of the run in `store`. Raises NotFoundError if there is no run.

    body, now: the run's `latest` and the store's time if the caller has just read them; then they are not read again.
    Requests: two per attempt, one for the head's manifest, and one more for some forks.
    """
    if body is None or now is None:
        body, now = read_latest_at(store)
    numbers = [attempt.number for attempt in body.attempts]
    with ContextPool(AT_ONCE, thread_name_prefix="raycheck-history") as pool:
        read_head = pool.submit(_head, store, body)
        ends = pool.map(lambda number: _record(store, number), numbers)
        begins = pool.map(lambda number: _resume(store, number), numbers)
        records = dict(zip(numbers, ends, strict=True))
        resumes = dict(zip(numbers, begins, strict=True))
        head = read_head.result()
    attempts = tuple(_attempts(body, records, resumes))
    entry = None if body.head is None else body.entry(body.head)
    status = status_of(body, records[body.attempt.number], now=now)
    until = now if status.state == "running" else max(status.at, 0.0 if entry is None else entry.committed_at)
    blocked_s = max((rank.blocked_s for rank in head.ranks), default=None) if head is not None else None
    return RunHistory(
        uri=store.uri,
        run_id=body.run_id,
        status=status,
        attempts=attempts,
        began_at=None if head is None else head.began_at,
        trained_s=None if head is None else head.trained_s,
        goodput=None
        if head is None or entry is None
        else goodput_of(trained_s=head.trained_s, began_at=head.began_at, committed_at=entry.committed_at),
        goodput_limit=goodput_limit(attempts, blocked_s=blocked_s, until=until),
        parent=_parent(store, body, head),
        settings=None if head is None else head.settings,
    )


def _record(store: Store, number: int) -> AttemptRecord | None:
    """Return how an attempt ended, or None if that cannot be read. For a missing object S3 may answer "denied"."""
    with suppress(DeniedError):
        return read_record(store, number)
    return None


def _resume(store: Store, number: int) -> ResumeRecord | None:
    with suppress(DeniedError):
        return read_resumes(store, [number]).get(number)
    return None


def _head(store: Store, body: Latest) -> Manifest | None:
    """Return the head's manifest, or None without a head or if it cannot be read."""
    entry = None if body.head is None else body.entry(body.head)
    if entry is not None:
        with suppress(NotFoundError, CorruptError, DeniedError, DamagedError):
            return Checkpoint(store, entry).read_manifest()
    return None


def _parent(store: Store, body: Latest, head: Manifest | None) -> str | None:
    """Return the URI of the run that this one was forked from, which the head's manifest may contain."""
    if head is not None and head.attempt == 0:
        return origin_in(body, head)
    with suppress(DeniedError):
        return origin_of(store, body)
    return None


def _attempts(
    body: Latest, records: Mapping[int, AttemptRecord | None], resumes: Mapping[int, ResumeRecord | None]
) -> Sequence[AttemptHistory]:
    commits: dict[int, list[Commit]] = {}
    for entry in body.live:
        name = CheckpointName.parse(entry.key)
        if name is not None:
            commits.setdefault(name.attempt, []).append(_commit(entry, is_head=entry.key == body.head))
    found = []
    for place, attempt in enumerate(body.attempts):
        after = body.attempts[place + 1] if place + 1 < len(body.attempts) else None
        record, resume = records[attempt.number], resumes[attempt.number]
        ending, cause = _ending(body, attempt, after, record)
        found.append(
            AttemptHistory(
                number=attempt.number,
                world_size=attempt.world_size,
                began_at=attempt.claimed_at,
                ended_at=_ended_at(body, attempt, after, record, ending),
                ending=ending,
                cause=cause,
                restored=attempt.restore_key,
                last_save=attempt.last_save,
                restore_s=None if resume is None else resume.restore_s,
                start_step=None if resume is None else resume.step,
                lost_steps=None if resume is None else resume.lost_steps,
                lost_s=None if resume is None else resume.lost_s,
                commits=tuple(commits.get(attempt.number, ())),
                resume=resume,
            )
        )
    return found


def _commit(entry: Entry, *, is_head: bool) -> Commit:
    return Commit(
        key=entry.key,
        step=entry.step,
        at=entry.committed_at,
        size_bytes=entry.size_bytes,
        is_head=is_head,
        is_by_notice=entry.by_notice,
        is_rolling=entry.rolling,
        is_pinned=entry.pinned,
        name=entry.name,
        damaged=entry.damaged,
        metrics=dict(entry.metrics),
        scores=dict(entry.scores),
    )


def _ended_at(
    body: Latest, attempt: Attempt, after: Attempt | None, record: AttemptRecord | None, ending: Ending
) -> float | None:
    if ending == "finished" and body.finished is not None and body.finished.attempt == attempt.number:
        return body.finished.at
    if record is not None:
        return record.ended_at
    return None if after is None else after.claimed_at


def _ending(body: Latest, attempt: Attempt, after: Attempt | None, record: AttemptRecord | None) -> tuple[Ending, str]:
    """Return why an attempt ended: the kind of ending, and the text of its record."""
    cause = "" if record is None else record.cause
    if not attempt.world_size:
        return "by hand", cause
    if body.finished is not None and body.finished.attempt == attempt.number and body.is_finished:
        return "finished", cause or "came to the end of training"
    if after is None:
        return ("live", "") if record is None else ("gave up", cause)
    found = next((ending for words, ending in _ENDINGS if words in cause), None)
    return found or ("failed" if cause.startswith("rank ") else "unknown"), cause


_ENDINGS: tuple[tuple[str, Ending], ...] = (
    ("it had finished", "finished"),
    ("its driver gave up", "gave up"),
    ("its driver was killed or replaced", "driver lost"),
    ("the run was rewound", "by hand"),
    (": its node was taken away", "preempted"),
    ("Ray changed the group from", "resized"),
    ("the same driver restarted its workers", "restarted"),
)
"""Substrings of the texts that raycheck/group/coordinator/lost_work.py and a rewind write when an attempt ends; the
first match counts. Any other text starts with a rank and its error."""
