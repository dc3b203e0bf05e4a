"""Tells what happened to a run: its attempts, why each ended and what that cost, its commits, and its goodput.

It is put together from `latest`, the two small records of each attempt, and the newest manifest. What retention has
dropped is not in it: a commit is shown as long as its checkpoint is there.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

from raycheck.bucket.attempt_records import AttemptRecord, ResumeRecord, read_record, read_resumes
from raycheck.bucket.document_reading import again_if_corrupt
from raycheck.bucket.format.latest import Attempt, Entry, Latest
from raycheck.bucket.format.object_keys import CheckpointName
from raycheck.bucket.reading import Checkpoint, get_latest
from raycheck.bucket.run_status import Status, status_of
from raycheck.bucket.store import Store
from raycheck.errors import CorruptError, DeniedError, NotFoundError
from raycheck.views.attempts import AttemptHistory, Commit, Ending
from raycheck.views.notebook import Picture, history_html, steps_html

AT_ONCE = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class RunHistory:
    """Describes a run from its first attempt to now.

    status: whether it runs, as far as the bucket tells. attempts: the newest 50, the live one last. began_at: when the
    first attempt began, None where that is not known. trained_s: seconds of training in the head's state, without lost
    work and the time of saves. goodput: trained_s by the seconds from began_at to the head's commit, between 0 and 1;
    None without a commit.
    """

    uri: str
    run_id: str
    status: Status
    attempts: tuple[AttemptHistory, ...]
    began_at: float | None
    trained_s: float | None
    goodput: float | None

    @property
    def commits(self) -> tuple[Commit, ...]:
        """Returns the commits of all attempts, in their order."""
        return tuple(commit for attempt in self.attempts for commit in attempt.commits)

    @property
    def until(self) -> float:
        """Returns up to when something is known of the run, in unix seconds: for a run that goes on, up to now."""
        if self.status.state == "running":
            return self.status.now
        ends = [item.ended_at for item in self.attempts if item.ended_at is not None]
        return max(self.status.at, *ends, *(commit.at for commit in self.commits), self.attempts[0].began_at)

    @property
    def over_steps(self) -> Picture:
        """Returns a picture for a notebook: the attempts over steps instead of time, and what was trained and lost."""
        return Picture(steps_html(self.attempts))

    def _repr_html_(self) -> str:
        """Returns what a notebook shows: the attempts over time, why each ended, and the metrics at commits."""
        goodput = "unknown" if self.goodput is None else f"{100 * self.goodput:.1f} %"
        facts = (self.uri.partition("?")[0], self.status.text, f"goodput {goodput}")
        return history_html(facts, self.attempts, until=self.until)


def read_history(store: Store) -> RunHistory:
    """Read the history of the run in `store`. Raises NotFoundError when there is none."""
    body, got = again_if_corrupt(lambda: get_latest(store))
    numbers = [attempt.number for attempt in body.attempts]
    with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="raycheck-history") as pool:
        ends = pool.map(lambda number: _record(store, number), numbers)
        begins = pool.map(lambda number: _resume(store, number), numbers)
        head = pool.submit(_head_times, store, body)
        records = dict(zip(numbers, ends, strict=True))
        resumes = dict(zip(numbers, begins, strict=True))
        began_at, trained_s, committed_at = head.result()
    goodput = None
    if began_at is not None and trained_s is not None and committed_at is not None and committed_at > began_at:
        goodput = min(1.0, max(0.0, trained_s / (committed_at - began_at)))
    return RunHistory(
        uri=store.uri,
        run_id=body.run_id,
        status=status_of(body, records[body.attempt.number], now=got.at),
        attempts=tuple(_attempts(body, records, resumes)),
        began_at=began_at,
        trained_s=trained_s,
        goodput=goodput,
    )


def _record(store: Store, number: int) -> AttemptRecord | None:
    """Returns how an attempt ended; None where that cannot be read. S3 says "denied" for a missing object to some."""
    with suppress(DeniedError):
        return read_record(store, number)
    return None


def _resume(store: Store, number: int) -> ResumeRecord | None:
    with suppress(DeniedError):
        return read_resumes(store, [number]).get(number)
    return None


def _head_times(store: Store, body: Latest) -> tuple[float | None, float | None, float | None]:
    """Returns when the run began, its seconds of training, and the time of the head's commit."""
    entry = None if body.head is None else body.entry(body.head)
    if entry is None:
        return None, None, None
    with suppress(NotFoundError, CorruptError, DeniedError):
        manifest = Checkpoint(store, entry).read_manifest()
        return manifest.began_at, manifest.trained_s, entry.committed_at
    return None, None, None


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
                restore_s=None if resume is None else resume.restore_s,
                start_step=None if resume is None else resume.step,
                lost_steps=None if resume is None else resume.lost_steps,
                lost_s=None if resume is None else resume.lost_s,
                commits=tuple(commits.get(attempt.number, ())),
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
    """Returns why an attempt ended: in one word, and in the words of its record."""
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
"""How the texts of raycheck/train/coordinator/lost_work.py and of a rewind tell an attempt's end; the first that
applies counts. What is left begins with a rank and its error."""
