"""The saves of a node's actor, which is an object of this process here. With Ray's actors: test_node_uploads.py."""

import gc
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import raycheck
from raycheck.bucket.assembly.save_report import Report
from raycheck.bucket.format.progress import Progress
from raycheck.group.worker.group_restore import claim_run
from raycheck.on_ray.nodes.node_uploads import NodeAgent
from raycheck.state.train_state import TrainState
from raycheck.transfer.incremental_upload import StagedState
from tests.support.processes.coordinator_in_thread import group_of


def staged_and_reported(group: raycheck.adapters.Group, save: int) -> tuple[StagedState, Report]:
    state = {"model": torch.nn.Linear(3, 2)}
    progress = Progress(step=save)
    staged = TrainState(state, rank=0, world_size=1, is_shared=True).stage(progress)
    return staged, Report(group=group.id, rank=0, world_size=1, attempt=1, save=save, progress=progress)


@pytest.fixture
def group(tmp_path: Path) -> raycheck.adapters.Group:
    """The place of the only rank of a group, which has claimed the run."""
    (place,) = group_of(f"file://{tmp_path}/run")
    claim_run(place)
    return place


def test_an_actor_that_sees_another_place_does_not_take_the_save(group: raycheck.adapters.Group) -> None:
    elsewhere = replace(group, uri=f"{group.uri}/elsewhere")
    staged, report = staged_and_reported(group, 1)

    answer = NodeAgent().save(elsewhere, staged.to_share(), report, deadline=time.monotonic() + 9, timeout_s=9.0)

    assert answer.outcome is None
    assert "another place" in answer.problem


def test_an_actor_keeps_nothing_of_the_saves_that_it_has_uploaded(group: raycheck.adapters.Group) -> None:
    agent, before, kept = NodeAgent(), shared_copies(), []

    for save in range(1, 9):
        staged, report = staged_and_reported(group, save)
        agent.save(group, staged.to_share(), report, deadline=time.monotonic() + 60, timeout_s=60.0)
        del staged
        gc.collect()
        kept.append(shared_copies() - before)

    assert kept == [set()] * 8


def shared_copies() -> set[str]:
    """Return the mappings and the open files of staged copies in this process."""
    mapped = Path("/proc/self/maps").read_text().splitlines()
    opened = []
    for file in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # another thread has just closed it
            opened.append(f"{file.stat().st_ino} {file.readlink()}")
    return {line for line in (*mapped, *opened) if "memfd:raycheck (" in line}


def test_an_actor_that_cannot_reach_the_memory_does_not_take_the_save(tmp_path: Path) -> None:
    group = raycheck.adapters.RayGroup(id="g", uri=f"file://{tmp_path}/run", rank=0, world_size=1, coordinator=None)
    staged = TrainState({"model": torch.nn.Linear(3, 2)}, rank=0, world_size=1, is_shared=True).stage(Progress(step=1))
    shared = staged.to_share()
    elsewhere = replace(shared.shards[0], place=replace(shared.shards[0].place, pid=1 << 22))
    report = Report(group="g", rank=0, world_size=1, attempt=1, save=1, progress=Progress(step=1))

    answer = NodeAgent().save(group, replace(shared, shards=(elsewhere,)), report, deadline=0.0, timeout_s=1.0)

    assert answer.outcome is None
    assert "cannot be reached" in answer.problem
