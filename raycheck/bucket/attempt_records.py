"""Writes and reads small documents per attempt, for people to read.

`attempts/NNNNNN.json` states what the attempt was and why it ended; it is written when the attempt is over. A repair
and `raycheck submit` read it, too. `attempts/NNNNNN.start.json` states how the attempt continued from the previous one,
and what that one's end cost. Each is written once. `attempts/NNNNNN.slow.json` states which rank is slow, while it is.
Nothing in a running system depends on them.
"""

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import ClassVar

from raycheck.bucket.document_reading import read_document
from raycheck.bucket.format import object_keys
from raycheck.bucket.format.document import FORMAT_VERSION, Document, dump, load
from raycheck.bucket.format.latest import Attempt
from raycheck.bucket.store import Store
from raycheck.errors import ConflictError, CorruptError, DeniedError, NotFoundError, StoreError

MAX_BYTES = 64 * 1024
HAD_FINISHED = "it had finished"
"""The cause of the end of an attempt that came to the end of training, or the start of that text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptRecord(Document):
    """An ended attempt: `attempts/NNNNNN.json`.

    ended_at: when it finished or its driver gave up, otherwise when somebody noticed its end. ended_by_attempt: the
    number of the attempt that was claimed after it, or its own when its driver gave up the run. is_final: the driver
    said that another start of this script would end in the same way.
    """

    when_true: ClassVar[frozenset[str]] = frozenset({"is_final"})

    format_version: int = FORMAT_VERSION
    attempt: Attempt
    ended_by_attempt: int
    ended_at: float
    cause: str
    is_final: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class ResumeRecord(Document):
    """A record that `attempt` continued from `after`, the attempt before it, which ended by `cause`.

    restored: the checkpoint's name, None when there was none. step: the step at which training resumed.
    world_size_before: the world size of the attempt before, 0 when a person made that one (rewind, repair). lost_steps,
    lost_s: the steps and seconds of training that were lost, by rank 0's last heartbeat, which may be a second old;
    None when the driver had died too and no heartbeat is known. furthest_step: the furthest step of all attempts of
    this driver, by those heartbeats; None when none is known. is_from_memory: `restored` was a memory checkpoint, kept
    in the nodes' memory and not in the bucket. memory_problem: why there was no memory checkpoint of a later step; ""
    when there was one, or none was wanted. since_commit_s: seconds from the restored checkpoint's commit to the end of
    the restore, including downtime; None without a checkpoint. restore_s: seconds of the slowest rank. restore_bytes:
    bytes of all ranks. what: the entries that were restored, and those that were not.
    """

    when_true: ClassVar[frozenset[str]] = frozenset({"is_from_memory", "memory_problem"})

    format_version: int = FORMAT_VERSION
    attempt: int
    after: int
    cause: str
    restored: str | None
    step: int
    world_size_before: int
    world_size: int
    lost_steps: int | None
    lost_s: float | None
    since_commit_s: float | None
    restore_s: float
    restore_bytes: int
    what: str
    furthest_step: int | None = None
    is_from_memory: bool = False
    memory_problem: str = ""

    @property
    def lost(self) -> str:
        """Return in words how much training was lost."""
        steps = "unknown" if self.lost_steps is None else f"{self.lost_steps} steps"
        return steps if self.lost_s is None else f"{steps}, {self.lost_s:.1f} s"

    def __str__(self) -> str:
        since = "" if self.since_commit_s is None else f", {self.since_commit_s:.1f} s since that commit"
        speed = self.restore_bytes / 1e6 / max(self.restore_s, 1e-9)
        size = (
            f"{self.restore_bytes / 1e6:.1f} MB" if self.restore_bytes >= 1e6 else f"{self.restore_bytes / 1e3:.1f} kB"
        )
        restored = f", {size} restored in {self.restore_s:.2f} s ({speed:.0f} MB/s); {self.what}"
        place = f"at step {self.step}, as no checkpoint was there"
        if self.restored is not None:
            place = f"at step {self.step} of {self.restored}{' in memory' if self.is_from_memory else ''}"
        return (
            f"after attempt {self.after} ({self.cause}): {place}, {self.world_size_before} -> {self.world_size} ranks, "
            f"lost: {self.lost}{since}{restored if self.restored is not None else ''}"
            f"{'; no later memory checkpoint: ' + self.memory_problem if self.memory_problem else ''}"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class SlowRecord(Document):
    """The rank that others wait for in an upload or a restore: `attempts/NNNNNN.slow.json`.

    It is written again every few seconds while that lasts, so that one with an old time is over. at: the time, in unix
    seconds by the store's clock. checkpoint: what is saved or restored. object: the one that has been at hand for
    longest; "" when none is. wanted_bytes: None while it is not known. seconds: for how long the rank has been at it.
    finished: how many of the `world_size` ranks are done.
    """

    format_version: int = FORMAT_VERSION
    attempt: int
    at: float
    checkpoint: str
    is_restore: bool
    rank: int
    node: str
    object: str
    done_bytes: int
    wanted_bytes: int | None
    seconds: float
    finished: int
    world_size: int

    def __str__(self) -> str:
        verb, noun = ("read", "restore") if self.is_restore else ("sent", "save")
        done = f"has {verb} {bytes_of(self.done_bytes, self.wanted_bytes)} in {self.seconds:.0f} s"
        at_hand = f", and is at {self.object}" if self.object else ""
        others = "the others have" if self.finished == self.world_size - 1 else f"{self.finished} of {self.world_size}"
        return (
            f"{noun} of {self.checkpoint}: rank {self.rank} on node {self.node} {done}{at_hand}; {others} "
            f"{'' if others.startswith('the') else 'ranks have '}finished"
        )


def bytes_of(done: int, wanted: int | None) -> str:
    """Return in words how many bytes are done: "0.3 of 4.1 GB"."""
    if wanted is None:
        return "nothing"
    unit, name = next(((size, name) for size, name in _UNITS if wanted >= size), (1, "B"))
    digits = 0 if unit == 1 else 1
    return f"{done / unit:.{digits}f} of {wanted / unit:.{digits}f} {name}"


_UNITS = ((10**9, "GB"), (10**6, "MB"), (10**3, "kB"))


def record_end(store: Store, ended: Attempt, *, by: Attempt, cause: str, finished_at: float | None = None) -> bool:
    """Write the record of an ended attempt, once. Return whether this call wrote it.

    finished_at: when it came to the end of training, which the cause then says, too; None if it did not.
    """
    if finished_at is not None and cause != HAD_FINISHED:
        cause = f"{HAD_FINISHED}; {cause}"
    ended_at = by.claimed_at if finished_at is None else finished_at
    record = AttemptRecord(attempt=ended, ended_by_attempt=by.number, ended_at=ended_at, cause=cause)
    return _put(store, object_keys.attempt_key(ended.number), record)


def record_failure(store: Store, ended: Attempt, *, at: float, cause: str, is_final: bool) -> bool:
    """Write the record of an attempt whose driver gives up the run, once. Return whether this call wrote it."""
    record = AttemptRecord(attempt=ended, ended_by_attempt=ended.number, ended_at=at, cause=cause, is_final=is_final)
    return _put(store, object_keys.attempt_key(ended.number), record)


def read_record(store: Store, number: int) -> AttemptRecord | None:
    """Read the record of an attempt. Return None when it is missing or cannot be read. Raises StoreError."""
    key = object_keys.attempt_key(number)
    try:
        return read_document(store, key, load_record, max_bytes=MAX_BYTES)[0]
    except (NotFoundError, CorruptError):
        return None


def record_resume(store: Store, resume: ResumeRecord) -> bool:
    """Write the record of how an attempt began, once. Return whether this call wrote it."""
    return _put(store, object_keys.resume_key(resume.attempt), resume)


def record_slow(store: Store, slow: SlowRecord) -> None:
    """Write which rank is slow, over what was written before. Raises StoreError."""
    store.put(object_keys.slow_key(slow.attempt), dump(slow))


def read_slow(store: Store, attempt: int) -> SlowRecord | None:
    """Read which rank of an attempt was slow last. Return None when none was, or that cannot be read."""
    with suppress(NotFoundError, CorruptError, DeniedError):
        return read_document(store, object_keys.slow_key(attempt), load_slow, max_bytes=MAX_BYTES)[0]
    return None


def load_slow(data: bytes, *, what: str) -> SlowRecord:
    return load(SlowRecord, data, what=what, max_bytes=MAX_BYTES)


def load_record(data: bytes, *, what: str) -> AttemptRecord:
    return load(AttemptRecord, data, what=what, max_bytes=MAX_BYTES)


def load_resume(data: bytes, *, what: str) -> ResumeRecord:
    return load(ResumeRecord, data, what=what, max_bytes=MAX_BYTES)


def read_resumes(store: Store, attempts: Iterable[int]) -> dict[int, ResumeRecord]:
    """Read how these attempts began. Return the readable records, by attempt number."""
    found = {}
    for number in attempts:
        key = object_keys.resume_key(number)
        try:
            found[number] = read_document(store, key, load_resume, max_bytes=MAX_BYTES)[0]
        except (NotFoundError, CorruptError):
            continue
    return found


def _put(store: Store, key: str, document: Document) -> bool:
    try:
        store.put_if_absent(key, dump(document))
    except (ConflictError, StoreError):
        return False
    return True
