"""Memory checkpoints: the next attempt restores what the nodes hold, when it is newer than what the bucket has."""

import asyncio
import copy
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import pytest
import ray
import torch

import raycheck
from raycheck.bucket.assembly.save_report import Report
from raycheck.bucket.attempt_records import read_resumes
from raycheck.bucket.format.checksum import crc32
from raycheck.bucket.format.manifest import ShardRecord
from raycheck.bucket.format.object_keys import shard_key
from raycheck.bucket.format.progress import Progress
from raycheck.bucket.store import open_store
from raycheck.bucket.store.address import join_uri
from raycheck.group.coordinator.actor import Coordinator
from raycheck.group.coordinator.messages import Holder, Outcome, Pending
from raycheck.group.ports import PreemptionNotice
from raycheck.on_ray.nodes.memory_shards import CHUNK_BYTES, CHUNKS_IN_FLIGHT, MemoryReader, send
from raycheck.on_ray.nodes.node_uploads import NodeAgent
from raycheck.on_ray.ray_cluster import RayCluster
from tests.bench.coordinator import simulated
from tests.support.histories.invariants import assert_invariants
from tests.support.processes.ray_jobs import story, wait_for_memory

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore")]  # Ray itself warns
IN_MEMORY = {"upload_by": "node", "memory_every_steps": 2}


@pytest.mark.parametrize("mode", ["fsdp", pytest.param("ddp", marks=pytest.mark.slow)])  # fsdp: with a frozen layer
def test_a_group_that_dies_goes_on_from_the_memory_checkpoint(job, s3: str, tmp_path: Path, mode: str) -> None:
    storage = join_uri(s3, uuid4().hex)
    trainer = job(
        storage,
        "run",
        mode=mode,
        every=8,
        wait_at=8,
        kill=(1, 15),
        in_memory=9,
        settings=IN_MEMORY,
        max_failures=1,
        pause_s=0.1,
    )

    raycheck.fit(trainer)

    (fresh, again) = story(tmp_path, "restored")
    assert not fresh["is_from_memory"]
    assert again["is_from_memory"]
    (held,) = story(tmp_path, "held", rank=1)
    at = story(tmp_path, "start")[1]["at"]
    assert held["step"] <= at <= 14
    assert again["checkpoint"] == f"step-{at:09d}-a1-s0"
    for rank in (0, 1):
        steps = story(tmp_path, "step", rank=rank)
        assert len({event["step"] for event in steps}) == 24
        assert len({event["step"] for event in steps}) == len({(event["step"], event["loss"]) for event in steps})
    store = open_store(join_uri(storage, "run"))
    body = assert_invariants(store)
    assert body is not None
    assert at not in [entry.step for entry in body.live], "a memory checkpoint is never in latest"
    assert read_resumes(store, [2])[2].is_from_memory


class Averaged(torch.nn.Module):
    """Has an average of its weights, which gets no gradient and changes at every step."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(50_000))
        self.average = torch.nn.Parameter(torch.zeros(50_000), requires_grad=False)

    def step(self, number: int) -> None:
        with torch.no_grad():
            self.weight.fill_(number)
            self.average.lerp_(self.weight, 0.5)


@pytest.fixture
def coordinator(cluster: None, tmp_path: Path) -> Iterator[Any]:
    started = raycheck.adapters.start_coordinator(f"file://{tmp_path}/run", owner=uuid4().hex)
    yield started
    ray.kill(started)


def test_what_changes_without_a_gradient_is_in_memory_too_and_the_next_save_uploads_it(
    coordinator: Any, tmp_path: Path
) -> None:
    def attempt(steps: range) -> tuple[Any, Averaged]:
        model = Averaged()
        group = raycheck.adapters.RayGroup(
            id=uuid4().hex, uri=f"file://{tmp_path}/run", rank=0, world_size=1, coordinator=coordinator
        )
        settings = raycheck.SaveSettings(every_steps=4, upload_by="node", memory_every_steps=1)
        with suppress(ZeroDivisionError), raycheck.Checkpointer({"model": model}, settings, group=group) as ckpt:
            at = ckpt.restore()
            restored = copy.deepcopy(model)
            for number in steps:
                model.step(number)
                ckpt.end_step()
                if number % 4 == 0:
                    ckpt.wait()
                else:
                    wait_for_memory(ckpt, number) if number > 4 else None
            if steps.stop < 10:
                raise ZeroDivisionError
        return at, restored

    attempt(range(1, 8))
    expected = Averaged()
    for number in range(1, 8):
        expected.step(number)

    at, restored = attempt(range(8, 11))

    assert at.is_from_memory
    assert at.step == 7
    assert torch.equal(restored.weight, expected.weight)
    assert torch.equal(restored.average, expected.average)
    run = raycheck.open_run(f"file://{tmp_path}/run")
    assert [checkpoint.step for checkpoint in run.checkpoints] == [4, 8, 10]
    for checkpoint in run.checkpoints:
        assert not [finding for finding in checkpoint.verify() if finding.problem]
        assert checkpoint.details().components.keys() == {"train", "model.frozen"}


def test_a_group_that_leaves_a_node_at_once_leaves_a_memory_checkpoint_of_its_last_step(
    coordinator: Any, tmp_path: Path
) -> None:
    """Also when the one before is still under way, and there is too little time for a save to the bucket."""
    notices: list[PreemptionNotice] = []

    def attempt(steps: range) -> tuple[Any, Averaged]:
        model = Averaged()
        group = raycheck.adapters.RayGroup(
            id=uuid4().hex,
            uri=f"file://{tmp_path}/run",
            rank=0,
            world_size=1,
            coordinator=coordinator,
            notice=lambda: notices[-1] if notices else None,
        )
        settings = raycheck.SaveSettings(at_steps=[2], upload_by="node", memory_every_steps=1, on_preempt="restart")
        with raycheck.Checkpointer({"model": model}, settings, group=group) as ckpt:
            at = ckpt.restore()
            restored = copy.deepcopy(model)
            for number in steps:
                model.step(number)
                if number == 5:
                    notices.append(PreemptionNotice(at=time.time() + 0.02))
                ckpt.end_step()
                if number == 2:
                    ckpt.wait()
                if number == 3:
                    wait_for_memory(ckpt, number)
        return at, restored

    with pytest.raises(raycheck.errors.SupersededError, match="step 5 is not saved"):
        attempt(range(1, 100))
    notices.clear()

    at, restored = attempt(range(6, 7))

    assert (at.step, at.is_from_memory) == (5, True)
    assert restored.weight[0] == 5


class HoldingAgent(NodeAgent):
    """Holds what a test gives it, as if a rank had sealed it."""

    def hold(self, key: str, shard: bytes) -> None:
        self._shards.put(key, memoryview(shard))


def reports_of(step: int) -> list[Report]:
    """What two ranks of this node report of a memory checkpoint."""
    return [
        Report(
            group="group",
            rank=rank,
            world_size=2,
            attempt=1,
            save=0,
            progress=Progress(step=step),
            shards=(ShardRecord(component="train", rank=rank, size_bytes=4, crc32=crc32(b"data")),),
            section=section,
            node=ray.get_runtime_context().get_node_id(),
            is_in_memory=True,
        )
        for rank, section in enumerate(simulated(2, tensors=4))
    ]


@pytest.fixture
def memory(cluster: None, tmp_path: Path) -> Iterator[tuple[Coordinator, Any]]:
    """Yield the coordinator of two ranks on this node, which has to be asked for the claim, and the node's actor."""
    found = Coordinator(f"file://{tmp_path}", "driver", cluster=RayCluster())
    actor = found._node_agents.of(ray.get_runtime_context().get_node_id(), HoldingAgent)
    yield found, actor
    ray.kill(actor)


async def told(coordinator: Coordinator, report: Report) -> Outcome:
    """Report until there is an outcome."""
    while isinstance(answer := await coordinator.report(report), Pending):
        pass
    assert isinstance(answer, Outcome)
    return answer


def hold(actor: Any, reports: list[Report]) -> None:
    for report in reports:
        ray.get(actor.hold.remote(shard_key(report.checkpoint, "train", report.rank), b"data"), timeout=60)


def test_a_rank_that_asks_late_hears_that_its_memory_checkpoint_is_listed(memory: Any) -> None:
    """Else it would stage the next one over the memory of the listed one."""
    found, actor = memory
    reports = reports_of(10)
    hold(actor, reports)

    async def kinds() -> list[str]:
        await found.claim("group", 2)
        listed = await asyncio.gather(*(told(found, report) for report in reports))
        assert isinstance(await found.report(reports_of(20)[0], 0), Pending)
        late = await told(found, reports[1])
        failed = await told(found, replace(reports[1], progress=Progress(step=9)))
        return [outcome.kind for outcome in (*listed, late, failed)]

    assert asyncio.run(kinds()) == ["committed", "committed", "committed", "failed"]


def test_what_a_node_takes_with_it_before_it_is_copied_does_not_replace_what_has_copies(memory: Any) -> None:
    found, actor = memory

    async def report(step: int) -> Outcome:
        outcomes = await asyncio.gather(*(told(found, each) for each in reports_of(step)))
        return outcomes[0]

    async def both() -> list[Any]:
        await found.claim("group", 2)
        hold(actor, reports_of(10))
        first = await report(10)
        ray.kill(actor, no_restart=False)  # what it held is gone with it
        return [first, await report(20), found._memory._newest_key]

    first, second, newest = asyncio.run(both())

    assert (first.kind, second.kind) == ("committed", "failed")
    assert "before another one had a copy" in second.message
    assert newest == first.key


def end(actor: Any) -> None:
    """Kills an actor, and waits until it answers no more."""

    def is_alive() -> bool:
        try:
            ray.get(actor.held_shards.remote(), timeout=60)
        except ray.exceptions.RayActorError:
            return False
        return True

    ray.kill(actor)
    deadline = time.monotonic() + 90
    while is_alive():
        assert time.monotonic() < deadline


class Pause(threading.Event):
    """Lasts until its copy is told to hurry, however short it was to be."""

    def __init__(self) -> None:
        super().__init__()
        self.has_begun = threading.Event()

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        self.has_begun.set()
        assert super().wait(60), "nobody has told it to hurry"
        return True


class PausingAgent(HoldingAgent):
    def __init__(self) -> None:
        super().__init__(event=Pause)

    def wait_for_pause(self, attempt: int) -> None:
        pause = self._hurry_of(attempt)
        assert isinstance(pause, Pause)
        assert pause.has_begun.wait(60)


@pytest.fixture(scope="module")
def two_actors(cluster: None) -> Iterator[list[Any]]:
    """Yields two actors for the whole module, since starting one takes seconds."""
    options = {"num_cpus": 0, "max_concurrency": 8}
    found = [ray.remote(kind).options(**options).remote() for kind in (PausingAgent, HoldingAgent)]  # type: ignore[attr-defined]
    yield found
    for actor in found:
        ray.kill(actor)


@pytest.fixture
def nodes(two_actors: list[Any]) -> list[Any]:
    """Returns the actors of two nodes, which hold nothing."""
    ray.get([actor.__ray_call__.remote(lambda agent: agent.__init__()) for actor in two_actors], timeout=90)
    return two_actors


def test_a_copy_to_another_node_leaves_the_network_for_half_of_the_time(nodes: list[Any]) -> None:
    key = "checkpoints/step-000000004-a1-s0/train/__0_0.distcp"
    chunks = 2 * CHUNKS_IN_FLIGHT + 1
    shards = {key: np.zeros((chunks - 1) * CHUNK_BYTES + 1, np.uint8)}
    pauses: list[float] = []

    began = time.monotonic()
    send(shards, nodes[1], timeout_s=60, pause=pauses.append)
    sent_s = time.monotonic() - began

    assert len(pauses) == 2, "after all but the last few"
    assert 0 < sum(pauses) <= sent_s


@pytest.mark.parametrize("is_asked_before", [True, False])
def test_a_copy_that_pauses_goes_on_at_once_when_it_has_to_hurry(nodes: list[Any], is_asked_before: bool) -> None:
    name = "step-000000004-a3-s0"
    shard = bytes(CHUNKS_IN_FLIGHT * CHUNK_BYTES + 1)
    source, target = nodes
    ray.get(source.hold.remote(f"checkpoints/{name}/train/__0_0.distcp", shard), timeout=60)
    ray.get(source.hurry.remote(2), timeout=30)  # another attempt's
    if is_asked_before:
        ray.get(source.hurry.remote(3), timeout=30)
    sending = source.send_shards.remote(name, target, 60.0)
    ray.get(source.wait_for_pause.remote(3), timeout=90)
    if not is_asked_before:
        assert not ray.wait([sending], timeout=0)[0]
        ray.get(source.hurry.remote(3), timeout=30)
    assert ray.get(sending, timeout=60) == ""


def test_a_shard_is_copied_in_chunks_and_read_from_whoever_has_it(cluster: None, tmp_path: Path) -> None:
    name = "step-000000004-a1-s0"
    key = f"checkpoints/{name}/train/__0_0.distcp"
    shard = np.random.default_rng(1).bytes(2 * CHUNK_BYTES + 5)
    store = open_store(f"file://{tmp_path}")
    store.put_if_absent("other", b"in the bucket")
    actors = [ray.remote(HoldingAgent).options(num_cpus=0, max_concurrency=8).remote() for _ in range(2)]  # type: ignore[attr-defined]
    first, second = actors
    try:
        ray.get(first.hold.remote(key, shard), timeout=60)
        assert ray.get(first.send_shards.remote(name, second, 60.0), timeout=90) == ""
        held = ray.get(second.held_shards.remote(), timeout=30)[key]
        assert held.size_bytes == len(shard)
        holders = [Holder(node="a", actor=first), Holder(node="b", actor=second, place=held.place)]
        reader = MemoryReader(store, {key: holders}, "c")
        beside = MemoryReader(store, {key: [holders[1]]}, "b")
        gone = replace(held.place, inode=held.place.inode + 1)
        restarted = MemoryReader(store, {key: [replace(holders[1], place=gone)]}, "b")
        part = CHUNK_BYTES - 3, CHUNK_BYTES + 7

        assert bytes(reader.get_range(key, *part)) == shard[slice(*part)]
        assert bytes(reader.get_range("other", 3, 6)) == b"the"
        assert bytes(beside.get_range(key, *part)) == shard[slice(*part)]
        assert bytes(restarted.get_range(key, *part)) == shard[slice(*part)], "the actor is asked"
        end(second)
        assert bytes(beside.get_range(key, 0, 9)) == shard[:9], "it is mapped"
        assert bytes(reader.get_range(key, 0, 9)) == shard[:9]
        end(first)
        for of_nobody in (reader, restarted):
            with pytest.raises(raycheck.errors.DamagedError, match="is in no node's memory any more"):
                of_nobody.get_range(key, 0, 9)
    finally:
        for actor in actors:
            ray.kill(actor)
