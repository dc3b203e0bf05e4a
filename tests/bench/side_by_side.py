"""`python -m tests.bench.side_by_side`: two ranks save and load the same state by raycheck and by each of its peers.

The state is 16 large tensors, cut over both ranks as `fully_shard` does it. Each way has fresh processes in each round,
and the ways take turns in a shuffled order. A save counts after one that warms up, with other values, in seconds of the
slower rank: until training may go on (`blocked`), and until it is durable. `load` fills the emptied state on both
ranks, `load by one` in one process. CPU seconds are those of both ranks for save and load. Memory is the peak of the
rank that needs most, less what it had before its first save and a copy for comparison, over its half of the state.
Every load is compared with what was saved.

For raycheck this is all that a user calls: a save is committed when it counts as durable, and a load is that of a group
which torchrun has restarted, with the new coordinator, its claim and the agreement of the ranks.
"""

import argparse
import logging
import os
import statistics
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor

import raycheck
from tests.bench.memory import highest_bytes, resident_bytes
from tests.bench.ours import check_same, emptied
from tests.bench.peers import EXPECTED_WARNINGS, PEERS, Peer, StockDcp, TorchSave, peers
from tests.bench.place import new_folder
from tests.bench.sampling import Measured, Samples, interleaved
from tests.bench.servers import started
from tests.bench.states import State, make_state
from tests.support.processes.gloo_ranks import Ranks, mesh_of
from tests.support.servers.shaped_proxy import shaped_proxy

STATE = "few large"
RANKS = 2
MB_PER_S, LATENCY_S = 10.0, 0.02
ENGINES = {"raycheck": True, "raycheck, s3fs": False}
"""raycheck's ways, and whether each transfers through obstore."""
WITHOUT = (StockDcp, TorchSave)
"""The slower one of two, and what knows no ranks."""
COLUMNS = {
    "blocked": "save blocks, s",
    "durable": "durable, s",
    "load": "load, s",
    "by_one": "load by one, s",
    "cpu": "CPU, s",
    "memory": "peak memory / shard",
}


class Raycheck(Peer):
    """The public interface under torchrun."""

    name = "raycheck"

    def __init__(self, uri: str, state: State) -> None:
        super().__init__(uri, state)
        self._open = ExitStack()
        self._step = 0

    def save(self) -> None:
        self.begin()()

    def begin(self) -> Callable[[], object]:
        if not self._step:
            self._checkpointer = self._open.enter_context(self._new())
            self._checkpointer.restore()
        self._step += 1
        self._checkpointer.end_step()
        self._checkpointer.save()
        return self._checkpointer.wait

    def load(self) -> None:
        self._open.close()
        os.environ["TORCHELASTIC_RESTART_COUNT"] = "1"
        with self._new() as checkpointer:
            assert checkpointer.restore().step == 2

    def _new(self) -> raycheck.Checkpointer:
        settings = raycheck.SaveSettings(every_steps=None, keep_last=1)
        return raycheck.Checkpointer(self.state.live, settings, group=raycheck.torchrun_group(self.uri))


def side_of(way: str, uri: str, state: State) -> Peer:
    if way not in ENGINES:
        return next(peer for peer in PEERS if peer.name == way)(uri, state)
    if not ENGINES[way]:
        sys.modules["obstore"] = None  # type: ignore[assignment]  # as where it is not installed
    return Raycheck(uri, state)


def save_and_load(rank: int, world_size: int, way: str, uri: str, size_bytes: int) -> Measured:
    with quiet():
        state = cut(size_bytes, world_size)
        side = side_of(way, uri, state)
        before = resident_bytes()
        side.save()
        for tensor in state.tensors:
            tensor.add_(1)
        expected = [tensor.clone() for tensor in state.tensors]
        cpu = process_time()
        dist.barrier()
        began = perf_counter()
        wait = side.begin()
        blocked = perf_counter() - began
        wait()
        durable = perf_counter() - began
        emptied(state)
        dist.barrier()
        began = perf_counter()
        side.load()
        load = perf_counter() - began
        check_same(state, expected)
        shard = sum(tensor.nbytes for tensor in expected)
        return {
            "blocked": blocked,
            "durable": durable,
            "load": load,
            "cpu": process_time() - cpu,
            "memory": (highest_bytes() - before - shard) / shard,
        }


def load_by_one(rank: int, world_size: int, way: str, uri: str, size_bytes: int) -> float:
    with quiet():
        expected = [tensor + 1 for tensor in make_state(STATE, size_bytes).tensors]
        state = cut(size_bytes, world_size)
        emptied(state)
        side = side_of(way, uri, state)
        began = perf_counter()
        side.load()
        took = perf_counter() - began
        check_same(state, expected)
        return took


def cut(size_bytes: int, world_size: int) -> State:
    """The state, each tensor cut on its first dimension over all ranks."""
    state, mesh = make_state(STATE, size_bytes), mesh_of(world_size)
    for module in state.model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            module.register_parameter(name, torch.nn.Parameter(distribute_tensor(parameter, mesh, [Shard(0)])))
    return state


@contextmanager
def quiet() -> Iterator[None]:
    logging.getLogger("raycheck").setLevel(logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def turn(way: str, uri: str, size_bytes: int, settle: Callable[[], None]) -> Measured:
    place = new_folder(uri)
    settle()
    with tempfile.TemporaryDirectory() as folder:
        ranks = Ranks(RANKS, Path(folder))
        try:
            found: list[Any] = ranks.run(save_and_load, RANKS, way, place, size_bytes)
            slowest = {what: max(one[what] for one in found) for what in found[0]}
            slowest["cpu"] = sum(one["cpu"] for one in found)
            slowest["by_one"] = ranks.run(load_by_one, 1, way, place, size_bytes)[0]
        finally:
            ranks.stop()
    return slowest


def measured(kind: str, uri: str, size_bytes: int, rounds: int, settle: Callable[[], None]) -> Samples:
    others, missing = peers(kind, uri, make_state(STATE, 1))
    for name, why in missing.items():
        print(f"{name} is not measured: {why}", flush=True)
    ways = [*ENGINES, *(peer.name for peer in others if type(peer) not in WITHOUT)]
    sides = {way: lambda way=way: turn(way, uri, size_bytes, settle) for way in ways}
    return interleaved(sides, rounds, warm_ups=0)


def print_table(samples: Samples) -> None:
    """Medians; in brackets, how many times raycheck's, as the median of the rounds' ratios."""
    print("| | " + " | ".join(COLUMNS.values()) + " |\n|---|" + "---|" * len(COLUMNS))
    for way in samples.sides:
        cells = []
        for what in COLUMNS:
            value = statistics.median(samples.of(way, what))
            times = "" if way == "raycheck" else f" ({samples.ratio(way, 'raycheck', what).median:.1f})"
            cells.append(f"{value:.2f}{times}")
        print(f"| {way} | " + " | ".join(cells) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.side_by_side", description=__doc__)
    parser.add_argument("--server", choices=("auto", "ceph", "ministack", "moto", "seaweed"), default="seaweed")
    network = f"through {MB_PER_S:.0f} MB/s on each connection and {1000 * LATENCY_S:.0f} ms"
    parser.add_argument("--distant", action="store_true", help=network)
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    for text in EXPECTED_WARNINGS:
        warnings.filterwarnings("ignore", message=text)
    cores = sorted(os.sched_getaffinity(0))
    with started(arguments.server) as server:
        far = shaped_proxy(server.uri, mb_per_s=MB_PER_S, latency_s=LATENCY_S, cores=cores[-1:])
        with far if arguments.distant else nullcontext(server.uri) as uri:
            where = f"{server.name}{', ' + network if arguments.distant else ''}"
            print(f"{where}; {arguments.mib} MiB; {server.placement}; load {os.getloadavg()[0]:.1f}", flush=True)
            print_table(measured(server.kind, uri, arguments.mib << 20, arguments.rounds, server.settle))


if __name__ == "__main__":
    main()
