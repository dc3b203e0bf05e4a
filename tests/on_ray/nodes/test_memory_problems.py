"""When a memory checkpoint is missing, the log of the coordinator and the record of the next start say why."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import raycheck
from raycheck.bucket.assembly.save_report import Report
from raycheck.bucket.attempt_records import ResumeRecord, read_resumes
from raycheck.bucket.format.document import dump
from raycheck.bucket.format.progress import Progress
from raycheck.bucket.store import open_store
from raycheck.group.coordinator.actor import Coordinator
from raycheck.group.coordinator.messages import Outcome
from raycheck.group.worker.group_restore import RestoreResult
from tests.support.processes.background_call import InThread
from tests.support.processes.command_line import raycheck as command
from tests.support.processes.coordinator_in_thread import InProcess, again, group_of

WHY = "rank 1: model.frozen, which gets no gradient, is not in the bucket as it is now"


def test_the_reason_of_the_newest_failure_is_kept_for_the_next_start(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    coordinator = Coordinator(f"file://{tmp_path}/run", "driver")
    report = Report(
        group="g", rank=1, world_size=2, attempt=1, save=0, progress=Progress(step=4), failure=WHY, is_in_memory=True
    )

    async def failed() -> list[str]:
        await coordinator.claim("g", 2)
        answers = [await coordinator.report(replace(report, progress=Progress(step=step))) for step in (4, 6)]
        assert all(isinstance(answer, Outcome) and answer.kind == "failed" for answer in answers)
        assert await coordinator._memory.claimed(2, None) is None
        return [coordinator._memory.take_problem(), coordinator._memory.take_problem()]

    found = asyncio.run(failed())

    assert found == [f"rank 1: {WHY}", ""]
    assert caplog.text.count(WHY) == 1, "it is said once while it is the same"


@pytest.mark.parametrize(("step", "problem"), [(3, f"rank 1: {WHY}"), (4, ""), (5, "")])
def test_a_reason_is_over_once_the_bucket_has_the_step(tmp_path: Path, step: int, problem: str) -> None:
    coordinator = Coordinator(f"file://{tmp_path}/run", "driver")
    report = Report(
        group="g", rank=1, world_size=2, attempt=1, save=0, progress=Progress(step=4), failure=WHY, is_in_memory=True
    )

    async def failed() -> str:
        await coordinator.claim("g", 2)
        await coordinator.report(report)
        coordinator._memory.committed("key", step)
        return coordinator._memory.take_problem()

    assert asyncio.run(failed()) == problem


def test_a_start_without_a_checkpoint_says_why_there_is_nothing_in_memory_either(tmp_path: Path) -> None:
    groups = group_of(f"file://{tmp_path}/run")

    def begun(group: InProcess) -> RestoreResult:
        ckpt = raycheck.Checkpointer({"weights": torch.ones(4)}, raycheck.SaveSettings(every_steps=2), group=group)
        return ckpt.restore()

    begun(groups[0])
    groups[0].ask("no_memory", "rank 0: no node", timeout_s=60, what="report")
    at = begun(replace(groups[0], id="second"))

    assert at.resume is not None
    assert at.resume.memory_problem == "rank 0: no node"


def train(groups: list[InProcess], *, until: int) -> None:
    settings = raycheck.SaveSettings(every_steps=2, memory_every_steps=1, upload_by="node")

    def rank(group: InProcess) -> None:
        with raycheck.Checkpointer({"weights": torch.ones(4)}, settings, group=group) as ckpt:
            at = ckpt.restore()
            for _ in range(at.step, until):
                ckpt.end_step()
                ckpt.wait()

    for thread in [InThread(lambda group=group: rank(group)) for group in groups]:
        thread.join()


def test_show_says_why_nothing_newer_lay_in_memory(tmp_path: Path) -> None:
    """Without Ray no node has an actor that could hold anything."""
    uri = f"file://{tmp_path}/run"
    groups = group_of(uri)
    train(groups, until=4)
    train(again(groups), until=6)

    record = read_resumes(open_store(uri), [2])[2]
    assert record.memory_problem.startswith("rank 0: its node holds none any more: ")
    shown = command("show", uri).stdout
    assert "no later memory checkpoint: rank 0: its node holds none any more" in " ".join(shown.split())


def test_a_record_without_a_problem_has_the_bytes_that_it_had(tmp_path: Path) -> None:
    record = ResumeRecord(
        attempt=2,
        after=1,
        cause="killed",
        restored=None,
        step=0,
        world_size_before=1,
        world_size=1,
        lost_steps=None,
        lost_s=None,
        since_commit_s=None,
        restore_s=0.0,
        restore_bytes=0,
        what="",
    )

    assert b"memory" not in dump(record)
    assert "memory" not in str(record)
