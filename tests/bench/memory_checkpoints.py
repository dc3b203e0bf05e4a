"""`python -m tests.bench.memory_checkpoints`: what memory checkpoints cost and what they give, beside saves to the bucket.

One training (memory_job.py) on a Ray of several nodes, with three ranks, one on each. How long a save holds it up is
measured for saves to the bucket by the rank, by the node's actor, and for memory checkpoints. Then workers, nodes and
actors are killed, and the restore after each is timed: from the own node's memory, other nodes' and the bucket.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.bench.goodput import ENV, Driver, driver
from tests.bench.goodput_rows import Event
from tests.bench.memory_job import IN_BUCKET, IN_MEMORY
from tests.bench.place import new_folder
from tests.bench.scale import MIB
from tests.bench.servers import started
from tests.support.processes.node_memory import agents, shared_bytes
from tests.support.processes.ray_cluster import Arena, arena

WORKERS, SPARE_NODES = 3, 1
SAVES, RESTORES = 3, 3
COUNTED = 4
"""Memory checkpoints whose bytes on the network are counted."""
OBJECT_STORE_BYTES = 512 * MIB
WITHIN_S = 300.0
WAYS = {
    "the rank uploads": {"upload_by": "rank", "memory": False},
    "the node's actor uploads": {"upload_by": "node", "memory": False},
    "memory checkpoints, too": {"upload_by": "node", "memory": True},
}
Figures = dict[str, float]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.memory_checkpoints", description=__doc__)
    parser.add_argument("--shard-mib", type=int, default=256, help="what each of the three ranks holds")
    parser.add_argument("--server", choices=("auto", "ceph", "ministack", "moto"), default="auto")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here too")
    arguments = parser.parse_args()
    cores = os.sched_getaffinity(0)
    with tempfile.TemporaryDirectory(prefix="memory-") as scratch, started(arguments.server) as server:
        os.sched_setaffinity(0, cores)  # Ray's nodes need the server's core too
        with arena(ENV) as nodes:
            nodes.add(WORKERS + SPARE_NODES, object_store_memory=OBJECT_STORE_BYTES)
            bench = Bench(nodes, server.uri, Path(scratch), arguments.shard_mib * MIB)
            found = {way: bench.measure(way) for way in WAYS}
    show(found, f"{server.name}; {WORKERS} ranks, {arguments.shard_mib} MiB each; {os.cpu_count()} cores")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


class Bench:
    """Measures one way after the other on one Ray."""

    def __init__(self, nodes: Arena, uri: str, scratch: Path, shard_bytes: int) -> None:
        self._nodes, self._uri, self._scratch, self._shard_bytes = nodes, uri, scratch, shard_bytes

    def measure(self, way: str) -> Figures:
        folder = self._scratch / way.replace(" ", "-")
        folder.mkdir()
        facts = {"uri": new_folder(self._uri), "folder": str(folder), "workers": WORKERS, **WAYS[way]}
        with driver(
            self._nodes.address, {**facts, "shard_bytes": self._shard_bytes}, module="tests.bench.memory_job"
        ) as run:
            committed = SAVES * IN_BUCKET + IN_MEMORY
            run.wait_for(lambda: newest(run)["step"] > committed or None, within_s=WITHIN_S)
            found = {
                "a save to the bucket blocks, s": blocked(run, IN_BUCKET),
                "until it is committed, s": newest(run)["save_s"],
            }
            if WAYS[way]["memory"]:
                found |= self._costs(run)
                found |= self._restores(run)
        print(f"{way}: {json.dumps(found)}", flush=True)
        return found

    def _costs(self, run: Driver) -> Figures:
        """What memory checkpoints cost while they are made. Bytes are over those of the ranks' shards."""
        state_bytes = WORKERS * self._shard_bytes
        begun, before = listed(run, more_than=newest(run)["memory_step"]), network_bytes()
        made = listed(run, more_than=begun + (COUNTED - 1) * IN_MEMORY) - begun
        sent = network_bytes() - before
        staged = shared_bytes(run.start_of(rank)["pid"] for rank in range(WORKERS))
        copies = shared_bytes(process.pid for process in agents())
        return {
            "a memory checkpoint blocks, s": blocked(run, IN_MEMORY, but=IN_BUCKET),
            "until it is listed, s": statistics.median(listed_after(run.events())),
            "bytes on the network": sent * IN_MEMORY / made / state_bytes,
            "memory of the ranks' buffers": sum(staged.values()) / state_bytes,
            "memory of other nodes' copies": sum(copies[key] for key in copies.keys() - staged.keys()) / state_bytes,
        }

    def _restores(self, run: Driver) -> Figures:
        hurt = {"own memory": self._kill_worker, "other nodes' memory": self._kill_node, "the bucket": self._kill_all}
        found = {}
        for tier, kill in hurt.items():
            seconds = []
            for _ in range(RESTORES):
                run.wait_for(lambda: is_ahead(newest(run)) or None, within_s=WITHIN_S)
                since = kill(run)
                restored = run.wait_for(lambda since=since: restores(run, since), within_s=WITHIN_S)
                is_from_memory = {event["from_memory"] for event in restored}
                assert is_from_memory == {tier != "the bucket"}, f"{tier}: {restored}"
                told = [
                    event["memory_step"] for event in run.events() if event["kind"] == "step" and event["at"] < since
                ]
                assert tier == "the bucket" or restored[0]["step"] >= max(told[-1:]), f"{tier}: {told[-1:]}, {restored}"
                seconds.append(max(event["seconds"] for event in restored))
            found[f"restore from {tier}, s"] = statistics.median(seconds)
        return found

    def _kill_worker(self, run: Driver) -> float:
        return run.kill(1)

    def _kill_node(self, run: Driver) -> float:
        """The rank goes on on another node, which has nothing of its shard. A new node takes the place of that one."""
        going = run.start_of(1)["node"]
        at = time.time()
        self._nodes.kill(next(node for node in self._nodes.workers if node.node_id == going))
        self._nodes.add(1, object_store_memory=OBJECT_STORE_BYTES)
        return at

    def _kill_all(self, run: Driver) -> float:
        """The nodes' actors die with the worker, and with them all that memory holds."""
        for process in agents():
            process.kill()
        return run.kill(1)


def newest(run: Driver) -> Event:
    """Rank 0's newest step, with which nothing was done yet when there is none."""
    steps = [event for event in run.events() if event["kind"] in ("start", "step")]
    return steps[-1] if steps and steps[-1]["kind"] == "step" else {"step": 0, "memory_step": -1, "save_s": 0.0}


def listed(run: Driver, *, more_than: int) -> int:
    """Waits for a memory checkpoint of a later step. Returns its step."""

    def found() -> int | None:
        step: int = newest(run)["memory_step"]
        return step if step > more_than else None

    return run.wait_for(found, within_s=WITHIN_S)


def is_ahead(step: Event) -> bool:
    """Whether memory holds a newer step than the bucket, and does so for a while."""
    return 0 < step["memory_step"] % IN_BUCKET < step["step"] % IN_BUCKET < IN_BUCKET // 2


def blocked(run: Driver, every: int, *, but: int = sys.maxsize) -> float:
    """Median of what the steps with a save blocked the slowest rank. The first save, beside which processes start, does
    not count."""
    by_step: dict[int, float] = {}
    for rank in range(WORKERS):
        for event in run.events(rank):
            if event["kind"] == "step" and event["step"] > every and not event["step"] % every and event["step"] % but:
                by_step[event["step"]] = max(by_step.get(event["step"], 0.0), event["blocked_s"])
    return statistics.median(by_step.values())


def listed_after(events: list[Event]) -> Iterator[float]:
    """Yields for each memory checkpoint how long after its step rank 0 knew that it was listed."""
    begun: dict[int, float] = {}
    known = -1
    for event in events:
        if event["kind"] == "step":
            begun[event["step"]] = event["at"] - event["blocked_s"]
            if event["memory_step"] > known:
                known = event["memory_step"]
                yield event["at"] - begun[known]


def restores(run: Driver, since: float) -> list[Event] | None:
    """What the ranks restored after a kill; None before all of them have."""
    found = [
        [event for event in run.events(rank) if event["kind"] == "restored" and event["at"] > since]
        for rank in range(WORKERS)
    ]
    return [events[0] for events in found] if all(found) else None


def network_bytes() -> int:
    """What all processes of this machine have received from each other so far."""
    (line,) = (line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:"))
    return int(line.split()[1])


def show(found: dict[str, Figures], title: str) -> None:
    table = Table(title=title)
    for name in ("", *found):
        table.add_column(name)
    for name in dict.fromkeys(name for figures in found.values() for name in figures):
        table.add_row(name, *(f"{figures[name]:.3f}" if name in figures else "" for figures in found.values()))
    Console(width=None if Console().is_terminal else 160).print(table)


if __name__ == "__main__":
    sys.exit(main())
