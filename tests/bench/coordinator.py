"""What a save costs the coordinator: CPU and bytes, for simulated ranks on a memory store, without Ray and torch."""

import asyncio
import base64
import json
import math
import random
import sys
import time
from array import array
from collections.abc import Sequence
from dataclasses import replace
from uuid import uuid4

from raycheck.bucket.assembly.plan_cache import Section
from raycheck.bucket.assembly.save_report import Report
from raycheck.bucket.format.checksum import crc32
from raycheck.bucket.format.index import Chunk, Index, Leaf, Object, Tensor, index_of
from raycheck.bucket.format.index_codec import load_index
from raycheck.bucket.format.manifest import ShardRecord
from raycheck.bucket.format.object_keys import index_key, shard_key
from raycheck.bucket.format.progress import Progress
from raycheck.bucket.format.values import encode
from raycheck.bucket.protocol.resume import Never
from raycheck.bucket.store import open_store
from raycheck.group.coordinator.actor import Coordinator
from raycheck.group.coordinator.messages import Outcome, Pending

HEAD, FRAME = 704, 1184


def measure(ranks: Sequence[int] = (64, 128, 256, 512, 1024), *, tensors: int = 1000) -> dict[str, float]:
    """CPU seconds are of the whole process, figures those of the largest world; the exponent is that of the CPU of a
    save with a new plan over the number of ranks."""
    costs = [cost(world_size, tensors=tensors) for world_size in ranks]
    points = [(math.log(world_size), math.log(found["new_s"])) for world_size, found in zip(ranks, costs, strict=True)]
    means = [sum(column) / len(points) for column in zip(*points, strict=True)]
    spread = sum((x - means[0]) ** 2 for x, _ in points)
    slope = sum((x - means[0]) * (y - means[1]) for x, y in points) / spread if spread else math.nan
    return {**costs[-1], "exponent": slope}


def cost(world_size: int, *, tensors: int, saves: int = 3) -> dict[str, float]:
    """Of one world size: the first save, and the median of those after it, whose plans are the same."""
    sections = simulated(world_size, tensors=tensors)
    uri = f"memory://{uuid4().hex}"
    coordinator = Coordinator(uri, "bench", Never())
    seconds = asyncio.run(_saves(coordinator, sections, saves=saves + 1))
    name = "step-000000001-a1-s1"
    data = open_store(uri).get(index_key(name)).data
    began = time.process_time()
    index = load_index(data, what=name)
    parse_s = time.process_time() - began
    rows = world_size * tensors
    assert len(index.plan.object) == rows
    return {
        "new_s": seconds[0],
        "us_per_rank_tensor_new": 1e6 * seconds[0] / rows,
        "us_per_rank_unchanged": 1e6 * sorted(seconds[1:])[saves // 2] / world_size,
        "bytes_per_rank_tensor": len(data) / rows,
        "bytes_of_values_per_rank": sum(len(section.values[1]) for section in sections) / world_size,
        "parse_s_per_million": 1e6 * parse_s / rows,
    }


async def _saves(coordinator: Coordinator, sections: Sequence[Section], *, saves: int) -> list[float]:
    await coordinator.claim("group", len(sections))
    store = coordinator._store
    seconds = []
    for save in range(1, saves + 1):
        name = f"step-{save:09d}-a1-s{save}"
        shards = [
            ShardRecord(component="train", rank=rank, size_bytes=4, crc32=crc32(b"data"))
            for rank in range(len(sections))
        ]
        for shard in shards:
            store.put(shard_key(name, "train", shard.rank), b"data")
        reports = [
            Report(
                group="group",
                rank=rank,
                world_size=len(sections),
                attempt=1,
                save=save,
                progress=Progress(step=save),
                shards=(shards[rank],),
                section=section if save == 1 else section.without_plan(),
            )
            for rank, section in enumerate(sections)
        ]
        began = time.process_time()
        outcomes = await asyncio.gather(*(_outcome(coordinator, report) for report in reports))
        seconds.append(time.process_time() - began)
        assert {outcome.kind for outcome in outcomes} == {"committed"}, outcomes[0]
    return seconds


async def _outcome(coordinator: Coordinator, report: Report) -> Outcome:
    """As a rank asks: again for as long as it is told to."""
    while isinstance(answer := await coordinator.report(report), Pending):
        pass
    assert isinstance(answer, Outcome), "its plan is known"
    return answer


def simulated(world_size: int, *, tensors: int) -> list[Section]:
    """Every tensor cut evenly along its first dimension, every rank with its random state."""
    first = _section(world_size, tensors)
    found = []
    for rank in range(world_size):
        moved = array("q", (rank * size for size in first.plan.sizes[0]))
        plan = replace(
            first.plan,
            objects=(Object(component="train", rank=rank, num_crcs=tensors),),
            offsets=(moved, first.plan.offsets[1]),
            leaves=first.plan.leaves if rank == 0 else (),
        )
        generator = random.Random(rank)
        index = Index(
            plan=plan,
            crcs=array("I", (generator.getrandbits(32) for _ in range(tensors))),
            values=first.values if rank == 0 else {},
            rank_values=({"rng": _random_state(generator)},),
        )
        found.append(Section.of(index))
    return found


def _section(world_size: int, tensors: int) -> Index:
    names, chunks, at = [], [], 0
    for number in range(tensors):
        name = f"model.layers.{number // 10}.block.{number % 10}.weight"
        rows, columns = 8 * (1 + number % 10), 128
        payload = 4 * rows * columns
        names.append(Tensor(name=name, dtype="float32", shape=(world_size * rows, columns), path=("model", name[6:])))
        chunks.append(
            Chunk(
                tensor=number,
                component="train",
                rank=0,
                offsets=(0, 0),
                sizes=(rows, columns),
                record_offset=at,
                record_size=payload + FRAME,
                payload_offset=at + HEAD,
                payload_size=payload,
                crcs=(0,),
            )
        )
        at += -(-(payload + FRAME) // 64) * 64
    leaf = Leaf(
        name="progress.step", path=("progress", "step"), component="train", rank=0, record_offset=at, record_size=1021
    )
    return index_of(names, chunks, leaves=[leaf], values={"progress": {"step": 1}})


def _random_state(generator: random.Random) -> object:
    """As large as that of python, numpy and torch, and as little compressible."""
    words = [generator.getrandbits(32) for _ in range(624)]
    torchs = b"".join(word.to_bytes(8, "little") for word in words)
    numpys = b"".join(generator.getrandbits(32).to_bytes(4, "little") for _ in range(624))
    return {
        "python": encode(generator.getstate(), "rng"),
        "numpy": base64.b64encode(numpys).decode(),
        "torch": {"$bytes": base64.b64encode(torchs).decode()},
    }


if __name__ == "__main__":
    json.dump(measure([int(text) for text in sys.argv[1:]] or (64, 128, 256, 512, 1024)), sys.stdout, indent=1)
