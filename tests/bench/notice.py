"""`python -m tests.bench.notice`: how many steps a training loses when a node is taken away after a notice.

The setting is that of the benchmark in Ray's own repository (release/train_tests/preemption): a replicated training, saves
far apart, one node drained with a deadline and killed at it, again and again. Each way gets the same notices, at the same
seconds of training; the nodes that go are those of rank 0 and 1 in turn.
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path

from tests.bench.goodput import ENV, Driver, distance, driver
from tests.bench.notice_job import WAYS, WORKERS
from tests.bench.place import new_folder
from tests.bench.servers import started
from tests.support.processes.ray_cluster import Arena, arena

SEED = 11
NODE = {"object_store_memory": 200 * 1024 * 1024, "resources": {"room": 1}}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.notice", description=__doc__)
    parser.add_argument("--notice", type=float, default=30.0, metavar="SECONDS", help="Ray's benchmark has 30")
    parser.add_argument("--preemptions", type=int, default=4)
    parser.add_argument("--distant", action="store_true", help="a store at 40 ms and 4 MB/s")
    parser.add_argument("--width", type=int, default=1500, help="the state has 8 bytes times its square")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), metavar="WAY", help=", ".join(WAYS))
    arguments = parser.parse_args()
    facts = {"every": 400, "step_s": 0.25, "width": arguments.width}
    with (
        tempfile.TemporaryDirectory(prefix="notice-") as scratch,
        started("auto") as server,
        distance(server.uri) if arguments.distant else nullcontext(server.uri) as uri,
    ):
        for way in arguments.ways:
            folder = Path(scratch) / way.replace(" ", "-")
            folder.mkdir()
            config = {**facts, "way": way, "folder": str(folder), "uri": new_folder(uri)}
            with arena(ENV, num_cpus=1) as nodes:
                nodes.add(WORKERS, **NODE)
                with driver(nodes.address, config, module="tests.bench.notice_job") as run:
                    lost, restarts_s = hurt(nodes, run, arguments.notice, arguments.preemptions)
            told = {"lost": lost, "in all": sum(lost), "restart_s": round(statistics.median(restarts_s), 1)}
            print(json.dumps({"way": way, **told}), flush=True)
    return 0


def hurt(nodes: Arena, run: Driver, notice_s: float, count: int) -> tuple[list[int], list[float]]:
    """Return the steps that each preemption cost, and the seconds from a node's end to the next step."""
    chance = random.Random(SEED)
    lost, restarts_s, since = [], [], 0.0
    for number in range(count):
        up = run.first_step(since=since)
        run.wait_until(up + chance.uniform(8.0, 16.0))
        name = run.start_of(number % WORKERS)["node"]
        node = next(node for node in nodes.workers if node.node_id == name)
        nodes.drain(node, seconds=notice_s)
        run.wait_until(time.time() + notice_s)
        nodes.kill(node)
        since = time.time()
        last = _steps(run)[-1]
        nodes.add(1, **NODE)
        restarts_s.append(run.first_step(since=since) - since)
        lost.append(last - int(run.start_of(0)["step"]))
    return lost, restarts_s


def _steps(run: Driver) -> list[int]:
    return [event["step"] for event in run.events() if event["kind"] == "step"]


if __name__ == "__main__":
    sys.exit(main())
