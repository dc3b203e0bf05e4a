"""What the comparison of replicas adds to the time for which a save blocks a DDP training.

    python -m tests.bench.comparing --mib 512 --rounds 9 [--device cuda] [--threads 1] [--layers 4000]

"compared" stages rank 0's half of a state that two ranks hold, and digests the other half, as every save does. "alone"
stages as many bytes of a state that nobody shares. Both in turns, in one process, into warm buffers. Many layers make
many small tensors, each of which costs some time by itself.
"""

import argparse
import statistics
import time

import torch
from torch import nn

from raycheck.bucket.assembly.replica_agreement import agree
from raycheck.bucket.format.progress import Progress
from raycheck.state.train_state import TrainState
from tests.bench.sampling import Measured, Samples, interleaved

LAYERS = 16
RANKS = 2


def state_of(layers: int, width: int, device: str) -> dict[str, object]:
    """Returns a model with AdamW's moments, of random numbers."""
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers))).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        optimizer.state[parameter] = {"exp_avg": torch.rand_like(parameter), "exp_avg_sq": torch.rand_like(parameter)}
    return {"model": model, "optimizer": optimizer}


def measured(state_bytes: int, rounds: int, *, device: str = "cpu", layers: int = LAYERS) -> Samples:
    """Returns the seconds for which each side blocks: `alone` without the comparison, `compared` with it."""
    width = int((state_bytes / 3 / 4 / layers) ** 0.5)
    shared = TrainState(state_of(layers, width, device), rank=0, world_size=RANKS)
    shared.use_agreement(agree([shared.replica_checksums()] * RANKS)[0])
    alone = TrainState(state_of(layers // RANKS, width, device), rank=0, world_size=1)
    sizes = [sum(shard.size_bytes for shard in state.stage(Progress()).staged) for state in (shared, alone)]
    assert abs(sizes[0] - sizes[1]) < max(sizes) / 20, "both sides copy the same"
    return interleaved({"alone": lambda: _blocked(alone), "compared": lambda: _blocked(shared)}, rounds, warm_ups=2)


def _blocked(state: TrainState) -> Measured:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    began = time.perf_counter()
    staged = state.stage(Progress(step=1))
    host_s = time.perf_counter() - began
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # the next step waits for this
    blocked_s = time.perf_counter() - began
    staged.wait()
    return {"s": blocked_s, "host_s": host_s}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1, help="torch's: torchrun sets 1")
    parser.add_argument("--layers", type=int, default=LAYERS, help="each has three tensors of equal size")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    samples = measured(given.mib << 20, given.rounds, device=given.device, layers=given.layers)
    for what in ("s", "host_s"):
        ratio = samples.ratio("compared", "alone", what)
        alone_ms = 1e3 * statistics.median(samples.of("alone", what))
        print(f"{what}: {ratio.median:.2f} ({ratio.low:.2f} to {ratio.high:.2f}), alone {alone_ms:.1f} ms")


if __name__ == "__main__":
    main()
