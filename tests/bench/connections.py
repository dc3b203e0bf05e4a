"""Measures saves and loads over networks of many shapes against the best fixed number of requests in flight.

    python -m tests.bench.connections [--quick] [--mib 128] [--rounds 3] [--network "10 MB/s, 20 ms"] [--stuck | --simulated]

The store is a server in a process of its own (tests/support/servers/shaped_bucket.py). A save is a shard that is uploaded, a
load reads it into the tensors and verifies it. Each fixed number is tried, with parts and ranges of the size that
belongs to it, and raycheck as it is, in alternating rounds. `first` is the first save or load, with new clients and
windows, `warm` one after the warm-up: medians, as the time of the best fixed number in the same place over raycheck's.
"""

import argparse
import math
import os
import random
import statistics
from collections.abc import Iterable, Mapping
from itertools import product
from time import perf_counter

import torch

from raycheck.bucket.format.object_keys import component_prefix
from raycheck.bucket.store import Store, request_window, send_each
from raycheck.bucket.store.address import join_uri
from raycheck.bucket.store.request_window import RequestWindow
from raycheck.state.train_state import Progress, TrainState
from raycheck.transfer.read.reader import read_into
from raycheck.transfer.stage.local_box import boxes_of
from tests.bench.place import ENGINES, open_with
from tests.support.samples.simulated_store import MB, SimulatedStore, best_fixed_s, mean_s, new_window
from tests.support.servers.shaped_bucket import Shape, shaped_bucket

FIXED = (4, 8, 16, 32, 64)
OURS = "raycheck"
WARM_UPS = 4
LOST = 0.004  # about one piece of a part of 16 MiB
LIMIT = 16
STUCK_S = 30.0
NAME = "step-000000001-a1-s1"


def shapes(*, is_quick: bool) -> dict[str, Shape]:
    rates = (10, 50, 0)
    latencies = (0.02,) if is_quick else (0.001, 0.02, 0.04)
    found = {
        f"{rate or 'unlimited'} MB/s, {1000 * latency:.0f} ms": Shape(mb_per_s=rate, latency_s=latency)
        for rate in rates
        for latency in latencies
    }
    for rate in (10, 50):
        found[f"{rate} MB/s, 20 ms, 503 above {LIMIT}"] = Shape(mb_per_s=rate, latency_s=0.02, limit=LIMIT)
        found[f"{rate} MB/s, 20 ms, loss"] = Shape(mb_per_s=rate, latency_s=0.02, loss=LOST)
    return found


class Side:
    """Saves and loads of one state with one way to choose the number in flight, which keeps what it has found out."""

    def __init__(self, store: Store, tensor: torch.Tensor, number: int | None) -> None:
        self._store = store
        self._tensor = tensor
        self._state = TrainState({"weights": {"tensor": tensor}}, rank=0, world_size=1)
        self._windows: dict[tuple[object, str], RequestWindow] = {}
        if number is not None:
            fixed = {way: RequestWindow(least=number, most=number) for way in ("uploads", "reads")}
            self._windows = {(store.bucket_id, way): window for way, window in fixed.items()}

    def turn(self) -> dict[str, float]:
        request_window._windows.clear()
        request_window._windows.update(self._windows)
        staged = self._state.stage(Progress(step=1))
        began = perf_counter()
        staged.upload(self._store, NAME)
        saved_s = perf_counter() - began
        index = staged.section()
        boxes = boxes_of(index.tensors[0].name, index.tensors[0].path, torch.zeros_like(self._tensor), may_spread=False)
        prefixes = {"train": component_prefix(NAME, "train")}
        began = perf_counter()
        read_into(self._store, prefixes, index, boxes)
        loaded_s = perf_counter() - began
        assert boxes[0].local.equal(self._tensor), "a load came back with other values than were saved"
        self._windows = dict(request_window._windows)
        self._state.components.forget()
        return {"save": saved_s, "load": loaded_s}

    @property
    def sizes(self) -> str:
        return " ".join(
            f"{way} {window.size}" for (_, way), window in sorted(self._windows.items(), key=lambda item: item[0][1])
        )


Took = dict[str, list[Mapping[str, float]]]


def measured(shape: Shape, engine: str, size_bytes: int, rounds: int) -> tuple[Took, Took, str]:
    """What the first turns took, and the later ones, of each side; and raycheck's sizes at the end."""
    tensor = torch.empty(size_bytes // 8, dtype=torch.int64).random_()
    numbers = {str(number): number for number in FIXED} | {OURS: None}
    first: Took = {side: [] for side in numbers}
    warm: Took = {side: [] for side in numbers}
    chance = random.Random(0)
    with shaped_bucket(shape) as uri:
        for _ in range(rounds):
            sides = {name: Side(open_with(engine, join_uri(uri, "run")), tensor, numbers[name]) for name in numbers}
            for name in chance.sample(sorted(sides), len(sides)):
                first[name].append(sides[name].turn())
        for _ in range(WARM_UPS - 1):
            sides[OURS].turn()
        for _ in range(rounds):
            for name in chance.sample(sorted(sides), len(sides)):
                warm[name].append(sides[name].turn())
        return first, warm, sides[OURS].sizes


def print_simulated(size_bytes: int) -> None:
    """Print the ratios of a window that begins with FIRST, for objects of this size, with speeds that differ by 15 %."""
    print("| each connection, and all | latency, ms | first | second | warm | 503 above 16: first | second | warm |")
    print("|---" * 8 + "|")
    for (each, total), latency_s in product(((10, 0), (50, 0), (50, 1000), (400, 1000)), (0.001, 0.02, 0.04)):
        cells = [f"{each} MB/s, {total or 'unlimited'}", f"{1000 * latency_s:.0f}"]
        for limit in (math.inf, LIMIT):
            speeds = {"each": each * MB, "total": total * MB or math.inf, "noise": 0.15}
            shape = speeds | {"latency_s": latency_s, "limit": limit}
            best_s, store = best_fixed_s(size_bytes=size_bytes, **shape), SimulatedStore(**shape)
            window = new_window(store)
            for saves in (1, 1, WARM_UPS - 2, 8):
                took_s = mean_s(store, window, saves=saves, size_bytes=size_bytes)
                cells += [f"{best_s / took_s:.2f}"] if saves != WARM_UPS - 2 else []
        print("| " + " | ".join(cells) + " |", flush=True)


def print_stuck_loads(engines: Iterable[str], size_bytes: int, rounds: int) -> None:
    """Print how long a load takes without a stuck range, and with one, as it is and without second requests."""
    tensor = torch.empty(size_bytes // 8, dtype=torch.int64).random_()
    print("| engine | no range stuck, s | one stuck, s | one stuck, nothing requested twice, s |\n" + "|---" * 4 + "|")
    patience_s = send_each.REPEAT_AFTER_S
    for engine in engines:
        cells = []
        for stuck_s, repeat_after_s in ((0.0, patience_s), (STUCK_S, patience_s), (STUCK_S, 2 * STUCK_S)):
            send_each.REPEAT_AFTER_S = repeat_after_s
            with shaped_bucket(Shape(mb_per_s=50, latency_s=0.02, stuck_s=stuck_s)) as uri:
                side = Side(open_with(engine, join_uri(uri, "run")), tensor, None)
                cells.append(statistics.median(side.turn()["load"] for _ in range(rounds)))
        send_each.REPEAT_AFTER_S = patience_s
        print(f"| {engine} | " + " | ".join(f"{seconds:.1f}" for seconds in cells) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.connections")
    parser.add_argument("--quick", action="store_true", help="one latency")
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--network", action="append", choices=tuple(shapes(is_quick=False)))
    parser.add_argument("--simulated", action="store_true", help="the window against a store in virtual time")
    parser.add_argument("--stuck", action="store_true", help="only loads of which one range is stuck for 30 s")
    parser.add_argument("--engine", choices=tuple(ENGINES), action="append")
    arguments = parser.parse_args()
    os.environ |= {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
    torch.set_num_threads(1)
    if arguments.simulated:
        print_simulated(arguments.mib << 20)
        return
    if arguments.stuck:
        print_stuck_loads(arguments.engine or ENGINES, arguments.mib << 20, arguments.rounds)
        return
    print(
        "| network | engine | | best first | s | first | best | s | warm | in flight at the end |\n" + "|---" * 10 + "|"
    )
    found = shapes(is_quick=arguments.quick and not arguments.network)
    for name in arguments.network or found:
        for engine in arguments.engine or ENGINES:
            *both, sizes = measured(found[name], engine, arguments.mib << 20, arguments.rounds)
            for what in ("save", "load"):
                cells = " | ".join(_ratio(took, what) for took in both)
                print(f"| {name} | {engine} | {what} | {cells} | {sizes} |", flush=True)


def _ratio(took: Took, what: str) -> str:
    """The best fixed number, its seconds, and these over raycheck's."""
    median = {side: statistics.median(turn[what] for turn in turns) for side, turns in took.items()}
    best = min(map(str, FIXED), key=median.__getitem__)
    return f"{best} | {median[best]:.2f} | {median[best] / median[OURS]:.2f}"


if __name__ == "__main__":
    main()
