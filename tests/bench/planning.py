"""R6 and R7: what a coordinator spends on planning, and how many bytes a plan takes, with ranks that are simulated.

CPU time of this process over a store in memory: nothing waits.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from time import perf_counter, process_time
from uuid import uuid4

from raycheck.bucket.document import dump
from raycheck.bucket.index import Chunk, Index, Tensor, dump_index, load_index
from raycheck.bucket.layout import index_key
from raycheck.bucket.manifest import Manifest, ShardRecord
from raycheck.bucket.store import Store, open_store
from raycheck.shards.report import Report, assemble
from raycheck.shards.state import COMPONENT, Progress
from tests.bench.goals import Row
from tests.bench.scale import Bench

ROWS_PER_RANK = 8
COLUMNS = 64
RECORD_BYTES = 4096
HEAD_BYTES = 704
PAYLOAD_BYTES = ROWS_PER_RANK * COLUMNS * 4


def rows(bench: Bench) -> list[Row]:
    ranks, tensors = bench.scale.ranks, bench.scale.tensors
    found = simulated(ranks, tensors)
    note = f"{ranks} simulated ranks x {tensors} tensors"
    growth = {"exponent of CPU over ranks": found["exponent"]}
    return [
        Row(key="R6", value=found["us_per_rank_tensor_new"], note=note, details=growth),
        Row(key="R6.unchanged", value=found["us_per_rank_unchanged"], note=note),
        Row(key="R7", value=found["bytes_per_rank_tensor"], note=note),
        Row(key="R7.parse", value=found["parse_s_per_million"], note=f"{note}, scaled up"),
    ]


def simulated(ranks: int, tensors: int) -> dict[str, float]:
    """CPU in microseconds, per rank and tensor for a new plan and per rank for one that is as before; bytes; seconds
    to parse an index of a million rows; how CPU grows with the ranks, as a power."""
    store = open_store(f"memory://{uuid4().hex}")
    few, _ = _assembled(store, [_report(rank, ranks // 2, tensors) for rank in range(ranks // 2)])
    reports = [replace(_report(rank, ranks, tensors), save=2) for rank in range(ranks)]
    new_s, manifest = _assembled(store, reports)
    again_s, _ = _assembled(store, [replace(report, save=3) for report in reports])
    index = store.get(index_key(manifest.key)).data
    began = perf_counter()
    load_index(index, what="index")
    parse_s = perf_counter() - began
    return {
        "us_per_rank_tensor_new": new_s / (ranks * tensors) * 1e6,
        "us_per_rank_unchanged": again_s / ranks * 1e6,
        "bytes_per_rank_tensor": (len(index) + len(dump(manifest))) / (ranks * tensors),
        "parse_s_per_million": parse_s / (ranks * tensors) * 1e6,
        "exponent": math.log2(new_s / few),
    }


def _assembled(store: Store, reports: Sequence[Report]) -> tuple[float, Manifest]:
    """CPU seconds, and the manifest."""
    began = process_time()
    manifest, _ = assemble(store, reports)
    return process_time() - began, manifest


def _report(rank: int, ranks: int, count: int) -> Report:
    """A rank that holds its rows of every tensor."""
    tensors = [
        Tensor(name=name, dtype="float32", shape=(ranks * ROWS_PER_RANK, COLUMNS), path=("model", name))
        for name in (f"model.layers.{number // 10}.block.weight{number % 10}" for number in range(count))
    ]
    chunks = [
        Chunk(
            tensor=number,
            component=COMPONENT,
            rank=rank,
            offsets=(rank * ROWS_PER_RANK, 0),
            sizes=(ROWS_PER_RANK, COLUMNS),
            record_offset=number * RECORD_BYTES,
            record_size=RECORD_BYTES,
            payload_offset=number * RECORD_BYTES + HEAD_BYTES,
            payload_size=PAYLOAD_BYTES,
            crcs=((number * 2654435761 + rank * 40503) % 2**32,),
        )
        for number in range(count)
    ]
    section = Index(tensors=tuple(tensors), chunks=tuple(chunks), values={}, rank_values=({},))
    return Report(
        group="bench",
        rank=rank,
        world_size=ranks,
        attempt=1,
        save=1,
        progress=Progress(step=1),
        shards=(ShardRecord(component=COMPONENT, rank=rank, size_bytes=count * RECORD_BYTES, crc32=rank),),
        section=dump_index(section),
    )
