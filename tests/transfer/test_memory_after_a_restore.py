"""What a memory checkpoint needs is there after every restore: of a run with one frozen component, too, at any world size.

The coordinator's list and the nodes' actors are left out: shards are held in a dict, and read from there.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn

from raycheck.bucket.assembly.assemble import assemble
from raycheck.bucket.assembly.plan_cache import PlanCache, Section
from raycheck.bucket.assembly.save_report import Report
from raycheck.bucket.format.checksum import crc32
from raycheck.bucket.format.latest import Entry
from raycheck.bucket.format.object_keys import CheckpointName, index_key
from raycheck.bucket.format.progress import Progress
from raycheck.bucket.reading import Checkpoint, Documents
from raycheck.bucket.store import Store
from raycheck.errors import NotFoundError, SaveFailedError
from raycheck.state.train_state import TrainState
from tests.support.processes.save_without_ray import agreed, save

BASE = "model.frozen"


class Adapted(nn.Module):
    """A frozen base in two tensors that are spread over ranks, and a part that is trained."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.base = nn.ParameterList(nn.Parameter(torch.randn(1 << 18), requires_grad=False) for _ in range(2))
        self.head = nn.Linear(8, 2)

    def train_to(self, step: int) -> None:
        with torch.no_grad():
            self.head.weight.fill_(step)


@dataclass(frozen=True)
class Held:
    """Holds the shards of memory checkpoints by key, as the nodes do; the rest is in the bucket."""

    store: Store
    shards: dict[str, bytes] = field(default_factory=dict)

    def get_range(self, key: str, start: int, stop: int) -> bytes:
        if key not in self.shards:
            raise NotFoundError(f"{key} is not in memory")
        return self.shards[key][start:stop]


@dataclass(frozen=True)
class Reader:
    held: Held
    keys: frozenset[str]

    def get_range(self, key: str, start: int, stop: int) -> memoryview:
        source = self.held if key in self.keys else self.held.store
        return memoryview(source.get_range(key, start, stop))


class Group:
    """The ranks of one group, which has restored a checkpoint or begins fresh."""

    def __init__(self, store: Store, world_size: int, *, attempt: int) -> None:
        self._store, self._attempt = store, attempt
        self.models = [Adapted(seed=0) for _ in range(world_size)]
        self.states = [
            TrainState({"model": model}, rank=rank, world_size=world_size, is_shared=True, has_memory=True)
            for rank, model in enumerate(self.models)
        ]
        agreed(self.states)
        self._slot = 0

    def restore(self, checkpoint: Checkpoint) -> "Group":
        for model in self.models:
            nn.init.zeros_(model.base[0])
        for state in self.states:
            state.apply(checkpoint)
        return self

    def save(self, step: int) -> Checkpoint:
        """Save to the bucket."""
        for model in self.models:
            model.train_to(step)
        staged = [state.stage(Progress(step=step)) for state in self.states]
        checkpoint = save(self._store, staged, save=step, progress=Progress(step=step))
        places = {part.name: part.checkpoint for part in checkpoint.read_manifest().components}
        for state, own in zip(self.states, staged, strict=True):
            state.components.committed(own, places)
        return checkpoint

    def to_memory(self, step: int) -> Checkpoint:
        """Make a memory checkpoint, as the coordinator does."""
        for model in self.models:
            model.train_to(step)
        self._slot = 1 - self._slot
        name = str(CheckpointName(step=step, attempt=self._attempt, save=0))
        held = Held(self._store)
        reports = []
        for rank, state in enumerate(self.states):
            staged = state.stage_for_memory(Progress(step=step), self._slot)
            for key, data, _ in staged.seal(name):
                held.shards[key] = bytes(data)
            report = Report(
                group="group",
                rank=rank,
                world_size=len(self.states),
                attempt=self._attempt,
                save=0,
                progress=Progress(step=step),
                shards=staged.records,
                references=staged.references,
                section=Section.of(staged.section()),
                is_in_memory=True,
            )
            reports.append(report)
        made = assemble(self._store, reports, PlanCache())
        entry = Entry(
            key=name,
            refs=made.manifest.refs,
            step=step,
            committed_at=0.0,
            size_bytes=made.manifest.size_bytes,
            metrics={},
            manifest_crc32=crc32(made.manifest_bytes),
        )
        documents = Documents(manifest=made.manifest_bytes, index=made.documents[index_key(name)])
        return Checkpoint(self._store, entry, documents, Reader(held, frozenset(held.shards)))


def places(checkpoint: Checkpoint) -> Mapping[str, str]:
    return {part.name: part.checkpoint for part in checkpoint.read_manifest().components}


def assert_holds(checkpoint: Checkpoint, step: int) -> None:
    found, expected = Adapted(seed=9), Adapted(seed=0)
    expected.train_to(step)
    TrainState({"model": found}, rank=0, world_size=1).apply(checkpoint)
    assert all(torch.equal(tensor, expected.state_dict()[name]) for name, tensor in found.state_dict().items())


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_run_with_one_frozen_component_goes_on_making_memory_checkpoints(files: Store, world_size: int) -> None:
    first = Group(files, world_size, attempt=1)
    base = first.save(10).entry.key
    memory = first.to_memory(12)

    second = Group(files, world_size, attempt=2).restore(memory)
    again = second.to_memory(14)
    third = Group(files, world_size, attempt=3).restore(again)
    once_more = third.to_memory(16)
    saved = third.save(20)

    for checkpoint, step in ((memory, 12), (again, 14), (once_more, 16), (saved, 20)):
        assert places(checkpoint)[BASE] == base, "it is uploaded once"
        assert_holds(checkpoint, step)


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 3)])
def test_after_a_change_of_world_size_there_are_memory_checkpoints_at_once(
    files: Store, before: int, after: int
) -> None:
    saved = Group(files, before, attempt=1).save(10)

    second = Group(files, after, attempt=2).restore(saved)
    memory = second.to_memory(12)
    third = Group(files, after, attempt=3).restore(memory)
    again = third.to_memory(14)
    at_last = third.save(20)
    after_that = third.to_memory(22)

    for checkpoint, step in ((memory, 12), (again, 14), (at_last, 20), (after_that, 22)):
        assert_holds(checkpoint, step)
    assert {places(memory)[BASE], places(again)[BASE]} == {saved.entry.key}


def test_what_changed_since_the_restore_is_named_when_there_can_be_no_memory_checkpoint(files: Store) -> None:
    saved = Group(files, 1, attempt=1).save(10)
    group = Group(files, 2, attempt=2).restore(saved)
    for model in group.models:
        with torch.no_grad():
            for tensor in model.base:
                tensor.add_(1)

    with pytest.raises(SaveFailedError, match=r"model\.frozen, which gets no gradient, is not in the bucket as it"):
        group.to_memory(12)
