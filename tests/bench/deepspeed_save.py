"""`python -m tests.bench.deepspeed_save`: a save of a ZeRO-2 engine on two ranks, in an S3 store.

The engine has 22 million parameters in bfloat16, which are 256 MiB of 32-bit weights and moments. Measured are
raycheck's save, DeepSpeed's own save_checkpoint into a local folder of each rank, as Ray's example for DeepSpeed has
it, and that with the upload of the folders, by the function that `ray.train.report` calls, in the training's thread.
The three alternate in a shuffled order, and ratios are taken within each round. The slowest rank counts. What DeepSpeed
writes alone is on the local disk, so that it is lost with the node; only the other two are in the bucket.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from raycheck.bucket.store.address import join_uri
from tests.bench.place import new_folder, pyarrow_files
from tests.bench.sampling import Measured, Samples, interleaved
from tests.bench.servers import started
from tests.support.frameworks.deepspeed_training import launch, prepare

WIDTH, LAYERS, ROUNDS = 2364, 4, 5
OURS, OWN, UPLOADED = "raycheck", "DeepSpeed's own", "with Ray's upload"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.deepspeed_save", description=__doc__)
    parser.add_argument("--server", choices=("auto", "ceph", "ministack", "moto"), default="auto")
    arguments = parser.parse_args()
    prepare()
    with started(arguments.server) as server:
        print(f"{server.name}; {server.placement}; load {os.getloadavg()[0]:.1f}", flush=True)
        found = launch(__file__, {"uri": new_folder(server.uri)}, 2, within_s=500.0)
    for line in found["lines"]:
        print(line)


def on_a_rank(uri: str) -> None:
    import deepspeed
    import torch
    import torch.distributed as dist
    from ray.train.v2._internal.execution.storage import _upload_to_fs_path

    import raycheck

    torch.set_num_threads(1)
    # By default pyarrow sends trailing checksums, which RGW turns down.
    os.environ["AWS_REQUEST_CHECKSUM_CALCULATION"] = "when_required"
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    engine, _, _, _ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters()),
        config={
            "train_batch_size": 2,
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": 2},
            "zero_allow_untested_optimizer": True,
        },
    )
    settings, run = raycheck.SaveSettings(every_steps=None, keep_last=1), join_uri(uri, "run")
    with (
        tempfile.TemporaryDirectory() as scratch,
        raycheck.Checkpointer({"engine": engine}, settings, group=raycheck.torchrun_group(run)) as ckpt,
    ):
        ckpt.restore()
        numbers = iter(range(10**6))

        def step() -> None:
            engine.backward(engine(torch.randn(1, WIDTH, dtype=torch.bfloat16)).float().square().mean())
            engine.step()
            dist.barrier()

        def ours() -> Measured:
            step()
            began = time.perf_counter()
            ckpt.end_step()
            ckpt.save()
            blocked = time.perf_counter() - began
            ckpt.wait()
            durable = time.perf_counter() - began
            head = raycheck.open_run(run).head
            assert head is not None
            return _slowest(blocked=blocked, durable=durable, bytes=head.size_bytes / dist.get_world_size())

        def own(then: Callable[[Path], None]) -> Measured:
            step()
            folder = Path(scratch) / str(next(numbers))
            began = time.perf_counter()
            engine.save_checkpoint(str(folder))
            then(folder)
            dist.barrier()
            blocked = time.perf_counter() - began
            size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
            shutil.rmtree(folder)
            return _slowest(blocked=blocked, durable=blocked, bytes=size)

        def upload(folder: Path) -> None:
            files, place = pyarrow_files(join_uri(uri, f"own-{folder.name}"))
            _upload_to_fs_path(str(folder), files, place)

        sides = {OURS: ours, OWN: lambda: own(lambda _: None), UPLOADED: lambda: own(upload)}
        samples = interleaved(sides, ROUNDS, warm_ups=1)
    if dist.get_rank() == 0:
        print(json.dumps({"lines": _lines(samples)}), flush=True)


def _slowest(**measured: float) -> Measured:
    """Return the slowest rank's seconds, and the bytes of all ranks."""
    import torch
    import torch.distributed as dist

    found: dict[str, float] = {}
    for name, value in measured.items():
        all_ranks = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(all_ranks, op=dist.ReduceOp.SUM if name == "bytes" else dist.ReduceOp.MAX)
        found[name] = float(all_ranks)
    return found


def _lines(samples: Samples) -> list[str]:
    def shown(side: str, what: str) -> str:
        ratio = samples.ratio(side, OURS, what)
        return (
            f"{median(samples.of(side, what)):.3f} s, / raycheck {ratio.median:.1f} ({ratio.low:.1f}..{ratio.high:.1f})"
        )

    lines = []
    for side in samples.sides:
        mib = median(samples.of(side, "bytes")) / 2**20
        lines.append(f"{side}: blocked {shown(side, 'blocked')}; durable after {shown(side, 'durable')}; {mib:.0f} MiB")
    return lines


if __name__ == "__main__":
    if len(sys.argv) == 2 and sys.argv[1].startswith("{"):
        job: dict[str, Any] = json.loads(sys.argv[1])
        on_a_rank(job["uri"])
    else:
        main()
