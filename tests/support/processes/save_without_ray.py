"""Makes a committed checkpoint of staged shards, as the workers and the coordinator do, but without Ray."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from raycheck.bucket.assembly.assemble import assemble
from raycheck.bucket.assembly.plan_cache import PlanCache, Section
from raycheck.bucket.assembly.replica_agreement import agree
from raycheck.bucket.assembly.save_report import Reference, Report
from raycheck.bucket.format import object_keys
from raycheck.bucket.format.manifest import ShardRecord
from raycheck.bucket.format.progress import Progress
from raycheck.bucket.protocol import claim as claims
from raycheck.bucket.protocol import commit as protocol
from raycheck.bucket.protocol.claim import Identity
from raycheck.bucket.protocol.resume import AUTO
from raycheck.bucket.protocol.swap import Register
from raycheck.bucket.protocol.write_once import put_all_once
from raycheck.bucket.reading import Checkpoint, read_latest
from raycheck.bucket.store import Store
from raycheck.settings import Retention
from raycheck.state.train_state import TrainState
from raycheck.transfer.incremental_upload import StagedState
from raycheck.transfer.stage.staged_shard import Staged
from tests.support.histories.invariants import assert_invariants

ME = Identity(owner="driver", coordinator="coordinator")


@dataclass(frozen=True, kw_only=True, slots=True)
class Uploaded:
    """What a rank reports: its shards' records, what it refers to, and its section of the index."""

    records: tuple[ShardRecord, ...]
    references: tuple[Reference, ...]
    section: Section


def claimed(store: Store, *, world_size: int, save: int = 1, step: int = 1) -> str:
    """Claim the run with the first save of a group, and name the save that may be uploaded now."""
    group = f"group-of-{world_size}"
    claimed = claims.claim(Register(store), ME, group=group, world_size=world_size, resume=AUTO, run_id="run")
    return str(object_keys.CheckpointName(step=step, attempt=claimed.attempt.number, save=save))


def upload(store: Store, staged: StagedState, *, name: str) -> Uploaded:
    """Do one rank's part of a save, whose shards are durable when it returns."""
    staged.upload(store, name)
    return Uploaded(
        records=staged.records,
        references=staged.references,
        section=Section.of(staged.section(), staged.replica_digests()),
    )


def places(staged: StagedState) -> dict[str, str]:
    """Return the checkpoint that has each component to which this save refers."""
    return {reference.name: reference.checkpoint for reference in staged.references}


def committed(
    store: Store,
    name: str,
    uploads: Sequence[Uploaded],
    *,
    progress: Progress,
    metrics: dict[str, float] | None = None,
    plans: PlanCache | None = None,
    keep_last: int = 10,
    keeps_drift: bool = False,
) -> Checkpoint:
    """Do the coordinator's part of a save, and check that every invariant holds."""
    conclude(
        Register(store),
        name,
        uploads,
        progress=progress,
        metrics=metrics,
        plans=plans,
        keep_last=keep_last,
        keeps_drift=keeps_drift,
    )
    body = read_latest(store)
    entry = body.entry(name)
    assert entry is not None
    assert_invariants(store, before=body)
    return Checkpoint(store, entry)


def conclude(
    register: Register,
    name: str,
    uploads: Sequence[Uploaded],
    *,
    progress: Progress,
    metrics: dict[str, float] | None = None,
    plans: PlanCache | None = None,
    keep_last: int | None = 10,
    keeps_drift: bool = False,
) -> None:
    """Write index, `.metadata` and manifest, and commit, which must succeed."""
    parsed = object_keys.CheckpointName.parse(name)
    assert parsed is not None
    reports = [
        Report(
            group="group",
            rank=rank,
            world_size=len(uploads),
            attempt=parsed.attempt,
            save=parsed.save,
            progress=progress,
            shards=item.records,
            references=item.references,
            section=item.section,
            metrics=metrics or {},
            keeps_drift=keeps_drift,
        )
        for rank, item in enumerate(uploads)
    ]
    made = assemble(register.store, reports, plans)
    assert made.manifest.key == name
    at = put_all_once(register.store, made.documents)
    assert protocol.commit(register, ME, made.manifest, made.manifest_bytes, Retention(keep_last=keep_last), at=at)


def save(
    store: Store,
    staged: Sequence[StagedState],
    *,
    save: int = 1,
    progress: Progress | None = None,
    metrics: dict[str, float] | None = None,
) -> Checkpoint:
    """Save and commit, for ranks that live in this process."""
    progress = progress or Progress(step=save)
    name = claimed(store, world_size=len(staged), save=save, step=progress.step)
    uploads = [upload(store, own, name=name) for own in staged]
    return committed(store, name, uploads, progress=progress, metrics=metrics)


def agreed(states: Sequence[TrainState]) -> Sequence[TrainState]:
    """Let the ranks of this process agree on who writes what."""
    for state, agreement in zip(states, agree([state.replica_checksums() for state in states]), strict=True):
        state.use_agreement(agreement)
    return states


def save_state(
    store: Store,
    state: dict[str, object],
    *,
    save_number: int = 1,
    step: int = 1,
    metrics: dict[str, float] | None = None,
) -> Checkpoint:
    """Save and commit the state of a world of one rank."""
    progress = Progress(step=step)
    staged = TrainState(state, rank=0, world_size=1).stage(progress)
    return save(store, [staged], save=save_number, progress=progress, metrics=metrics)


def restore_state(checkpoint: Checkpoint, state: dict[str, object]) -> None:
    TrainState(state, rank=0, world_size=1).apply(checkpoint)


def shard_bytes(staged: Staged | StagedState) -> bytes:
    """Returns the whole object that an upload would send: the only one, for a state whose tensors are all trained."""
    if isinstance(staged, StagedState):
        (staged,) = staged.staged
    return b"".join(bytes(part) for part in staged.parts(1 << 20))


class Own:
    """Has a state_dict and a load_state_dict, and nothing else."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state
