"""Claims the run, and restores it on all ranks together: a restore is over when every rank has completed it.

When one rank finds the checkpoint damaged, all of them go back to the one before it. That decision is written into
`latest` before any rank trains (step 26). This is the ranks' side; the coordinator's is in coordinator/actor.py.
"""

import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Generic, TypeVar

from raycheck.bucket.attempt_records import ResumeRecord
from raycheck.bucket.format.latest import Entry
from raycheck.bucket.format.progress import Progress
from raycheck.bucket.protocol.resume import AUTO, Resume
from raycheck.bucket.reading import Checkpoint
from raycheck.data.data_stream import DataStream
from raycheck.errors import DamagedError, RaycheckError, StoreError, SupersededError
from raycheck.group.coordinator.messages import (
    Arrival,
    Claim,
    HeldCheckpoint,
    NodeCheck,
    OnCorrupt,
    Pending,
    RankRestore,
    RestoreDecision,
)
from raycheck.group.group import CLAIM_TIMEOUT_S, Group, ask_until_decided
from raycheck.group.worker.slow_progress import SlowProgress, slow_progress
from raycheck.log import event, logger
from raycheck.settings import Alerts
from raycheck.state.deferred_tensors import DeferredTensors
from raycheck.state.preview import Preview
from raycheck.state.random_state import rng_values
from raycheck.state.restore_result import Restored, RestoreReport
from raycheck.state.restore_selection import Selection
from raycheck.state.train_state import TrainState

NODE_CHECKS_S = 60.0
"""How long the ranks that have nothing to check wait for the others before a driver's first claim."""
RESTORE_TIMEOUT_S = 3600.0
"""How much later than the first rank the last one may complete its restore."""
LEAST_S = 60.0
"""How long a rank may take at least to read a checkpoint, however short the time of a save is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RestoreResult:
    """The point where training resumes after a restore; all counts are zero in a fresh run.

    step: index of the next optimizer step. epoch, epoch_step, samples: consumed position of the data. tokens, episodes:
    the sums of what was passed to `end_step` so far. checkpoint: name of the restored checkpoint, None in a fresh run.
    attempt: number of this attempt. saved_world_size: number of ranks that wrote the checkpoint. seconds,
    bytes_fetched, tensors: what this rank's restore took, without what it has deferred. rng: what was done about random
    state. report: which entries were restored, and which were not. resume: what the end of the previous attempt cost,
    None in a run's first attempt. is_finished: whether training had ended with this checkpoint: all ranks had left the
    Checkpointer's block without an exception. A loop that continues from here trains more, or nothing. is_from_memory:
    `checkpoint` is a memory checkpoint (SaveSettings.memory_every_steps), which was in the nodes' memory and not in the
    bucket.
    """

    step: int = 0
    epoch: int = 0
    epoch_step: int = 0
    samples: int = 0
    tokens: int = 0
    episodes: int = 0
    checkpoint: str | None = None
    attempt: int
    saved_world_size: int = 0
    seconds: float = 0.0
    bytes_fetched: int = 0
    tensors: int = 0
    rng: str = "untouched"
    report: RestoreReport = field(default_factory=RestoreReport)
    resume: ResumeRecord | None = None
    is_finished: bool = False
    is_from_memory: bool = False

    @classmethod
    def of(
        cls, done: Restored, progress: Progress, *, claim: Claim, resume: ResumeRecord | None, seconds: float, rng: str
    ) -> "RestoreResult":
        """Return the result of a restore. progress: the counts from which training resumes, the data's included."""
        return cls(
            **asdict(progress),
            checkpoint=done.manifest.key,
            attempt=claim.attempt,
            saved_world_size=done.manifest.world_size,
            seconds=seconds,
            bytes_fetched=done.bytes_fetched,
            tensors=done.tensors,
            rng=rng,
            report=done.report,
            resume=resume,
            is_from_memory=claim.memory is not None,
            is_finished=claim.is_finished and not done.report.skipped,  # entries that were left out are trained again
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class RestoreOptions:
    """How to restore, see Checkpointer.restore."""

    strict: bool
    on_corrupt: OnCorrupt
    cast: bool
    defer_optimizer: bool


T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Agreed(Generic[T]):
    """The facts that all ranks have read of one checkpoint.

    claim: the final claim, which names that checkpoint. result: what this rank has read.
    """

    claim: Claim
    result: T
    resume: ResumeRecord | None


def claim_run(group: Group, at: Resume = AUTO, alerts: Alerts | None = None) -> Claim:
    """Claim the run for this worker group, and check what this node may do in the bucket. Every rank calls it.

    at: where to start, the same on all ranks. Only a driver's first claim obeys it. alerts: whom the coordinator tells
    what happens to the run. Raises ConfigError if that cannot work there.
    """
    if alerts is not None and not group.rank:
        group.ask("alert_by", alerts, timeout_s=CLAIM_TIMEOUT_S, what="settings of alerts")

    def claim() -> Claim:
        alone_from = time.monotonic() + NODE_CHECKS_S
        while True:
            rank = group.rank if time.monotonic() < alone_from else None
            answer: Claim | Pending = group.ask(
                "claim", group.id, group.world_size, rank, at, timeout_s=CLAIM_TIMEOUT_S, what="claim of the run"
            )
            if not isinstance(answer, Pending):
                return answer

    when: NodeCheck = "done"
    if group.is_first_on_node:
        when = group.ask("node_check", group.node, timeout_s=CLAIM_TIMEOUT_S, what="check of the node")
    if when == "done":
        return claim()
    if when == "before the claim":
        group.check_node()
        claimed = claim()
    else:
        claimed, _ = group.store.both(claim, group.check_node)
    group.check_shared()
    group.tell("node_checked", group.node)
    return claimed


def peek_together(
    group: Group, claim: Claim, selection: Selection, *, on_corrupt: OnCorrupt
) -> tuple[Claim, Checkpoint, Preview]:
    """Read the documents of the checkpoint of `claim`, or of the newest good one before it, the same on all ranks.

    Returns the final claim, which names that checkpoint, and the checkpoint. Raises DamagedError when there is no good
    one, or when on_corrupt is "raise".
    """

    def read(checkpoint: Checkpoint, claim: Claim) -> tuple[Checkpoint, Preview]:
        known = checkpoint.read_once()
        return known, Preview.of(known, selection, attempt=claim.attempt, rank=group.rank, refused=claim.refused)

    agreed = _read_together(group, claim, read, lambda *_: Arrival(), on_corrupt=on_corrupt, is_peek=True)
    return agreed.claim, *agreed.result


def restore_together(
    group: Group,
    state: TrainState,
    claim: Claim,
    selection: Selection,
    how: RestoreOptions,
    *,
    peeked: Checkpoint | None = None,
    timeout_s: float,
) -> tuple[Claim, Restored, ResumeRecord | None]:
    """Load the checkpoint of `claim`, or the newest good one before it, into the live state on all ranks.

    With defer_optimizer, tensors of optimizers are still being read when this returns, see DeferredTensors. peeked: the
    checkpoint that `peek_together` found. timeout_s: how long this rank may take to read each checkpoint, but never
    less than LEAST_S, and more if it reads much, see MovedBytes. Returns the final claim, which names the restored one.
    Raises DamagedError when there is no good one, or when on_corrupt is "raise"; SupersededError when it is not
    `peeked`.
    """

    def read(checkpoint: Checkpoint, claim: Claim) -> Restored:
        with _bounded(group, checkpoint.entry.key, timeout_s, is_deferred=False):
            done = state.apply(
                checkpoint,
                selection,
                strict=how.strict,
                once=True,
                share=True,
                cast=how.cast,
                defer_optimizer=how.defer_optimizer,
            )
        return replace(done, report=replace(done.report, refused=claim.refused))

    try:
        arrival = partial(_arrival, defers=how.defer_optimizer)
        agreed = _read_together(group, claim, read, arrival, on_corrupt=how.on_corrupt, peeked=peeked)
    except BaseException:
        state.abandon_deferred()
        raise
    if state.deferred is not None:
        _begin_deferred(group, state.deferred, agreed.claim, on_corrupt=how.on_corrupt, timeout_s=timeout_s)
    return agreed.claim, agreed.result, agreed.resume


def _bounded(group: Group, key: str, timeout_s: float, *, is_deferred: bool) -> AbstractContextManager[SlowProgress]:
    """Return the context of a rank's reading of a checkpoint, with its deadline."""
    limit_s = max(timeout_s, LEAST_S)
    return slow_progress(group, key, until=time.monotonic() + limit_s, limit_s=limit_s, is_deferred=is_deferred)


def _begin_deferred(
    group: Group, deferred: DeferredTensors, claim: Claim, *, on_corrupt: OnCorrupt, timeout_s: float
) -> None:
    """Read in a thread what the restore of the checkpoint of `claim` has left for later. A collective."""
    mine = replace(_ended(group, claim, on_corrupt), is_deferred=True)

    def decide(read: Callable[[], int]) -> None:
        def read_bounded() -> tuple[int, Arrival]:
            try:
                with _bounded(group, mine.key, timeout_s, is_deferred=True):
                    return read(), Arrival()
            except RaycheckError:
                raise
            except Exception as error:  # such as that of gloo when another rank has died
                said = f"rank {group.rank}: {mine.what}: {type(error).__name__}: {error}"
                raise StoreError(said) from error

        _, decision = _decided(group, mine, read_bounded)
        if decision.claim is not None:
            # The script has trained on this checkpoint's weights already. All ranks get this error.
            before = decision.claim.entry
            raise SupersededError(
                f"rank {group.rank}: {mine.key} is damaged in what was read after restore() had returned "
                f"({decision.message}); restart the workers, which will restore {before.key if before else 'nothing'}"
            )

    def complete(waited_s: float) -> None:
        if not group.rank:
            text = "the optimizers' tensors have come"
            read = {"bytes": deferred.bytes_fetched, "read_s": deferred.seconds, "waited_s": waited_s}
            logger.info(event(text, checkpoint=mine.key, **read, run=group.uri))

    deferred.begin(decide, complete)


def _read_together(
    group: Group,
    claim: Claim,
    read: Callable[[Checkpoint, Claim], T],
    arrival: Callable[[T, float], Arrival],
    *,
    on_corrupt: OnCorrupt,
    is_peek: bool = False,
    peeked: Checkpoint | None = None,
) -> _Agreed[T]:
    """Read checkpoint after checkpoint, newest first, until no rank finds damage."""
    began = time.monotonic()
    while True:
        assert claim.entry is not None, "a fresh run restores nothing"
        mine = replace(_ended(group, claim, on_corrupt), is_peek=is_peek)

        def read_one(claim: Claim = claim, entry: Entry = claim.entry) -> tuple[T, Arrival]:
            found = read(peeked or _checkpoint(group, claim, entry), claim)
            return found, arrival(found, time.monotonic() - began)

        result, decision = _decided(group, mine, read_one)
        if decision.claim is None:
            assert result is not None, "a rank that found damage never gets a final decision"
            return _Agreed(claim=claim, result=result, resume=decision.resume)
        claim = decision.claim
        if claim.entry is None:  # some of the state may come from the memory checkpoint
            raise SupersededError(
                f"rank {group.rank}: {mine.key} is lost ({decision.message}), and the bucket has no checkpoint yet; "
                "restart the workers, which start the run from the beginning"
            )
        if peeked is not None:
            # The script has acted on what peek() returned for the damaged one. All ranks get this error.
            raise SupersededError(
                f"rank {group.rank}: peek() described {mine.key}, which is damaged ({decision.message}); restart the "
                f"workers: peek() will then describe {claim.entry.key}"
            )


def _ended(group: Group, claim: Claim, on_corrupt: OnCorrupt) -> RankRestore:
    """Return the report of this rank to the coordinator, before anything is known but which checkpoint it restores."""
    assert claim.entry is not None, "a fresh run restores nothing"
    return RankRestore(
        group=group.id,
        rank=group.rank,
        world_size=group.world_size,
        key=claim.entry.key,
        on_corrupt=on_corrupt,
    )


def _decided(
    group: Group, mine: RankRestore, read: Callable[[], tuple[T, Arrival]]
) -> tuple[T | None, RestoreDecision]:
    """Read, report how that ended, and wait for the decision that all ranks are told. None if it is damaged."""
    result: T | None = None
    try:
        result, arrival = read()
        mine = replace(mine, arrival=arrival)
    except DamagedError as error:
        mine = replace(mine, damage=str(error))
    except Exception as error:
        failure = error if isinstance(error, RaycheckError) else StoreError(f"{type(error).__name__}: {error}")
        group.tell("restored", replace(mine, failure=failure))  # the other ranks must not wait for this one
        raise
    deadline = time.monotonic() + RESTORE_TIMEOUT_S
    decision: RestoreDecision = ask_until_decided(group, "restored", mine, deadline=deadline, what=mine.what)
    return result, decision


def _checkpoint(group: Group, claim: Claim, entry: Entry) -> Checkpoint:
    """Return the checkpoint that this rank has to read: from the bucket, or from the nodes' memory.

    Raises DamagedError when the cluster has lost what says who holds it.
    """
    if claim.memory is None:
        return Checkpoint(group.store, entry, group.fetch(claim.documents))
    held: HeldCheckpoint | None = group.fetch(claim.memory.contents)
    if held is None:
        raise DamagedError(f"{entry.key} is in no node's memory any more: its documents are lost")
    return Checkpoint(group.store, entry, held.documents, shards=group.memory_reader(held.holders))


def _arrival(done: Restored, seconds: float, *, defers: bool) -> Arrival:
    return Arrival(
        step=done.progress.step,
        trained_s=done.trained_s,
        seconds=seconds,
        bytes_fetched=done.bytes_fetched,
        what=str(done.report),
        defers=defers,
    )


def apply_random_state(done: Restored, group: Group, data: Iterable[DataStream]) -> str:
    """Restore the checkpoint's random state now, and inside an epoch once more just before the first batch.

    A script draws random numbers before its first batch: a shuffle, or an iterator's seed. The run that saved the
    checkpoint in the middle of an epoch had drawn these before the checkpoint. Returns what was done, as text.
    """
    text = done.apply_rng()
    applied = rng_values()

    def apply_again() -> None:
        if rng_values() != applied:
            said = "random numbers were drawn between restore() and the first batch: the random state is put back"
            logger.info(event(said, checkpoint=done.manifest.key, rank=group.rank, run=group.uri))
        done.apply_rng()

    for stream in data if done.random_source else ():
        stream.before_first_batch(apply_again)
    return text
