"""Measures what a tensor costs a rank in Python: CPU microseconds per tensor of each part of a save and of a restore.

`python -m tests.bench.many_tensors`. The state is a module of many layers of 8 x 8 with AdamW, four tensors a layer, so
that bytes hardly count. One rank saves it twice and restores it, into a directory. Times are CPU seconds of the whole
process, since the machine may be shared, and the lowest of all rounds counts. `--before PATH` measures an older tree in
the same run, in turn, each time in a process of its own.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn

from raycheck.bucket.assembly.plan_cache import PlanCache
from raycheck.bucket.format.progress import Progress
from raycheck.bucket.protocol.swap import Register
from raycheck.bucket.reading import Checkpoint, read_latest
from raycheck.bucket.store import open_store
from raycheck.state.train_state import TrainState
from tests.bench.states import State
from tests.support.processes.save_without_ray import claimed, conclude, upload

ROOT = Path(__file__).parents[2]
TENSORS_PER_LAYER = 4
Result = TypeVar("Result")
PHASES = ("check", "first stage", "first upload", "first commit", "stage", "upload", "commit", "restore")


def many_layers(num_tensors: int) -> State:
    """A state of so many tensors: weights, and what AdamW has after a step."""
    layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(num_tensors // TENSORS_PER_LAYER))
    model = nn.Module()
    model.layers = layers
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
    for parameter in model.parameters():
        slots = {slot: torch.rand(8, 8) for slot in ("exp_avg", "exp_avg_sq")}
        optimizer.state[parameter] = {"step": torch.tensor(1.0), **slots}
    return State(name="many layers", model=model, optimizer=optimizer)


def measure_here(num_tensors: int, clock: Callable[[], float] = time.process_time) -> dict[str, float]:
    """Return what each phase costs by this clock, in millionths per tensor."""
    found: dict[str, float] = {}

    def timed(phase: str, work: Callable[[], Result]) -> Result:
        start = clock()
        result = work()
        found[phase] = 1e6 * (clock() - start) / num_tensors
        return result

    state = many_layers(num_tensors)
    with tempfile.TemporaryDirectory() as folder:
        store = open_store(f"file://{folder}/run")
        register, plans = Register(store), PlanCache()
        ours = TrainState(state.live, rank=0, world_size=1)
        timed("check", ours.check)
        for save, title in enumerate(("first ", ""), 1):
            name, progress = claimed(store, world_size=1, save=save, step=save), Progress(step=save)
            staged = timed(f"{title}stage", partial(ours.stage, progress))
            uploaded = timed(f"{title}upload", partial(upload, store, staged, name=name))
            commit = partial(conclude, register, name, [uploaded], progress=progress, plans=plans)
            timed(f"{title}commit", commit)
        other = many_layers(num_tensors)
        fresh = TrainState(other.live, rank=0, world_size=1)
        timed("restore", lambda: fresh.apply(Checkpoint(store, read_latest(store).live[-1])))
        assert all(map(torch.equal, state.tensors, other.tensors))
    return found


def measure_tree(tree: Path, num_tensors: int) -> dict[str, float]:
    """Measure in a process of its own, with the raycheck of this tree."""
    command = [sys.executable, "-P", __file__, "--here", str(num_tensors)]
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise SystemExit(ran.stderr[-4000:])
    found: dict[str, float] = json.loads(ran.stdout)
    return found


def table(num_tensors: int, trees: Mapping[str, Mapping[str, float]]) -> str:
    """Return the rows for one state. trees: what was measured, by the tree's title."""
    lines = [
        f"| {num_tensors:,} tensors, us of CPU per tensor | {' | '.join(trees)} |",
        "|---" * (1 + len(trees)) + "|",
    ]
    lines += [f"| {phase} | {' | '.join(f'{found[phase]:.1f}' for found in trees.values())} |" for phase in PHASES]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="the root of an older checkout, measured too")
    parser.add_argument("--tensors", type=int, nargs="+", default=[10_000, 100_000])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--here", type=int, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.here:
        print(json.dumps(measure_here(asked.here)))
        return
    trees = {"before": asked.before.resolve(), "now": ROOT} if asked.before else {"now": ROOT}
    for num_tensors in asked.tensors:
        rounds = [
            {title: measure_tree(tree, num_tensors) for title, tree in trees.items()} for _ in range(asked.rounds)
        ]
        lowest = {title: {phase: min(found[title][phase] for found in rounds) for phase in PHASES} for title in trees}
        print(table(num_tensors, lowest), flush=True)


if __name__ == "__main__":
    main()
