"""`python -m tests.bench.restart`: where the time goes from a rank's death to the next step, piece by piece.

The training of goodput_job.py. A rank gets a SIGKILL at seeded moments, the same for all ways, which take turns in a
shuffled order. What the ranks tell of themselves divides each restart. All pieces but the restore are Ray's and the
script's, and they vary by more than a restore takes. So beside the ratio of whole restarts stands that of the restore
alone: the median restart without checkpoints and this way's restore, over that restart and a raw GET of what a rank
restores.
"""

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.bench.goodput import ENV, OBJECT_STORE_BYTES, Bench, Driver, raw_get
from tests.bench.goodput_job import BARE, ROOM, TORCHFT, WAYS, WORKERS
from tests.bench.goodput_rows import PIECES, QUICK, pieces
from tests.bench.servers import started
from tests.support.processes.ray_cluster import arena

SEED = 7
RESTORE = "the restore"
SAVE_EVERY = 2
TRAINED_S = (2.0, 6.0)
"""Between which the time from one restart's end to the next kill lies. Ray looks at its workers every 2 s: kills at one
distance from the start of a group would meet each way at another moment of these."""
Restart = Mapping[str, float]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.restart", description=__doc__)
    ways = [way for way in WAYS if way not in (BARE, TORCHFT)]
    parser.add_argument("--rounds", type=int, default=3, help="each way takes so many turns")
    parser.add_argument("--kills", type=int, default=8, help="in each of them")
    parser.add_argument("--ways", nargs="+", choices=ways, default=ways, metavar="WAY", help=f"of: {', '.join(ways)}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here too")
    parser.add_argument("--server", choices=("auto", "ceph", "ministack", "moto"), default="auto")
    arguments = parser.parse_args()
    cores = os.sched_getaffinity(0)
    order = [BARE, *arguments.ways]
    found: dict[str, list[Restart]] = {way: [] for way in order}
    chance = random.Random(SEED)
    with tempfile.TemporaryDirectory(prefix="restart-") as scratch, started(arguments.server) as server:
        os.sched_setaffinity(0, cores)  # Ray's nodes need the server's core too
        raw_get_s = raw_get(server.uri, QUICK)
        with arena(ENV, num_cpus=1) as nodes:
            nodes.add(WORKERS, object_store_memory=OBJECT_STORE_BYTES, resources={ROOM: 1})
            bench = Bench(nodes.address, server.uri, Path(scratch), QUICK, order)
            for number in range(arguments.rounds):
                chance.shuffle(order)
                moments = [chance.uniform(*TRAINED_S) for _ in range(arguments.kills)]
                for way in order:
                    with bench.driver(way, SAVE_EVERY) as run:
                        found[way] += hurt(run, moments)
                    print(f"round {number + 1}, {way}", flush=True)
    doc = {"server": server.name, "raw_get_s": raw_get_s, "restarts": found}
    if arguments.json:
        arguments.json.write_text(json.dumps(doc, indent=1) + "\n")
    show(found, raw_get_s)
    return 0


def hurt(run: Driver, moments: Sequence[float]) -> list[Restart]:
    """Kill ranks in turn, each after so many seconds of training. Returns the pieces of each restart."""
    found, up = [], run.first_step(since=0.0)
    for number, after_s in enumerate(moments):
        run.wait_until(up + after_s)
        at = run.kill(number % WORKERS)
        up = max(run.first_step(since=at, rank=rank) for rank in range(WORKERS))
        found.append(pieces([run.events(rank) for rank in range(WORKERS)], since=at))
    return found


def show(found: Mapping[str, Sequence[Restart]], raw_get_s: float) -> None:
    table = Table(title=f"seconds: median (low..high); a raw GET takes {raw_get_s:.2f} s")
    table.add_column("")
    for way in found:
        table.add_column(way)
    for piece in PIECES:
        table.add_row(piece, *(_spread([restart[piece] for restart in found[way]]) for way in found))
    whole = {way: [sum(restart.values()) for restart in restarts] for way, restarts in found.items()}
    table.add_row("all", *map(_spread, whole.values()))
    bare_s = statistics.median(whole[BARE])
    table.add_row(
        "all / (bare + GET)", *(f"{statistics.median(each) / (bare_s + raw_get_s):.3f}" for each in whole.values())
    )
    restores_s = [statistics.median(restart[RESTORE] for restart in restarts) for restarts in found.values()]
    table.add_row(
        "(bare + restore) / (bare + GET)", *(f"{(bare_s + each) / (bare_s + raw_get_s):.3f}" for each in restores_s)
    )
    Console(width=None if Console().is_terminal else 200).print(table)


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f}..{max(values):.2f})"


if __name__ == "__main__":
    sys.exit(main())
