"""A restore is over when all ranks are through with it. When one finds the checkpoint damaged, all of them go back to
the one before it: a decision that stands in `latest` before anybody trains on (step 26).

The ranks' side; the coordinator's is in rendezvous.py.
"""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Generic, TypeVar

from raycheck.bucket.attempt_records import ResumeRecord
from raycheck.bucket.format.manifest import Manifest
from raycheck.bucket.format.object_keys import pointed_by
from raycheck.bucket.format.progress import Progress
from raycheck.bucket.reading import Checkpoint
from raycheck.errors import DamagedError, RaycheckError, StoreError, SupersededError
from raycheck.settings import SaveSettings
from raycheck.shards.state.preview import Preview
from raycheck.shards.state.restore_result import Restored, RestoreReport
from raycheck.shards.state.restore_selection import Selection
from raycheck.shards.state.train_state import TrainState
from raycheck.train.coordinator.messages import Arrival, Claim, OnCorrupt, RankRestore, RestoreDecision
from raycheck.train.group import Group, ask_until_decided
from raycheck.train.log import logger, name_of
from raycheck.train.ray_api import train_context
from raycheck.train.ray_api.train_context import dataset_names

RESTORE_TIMEOUT_S = 3600.0
"""How much later than the first rank the last one may be through."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RestoreResult:
    """Where training stands after a restore; all zero in a fresh run.

    step: index of the next optimizer step. epoch, epoch_step, samples: consumed position of the data. tokens, episodes:
    as `end_step` was told so far. checkpoint: the name of what was restored, None when fresh. attempt: this life of the
    worker group. saved_world_size: ranks that wrote it. seconds, bytes_fetched, tensors: of this rank's restore. rng:
    what was done about random state. report: what was restored, and what was not. resume: what the end of the attempt
    before cost, None in a run's first. is_finished: the run had come to its end with what was restored, by leaving the
    Checkpointer's block without an exception on all ranks; a loop that goes on from here trains more, or nothing.
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

    @classmethod
    def of(
        cls, done: Restored, where: Progress, *, claim: Claim, resume: ResumeRecord | None, seconds: float, rng: str
    ) -> "RestoreResult":
        """`where`: the position, in the data too."""
        return cls(
            **asdict(where),
            checkpoint=done.manifest.key,
            attempt=claim.attempt,
            saved_world_size=done.manifest.world_size,
            seconds=seconds,
            bytes_fetched=done.bytes_fetched,
            tensors=done.tensors,
            rng=rng,
            report=done.report,
            resume=resume,
            is_finished=claim.is_finished and not done.report.skipped,  # what was left out is to be trained anew
        )


T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Agreed(Generic[T]):
    """What all ranks have read of one checkpoint: `claim` as it stands in the end, and what this rank has got. refused:
    newer ones that are damaged, each with the proof."""

    claim: Claim
    got: T
    resume: ResumeRecord | None
    refused: tuple[str, ...]


def peek_together(group: Group, claim: Claim, selection: Selection, *, on_corrupt: OnCorrupt) -> tuple[Claim, Preview]:
    """Read what the checkpoint of `claim` says of itself, or the newest good one before it, alike on all ranks.

    Returns the claim as it stands in the end. Raises DamagedError when there is none, or by `on_corrupt`.
    """

    def read(checkpoint: Checkpoint, refused: tuple[str, ...]) -> Preview:
        return Preview.of(checkpoint, selection, attempt=claim.attempt, rank=group.rank, refused=refused)

    def arrival(preview: Preview, seconds: float) -> Arrival:
        return Arrival(step=preview.step, seconds=seconds)

    agreed = _together(group, claim, read, arrival, on_corrupt=on_corrupt, is_peek=True)
    return agreed.claim, agreed.got


def restore_together(
    group: Group,
    state: TrainState,
    claim: Claim,
    selection: Selection,
    *,
    strict: bool,
    on_corrupt: OnCorrupt,
    cast: bool = False,
    preview: Preview | None = None,
) -> tuple[Claim, Restored, ResumeRecord | None]:
    """Put the checkpoint of `claim` into the live state on all ranks, or the newest good one before it.

    preview: what `peek_together` has answered. Returns the claim as it stands in the end. Raises DamagedError when
    there is none, or by `on_corrupt`; SupersededError when it would be another one than was peeked at.
    """

    def read(checkpoint: Checkpoint, refused: tuple[str, ...]) -> Restored:
        done = state.apply(checkpoint, selection, strict=strict, once=True, share=True, cast=cast)
        return replace(done, report=replace(done.report, refused=refused))

    agreed = _together(
        group, claim, read, _arrival, on_corrupt=on_corrupt, refused=preview.refused if preview else (), preview=preview
    )
    return agreed.claim, agreed.got, agreed.resume


def _together(
    group: Group,
    claim: Claim,
    read: Callable[[Checkpoint, tuple[str, ...]], T],
    arrival: Callable[[T, float], Arrival],
    *,
    on_corrupt: OnCorrupt,
    is_peek: bool = False,
    refused: tuple[str, ...] = (),
    preview: Preview | None = None,
) -> _Agreed[T]:
    began = time.monotonic()
    while True:
        assert claim.restore is not None, "a fresh run restores nothing"
        verdict = RankRestore(
            group=group.id,
            rank=group.rank,
            world_size=group.world_size,
            key=claim.restore.key,
            on_corrupt=on_corrupt,
            is_peek=is_peek,
        )
        checkpoint = Checkpoint(group.store, claim.restore, group.fetch(claim.documents))
        got: T | None = None
        try:
            got = read(checkpoint, refused)
            verdict = replace(verdict, arrival=arrival(got, time.monotonic() - began))
        except DamagedError as error:
            verdict = replace(verdict, damage=str(error))
        except Exception as error:
            told = error if isinstance(error, RaycheckError) else StoreError(f"{type(error).__name__}: {error}")
            group.tell("restored", replace(verdict, failure=told))
            raise
        ruling = _ruling(group, verdict)
        if ruling.claim is None:
            assert got is not None, "what is damaged here is not all well"
            return _Agreed(claim=claim, got=got, resume=ruling.resume, refused=refused)
        refused = (*refused, f"{verdict.key} ({ruling.message})")
        claim = ruling.claim
        if preview is not None and claim.restore is not None:
            # The script has acted on what peek() said of the other one. All ranks are told so, and all start again.
            raise SupersededError(
                f"rank {group.rank}: peek() answered for {verdict.key}, which is damaged ({ruling.message}); start the "
                f"workers again: peek() will answer for {claim.restore.key}"
            )


def say_what_changed(group: Group, manifest: Manifest, settings: SaveSettings) -> None:
    """Since the checkpoint was saved. The settings of the script always hold."""
    before, now = set(manifest.settings), set(settings.chosen)
    if before != now and not group.rank:
        texts = [", ".join(sorted(said)) or "defaults" for said in (now - before, before - now)]
        logger.info("%s: settings since %s: now %s, before %s", name_of(group.uri), manifest.key, *texts)


def warn_of_rays_checkpoint(group: Group, restored: Manifest | None) -> None:
    """Say so when a script that reads ray.train.get_checkpoint() too would mix two steps: after a hard kill Ray is some
    commits behind, and it may have checkpoints that the script itself reported."""
    if group.rank or not group.is_ray_train:
        return
    path = train_context.checkpoint_path()
    name = pointed_by(path) if path else None
    if path is None if restored is None else name is not None and name.step == restored.step:
        return
    ours = "starts fresh" if restored is None else f"has restored step {restored.step}"
    theirs = f"is of step {name.step}" if name else f"is {path}" if path else "is none"
    logger.warning(
        "%s: raycheck %s, while ray.train.get_checkpoint() %s: take step, epoch and weights from restore() alone",
        name_of(group.uri),
        ours,
        theirs,
    )


def furthest_of(resume: ResumeRecord | None) -> int:
    """The furthest step that an attempt before this one is known to have completed; -1 for none."""
    return -1 if resume is None or resume.furthest_step is None else resume.furthest_step


def say_what_begins_anew(group: Group, restored: Progress | None) -> None:
    """Without a position in the data in the state: warn of Ray Data's epoch that is cut off, at a run's first start and
    whenever it happens. It is no error: a run of one epoch loses nothing, and one that is restarted at night is better
    off with some samples twice than with an end. restored: None in a fresh run."""
    names = ", ".join(dataset_names())
    if group.rank or (restored is not None and restored.epoch_step == 0) or not (names or restored):
        return
    where = name_of(group.uri)
    if restored is not None:
        where += (
            f": training goes on at step {restored.step}, after {restored.epoch_step} steps of epoch {restored.epoch}"
        )
    if not names:
        logger.info("%s; the state has no position in the data, which begin where the script begins them", where)
        return
    happens = "the epoch begins anew after a restart in the middle of it, while step and schedule go on"
    if restored is not None:
        happens = "they begin that epoch anew, so that its samples are trained on again"
    logger.warning(
        "%s; the datasets of Ray Data (%s) cannot say where they stand: %s. Call end_epoch() after each epoch and loop "
        "over range(at.epoch, epochs); where the order of an epoch is fixed, skip its first at.epoch_step batches; "
        "raycheck.Batches need neither",
        where,
        names,
        happens,
    )


def _arrival(done: Restored, seconds: float) -> Arrival:
    return Arrival(
        step=done.progress.step,
        trained_s=done.trained_s,
        seconds=seconds,
        bytes_fetched=done.bytes_fetched,
        what=str(done.report),
    )


def _ruling(group: Group, verdict: RankRestore) -> RestoreDecision:
    what = f"{'peek at' if verdict.is_peek else 'restore of'} {verdict.key}"
    decision: RestoreDecision = ask_until_decided(
        group,
        "restored",
        verdict,
        deadline=time.monotonic() + RESTORE_TIMEOUT_S,
        what=what,
        late=lambda missing: StoreError(f"rank {group.rank}: {what}: {missing} within {RESTORE_TIMEOUT_S:.0f} s"),
    )
    return decision
