"""`python -m tests.bench.first_step`: from restore() to the end of the first step, with and without defer_optimizer.

Each turn is a restart in processes of its own, behind a proxy that carries 50 MB/s on each connection and answers after
40 ms. The optimizer is AdamW, so two thirds of the bytes are its moments. The forward and backward pass are those of a
device: the host sleeps for as long, and then the gradients are there. Both ways take turns.
"""

import argparse
import logging
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

import raycheck
from tests.bench.place import new_folder
from tests.bench.servers import started
from tests.support.processes.gloo_ranks import Ranks
from tests.support.servers.shaped_proxy import shaped_proxy

MB_PER_S, LATENCY_S = 50.0, 0.04
LAYERS = 12
WAYS = {"whole": False, "deferred": True}
COLUMNS = {"restore": "restore() returns", "step": "first step ends"}


def training(size_bytes: int, world_size: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Make a model of which weights and moments have this many bytes together."""
    width = int((size_bytes / 3 / 4 / LAYERS) ** 0.5)
    model: torch.nn.Module = torch.nn.ModuleList(torch.nn.Linear(width, width, bias=False) for _ in range(LAYERS))
    if world_size > 1:
        model = DistributedDataParallel(model)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def save(rank: int, world_size: int, uri: str, size_bytes: int) -> None:
    logging.getLogger("raycheck").setLevel(logging.WARNING)
    model, optimizer = training(size_bytes, world_size)
    with raycheck.Checkpointer({"model": model, "optimizer": optimizer}, group=raycheck.torchrun_group(uri)) as ckpt:
        ckpt.restore()
        compute(model, 0.0)
        optimizer.step()
        ckpt.end_step()


def compute(model: torch.nn.Module, seconds: float) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    time.sleep(seconds)


def restart(rank: int, world_size: int, uri: str, size_bytes: int, compute_s: float, defers: bool) -> dict[str, float]:
    logging.getLogger("raycheck").setLevel(logging.WARNING)
    os.environ["TORCHELASTIC_RESTART_COUNT"] = "1"  # as torchrun does
    model, optimizer = training(size_bytes, world_size)
    group = raycheck.torchrun_group(uri)
    ckpt = raycheck.Checkpointer({"model": model, "optimizer": optimizer}, group=group)
    began = time.monotonic()
    ckpt.restore(defer_optimizer=defers)
    restored_s = time.monotonic() - began
    compute(model, compute_s)
    optimizer.step()
    stepped_s = time.monotonic() - began
    ckpt.__exit__(RuntimeError, RuntimeError("this is enough"), None)
    return {"restore": restored_s, "step": stepped_s}


@contextmanager
def started_ranks(count: int) -> Iterator[Ranks]:
    with tempfile.TemporaryDirectory() as folder:
        ranks = Ranks(count, Path(folder))
        try:
            yield ranks
        finally:
            ranks.stop()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.first_step", description=__doc__)
    parser.add_argument("--server", choices=("auto", "ceph", "ministack", "moto", "seaweed"), default="seaweed")
    parser.add_argument("--mib", type=int, default=384, help="weights and moments together")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="under DDP, if there are several")
    parser.add_argument("--compute-s", type=float, nargs="+", default=[0.0, 1.0, 3.0], metavar="S")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    size_bytes, cores = arguments.mib << 20, sorted(os.sched_getaffinity(0))
    with started(arguments.server) as server:
        far = shaped_proxy(server.uri, mb_per_s=MB_PER_S, latency_s=LATENCY_S, cores=cores[-1:])
        with far as uri:
            print(f"{server.name}; {arguments.mib} MiB; {server.placement}; load {os.getloadavg()[0]:.1f}", flush=True)
            print(f"| ranks | compute, s | {' | '.join(f'{c}: {w}' for c in COLUMNS.values() for w in WAYS)} | ratio |")
            print("|" + "---|" * (3 + 2 * len(WAYS)))
            for count in arguments.ranks:
                place = new_folder(server.uri)
                with started_ranks(count) as ranks:
                    ranks.run(save, count, place, size_bytes)
                behind = place.replace(server.uri.partition("?")[2], uri.partition("?")[2])
                for compute_s in arguments.compute_s:
                    row(behind, count, size_bytes, compute_s, arguments.rounds, server.settle)


def row(uri: str, count: int, size_bytes: int, compute_s: float, rounds: int, settle: Any) -> None:
    """Print the medians, and the median of the rounds' ratios."""
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for _ in range(rounds):
        for way, defers in WAYS.items():
            settle()
            with started_ranks(count) as ranks:
                each = ranks.run(restart, count, uri, size_bytes, compute_s, defers)
            found[way].append({what: max(one[what] for one in each) for what in COLUMNS})
    medians = [statistics.median(one[what] for one in found[way]) for what in COLUMNS for way in WAYS]
    ratio = statistics.median(
        late["step"] / whole["step"] for whole, late in zip(found["whole"], found["deferred"], strict=True)
    )
    print(
        f"| {count} | {compute_s:.0f} | {' | '.join(f'{value:.2f}' for value in medians)} | {ratio:.2f} |", flush=True
    )


if __name__ == "__main__":
    main()
