"""Writes `tests/golden/v5/run` with the code as it is: `python -m tests.golden.make`. No test runs it.

Once a format version is released its run is never written again: it stands for what lies in people's buckets. A
later version gets a folder beside `v1`, and readers must read both.
"""

import math
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

from raycheck.bucket.format.latest import Latest
from raycheck.bucket.history.attempt_facts import facts_of
from raycheck.bucket.history.facts import DropRecord, Facts
from raycheck.bucket.history.metric_rows import TIME, MetricRows
from raycheck.bucket.history.segments import record_facts
from raycheck.bucket.protocol import claim as claims
from raycheck.bucket.protocol import commit as protocol
from raycheck.bucket.protocol import pin_and_evict
from raycheck.bucket.protocol.claim import Identity
from raycheck.bucket.protocol.resume import AUTO
from raycheck.bucket.protocol.swap import Register
from raycheck.bucket.store import Store, open_store
from tests.golden import state
from tests.support.histories.small_pages import small_pages
from tests.support.processes.gloo_ranks import Ranks
from tests.support.processes.save_without_ray import ME, claimed, committed

VERSION = "v5"
EARLIER = ("ann", "bob", "cat")
"""Drivers that started the run before the one that trained it; pages list the first of them."""


def make(folder: Path) -> None:
    """Two ranks, two checkpoints, the older one pinned and in a page, and the end of the run put down."""
    shutil.rmtree(folder, ignore_errors=True)
    store = open_store(f"file://{folder}")
    names = []
    for owner in EARLIER:
        me = Identity(owner=owner, coordinator=owner)
        claims.claim(Register(store), me, group=owner, world_size=1, resume=AUTO, run_id="run")
    with TemporaryDirectory() as rendezvous:
        ranks = Ranks(state.WORLD_SIZE, Path(rendezvous))
        try:
            for number, step in enumerate(state.STEPS, 1):
                names.append(claimed(store, world_size=state.WORLD_SIZE, save=number, step=step))
                uploads = ranks.run(state.save, state.WORLD_SIZE, store.uri, names[-1], step)
                committed(store, names[-1], uploads, progress=state.progress_of(step), metrics={"loss": 1 / step})
        finally:
            ranks.stop()
    pin_and_evict.pin(Register(store), names[0], pinned=True)
    body = protocol.finish(Register(store), ME, group=f"group-of-{state.WORLD_SIZE}")
    write_history(store, body)
    for lock in folder.glob(".raycheck-*"):
        lock.unlink()


def write_history(store: Store, body: Latest) -> None:
    """Write one segment: what `body` lists itself, a checkpoint that was dropped, and metrics of each width."""
    number = body.attempt.number
    name = f"step-000000001-a{number}-s9"
    rows = MetricRows(
        series={
            (number, "loss"): {1: 1.0, 2: 0.5, 3: 1 / 3, 4: 0.25},
            (number, "lr"): {1: 0.5, 2: math.nan, 3: math.inf, 4: 0.125},
            (number, TIME): {step: 1_700_000_000.125 + step for step in range(1, 5)},
            (number, "eval"): {4: 1e300},
        }
    )
    facts = facts_of(body).joined(Facts(drops={name: DropRecord(key=name, at=5.0, why="expired")}, rows=rows))
    record_facts(store, facts, run_id=body.run_id, counter=body.counter)


if __name__ == "__main__":
    with small_pages():
        make(Path(__file__).parent / VERSION / "run")
