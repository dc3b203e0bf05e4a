"""R1: how long a save holds up the training, against copying the same tensors one by one into warm buffers.

The first save of a TrainState comes a moment after it was made, as a training's does: what can be prepared before it
has had the time. All in memory, without a store.
"""

import time
from collections.abc import Callable
from time import perf_counter

from torch.distributed.checkpoint.staging import BlockingAsyncStager, DefaultStager, StagingOptions

from raycheck.state.train_state import Progress, TrainState
from tests.bench.ceilings import copied_one_by_one
from tests.bench.goals import Row, worst_row
from tests.bench.sampling import Measured, Samples, Spread, interleaved
from tests.bench.scale import Bench
from tests.bench.states import State, make_state

UNCACHED = "DCP, as FsspecWriter stages"
REUSED = "DCP DefaultStager, buffers reused"


def rows(bench: Bench) -> list[Row]:
    taken = {name: _measured(bench, make_state(name, bench.scale.state_bytes)) for name in bench.scale.states}
    blocked = {name: samples.ratio("warm", "copy", "s") for name, samples in taken.items()}
    first = {name: samples.ratio("first", "warm", "s") for name, samples in taken.items()}
    peers = {side: _worst(taken, side).median for side in (UNCACHED, REUSED)}
    copies = {f"{name}, copy in ms": 1e3 * Spread.of(found.of("copy", "s")).median for name, found in taken.items()}
    return [
        worst_row("R1", blocked, today=peers[UNCACHED], peers=peers, details=copies),
        worst_row(
            "R1.first", first, note=f"{bench.scale.before_first_s:g} s after it was prepared, as after the first step"
        ),
    ]


def _worst(taken: dict[str, Samples], side: str) -> Spread:
    ratios = [samples.ratio(side, "copy", "s") for samples in taken.values()]
    return max(ratios, key=lambda ratio: ratio.median)


def _measured(bench: Bench, state: State) -> Samples:
    kept = TrainState(state.live, rank=0, world_size=1)
    copies = copied_one_by_one(state.tensors)
    uncached = BlockingAsyncStager()
    options = StagingOptions(
        use_pinned_memory=False, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=False
    )
    reused = DefaultStager(options)
    nested = state.nested
    sides: dict[str, Callable[[], Measured]] = {
        "copy": lambda: {"s": next(copies)},
        "warm": lambda: _warm(kept),
        "first": lambda: _first(state, bench.scale.before_first_s),
        UNCACHED: lambda: _timed(lambda: uncached.stage(nested)),
        REUSED: lambda: _timed(lambda: reused.stage(nested)),
    }
    try:
        return interleaved(sides, bench.scale.rounds, warm_ups=bench.scale.warm_ups)
    finally:
        reused.close()


def _warm(kept: TrainState) -> Measured:
    """As after a commit: what is frozen is looked at, and not copied again."""
    began = perf_counter()
    staged = kept.stage(Progress(step=1))
    taken_s = perf_counter() - began
    for shard in staged.staged:
        for _ in shard.parts(shard.size_bytes):
            pass
    kept.components.committed(staged, dict.fromkeys((record.component for record in staged.records), "anywhere"))
    return {"s": taken_s}


def _first(state: State, before_s: float) -> Measured:
    made = TrainState(state.live, rank=0, world_size=1)
    made.prepare()
    time.sleep(before_s)
    return _timed(lambda: made.stage(Progress(step=1)))


def _timed(call: Callable[[], object]) -> Measured:
    began = perf_counter()
    call()
    return {"s": perf_counter() - began}
