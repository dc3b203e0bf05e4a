"""Writes `tests/golden/v4/run` with the code as it is: `python -m tests.golden.make`. No test runs it.

Once a format version is released its run is never written again: it stands for what lies in people's buckets. A
later version gets a folder beside `v1`, and readers must read both.
"""

import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

from raycheck.bucket.protocol import commit as protocol
from raycheck.bucket.protocol import pin_and_evict
from raycheck.bucket.protocol.swap import Register
from raycheck.bucket.store import open_store
from tests.golden import state
from tests.support.histories.small_pages import small_pages
from tests.support.processes.gloo_ranks import Ranks
from tests.support.processes.save_without_ray import ME, claimed, committed

VERSION = "v4"


def make(folder: Path) -> None:
    """Two ranks, two checkpoints, the older one pinned and in a page, and the end of the run put down."""
    shutil.rmtree(folder, ignore_errors=True)
    store = open_store(f"file://{folder}")
    names = []
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
    protocol.finish(Register(store), ME, group=f"group-of-{state.WORLD_SIZE}")
    for lock in folder.glob(".raycheck-*"):
        lock.unlink()


if __name__ == "__main__":
    with small_pages():
        make(Path(__file__).parent / VERSION / "run")
