"""How long a save holds up a training on an accelerator: `python -m tests.bench.device [--gib 8]`, on a machine with one.

All sides in one run, in turns, medians; "copy" is the floor: every tensor copied by itself, without blocking, into
page-locked memory of its own that is warm, then one wait. A step is a forward and backward pass and AdamW on the same
device, timed to its end there.
"""

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from raycheck.bucket.store import open_store
from raycheck.state.train_state import Progress, TrainState
from tests.support.processes.save_without_ray import claimed, committed, upload

ROUNDS = 5


def made(gib: float) -> dict[str, object]:
    """Float32 layers and their AdamW's moments: `gib` GiB in all."""
    width = 4096
    layers = max(1, round(gib * 2**30 / (width * width * 4 * 3)))
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers))).cuda()
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)}


def step(state: dict[str, object], batch: torch.Tensor) -> None:
    state["model"](batch).square().mean().backward()
    state["optimizer"].step()
    state["optimizer"].zero_grad()


def timed(call: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def restores(state: dict[str, object], tensors: list[torch.Tensor], folder: Path) -> dict[str, list[float]]:
    """Saves to the folder, and restores from it: "read and copy" is the floor, as many threads read the shard's bytes
    into page-locked memory and copy them to the device. dcp.save and dcp.load are stock torch's, with their defaults."""
    place = Path(tempfile.mkdtemp(dir=folder))
    store = open_store(f"file://{place}/run")
    live = TrainState(state, rank=0, world_size=1)
    took: dict[str, list[float]] = {}
    try:
        for number in range(1, ROUNDS):
            progress = Progress(step=number)
            staged = live.stage(progress)
            staged.wait()
            name = claimed(store, world_size=1, save=number, step=number)
            began = time.perf_counter()
            uploaded = upload(store, staged, name=name)
            uploaded_s = time.perf_counter() - began
            checkpoint = committed(store, name, [uploaded], progress=progress)
            nested = {"model": dict(state["model"].state_dict()), "optimizer": state["optimizer"].state_dict()["state"]}
            stock = place / f"stock{number}"
            (shard,) = (place / "run" / "checkpoints" / checkpoint.entry.key).rglob("*.distcp")
            seconds = {
                "upload": uploaded_s,
                "dcp.save": timed(partial(dcp.save, nested, checkpoint_id=stock)),
                "read and copy": timed(partial(read_and_copy, shard)),
                "restore": timed(partial(live.apply, checkpoint)),
                "dcp.load": timed(partial(dcp.load, nested, checkpoint_id=stock)),
            }
            for row, value in seconds.items():
                took.setdefault(row, []).append(value)
            shutil.rmtree(stock)
    finally:
        shutil.rmtree(place)
    return took


def read_and_copy(file: Path, *, threads: int = 16, piece: int = 64 << 20) -> None:
    """Reads the whole file, and copies it to the device."""
    size = file.stat().st_size
    if size not in _page_locked:
        _page_locked[size] = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    host = _page_locked[size]
    view = memoryview(host.numpy())
    target = torch.empty(piece, dtype=torch.uint8, device="cuda")

    with file.open("rb", buffering=0) as opened, ThreadPoolExecutor(threads) as pool:

        def read(start: int) -> int:
            os.preadv(opened.fileno(), [view[start : start + piece]], start)
            return start

        for start in pool.map(read, range(0, size, piece)):
            part = host[start : start + piece]
            target[: part.numel()].copy_(part, non_blocking=True)


_page_locked: dict[int, torch.Tensor] = {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=8)
    parser.add_argument("--batch", type=int, default=8192)
    parser.add_argument("--folder", default="/dev/shm", help="where to save and restore; in memory, it costs little")
    options = parser.parse_args()
    state = made(options.gib)
    batch = torch.randn(options.batch, 4096, device="cuda")
    step(state, batch)
    optimizer, model = state["optimizer"], state["model"]
    tensors = [*model.parameters(), *(value for slots in optimizer.state.values() for value in slots.values())]
    tensors = [tensor.detach() for tensor in tensors]
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    live = TrainState(state, rank=0, world_size=1)
    took: dict[str, list[float]] = {}

    def note(name: str, seconds: float) -> None:
        took.setdefault(name, []).append(seconds)

    note("prepare: the training waits", timed(live.prepare))
    note("a step just after prepare", timed(lambda: (step(state, batch), torch.cuda.synchronize())))
    time.sleep(5)
    note("first stage: the host waits", timed(lambda: live.stage(Progress(step=1)).wait()))
    copies = [torch.empty(t.shape, dtype=t.dtype, pin_memory=t.is_cuda) for t in tensors]
    stock = DefaultStager(
        StagingOptions(
            use_pinned_memory=True, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=True
        )
    )
    nested = {"model": dict(model.state_dict()), "optimizer": optimizer.state_dict()["state"]}

    def copy() -> None:
        for ours, tensor in zip(copies, tensors, strict=True):
            ours.copy_(tensor, non_blocking=True)
        torch.cuda.synchronize()

    def stepped() -> None:
        step(state, batch)
        torch.cuda.synchronize()

    for _ in range(ROUNDS + 1):
        note("copy", timed(copy))
        began = time.perf_counter()
        staged = live.stage(Progress(step=1))
        note("stage: the host waits", time.perf_counter() - began)
        staged.wait()
        note("stage: all copied", time.perf_counter() - began)
        with suppress(KeyError):  # torch 2.11's can be used once
            note("DCP DefaultStager, pinned: the host waits", timed(lambda: stock.stage(nested)))
        note("step", timed(stepped))
        torch.cuda.synchronize()
        began = time.perf_counter()
        staged = live.stage(Progress(step=1))
        step(state, batch)
        torch.cuda.synchronize()
        note("stage and step", time.perf_counter() - began)
        began = time.perf_counter()
        for shard in staged.staged:
            shard.seal()
        note("checksums of what was staged", time.perf_counter() - began)
    stock.close()
    took |= restores(state, tensors, Path(options.folder))
    floor = statistics.median(took["copy"][1:])
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {size / 2**30:.2f} GiB in {len(tensors)} tensors"
    )
    for name, seconds in took.items():
        median = statistics.median(seconds[1:] or seconds)
        print(f"{name:45} {1e3 * median:9.1f} ms  {median / floor:7.3f} of copy  {size / median / 1e9:7.1f} GB/s")


if __name__ == "__main__":
    main()
