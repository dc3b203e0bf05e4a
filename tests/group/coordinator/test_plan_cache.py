"""Tests that a rank sends its plan once, and that the coordinator writes equal bytes whether it has the plan, has
forgotten it, or never had it."""

import asyncio
import subprocess
import sys
from typing import Any
from uuid import uuid4

from raycheck.bucket.assembly.plan_cache import PlanCache, Section
from raycheck.bucket.assembly.save_report import Report
from raycheck.bucket.format.checksum import crc32
from raycheck.bucket.format.manifest import ShardRecord
from raycheck.bucket.format.object_keys import shard_key
from raycheck.bucket.format.progress import Progress
from raycheck.bucket.store import Store, open_store
from raycheck.group.coordinator.actor import Coordinator
from raycheck.group.coordinator.messages import Outcome, PlanWanted
from tests.bench.coordinator import simulated
from tests.support.histories.invariants import assert_invariants
from tests.support.samples.sample_checkpoints import everything

WORLD_SIZE = 3


def reports(store: Store, sections: list[Section], *, save: int) -> list[Report]:
    """Return the ranks' reports of one save of attempt 1, whose shards are in the store."""
    made = []
    for rank, section in enumerate(sections):
        report = Report(
            group="group",
            rank=rank,
            world_size=WORLD_SIZE,
            attempt=1,
            save=save,
            progress=Progress(step=save),
            shards=(ShardRecord(component="train", rank=rank, size_bytes=4, crc32=crc32(b"data")),),
            section=section,
        )
        store.put(shard_key(report.checkpoint, "train", rank), b"data")
        made.append(report)
    return made


async def tell(coordinator: Coordinator, told: list[Report]) -> list[Any]:
    return await asyncio.gather(*(coordinator.report(report) for report in told))


def files(store: Store, save: int) -> dict[str, bytes]:
    """Return a checkpoint's index and DCP metadata as bytes, by name."""
    found = {key.partition(f"-a1-s{save}/")[2]: data for key, data in everything(store).items()}
    return {name: data for name, data in found.items() if name in ("index", "train/.metadata")}


def test_a_plan_is_sent_once_and_every_checkpoint_has_it_whole() -> None:
    uri = f"memory://{uuid4().hex}"
    store, sections = open_store(uri), simulated(WORLD_SIZE, tensors=5)

    async def two_saves() -> list[Outcome]:
        coordinator = Coordinator(uri, "driver")
        await coordinator.claim("group", WORLD_SIZE)
        first = await tell(coordinator, reports(store, sections, save=1))
        hashes_only = [section.without_plan() for section in sections]
        return first + await tell(coordinator, reports(store, hashes_only, save=2))

    outcomes = asyncio.run(two_saves())

    assert {outcome.kind for outcome in outcomes} == {"committed"}
    assert files(store, 1) == files(store, 2)
    assert len(files(store, 1)) == 2
    assert_invariants(store)


def test_a_coordinator_that_was_started_again_asks_for_the_plan_and_writes_the_same_bytes() -> None:
    uri = f"memory://{uuid4().hex}"
    store, sections = open_store(uri), simulated(WORLD_SIZE, tensors=5)
    hashes_only = [section.without_plan() for section in sections]

    async def first_life() -> None:
        coordinator = Coordinator(uri, "driver")
        await coordinator.claim("group", WORLD_SIZE)
        await tell(coordinator, reports(store, sections, save=1))

    async def second_life() -> tuple[list[Any], list[Outcome]]:
        coordinator = Coordinator(uri, "driver")
        refused = await tell(coordinator, reports(store, hashes_only, save=2))
        return refused, await tell(coordinator, reports(store, sections, save=2))

    asyncio.run(first_life())
    refused, outcomes = asyncio.run(second_life())

    assert refused == [PlanWanted()] * WORLD_SIZE
    assert {outcome.kind for outcome in outcomes} == {"committed"}
    assert files(store, 1) == files(store, 2)
    assert_invariants(store)


def test_one_rank_s_new_plan_is_merged_with_the_plans_of_the_others_that_are_known() -> None:
    uri = f"memory://{uuid4().hex}"
    store = open_store(uri)
    sections, others = simulated(WORLD_SIZE, tensors=5), simulated(WORLD_SIZE, tensors=6)
    wanted: list[bool] = []

    async def three_saves() -> list[Outcome]:
        coordinator = Coordinator(uri, "driver")
        await coordinator.claim("group", WORLD_SIZE)
        await tell(coordinator, reports(store, sections, save=1))
        mixed = [others[0], *(section.without_plan() for section in sections[1:])]
        failed = await tell(coordinator, reports(store, mixed, save=2))
        wanted.extend(isinstance(answer, PlanWanted) for answer in failed)
        return failed + await tell(coordinator, reports(store, others, save=3))

    outcomes = asyncio.run(three_saves())

    assert not any(wanted), "they are known"
    assert [outcome.kind for outcome in outcomes] == ["failed"] * 3 + ["committed"] * 3
    assert "block.5" in outcomes[0].message, "two ranks lack the sixth tensor"
    assert_invariants(store)


def test_a_save_is_concluded_without_torch() -> None:
    code = "from tests.bench.coordinator import cost; cost(2, tensors=3); import sys; print('torch' in sys.modules)"

    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)

    assert found.stdout.strip() == "False"


def test_what_one_kind_of_save_has_sent_is_known_to_the_other_and_stays_while_either_names_it() -> None:
    plans, (section, _) = PlanCache(), simulated(2, tensors=5)
    others = [simulated(2, tensors=number)[1] for number in range(6, 40)]

    assert plans.complete(section.without_plan(), "bucket") is None
    assert plans.complete(section, "memory") == section
    assert plans.complete(section.without_plan(), "bucket") == section
    for other in others:
        assert plans.complete(other, "memory") == other

    assert plans.complete(section.without_plan(), "bucket") == section
    assert plans.complete(others[-1].without_plan(), "bucket") == others[-1]
    assert plans.complete(others[0].without_plan(), "bucket") is None, "nobody has named it for long"
