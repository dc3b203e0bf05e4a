"""How long a save holds up a training on an accelerator: `python -m tests.bench.device [--gib 8]`, on a machine with one.

All sides in one run, in turns, medians; "copy" is the floor: every tensor copied by itself, without blocking, into
page-locked memory of its own that is warm, then one wait. A step is a forward and backward pass and AdamW on the same
device, timed to its end there.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from raycheck.state.train_state import Progress, TrainState

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
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=8)
    parser.add_argument("--batch", type=int, default=8192)
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
    time.sleep(20)
    note("first stage: the host waits", timed(lambda: live.stage(Progress(step=1)).wait()))
    copies = [torch.empty(t.shape, dtype=t.dtype, pin_memory=t.is_cuda) for t in tensors]
    stock = DefaultStager(
        StagingOptions(
            use_pinned_memory=True, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=True
        )
    )
    nested = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

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
        note("DCP DefaultStager, pinned: the host waits", timed(lambda: stock.stage(nested)))
        note("step", timed(stepped))
        torch.cuda.synchronize()
        began = time.perf_counter()
        staged = live.stage(Progress(step=1))
        step(state, batch)
        torch.cuda.synchronize()
        note("stage and step", time.perf_counter() - began)
        began = time.perf_counter()
        for _part in staged.parts(64 << 20):
            pass
        note("checksums of what was staged", time.perf_counter() - began)
    stock.close()
    floor = statistics.median(took["copy"][1:])
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {size / 2**30:.2f} GiB in {len(tensors)} tensors"
    )
    for name, seconds in took.items():
        median = statistics.median(seconds[1:] or seconds)
        print(f"{name:45} {1e3 * median:9.1f} ms  {median / floor:7.3f} of copy  {size / median / 1e9:7.1f} GB/s")


if __name__ == "__main__":
    main()
