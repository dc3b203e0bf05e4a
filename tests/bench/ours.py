"""raycheck as one worker of one rank runs it: staged, uploaded, reported, committed and loaded again.

The same calls in the same order as in raycheck/train, less Ray, so that each can be timed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

from raycheck.bucket.assembly.assemble import assemble
from raycheck.bucket.assembly.plan_cache import PlanCache
from raycheck.bucket.assembly.save_report import Report
from raycheck.bucket.format import object_keys
from raycheck.bucket.protocol import claim as claims
from raycheck.bucket.protocol import commit as protocol
from raycheck.bucket.protocol.resume import Never
from raycheck.bucket.protocol.swap import Register
from raycheck.bucket.protocol.write_once import put_all_once
from raycheck.bucket.reading import Checkpoint, read_latest
from raycheck.bucket.store import Store
from raycheck.settings import Retention
from raycheck.state.train_state import Progress, TrainState
from raycheck.transfer.incremental_upload import StagedState
from tests.bench.sampling import Measured
from tests.bench.states import State
from tests.support.processes.save_without_ray import ME, Uploaded, upload


@dataclass(frozen=True, kw_only=True, slots=True)
class Saved:
    """Seconds: staged_s of blocked training, durable_s until the shard is safe, committed_s in all."""

    checkpoint: Checkpoint
    staged_s: float
    durable_s: float
    committed_s: float


class Ours:
    """A run of one rank at a place of its own."""

    def __init__(self, store: Store, state: State) -> None:
        self.store = store
        self._state = state
        self._train_state = TrainState(state.live, rank=0, world_size=1)
        self._register = Register(store)
        self._attempt = claims.claim(
            self._register, ME, group="bench", world_size=1, resume=Never(), run_id="run"
        ).attempt
        self._plans = PlanCache()
        self._saves = 0

    def stage(self) -> StagedState:
        return self._train_state.stage(Progress(step=self._saves + 1))

    def upload(self, staged: StagedState) -> Uploaded:
        """Durable when it returns."""
        return upload(self.store, staged, name=self._name(self._saves + 1))

    def commit(self, staged: StagedState, uploaded: Uploaded) -> None:
        self._saves += 1
        report = Report(
            group="bench",
            rank=0,
            world_size=1,
            attempt=self._attempt.number,
            save=self._saves,
            progress=Progress(step=self._saves),
            shards=uploaded.records,
            references=uploaded.references,
            section=uploaded.section,
        )
        made = assemble(self.store, [report], self._plans)
        manifest, at = made.manifest, put_all_once(self.store, made.documents)
        assert protocol.commit(self._register, ME, manifest, made.manifest_bytes, Retention(keep_last=2), at=at)
        self._plans.components = manifest.components
        self._train_state.components.committed(staged, {part.name: part.checkpoint for part in manifest.components})

    def newest(self) -> Checkpoint:
        return Checkpoint(self.store, read_latest(self.store).live[-1])

    def save(self) -> Saved:
        began = perf_counter()
        staged = self.stage()
        staged_s = perf_counter() - began
        uploaded = self.upload(staged)
        durable_s = perf_counter() - began
        self.commit(staged, uploaded)
        committed_s = perf_counter() - began
        return Saved(checkpoint=self.newest(), staged_s=staged_s, durable_s=durable_s, committed_s=committed_s)

    def load(self, checkpoint: Checkpoint) -> float:
        """Seconds to fill the live state, manifest and index included."""
        began = perf_counter()
        self._train_state.apply(checkpoint)
        return perf_counter() - began

    def clear(self) -> None:
        """Delete what was saved; `latest` stays. The next save is whole."""
        self._train_state.components.forget()
        for item in list(self.store.list_objects(object_keys.CHECKPOINTS_PREFIX)):
            self.store.delete(item.key)

    def turn(self, settle: Callable[[], None]) -> Measured:
        """A side of a comparison. Loads what it saved into the emptied state, and makes sure that it is back."""
        settle()
        saved = self.save()
        expected = [tensor.clone() for tensor in self._state.tensors]
        emptied(self._state)
        settle()
        loaded_s = self.load(saved.checkpoint)
        check_same(self._state, expected)
        self.clear()
        return {
            "save": saved.durable_s,
            "blocked": saved.staged_s,
            "committed": saved.committed_s,
            "load": loaded_s,
        }

    def _name(self, save: int) -> str:
        return str(object_keys.CheckpointName(step=save, attempt=self._attempt.number, save=save))


def emptied(state: State) -> None:
    for tensor in state.tensors:
        tensor.zero_()


def check_same(state: State, expected: list) -> None:
    for tensor, wanted in zip(state.tensors, expected, strict=True):
        assert tensor.equal(wanted), "a load came back with other values than were saved"
