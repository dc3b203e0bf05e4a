"""The history of a run: its attempts, why each ended and what that cost, its commits, and its goodput.

It is the union of the segments of the history, `latest`, and the small records of the attempts that no segment has yet;
the newest manifest states the goodput. A run without segments, as an older raycheck wrote, has what the others say.
"""

import re
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from raycheck.bucket.attempt_records import HAD_FINISHED, AttemptRecord, SlowRecord, read_slow
from raycheck.bucket.format.latest import Attempt, Latest, PageRef
from raycheck.bucket.format.manifest import Manifest
from raycheck.bucket.format.object_keys import CheckpointName
from raycheck.bucket.history.attempt_facts import with_records
from raycheck.bucket.history.facts import CommitRecord, Facts
from raycheck.bucket.history.metric_rows import TIME, Series
from raycheck.bucket.history.segments import read_facts
from raycheck.bucket.pages import lost_page_text
from raycheck.bucket.protocol.sharing.fork import origin_in, origin_of
from raycheck.bucket.reading import Checkpoint, read_readable_at
from raycheck.bucket.run_status import Status, status_of
from raycheck.bucket.store import Store
from raycheck.errors import CorruptError, DamagedError, DeniedError, NotFoundError
from raycheck.views.attempts import AttemptHistory, Commit, CommitState, Ending, MetricLine
from raycheck.views.context_pool import ContextPool
from raycheck.views.goodput import goodput_limit, goodput_of
from raycheck.views.in_words import goodput_text
from raycheck.views.metric_charts import MAX_CHARTS
from raycheck.views.notebook import Picture, history_html, steps_html

SLOW_FRESH_S = 45.0
"""How old a record of a slow rank may be. It is written about every ten seconds."""
COLUMNS = ("step", "attempt", "is_abandoned", "time")
"""The columns of `RunHistory.rows` that are not metrics."""
PREFIX = "metric."
"""Put before the name of a metric that is called as one of COLUMNS."""


def column_of(metric: str) -> str:
    """Return the name under which `RunHistory.rows` has a metric. No two metrics have one name."""
    is_taken = re.fullmatch(f"({re.escape(PREFIX)})*({'|'.join(COLUMNS)})", metric)
    return f"{PREFIX}{metric}" if is_taken else metric


@dataclass(frozen=True, kw_only=True, slots=True)
class RunHistory:
    """A run from its first attempt until now.

    status: whether it is running, judging by the bucket. attempts: all of them, the live one last. began_at: the start
    of the first attempt, None if unknown. trained_s: seconds of training in the head's state, excluding lost work and
    the time of saves. goodput: trained_s divided by the seconds from began_at to the head's commit, between 0 and 1;
    None without a commit. goodput_limit: the highest possible goodput, see raycheck/views/goodput.py; None for fewer
    than two failures or if a cost is unknown. parent: the URI of the run that this one was forked from; None for a run
    that is not a fork, and for a fork by an older raycheck that has dropped its first checkpoint. settings: those of
    the training at its newest commit, as text; None if its manifest cannot be read. problems: in words, what of the
    history cannot be read, which is therefore missing here. every: 1 if every step's metrics are here; otherwise older
    ones are the first of each span of this many steps. slow: the rank for which others wait in a save or a restore
    right now, or None.
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
    problems: tuple[str, ...] = ()
    every: int = 1
    slow: SlowRecord | None = None
    _series: Mapping[tuple[int, str], Series] = field(default_factory=dict, repr=False)
    _line: Mapping[int, int] = field(default_factory=dict, repr=False)
    _restored: Mapping[int, str | None] = field(default_factory=dict, repr=False)

    def rows(self) -> list[dict[str, float | None]]:
        """Return the metrics as one row per step of each attempt, for `pandas.DataFrame(history.rows())`.

        Each row has step, attempt, is_abandoned (the run went back behind this step), time (when the step ended, in
        unix seconds by the bucket's clock, or None), the metrics that the step had, and the scores of its checkpoint. A
        metric that has one of these four names, such as "step", is "metric.step" here. Order: by attempt and step.
        """
        found: dict[tuple[int, int], dict[str, float | None]] = {}
        for (attempt, name), values in self._all_series().items():
            column = "time" if name == TIME else column_of(name)
            for step, value in values.items():
                if (row := found.get((attempt, step))) is None:
                    is_abandoned = _is_abandoned(self._line, attempt, step)
                    row = {"step": step, "attempt": attempt, "is_abandoned": is_abandoned, "time": None}
                    found[attempt, step] = row
                row[column] = value
        return [row for _, row in sorted(found.items(), key=lambda item: item[0])]

    @property
    def metrics(self) -> tuple[str, ...]:
        """Return the names of all metrics and scores of steps and commits, sorted."""
        of_commits = (name for commit in self.commits for name in (*commit.metrics, *commit.scores))
        return tuple(sorted({*of_commits, *(name for _, name in self._series)} - {TIME}))

    def curve(self, metric: str) -> tuple[MetricLine, ...]:
        """Return a metric over steps, as one line per attempt, or two where the run went back behind a part of it.

        It has every step that had the metric; if `every` is above 1, older ones may be the first of each span of so
        many steps.
        """
        if metric == TIME:
            return ()
        lines, series = [], self._all_series({metric, TIME})
        for (attempt, name), values in sorted(series.items()):
            for is_abandoned in (False, True):
                steps = [step for step in sorted(values) if _is_abandoned(self._line, attempt, step) == is_abandoned]
                if name == metric and steps:
                    times = series.get((attempt, TIME), {})
                    lines.append(
                        MetricLine(
                            name=metric,
                            attempt=attempt,
                            is_abandoned=is_abandoned,
                            steps=tuple(steps),
                            values=tuple(values[step] for step in steps),
                            times=tuple(map(times.get, steps)),
                            continues=self._continued_by(attempt, is_abandoned=is_abandoned),
                        )
                    )
        return tuple(lines)

    def _continued_by(self, attempt: int, *, is_abandoned: bool) -> tuple[int, int] | None:
        """Return the attempt and the step after which a line continues. See MetricLine."""
        if is_abandoned and attempt in self._line:
            return attempt, self._line[attempt]
        name = CheckpointName.parse(self._restored.get(attempt) or "")
        return None if name is None else (name.attempt, name.step)

    def _all_series(self, names: Collection[str] | None = None) -> Mapping[tuple[int, str], Series]:
        """Return the rows with the metrics and scores of commits. An older raycheck wrote no others.

        A step's metric counts rather than a score of the same name. names: only these metrics; None: all.
        """
        found = {key: dict(values) for key, values in self._series.items() if names is None or key[1] in names}
        for attempt in self.attempts:
            for commit in attempt.commits:
                for name, value in {TIME: commit.at, **commit.scores, **commit.metrics}.items():
                    if (commit.metrics or commit.scores) and (names is None or name in names):
                        found.setdefault((attempt.number, name), {}).setdefault(commit.step, value)
        return found

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
        return Picture(steps_html(self.attempts, self._curves()))

    def _repr_html_(self) -> str:
        """Return HTML for a notebook: the attempts over time, why each ended, and the metrics over steps."""
        goodput = f"goodput {goodput_text(self.goodput, self.goodput_limit)}"
        facts = (self.uri.partition("?")[0], self.status.text, goodput)
        return history_html(facts, self.attempts, self._curves(), until=self.until)

    def _curves(self) -> Mapping[str, tuple[MetricLine, ...]]:
        return {name: self.curve(name) for name in self.metrics[:MAX_CHARTS]}


def read_history(
    store: Store,
    body: Latest | None = None,
    *,
    now: float | None = None,
    read: dict[str, Facts] | None = None,
    lost: Collection[PageRef] = (),
) -> RunHistory:
    """Read the history of the run in `store`. Raises NotFoundError if there is no run.

    body, now: the run's `latest`, whole, and the store's time if the caller has just read them; then they are not read
    again. lost: the pages that cannot be read, without which the body is whole. read: see read_facts. Requests: one
    listing and at most nine others for the segments of the history, one for the head's manifest, one for the record of
    a slow rank, two for each attempt whose records the history does not have yet, and one more for some forks.
    """
    if body is None or now is None:
        body, now, lost = read_readable_at(store)
    with ContextPool(3, thread_name_prefix="raycheck-history") as pool:
        read_head = pool.submit(_head, store, body)
        recorded = None if body.is_finished else pool.submit(read_slow, store, body.attempt.number)
        known, problems = read_facts(store, body.run_id, read)
        facts = with_records(store, body, known)
        head = read_head.result()
    line = _line_of(facts)
    attempts = tuple(_attempts(facts, body, line, lost))
    entry = None if body.head is None else body.entry(body.head)
    status = status_of(body, facts.ends.get(body.attempt.number), now=now)
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
        problems=(*(lost_page_text(store, page) for page in lost), *problems),
        every=facts.rows.every,
        slow=None if recorded is None else slow_now(recorded.result(), status, attempts[-1]),
        _series=facts.rows.series,
        _line=line,
        _restored={item.number: _restored(facts, item.number) for item in attempts},
    )


def slow_now(slow: SlowRecord | None, status: Status, attempt: AttemptHistory) -> SlowRecord | None:
    """Return the record of a slow rank if others still wait for it, as far as the bucket shows. attempt: the live one.

    It is not removed when the save or the restore is over, but it is written every few seconds until then.
    """
    if slow is None or status.state not in ("running", "silent") or status.now - slow.at > SLOW_FRESH_S:
        return None
    is_over = bool(attempt.commits) or attempt.resume is not None
    if not slow.is_restore:
        is_over = any(commit.key == slow.checkpoint for commit in attempt.commits)
    return None if is_over else slow


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
    facts: Facts, body: Latest, line: Mapping[int, int], lost: Collection[PageRef]
) -> Iterator[AttemptHistory]:
    """Yield all attempts, oldest first. line: see _line_of. lost: see read_history."""
    commits = _commits(facts, body, line, lost)
    numbers = sorted(number for number in {*facts.attempts, *facts.numbers} if number <= body.attempt.number)
    known = [_attempt(facts, number, commits) for number in numbers]
    for place, attempt in enumerate(known):
        after = known[place + 1] if place + 1 < len(known) else None
        record, resume = facts.ends.get(attempt.number), facts.starts.get(attempt.number)
        ending, cause = _ending(body, attempt, after, record) if attempt.number in facts.attempts else ("unknown", "")
        own = tuple(commits.get(attempt.number, ()))
        times = facts.rows.series.get((attempt.number, TIME), {})
        last_seen_at = max((attempt.claimed_at, *(commit.at for commit in own), *times.values()))
        yield AttemptHistory(
            number=attempt.number,
            world_size=attempt.world_size if attempt.number else 0,
            began_at=attempt.claimed_at,
            ended_at=_ended_at(body, attempt, after, record, ending=ending, last_seen_at=last_seen_at),
            ending=ending,
            cause=cause,
            restored=attempt.restore_key,
            last_save=attempt.last_save,
            restore_s=None if resume is None else resume.restore_s,
            start_step=None if resume is None else resume.step,
            lost_steps=None if resume is None else resume.lost_steps,
            lost_s=None if resume is None else resume.lost_s,
            commits=own,
            resume=resume,
            last_seen_at=last_seen_at,
            first_step_at=min(times.values(), default=None),
        )


def _attempt(facts: Facts, number: int, commits: Mapping[int, list[Commit]]) -> Attempt:
    """Return an attempt. If its facts were lost, it is made of its commits, its metrics and the record of its start.

    Its beginning is then the first of them, and its world size is 0 unless that record states it.
    """
    if (fact := facts.attempts.get(number)) is not None:
        return fact.attempt
    resume, own = facts.starts.get(number), commits.get(number, ())
    times = (*(commit.at for commit in own), *facts.rows.series.get((number, TIME), {}).values())
    return Attempt(
        number=number,
        owner="",
        coordinator="",
        group="",
        world_size=0 if resume is None else resume.world_size,
        restore_key=_restored(facts, number),
        last_save=max((name.save for commit in own if (name := CheckpointName.parse(commit.key))), default=0),
        claimed_at=min(times, default=0.0),
    )


def _commits(
    facts: Facts, body: Latest, line: Mapping[int, int], lost: Collection[PageRef]
) -> Mapping[int, list[Commit]]:
    """Return all commits, by attempt and in order. One counts as live if a lost page may list it and nobody dropped
    it."""
    live = {entry.key for entry in body.live}
    evicted = {item.key for item in body.evicted}
    found: dict[int, list[Commit]] = {}
    for name in sorted(filter(None, map(CheckpointName.parse, facts.commits.keys() | facts.drops.keys()))):
        record, drop = facts.commits.get(str(name)), facts.drops.get(str(name))
        if record is None:
            assert drop is not None, "each key is one of a commit or of a drop"
            record = CommitRecord(key=str(name), counter=0, at=drop.at, size_bytes=0)
        state: CommitState = "dropped" if record.key in evicted else "deleted"
        may_be_live = drop is None and any(page.steps and page.may_list(name) for page in lost)
        if record.key in live or may_be_live:
            state, drop = "damaged" if record.damaged else "kept", None
        found.setdefault(name.attempt, []).append(
            Commit(
                key=record.key,
                step=name.step,
                at=record.at,
                size_bytes=record.size_bytes,
                is_head=record.key == body.head,
                is_by_notice=record.by_notice,
                is_rolling=record.rolling,
                is_pinned=record.pinned,
                name=record.name,
                damaged=record.damaged,
                metrics=dict(record.metrics),
                scores=dict(record.scores),
                state=state,
                why="" if drop is None else drop.why,
                dropped_at=None if drop is None else drop.at,
                is_abandoned=_is_abandoned(line, name.attempt, name.step),
            )
        )
    return found


def _line_of(facts: Facts) -> Mapping[int, int]:
    """Return the attempts in the past of the newest one, itself included, each with its last step that is part of it.

    An attempt continues the one that saved what it restored, up to the step of that checkpoint, and so on.
    """
    line: dict[int, int] = {}
    number, last = max({*facts.attempts, *facts.numbers}, default=0), sys.maxsize
    while number not in line:
        line[number] = last
        name = CheckpointName.parse(_restored(facts, number) or "")
        if name is None:
            break
        number, last = name.attempt, name.step
    return line


def _restored(facts: Facts, number: int) -> str | None:
    """Return the name of the checkpoint from which an attempt continued, None if there was none.

    If nothing states it, because the attempt's own facts were lost, it is the newest earlier checkpoint before the
    first known step of the attempt: a claim restores the newest one, unless a person says otherwise.
    """
    fact, resume = facts.attempts.get(number), facts.starts.get(number)
    if resume is not None and (fact is None or resume.is_from_memory):
        return resume.restored
    if fact is not None:
        return fact.attempt.restore_key
    names = list(filter(None, map(CheckpointName.parse, facts.commits.keys() | facts.drops.keys())))
    steps = [name.step for name in names if name.attempt == number]
    steps += [step for (attempt, _), values in facts.rows.series.items() if attempt == number for step in values]
    first = min(steps, default=0)
    before = max((name for name in names if name.attempt < number and name.step < first), default=None)
    return None if before is None else str(before)


def _is_abandoned(line: Mapping[int, int], attempt: int, step: int) -> bool:
    """Return whether a step of an attempt is not in the past of the newest one. Attempt 0 is the past of a fork."""
    return attempt > 0 and step > line.get(attempt, -1)


def _ended_at(
    body: Latest,
    attempt: Attempt,
    after: Attempt | None,
    record: AttemptRecord | None,
    *,
    ending: Ending,
    last_seen_at: float,
) -> float | None:
    """Return when an attempt ended, None if nothing shows that it has. last_seen_at: its last sign of life.

    An older raycheck wrote of an attempt that had finished only when the next one was claimed, which may be days later.
    """
    if body.finished is not None and body.finished.attempt == attempt.number:
        return body.finished.at
    if ending == "finished" and record is not None and after is not None and record.ended_at == after.claimed_at:
        return min(last_seen_at, after.claimed_at)
    if record is not None:
        return record.ended_at
    return None if after is None else after.claimed_at


def _ending(body: Latest, attempt: Attempt, after: Attempt | None, record: AttemptRecord | None) -> tuple[Ending, str]:
    """Return why an attempt ended: the kind of ending, and the text of its record."""
    cause = "" if record is None else record.cause
    if not attempt.world_size or not attempt.number:
        return "by hand", cause
    if body.finished is not None and body.finished.attempt == attempt.number and body.is_finished:
        return "finished", cause or "came to the end of training"
    if after is None:
        return ("live", "") if record is None else ("gave up", cause)
    found = next((ending for words, ending in _ENDINGS if words in cause), None)
    return found or ("failed" if cause.startswith("rank ") else "unknown"), cause


_ENDINGS: tuple[tuple[str, Ending], ...] = (
    (HAD_FINISHED, "finished"),
    ("its driver gave up", "gave up"),
    ("its driver was killed or replaced", "driver lost"),
    ("the run was rewound", "by hand"),
    ("the run was repaired", "by hand"),
    (": its node was taken away", "preempted"),
    ("Ray changed the group from", "resized"),
    ("the same driver restarted its workers", "restarted"),
)
"""Substrings of the texts that raycheck/group/coordinator/lost_work.py, a rewind and a repair write when an attempt
ends; the first match counts. Any other text starts with a rank and its error."""
